//! Results as their declared types want them.

use candle_core::{DType as CandleType, Tensor};

use super::Precision;
use crate::{
    bail,
    error::Result,
    mil::{DType, Dim, Type, types::shape_text},
    ops::Val,
};

/// How values of an element type are held.
pub(super) fn kind(dtype: DType) -> CandleType {
    match dtype {
        DType::Bool => CandleType::U8,
        d if d.is_int() => CandleType::I64,
        _ => CandleType::F32,
    }
}

/// Refuses a value of another type, and rounds one of this type.
pub(super) fn settle(value: Val, ty: &Type, precision: Precision) -> Result<Val> {
    match (ty, value) {
        (Type::Tensor(t), Val::Tensor(v)) => {
            let fits = |(want, seen): (&Dim, &usize)| want.agrees(Dim::Fixed(*seen));
            if t.rank() != v.rank() || !t.dims.iter().zip(v.dims()).all(fits) {
                bail!("the value is {}, {t} is declared", shape_text(v.dims()));
            }
            if v.dtype() != kind(t.dtype) {
                bail!("the value holds {}, {t} is declared", held(v.dtype()));
            }
            Ok(Val::Tensor(rounded(v, t.dtype, precision)?))
        }
        (Type::Tensor(t), value @ (Val::Str(_) | Val::List(_))) if t.dtype == DType::String => Ok(value),
        // The elements of a list were settled when they were computed.
        (Type::List { .. } | Type::Tuple(_) | Type::Dict(..), value @ Val::List(_)) => Ok(value),
        (Type::Unset, value) => Ok(value),
        (ty, _) => bail!("the value is of another kind than {ty}, which is declared"),
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

fn rounded(v: Tensor, dtype: DType, precision: Precision) -> Result<Tensor> {
    Ok(match (dtype, precision) {
        (DType::F16, Precision::Fp16) => v.to_dtype(CandleType::F16)?.to_dtype(CandleType::F32)?,
        (DType::BF16, Precision::Fp16) => v.to_dtype(CandleType::BF16)?.to_dtype(CandleType::F32)?,
        _ if dtype.is_int() => wrapped(v, dtype)?,
        _ => v,
    })
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
