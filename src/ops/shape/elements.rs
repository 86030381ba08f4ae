//! Moving elements of any type, with sizes and indices checked first.

use candle_core::{Device, Tensor};

use crate::{
    bail,
    error::Result,
    mil::{DType, Dim, Type, types::shape_text},
    ops::Args,
};

/// Elements that one result may have.
const LIMIT: usize = 1 << 28;

/// The work of an op that only moves.
pub(in crate::ops) fn free(_: &Args<'_>) -> u64 {
    0
}

/// One result of this type.
pub(in crate::ops) fn result(dtype: DType, dims: Vec<Dim>) -> Result<Vec<Type>> {
    Ok(vec![Type::tensor(dtype, dims)])
}

/// The sizes of a shape whose sizes are all known.
pub(in crate::ops) fn sizes(dims: &[Dim]) -> Result<Vec<usize>> {
    match dims.iter().map(|d| d.fixed()).collect() {
        Some(sizes) => Ok(sizes),
        None => bail!("{} has a size that is not known", shape_text(dims)),
    }
}

/// The number of elements of a shape that is about to be made.
pub(in crate::ops) fn bounded(shape: &[usize]) -> Result<usize> {
    match shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)) {
        Some(n) if n <= LIMIT => Ok(n),
        _ => bail!("a result of {} has more than 2^28 elements", shape_text(shape)),
    }
}

/// An index into `size` elements, counted from the back when negative.
pub(in crate::ops) fn index(at: i64, size: usize) -> Result<usize> {
    let from_front = if at < 0 { at.saturating_add_unsigned(size as u64) } else { at };
    match usize::try_from(from_front) {
        Ok(i) if i < size => Ok(i),
        _ => bail!("index {at} is outside a size of {size}"),
    }
}

/// Elements of `x` by their row-major position, as a tensor of `shape`.
pub(in crate::ops) fn take(x: &Tensor, positions: Vec<i64>, shape: &[usize]) -> Result<Tensor> {
    let ids = Tensor::new(positions, &Device::Cpu)?;
    Ok(x.flatten_all()?.contiguous()?.index_select(&ids, 0)?.reshape(shape)?)
}

/// Slices of `x` along an axis, in the order given.
pub(super) fn select(x: &Tensor, axis: usize, picks: &[usize]) -> Result<Tensor> {
    let start = picks.first().copied().unwrap_or(0);
    if picks.iter().enumerate().all(|(i, p)| *p == start + i) {
        return Ok(x.narrow(axis, start, picks.len())?);
    }
    let ids: Vec<i64> = picks.iter().filter_map(|p| i64::try_from(*p).ok()).collect();
    Ok(x.contiguous()?.index_select(&Tensor::new(ids, &Device::Cpu)?, axis)?)
}

/// Distances between neighbours along each axis of a row-major tensor.
pub(super) fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i];
    }
    strides
}

/// Calls a function that is generic over the element type for the type of a tensor.
macro_rules! typed {
    ($x:expr, $f:ident($($arg:expr),* $(,)?)) => {
        match $x.dtype() {
            candle_core::DType::F32 => $f::<f32>($($arg),*),
            candle_core::DType::I64 => $f::<i64>($($arg),*),
            candle_core::DType::U8 => $f::<u8>($($arg),*),
            other => $crate::bail!("a tensor of {other:?} is no value of a program"),
        }
    };
}
pub(in crate::ops) use typed;
