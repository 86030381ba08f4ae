//! Attention to what came before: keys and values for groups of heads, windows, rotary positions, ALiBi.

use candle_core::{D, Device, Tensor};
use half::bf16;

use super::{
    family::Qkv,
    parts::{Linear, Norm},
    plan::{Alibi, LayerPlan, Plan},
};
use crate::{
    error::Result,
    reference::{Inputs, scope::Scope},
};

#[derive(Clone)]
pub(super) struct Attention {
    qkv: Projections,
    norms: Option<[Norm; 2]>,
    /// The norms are over all heads at once.
    whole: bool,
    out: Linear,
}

#[derive(Clone)]
enum Projections {
    Apart([Linear; 3]),
    Joined(Linear),
    Grouped(Linear),
}

/// What all layers share in one run.
pub(super) struct Places {
    /// Cosines and sines of each rope, `[batch, 1, sequence, half]`.
    pub(super) tables: Vec<(Tensor, Tensor)>,
    pub(super) positions: Vec<Vec<u32>>,
}

impl Attention {
    pub(super) fn open(plan: &Plan, scope: &Scope<'_>) -> Result<Attention> {
        let (hidden, of) = (plan.hidden, |heads: usize| heads * plan.width);
        let linear = |name: &str, out: usize| Linear::open(plan, scope, name)?.of_shape(out, hidden);
        let all = of(plan.heads + 2 * plan.kv_heads);
        let qkv = match plan.family.qkv {
            Qkv::Apart([q, k, v]) => Projections::Apart([
                linear(q, of(plan.heads))?,
                linear(k, of(plan.kv_heads))?,
                linear(v, of(plan.kv_heads))?,
            ]),
            Qkv::Joined(name) => Projections::Joined(linear(name, all)?),
            Qkv::Grouped(name) => Projections::Grouped(linear(name, all)?),
        };
        let named = plan.family.qk_norm.filter(|_| plan.qk_norm);
        let norms = match named {
            Some(norm) => {
                let [q, k] = norm.names;
                Some([Norm::open(plan, scope, q)?, Norm::open(plan, scope, k)?])
            }
            None => None,
        };
        let out = Linear::open(plan, scope, plan.family.out)?.of_shape(hidden, of(plan.heads))?;
        Ok(Attention { qkv, norms, whole: named.is_some_and(|n| n.whole), out })
    }

    pub(super) fn linears(&mut self) -> Vec<&mut Linear> {
        let mut all: Vec<&mut Linear> = match &mut self.qkv {
            Projections::Apart(each) => each.iter_mut().collect(),
            Projections::Joined(all) | Projections::Grouped(all) => vec![all],
        };
        all.push(&mut self.out);
        all
    }

    /// Of `x` with the additive `bias` of this layer's window.
    pub(super) fn run(
        &self,
        plan: &Plan,
        layer: &LayerPlan,
        places: &Places,
        bias: &Tensor,
        x: &Tensor,
    ) -> Result<Tensor> {
        let (batch, sequence, _) = x.dims3()?;
        let [mut q, mut k, v] = self.split(plan, x)?;
        if let Some([q_norm, k_norm]) = &self.norms {
            (q, k) = (self.normed(q_norm, &q)?, self.normed(k_norm, &k)?);
        }
        let [mut q, mut k, v] = [q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?];
        if let Some((rope, (cos, sin))) = layer.rope.and_then(|i| plan.ropes.get(i).zip(places.tables.get(i)))
        {
            (q, k) = (rope.rotate(&q, cos, sin)?, rope.rotate(&k, cos, sin)?);
        }
        let (k, v) = (shared(&k, plan.heads)?, shared(&v, plan.heads)?);
        let mut scores = (q.contiguous()?.matmul(&k.t()?)? * layer.score_scale)?;
        if let Some(cap) = plan.score_cap {
            scores = soft_cap(&scores, cap)?;
        }
        let weights = candle_nn::ops::softmax(&scores.broadcast_add(bias)?, D::Minus1)?;
        let mixed =
            weights.matmul(&v)?.transpose(1, 2)?.reshape((batch, sequence, plan.heads * plan.width))?;
        self.out.run(&mixed)
    }

    /// Queries, keys and values, `[batch, sequence, heads, channels]`.
    fn split(&self, plan: &Plan, x: &Tensor) -> Result<[Tensor; 3]> {
        let (batch, sequence, _) = x.dims3()?;
        let (heads, kv, width) = (plan.heads, plan.kv_heads, plan.width);
        let shaped = |x: Tensor, heads: usize| x.reshape((batch, sequence, heads, width));
        Ok(match &self.qkv {
            Projections::Apart([q, k, v]) => {
                [shaped(q.run(x)?, heads)?, shaped(k.run(x)?, kv)?, shaped(v.run(x)?, kv)?]
            }
            Projections::Joined(qkv) => {
                let all = shaped(qkv.run(x)?, heads + 2 * kv)?;
                [all.narrow(2, 0, heads)?, all.narrow(2, heads, kv)?, all.narrow(2, heads + kv, kv)?]
            }
            Projections::Grouped(qkv) => {
                let each = heads / kv;
                let all = qkv.run(x)?.reshape((batch, sequence, kv, each + 2, width))?;
                let part = |from: usize, count: usize| {
                    all.narrow(3, from, count)?.reshape((batch, sequence, kv * count, width))
                };
                [part(0, each)?, part(each, 1)?, part(each + 1, 1)?]
            }
        })
    }

