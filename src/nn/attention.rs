//! Split-head attention: one small attention per head, softmax over the keys, one transpose in all.

use super::{Hidden, Net, linear::Rows};
use crate::{bail, error::Result, graph::In, mil::ValueId};

/// One value per head, `[B, head dim, 1, S]`, or `[B, S, 1, head dim]` for transposed keys.
#[derive(Debug, Clone)]
pub struct Heads(pub Vec<ValueId>);

/// What is added to the scores `[B, K, 1, Q]` before the softmax: one value for all heads, or one each.
#[derive(Debug, Clone)]
pub struct Mask(pub Vec<ValueId>);

/// Blocks attention to a key: finite in fp16, and far enough from its end that scores and biases may be
/// added. Two masks are joined with `minimum`, never summed.
pub const BLOCKED: f32 = -4.0e4;

impl Net<'_> {
    /// Projects queries with the scores' scale folded in, so that no op is spent on it.
    pub fn queries(&mut self, name: &str, x: Hidden, heads: usize, scale: f32) -> Result<Hidden> {
        let channels = self.linear_out(name)?;
        self.split_evenly(name, channels, heads)?;
        self.linear_with(name, "", Rows { order: (0..channels).collect(), scale }, x)
    }

    /// Attention of `q`, `k` and `v` `[B, heads · dim, 1, S]`; the queries carry the scale already.
    pub fn attention(
        &mut self,
        name: &str,
        heads: usize,
        [q, k, v]: [Hidden; 3],
        mask: Option<&Mask>,
    ) -> Result<Hidden> {
        let q = self.heads(&format!("{name}_q"), q, heads)?;
        let k = self.keys(&format!("{name}_k"), k, heads)?;
        let v = self.heads(&format!("{name}_v"), v, heads)?;
        self.attend(name, &q, &k, &v, mask)
    }

    /// The channels, split into heads.
    pub fn heads(&mut self, name: &str, x: Hidden, heads: usize) -> Result<Heads> {
        let channels = self.channels(x)?;
        self.split_evenly(name, channels, heads)?;
        Ok(Heads(self.split_channels(name, x.0, 1, heads)?))
    }

    /// Keys `[B, C, 1, S]` as one `[B, S, 1, dim]` per head: the only transpose of the layer.
    pub fn keys(&mut self, name: &str, x: Hidden, heads: usize) -> Result<Heads> {
        let channels = self.channels(x)?;
        self.split_evenly(name, channels, heads)?;
        let t = self.op(
            "transpose",
            &format!("{name}_transpose"),
            [("x", x.into()), ("perm", [0, 3, 2, 1].into())],
        )?;
        Ok(Heads(self.split_channels(name, t, 3, heads)?))
    }

    /// Per head: scores over the keys, mask, softmax over the keys, weighted values.
    pub fn attend(
        &mut self,
        name: &str,
        q: &Heads,
        k: &Heads,
        v: &Heads,
        mask: Option<&Mask>,
    ) -> Result<Hidden> {
        let mut parts = Vec::with_capacity(q.0.len());
        for (h, ((q, k), v)) in q.0.iter().zip(&k.0).zip(&v.0).enumerate() {
            let scores = self.einsum(&format!("{name}_scores"), "bkhc,bchq->bkhq", [*k, *q])?;
            let scores = match mask {
                Some(mask) => self.binary("add", &format!("{name}_masked"), scores, mask.head(h))?,
                None => scores,
            };
            let weights =
                self.op("softmax", &format!("{name}_weights"), [("x", scores.into()), ("axis", 1.into())])?;
            parts.push(self.einsum(&format!("{name}_head"), "bchk,bkhq->bchq", [*v, weights])?);
        }
        self.concat_channels(name, &parts)
    }

    /// `attention_mask` `[B, S]` as what is added to scores: 0 for real keys, [`BLOCKED`] for padding,
    /// `[B, S, 1, 1]`.
    pub fn padding_mask(&mut self, attention_mask: ValueId) -> Result<ValueId> {
        let real = self.op(
            "cast",
            "mask_real",
            [("x", attention_mask.into()), ("dtype", self.float.name().into())],
        )?;
        let padding = self.binary("sub", "mask_padding", self.scalar(1.0), real)?;
        let blocked = self.binary("mul", "mask_blocked", padding, self.scalar(BLOCKED))?;
        self.op("expand_dims", "mask", [("x", blocked.into()), ("axes", [2, 3].into())])
    }

    /// A padding mask joined with a window: keys further than `reach` positions away are blocked too,
    /// `[B, S, 1, S]`.
    pub fn window_mask(&mut self, padding: ValueId, reach: usize) -> Result<ValueId> {
        let tokens = self.tokens;
        let window = (0..tokens * tokens)
            .map(|i| if (i / tokens).abs_diff(i % tokens) <= reach { 0.0 } else { BLOCKED })
            .collect();
        let window = self.constant(&format!("window {reach}"), &[1, tokens, 1, tokens], window);
        self.binary("minimum", "window_mask", padding, window)
    }

    /// 1 for real tokens, 0 for padding, `[B, 1, 1, S]`.
    pub fn token_weights(&mut self, attention_mask: ValueId) -> Result<ValueId> {
        let real = self.op(
            "cast",
            "token_real",
            [("x", attention_mask.into()), ("dtype", self.float.name().into())],
        )?;
        self.op("expand_dims", "token_weights", [("x", real.into()), ("axes", [1, 2].into())])
    }

    fn einsum(&mut self, name: &str, equation: &str, values: [ValueId; 2]) -> Result<ValueId> {
        self.op("einsum", name, [("values", In::from(&values[..])), ("equation", equation.into())])
    }

    fn split_evenly(&self, name: &str, channels: usize, heads: usize) -> Result<()> {
        if heads == 0 || !channels.is_multiple_of(heads) {
            bail!("{}: {channels} channels do not split into {heads} heads", self.place(name));
        }
        Ok(())
    }

    /// 1/√dim, the usual scale of scores.
    pub fn score_scale(dim: usize) -> f32 {
        #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "a small head size")]
        let scale = (1.0 / (dim as f64).sqrt()) as f32;
        scale
    }
}

impl Mask {
    pub fn head(&self, h: usize) -> ValueId {
        if self.0.len() == 1 { self.0[0] } else { self.0[h] }
    }
}
