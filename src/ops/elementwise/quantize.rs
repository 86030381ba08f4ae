//! Activations to 8-bit integers and back.

use candle_core::Tensor;

use super::channels;
use crate::{
    bail,
    error::Result,
    mil::{DType, Type},
    ops::{
        Args, Call, DTypes, Eval, FLOAT, INT, Opset, STRING, Spec, Tolerance, args::named, fixed, need, one,
        option,
    },
};

const BYTE: DTypes = DTypes::of(&[DType::I8, DType::U8]);

pub(super) static QUANTIZE: Spec = Spec {
    name: "quantize",
    since: Opset::Ios17,
    params: &[
        need("input", FLOAT),
        fixed("scale", FLOAT),
        option("zero_point", BYTE),
        option("axis", INT),
        fixed("output_dtype", STRING),
    ],
    infer: |a| {
        a.same_dtype(&["input", "scale"])?;
        check_scale(a)?;
        let name = a.str_or("output_dtype", "");
        let Some(dtype) = DType::from_name(name).filter(|d| BYTE.has(*d)) else {
            bail!("`output_dtype` is `{name}`, int8 or uint8 is expected");
        };
        if a.has("zero_point") && a.dtype("zero_point")? != dtype {
            bail!("`zero_point` is {}, `output_dtype` is {dtype}", a.dtype("zero_point")?);
        }
        Ok(vec![Type::tensor(dtype, a.dims("input")?.to_vec())])
    },
    eval: Eval::Call(|c| {
        let x = c.tensor("input")?;
        let q = super::each(&x.broadcast_div(&spread(c, "scale", x)?)?, f32::round_ties_even)?;
        let q = if c.has("zero_point") { q.broadcast_add(&spread(c, "zero_point", x)?)? } else { q };
        let (low, high) =
            if c.str_or("output_dtype", "int8") == "uint8" { (0f64, 255f64) } else { (-128f64, 127f64) };
        one(q.clamp(low, high)?.to_dtype(candle_core::DType::I64)?)
    }),
    flops: |a| a.out_count().saturating_mul(4),
    tolerance: Tolerance::Rounding,
};

pub(super) static DEQUANTIZE: Spec = Spec {
    name: "dequantize",
    since: Opset::Ios17,
    params: &[need("input", BYTE), fixed("scale", FLOAT), option("zero_point", BYTE), option("axis", INT)],
    infer: |a| {
        a.same_dtype(&["input", "zero_point"])?;
        check_scale(a)?;
        Ok(vec![Type::tensor(a.dtype("scale")?, a.dims("input")?.to_vec())])
    },
    eval: Eval::Call(|c| {
        let x = c.tensor("input")?.to_dtype(candle_core::DType::F32)?;
        let x = if c.has("zero_point") { x.broadcast_sub(&spread(c, "zero_point", &x)?)? } else { x };
        one(x.broadcast_mul(&spread(c, "scale", &x)?)?)
    }),
    flops: |a| a.out_count().saturating_mul(2),
    tolerance: Tolerance::Rounding,
};

/// A scalar, or a vector along `axis`.
fn check_scale(a: &Args<'_>) -> Result<()> {
    let (x, scale) = (a.tensor("input")?, a.tensor("scale")?);
    match scale.rank() {
        0 => {}
        1 if a.has("axis") => {
            let axis = a.axis("axis", "input", 0)?;
            if !scale.dims[0].agrees(x.dims[axis]) {
                bail!("{} does not fit axis {axis} of {}", named("scale", scale), named("input", x));
            }
        }
        1 => bail!("{} wants `axis`", named("scale", scale)),
        _ => bail!("{} is neither a scalar nor a vector", named("scale", scale)),
    }
    if a.has("zero_point") && !a.tensor("zero_point")?.dims.iter().eq(&scale.dims) {
        bail!(
            "{} and {} differ in shape",
            named("scale", scale),
            named("zero_point", a.tensor("zero_point")?)
        );
    }
    Ok(())
}

/// A scalar, or a vector along `axis`, as floats that broadcast against `x`.
fn spread(c: &Call<'_>, name: &str, x: &Tensor) -> Result<Tensor> {
    let t = c.tensor(name)?.to_dtype(candle_core::DType::F32)?;
    if t.rank() == 0 {
        return Ok(t);
    }
    let axis = c.axis("axis", x, 0)?;
    Ok(channels(&t, x.rank() + 1 - axis)?.squeeze(0)?)
}
