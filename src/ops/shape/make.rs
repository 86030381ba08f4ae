//! Tensors made from sizes.

use candle_core::Tensor;

use super::{bounded, free, result};
use crate::{
    bail,
    error::Result,
    mil::{DType, Dim, types::shape_text},
    ops::{ACTIVATION, ANY, Eval, INT, NUMBER, Opset, Preset, Spec, Tolerance, Val, need, one, written},
};

/// The sizes of `x`.
pub(super) static SHAPE: Spec = Spec {
    name: "shape",
    since: Opset::Ios15,
    params: &[need("x", ACTIVATION)],
    infer: |a| result(DType::I32, vec![Dim::Fixed(a.rank("x")?)]),
    eval: Eval::Call(|c| {
        let dims = c.tensor("x")?.dims();
        let sizes: Vec<i64> = dims.iter().filter_map(|d| i64::try_from(*d).ok()).collect();
        one(Val::ints(sizes, &[dims.len()])?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

pub(super) static FILL: Spec = Spec {
    name: "fill",
    since: Opset::Ios15,
    params: &[need("shape", INT), written("value", ACTIVATION, Preset::Float(0.0))],
    infer: |a| {
        let dims = match (a.ints("shape")?, a.dims("shape")?) {
            (Some(shape), _) => lengths(&shape)?.into_iter().map(Dim::Fixed).collect(),
            (None, [Dim::Fixed(rank)]) if *rank <= 8 => vec![Dim::ANY; *rank],
            (None, other) => bail!("shape {} does not tell the rank of the result", shape_text(other)),
        };
        result(if a.has("value") { a.dtype("value")? } else { DType::F32 }, dims)
    },
    eval: Eval::Call(|c| {
        let shape = lengths(&c.ints("shape")?)?;
        one(full(if c.has("value") { Some(c.tensor("value")?) } else { None }, &shape)?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// A tensor of one value, of the shape of another.
pub(super) static FILL_LIKE: Spec = Spec {
    name: "fill_like",
    since: Opset::Ios16,
    params: &[need("ref_tensor", ANY), written("value", ACTIVATION, Preset::Float(0.0))],
    infer: |a| {
        let dtype = if a.has("value") { a.dtype("value")? } else { DType::F32 };
        result(dtype, a.dims("ref_tensor")?.to_vec())
    },
    eval: Eval::Call(|c| {
        let shape = c.tensor("ref_tensor")?.dims().to_vec();
        one(full(if c.has("value") { Some(c.tensor("value")?) } else { None }, &shape)?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// `start`, `start + step` and so on, up to `end` and without it.
pub(super) static RANGE_1D: Spec = Spec {
    name: "range_1d",
    since: Opset::Ios15,
    params: &[need("end", NUMBER), need("start", NUMBER), need("step", NUMBER)],
    infer: |a| {
        let dtype = a.same_dtype(&["end", "start", "step"])?;
        let dim = match (a.numbers("start")?, a.numbers("end")?, a.numbers("step")?) {
            (Some(start), Some(end), Some(step)) => {
                let first = |n: crate::mil::Numbers| n.into_floats().first().copied().map_or(0.0, f64::from);
                Dim::Fixed(steps(first(start), first(end), first(step))?)
            }
            _ => Dim::ANY,
        };
        result(dtype, vec![dim])
    },
    eval: Eval::Call(|c| {
        let scalar = |name| -> Result<f64> {
            let t = c.tensor(name)?;
            Ok(t.flatten_all()?.get(0)?.to_dtype(candle_core::DType::F64)?.to_scalar()?)
        };
        let (start, end, step) = (scalar("start")?, scalar("end")?, scalar("step")?);
        let count = steps(start, end, step)?;
        #[expect(clippy::cast_precision_loss, reason = "a count below 2^28 is exact in 64-bit floats")]
        let values: Vec<f64> = (0..count).map(|i| start + step * i as f64).collect();
        one(Tensor::from_vec(values, count, c.tensor("start")?.device())?
            .to_dtype(c.tensor("start")?.dtype())?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

fn lengths(shape: &[i64]) -> Result<Vec<usize>> {
    let shape: Option<Vec<usize>> = shape.iter().map(|s| usize::try_from(*s).ok()).collect();
    let Some(shape) = shape else { bail!("`shape` has a negative size") };
    bounded(&shape)?;
    Ok(shape)
}

fn full(value: Option<&Tensor>, shape: &[usize]) -> Result<Tensor> {
    bounded(shape)?;
    Ok(match value {
        Some(v) => v.flatten_all()?.narrow(0, 0, 1)?.broadcast_as(shape)?.contiguous()?,
        None => Tensor::zeros(shape, candle_core::DType::F32, &candle_core::Device::Cpu)?,
    })
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "checked against the limit first"
)]
fn steps(start: f64, end: f64, step: f64) -> Result<usize> {
    let count = ((end - start) / step).ceil();
    if step == 0.0 || !count.is_finite() || count > f64::from(1u32 << 28) {
        bail!("a range from {start} to {end} by {step} has no end that can be reached");
    }
    Ok(count.max(0.0) as usize)
}
