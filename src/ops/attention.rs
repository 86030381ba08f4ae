//! Scaled dot-product attention.

use candle_core::{DType as CandleType, Tensor};

use super::{
    DTypes, Eval, FLOAT, Opset, Spec, Tolerance, args::named, broadcast, linear::product, maybe, need,
    norm::softmax, one,
};
use crate::{
    bail,
    error::Result,
    mil::{DType, Type},
    ops::Args,
};

const MASK: DTypes = DTypes::of(&[DType::Bool, DType::F16, DType::F32]);

pub static SPECS: &[&Spec] = &[&SCALED_DOT_PRODUCT_ATTENTION];

static SCALED_DOT_PRODUCT_ATTENTION: Spec = Spec {
    name: "scaled_dot_product_attention",
    since: Opset::Ios18,
    params: &[need("query", FLOAT), need("key", FLOAT), need("value", FLOAT), maybe("attn_mask", MASK)],
    infer: |a| {
        let dtype = a.same_dtype(&["query", "key", "value"])?;
        let (q, k, v) = (a.tensor("query")?, a.tensor("key")?, a.tensor("value")?);
        let rank = q.rank();
        if rank < 3 || k.rank() != rank || v.rank() != rank {
            bail!(
                "{}, {} and {} want one rank of at least 3",
                named("query", q),
                named("key", k),
                named("value", v)
            );
        }
        let same = |a: &crate::mil::TensorType, b: &crate::mil::TensorType| {
            a.dims[..rank - 2].iter().zip(&b.dims[..rank - 2]).all(|(a, b)| a.agrees(*b))
        };
        for (name, t) in [("key", k), ("value", v)] {
            if !same(q, t) {
                bail!("{} and {} differ in their batch", named("query", q), named(name, t); hint: "repeat keys and values for every query head");
            }
        }
        if !q.dims[rank - 1].agrees(k.dims[rank - 1]) {
            bail!("{} and {} differ in their last size", named("query", q), named("key", k));
        }
        if !k.dims[rank - 2].agrees(v.dims[rank - 2]) {
            bail!("{} and {} differ in their length", named("key", k), named("value", v));
        }
        check_mask(a)?;
        let mut dims = q.dims.clone();
        dims[rank - 1] = v.dims[rank - 1];
        Ok(vec![Type::tensor(dtype, dims)])
    },
    eval: Eval::Call(|c| {
        let (q, k, v) = (c.tensor("query")?, c.tensor("key")?, c.tensor("value")?);
        let rank = q.rank();
        if rank < 2 || k.rank() != rank || v.rank() != rank {
            bail!("query, key and value have ranks {rank}, {} and {}", k.rank(), v.rank());
        }
        let scale = (q.dims()[rank - 1] as f64).sqrt().recip();
        let mut scores = (product(q, &k.transpose(rank - 2, rank - 1)?)? * scale)?;
        if c.has("attn_mask") {
            scores = masked(&scores, c.tensor("attn_mask")?)?;
        }
        one(product(&softmax(&scores, rank - 1)?, v)?)
    }),
    flops: |a| {
        let size = |name, back: usize| {
            a.dims(name).ok().and_then(|d| d[d.len().checked_sub(back)?].fixed()).unwrap_or(1) as u64
        };
        let pairs = size("key", 2).saturating_mul(size("query", 1).saturating_add(size("value", 1)));
        (a.count("query") / size("query", 1).max(1)).saturating_mul(2).saturating_mul(pairs)
    },
    tolerance: Tolerance::Rounding,
};

/// The mask broadcasts against `[*, L, S]`, and its last size is `S` itself.
fn check_mask(a: &Args<'_>) -> Result<()> {
    if !a.has("attn_mask") {
        return Ok(());
    }
    let (q, k, mask) = (a.tensor("query")?, a.tensor("key")?, a.tensor("attn_mask")?);
    let mut scores = q.dims.clone();
    scores[q.rank() - 1] = k.dims[k.rank() - 2];
    let fits = mask.dims.last().is_some_and(|d| d.agrees(k.dims[k.rank() - 2]))
        && broadcast(&mask.dims, &scores).is_some_and(|d| d.len() == scores.len());
    if !fits {
        bail!("{} does not fit {} and {}", named("attn_mask", mask), named("query", q), named("key", k));
    }
    Ok(())
}

/// A bool says where to look, a float is added.
fn masked(scores: &Tensor, mask: &Tensor) -> Result<Tensor> {
    if mask.dtype() == CandleType::F32 {
        return Ok(scores.broadcast_add(mask)?);
    }
    let hidden = Tensor::full(f32::NEG_INFINITY, scores.shape(), scores.device())?;
    Ok(mask.broadcast_as(scores.shape())?.where_cond(scores, &hidden)?)
}
