//! Normalisation of queries and keys, per head or over all of them, before they are rotated.

use super::{
    Net,
    cache::{Heads, size},
    rms::correction,
};
use crate::{
    error::Result,
    graph::In,
    mil::{ValueId, Weight},
};

/// Normalisation of queries and keys.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "one per layer, passed once")]
pub enum HeadNorm {
    None,
    /// RMSNorm of each head with one weight for all: names of the query's and the key's.
    Rms {
        query: &'static str,
        key: &'static str,
        eps: f64,
        plus: f32,
    },
    /// RMSNorm over all heads together.
    RmsWhole {
        query: &'static str,
        key: &'static str,
        eps: f64,
    },
    /// LayerNorm of each head: weights and biases of all heads, `[heads · dim]`.
    Layer {
        query: (Weight, Option<Weight>),
        key: (Weight, Option<Weight>),
        eps: f64,
    },
}

impl Net<'_> {
    /// Normalises queries and keys and gives them per head: `[query + kv heads, D, 1, T]`.
    pub(super) fn head_norm(
        &mut self,
        name: &str,
        h: Heads,
        norm: &HeadNorm,
        order: Option<&[usize]>,
        scale: f32,
        qk: ValueId,
    ) -> Result<ValueId> {
        let per_head = [h.query + h.kv, h.padded, 1, self.tokens];
        let natural: Vec<usize> = (0..h.dim).collect();
        let order = order.unwrap_or(&natural).to_vec();
        match norm {
            HeadNorm::None => self.reshape(&format!("{name}.heads"), qk, &per_head),
            HeadNorm::Rms { query, key, eps, plus } => {
                let x = self.reshape(&format!("{name}.heads"), qk, &per_head)?;
                let y = self.mirrored_norm(&format!("{name}.qk"), x, h.dim, *eps, 1.0, None)?;
                let factor = correction(h.dim, h.padded);
                let (q, k) =
                    (self.source(&format!("{query}.weight"))?, self.source(&format!("{key}.weight"))?);
                let weights = self.head_weights(
                    &format!("(w + {plus}) × {factor}, queries × {scale}"),
                    h,
                    order,
                    [(q, h.query, factor * scale), (k, h.kv, factor)],
                    *plus,
                );
                self.binary("mul", &format!("{name}.qk_scaled"), y, weights)
            }
            HeadNorm::RmsWhole { query, key, eps } => {
                let parts = self.ops(
                    "split",
                    &format!("{name}.norm_parts"),
                    [
                        ("x", qk.into()),
                        ("split_sizes", In::from(&[size(h.query * h.padded), size(h.kv * h.padded)][..])),
                        ("axis", 1.into()),
                    ],
                )?;
                let mut normed = Vec::new();
                for (x, norm, heads, scale) in [(parts[0], query, h.query, scale), (parts[1], key, h.kv, 1.0)]
                {
                    let (real, padded) = (heads * h.dim, heads * h.padded);
                    let factor = correction(real, padded) * scale;
                    let weight = self.source(&format!("{norm}.weight"))?;
                    let (dim, wide, order) = (h.dim, h.padded, order.clone());
                    let how = format!("heads of {dim} in {wide} × {factor}, mirrored, order {order:?}");
                    let gamma = self.store(&weight, &how, [2 * padded + 2], move |w| {
                        let mut all = vec![0.0; 2 * padded + 2];
                        for head in 0..heads {
                            for (to, from) in order.iter().enumerate() {
                                all[head * wide + to] =
                                    w.get(head * dim + from).copied().unwrap_or(0.0) * factor;
                            }
                        }
                        Ok(all)
                    });
                    normed.push(self.mirrored_norm(norm, x, real, *eps, 1.0, Some(gamma))?);
                }
                let both = self.concat_channels(&format!("{name}.normed"), &normed)?;
                self.reshape(&format!("{name}.heads"), both.0, &per_head)
            }
            HeadNorm::Layer { query, key, eps } => {
                let x = self.reshape(&format!("{name}.heads"), qk, &per_head)?;
                let real = [h.query + h.kv, h.dim, 1, self.tokens];
                let x = self.slice(&format!("{name}.real"), x, &[0, 0, 0, 0], &real)?;
                let eps = self.epsilon(*eps);
                let y = self.op(
                    "layer_norm",
                    &format!("{name}.qk_norm"),
                    [("x", x.into()), ("axes", [1].into()), ("epsilon", eps)],
                )?;
                let tight = Heads { padded: h.dim, ..h };
                let sides = |w: &Weight, k: &Weight| [(w.clone(), h.query, scale), (k.clone(), h.kv, 1.0)];
                let weights = self.head_weights(
                    &format!("queries × {scale}"),
                    tight,
                    order.clone(),
                    sides(&query.0, &key.0),
                    0.0,
                );
                let mut y = self.binary("mul", &format!("{name}.qk_scaled"), y, weights)?;
                if let (Some(q), Some(k)) = (&query.1, &key.1) {
                    let biases =
                        self.head_weights(&format!("queries × {scale}"), tight, order, sides(q, k), 0.0);
                    y = self.binary("add", &format!("{name}.qk_shifted"), y, biases)?;
                }
                if h.dim == h.padded {
                    return Ok(y);
                }
                let rest = [h.query + h.kv, h.padded - h.dim, 1, self.tokens];
                let zeros = self.constant("zeros", &rest, vec![0.0; rest.iter().product()]);
                let values: Vec<_> = [In::from(y), zeros].into_iter().flat_map(In::into_args).collect();
                self.op(
                    "concat",
                    &format!("{name}.qk_padded"),
                    [("values", In::from(values)), ("axis", 1.into())],
                )
            }
        }
    }

    /// Per-head weights `[query + kv heads, D, 1, 1]` from one of each side, `[dim]` or `[heads · dim]`.
    fn head_weights(
        &self,
        how: &str,
        h: Heads,
        order: Vec<usize>,
        sides: [(Weight, usize, f32); 2],
        plus: f32,
    ) -> Weight {
        let key = format!(
            "{} & {} heads {h:?} {how} order {order:?} {}",
            sides[0].0.key, sides[1].0.key, self.float
        );
        let float = self.float;
        Weight::new(key, float, [h.query + h.kv, h.padded, 1, 1], move || {
            let mut all = Vec::new();
            for (weight, heads, factor) in &sides {
                let w = weight.floats()?;
                let shared = w.len() == h.dim;
                for head in 0..*heads {
                    let start = if shared { 0 } else { head * h.dim };
                    let value = |i: &usize| (w.get(start + i).copied().unwrap_or(0.0) + plus) * factor;
                    all.extend(order.iter().map(value));
                    all.extend(std::iter::repeat_n(0.0, h.padded - h.dim));
                }
            }
            Ok(crate::mil::constant::encode_floats(float, &all)?.into())
        })
    }
}