    fn normed(&self, norm: &Norm, x: &Tensor) -> Result<Tensor> {
        if !self.whole {
            return norm.run(x);
        }
        Ok(norm.run(&x.flatten_from(2)?)?.reshape(x.dims())?)
    }
}

/// `cap · tanh(x / cap)`
pub(super) fn soft_cap(x: &Tensor, cap: f64) -> Result<Tensor> {
    Ok(((x / cap)?.tanh()? * cap)?)
}

/// A key or value head for each query head.
fn shared(x: &Tensor, heads: usize) -> Result<Tensor> {
    let (batch, kv, sequence, width) = x.dims4()?;
    let each = x.unsqueeze(2)?.broadcast_as((batch, kv, heads / kv, sequence, width))?;
    Ok(each.reshape((batch, heads, sequence, width))?.contiguous()?)
}

impl Places {
    pub(super) fn new(plan: &Plan, inputs: &Inputs) -> Result<Places> {
        let positions: Vec<Vec<u32>> = inputs.attention_mask.iter().map(|row| counted(row)).collect();
        let flat: Vec<u32> = positions.iter().flatten().copied().collect();
        let length = flat.iter().max().map_or(1, |p| *p as usize + 1);
        let (batch, sequence) = (positions.len(), flat.len() / positions.len().max(1));
        let index = Tensor::from_vec(flat, batch * sequence, &Device::Cpu)?;
        let mut tables = Vec::new();
        for rope in &plan.ropes {
            let (cos, sin) = rope.tables(length)?;
            let pick = |table: &Tensor| table.index_select(&index, 0)?.reshape((batch, 1, sequence, ()));
            tables.push((pick(&cos)?, pick(&sin)?));
        }
        Ok(Places { tables, positions })
    }

    /// What is added to the scores: the lowest number where a query may not look, and ALiBi.
    pub(super) fn bias(&self, plan: &Plan, inputs: &Inputs, layer: &LayerPlan) -> Result<Tensor> {
        let (rows, sequence) = (&inputs.attention_mask, self.positions.first().map_or(0, Vec::len));
        let mut mask = Vec::with_capacity(rows.len() * sequence * sequence);
        for row in rows {
            for query in 0..sequence {
                let near = |key: usize| key <= query && layer.window.is_none_or(|w| query - key < w);
                mask.extend(
                    row.iter()
                        .enumerate()
                        .map(|(key, real)| if near(key) && *real != 0 { 0.0 } else { f32::MIN }),
                );
            }
        }
        let mask = Tensor::from_vec(mask, (rows.len(), 1, sequence, sequence), &Device::Cpu)?;
        let Some(alibi) = plan.alibi else { return Ok(mask) };
        let slopes = slopes(plan.heads);
        let each = self.positions.iter().flat_map(|row| slopes.iter().map(move |slope| (row, *slope)));
        let values: Vec<f32> =
            each.flat_map(|(row, slope)| row.iter().map(move |p| alibi.at(slope, *p, layer))).collect();
        let values = Tensor::from_vec(values, (rows.len(), plan.heads, 1, sequence), &Device::Cpu)?;
        Ok(mask.broadcast_add(&values)?)
    }
}

impl Alibi {
    #[expect(clippy::cast_precision_loss, reason = "positions are small")]
    #[expect(clippy::cast_possible_truncation, reason = "a slope is used in f32")]
    fn at(self, slope: f64, position: u32, layer: &LayerPlan) -> f32 {
        match self {
            Alibi::Bloom => slope as f32 * position as f32,
            Alibi::Falcon => {
                let slope = bf16::from_f64(slope).to_f32();
                bf16::from_f32(slope * position as f32).to_f32() * layer.score_scale as f32
            }
        }
    }
}

/// A geometric series for the next lower power of two, and every second of a finer one for the rest.
#[expect(clippy::cast_precision_loss, reason = "there are few heads")]
fn slopes(heads: usize) -> Vec<f64> {
    let power = 1 << heads.max(1).ilog2();
    let base = |n: usize| (-8.0 / n as f64).exp2();
    let series = (1..=power).map(|i| base(power).powf(i as f64));
    let rest = (0..heads - power).map(|i| base(2 * power).powf((2 * i + 1) as f64));
    series.chain(rest).collect()
}

/// Positions over what is not padding, from 0.
fn counted(mask: &[u32]) -> Vec<u32> {
    let mut next = 0u32;
    let mut count = |real: &u32| {
        let here = next;
        next += u32::from(*real != 0);
        if *real != 0 { here } else { here.saturating_sub(1) }
    };
    mask.iter().map(&mut count).collect()
}
