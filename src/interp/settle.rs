//! Results as their declared types want them.

use std::marker::PhantomData;

use candle_core::{CpuStorage, DType as CandleType, InplaceOp1, Layout, Tensor};
use half::{bf16, f16, slice::HalfFloatSliceExt};
use rayon::prelude::*;

use super::Precision;
use crate::{
    bail,
    error::Result,
    mil::{Arg, DType, Dim, Function, Op, Type, Weight, types::shape_text},
    ops::Val,
};

/// Ops whose results are elements of their arguments.
const MOVES: &[&str] = &[
    "concat",
    "expand_dims",
    "gather",
    "identity",
    "read_state",
    "reshape",
    "slice_by_index",
    "slice_by_size",
    "slice_update",
    "split",
    "squeeze",
    "stack",
    "transpose",
];

/// Elements converted at a time, as many as fit the fastest cache.
const BLOCK: usize = 1024;

/// How values of an element type are held.
pub(super) fn kind(dtype: DType) -> CandleType {
    match dtype {
        DType::Bool => CandleType::U8,
        d if d.is_int() => CandleType::I64,
        _ => CandleType::F32,
    }
}

/// Refuses a value of another type, and rounds one of this type; in place where nothing else has it.
pub(super) fn settle(value: Val, ty: &Type, precision: Precision, own: bool) -> Result<Val> {
    match (ty, value) {
        (Type::Tensor(t), Val::Tensor(v)) => {
            let fits = |(want, seen): (&Dim, &usize)| want.agrees(Dim::Fixed(*seen));
            if t.rank() != v.rank() || !t.dims.iter().zip(v.dims()).all(fits) {
                bail!("the value is {}, {t} is declared", shape_text(v.dims()));
            }
            if v.dtype() != kind(t.dtype) {
                bail!("the value holds {}, {t} is declared", held(v.dtype()));
            }
            Ok(Val::Tensor(rounded(v, t.dtype, precision, own)?))
        }
        (Type::Tensor(t), value @ (Val::Str(_) | Val::List(_))) if t.dtype == DType::String => Ok(value),
        // The elements of a list were settled when they were computed.
        (Type::List { .. } | Type::Tuple(_) | Type::Dict(..), value @ Val::List(_)) => Ok(value),
        (Type::Unset, value) => Ok(value),
        (ty, _) => bail!("the value is of another kind than {ty}, which is declared"),
    }
}

/// Whether the results are rounded already because the arguments are.
pub(super) fn only_moves(function: &Function, op: &Op) -> bool {
    let Some(to) = op.outputs.first().map(|id| element(function.ty(*id))) else { return false };
    let same = |arg: &Arg| match arg {
        Arg::Value(id) => element(function.ty(*id)),
        Arg::Const(c) => element(&c.ty),
    } == to;
    let moved = ["x", "values", "update", "input"];
    let mut args =
        op.params.iter().filter(|(name, _)| moved.contains(&name.as_str())).flat_map(|(_, given)| given);
    MOVES.contains(&op.kind.as_str()) && to.is_some_and(DType::is_float) && args.all(same)
}

/// Whether what is written to a state is rounded already.
pub(super) fn fits_state(function: &Function, op: &Op) -> bool {
    let ty = |name: &str| match op.params.get(name).map(Vec::as_slice) {
        Some([Arg::Value(id)]) => element(function.ty(*id)),
        _ => None,
    };
    ty("data").is_some_and(|data| data.is_float() && ty("input") == Some(data))
}

fn element(ty: &Type) -> Option<DType> {
    match ty {
        Type::Tensor(t) => Some(t.dtype),
        Type::State(held) => element(held),
        _ => None,
    }
}

fn held(kind: CandleType) -> &'static str {
    match kind {
        CandleType::U8 => "bools",
        CandleType::I64 => "integers",
        CandleType::F32 => "floats",
        _ => "elements of no value of a program",
    }
}

fn rounded(v: Tensor, dtype: DType, precision: Precision, own: bool) -> Result<Tensor> {
    Ok(match (dtype, precision) {
        (DType::F16, Precision::Fp16) => through::<f16>(v, own, false)?,
        (DType::F16, Precision::Fp16Flush) => through::<f16>(v, own, true)?,
        (DType::BF16, Precision::Fp16 | Precision::Fp16Flush) => through::<bf16>(v, own, false)?,
        _ if dtype.is_int() => wrapped(v, dtype)?,
        _ => v,
    })
}

/// Rounds to a narrower type and back.
fn through<T: Copy + Default>(v: Tensor, own: bool, flush: bool) -> Result<Tensor>
where
    [T]: HalfFloatSliceExt,
{
    let v = if own && v.is_contiguous() { v } else { v.force_contiguous()? };
    v.inplace_op1(&Through::<T>(flush, PhantomData))?;
    Ok(v)
}

/// Whether subnormals of fp16 become zero.
struct Through<T>(bool, PhantomData<T>);

impl<T: Copy + Default> InplaceOp1 for Through<T>
where
    [T]: HalfFloatSliceExt,
{
    fn name(&self) -> &'static str {
        "round"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let (CpuStorage::F32(values), Some((start, end))) = (storage, layout.contiguous_offsets()) else {
            candle_core::bail!("contiguous floats are expected");
        };
        let flush = self.0;
        let round = |part: &mut [f32]| {
            let mut narrow = [T::default(); BLOCK];
            for block in part.chunks_mut(BLOCK) {
                let narrow = &mut narrow[..block.len()];
                narrow.convert_from_f32_slice(block);
                narrow.convert_to_f32_slice(block);
                if flush {
                    let least = f16::MIN_POSITIVE.to_f32();
                    block.iter_mut().filter(|v| v.abs() < least).for_each(|v| *v = 0.0);
                }
            }
        };
        match &mut values[start..end] {
            few if few.len() <= 32 * BLOCK => round(few),
            many => many.par_chunks_mut(16 * BLOCK).for_each(round),
        }
        Ok(())
    }
}

/// The elements of a weight of fp16, decoded in parallel.
pub(super) fn halves(weight: &Weight) -> Result<Vec<f32>> {
    let bytes = weight.bytes()?;
    let mut values = vec![0.0; weight.count()];
    values.par_chunks_mut(16 * BLOCK).zip(bytes.par_chunks(32 * BLOCK)).for_each(|(to, from)| {
        let mut narrow = [f16::ZERO; BLOCK];
        for (to, from) in to.chunks_mut(BLOCK).zip(from.chunks(2 * BLOCK)) {
            for (half, bytes) in narrow.iter_mut().zip(from.as_chunks::<2>().0) {
                *half = f16::from_le_bytes(*bytes);
            }
            narrow[..to.len()].convert_to_f32_slice(to);
        }
    });
    Ok(values)
}

/// Integers as two's complement of the declared width.
fn wrapped(v: Tensor, dtype: DType) -> Result<Tensor> {
    let (Some((low, high)), Some(bits)) = (dtype.int_range(), dtype.bits()) else { return Ok(v) };
    let mut values = v.flatten_all()?.to_vec1::<i64>()?;
    if bits >= 64 || values.iter().all(|i| (low..=high).contains(i)) {
        return Ok(v);
    }
    for i in &mut values {
        let top = *i << (64 - bits);
        *i = if low < 0 { top >> (64 - bits) } else { (top.cast_unsigned() >> (64 - bits)).cast_signed() };
    }
    Ok(Tensor::from_vec(values, v.dims(), v.device())?)
}
