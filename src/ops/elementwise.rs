//! Ops on one element, or on two.

use candle_core::{DType as CandleType, Device, Tensor, cpu::erf::erf_f32};
use rayon::prelude::*;

use super::{
    BOOL, Call, DTypes, Eval, FLOAT, NUMBER, Opset, Param, Preset, STRING, Spec, Tolerance, Val, args::named,
    broadcast, fixed, need, one, written,
};
use crate::{
    bail,
    error::Result,
    mil::{DType, Dim, Type},
    ops::Args,
};

mod activation;
mod quantize;

/// fp16, fp32, int32, bool
const VALUE: DTypes = DTypes::of(&[DType::F16, DType::F32, DType::I32, DType::Bool]);

pub static SPECS: &[&Spec] = &[
    &binary("add", |x, y| both(x, y, lined(|a, b| a + b, |x, y| x.broadcast_add(y)), i64::wrapping_add)),
    &binary("sub", |x, y| both(x, y, lined(|a, b| a - b, |x, y| x.broadcast_sub(y)), i64::wrapping_sub)),
    &binary("mul", |x, y| both(x, y, lined(|a, b| a * b, |x, y| x.broadcast_mul(y)), i64::wrapping_mul)),
    &binary("real_div", |x, y| {
        both(x, y, lined(|a, b| a / b, |x, y| x.broadcast_div(y)), |a, b| a.checked_div(b).unwrap_or(0))
    }),
    &binary("floor_div", |x, y| both(x, y, floats(|a, b| (a / b).floor()), floor_div)),
    &binary("mod", |x, y| {
        both(x, y, floats(|a, b| a - (a / b).floor() * b), |a, b| {
            a.wrapping_sub(floor_div(a, b).wrapping_mul(b))
        })
    }),
    &binary("pow", |x, y| both(x, y, floats(f32::powf), int_pow)),
    &binary("maximum", |x, y| both(x, y, floats(|a, b| if a >= b || a.is_nan() { a } else { b }), i64::max)),
    &binary("minimum", |x, y| both(x, y, floats(|a, b| if a <= b || a.is_nan() { a } else { b }), i64::min)),
    &compare("equal", NUMBER, |x, y| x.broadcast_eq(y)),
    &compare("not_equal", NUMBER, |x, y| x.broadcast_ne(y)),
    &compare("greater", NUMBER, |x, y| x.broadcast_gt(y)),
    &compare("greater_equal", NUMBER, |x, y| x.broadcast_ge(y)),
    &compare("less", NUMBER, |x, y| x.broadcast_lt(y)),
    &compare("less_equal", NUMBER, |x, y| x.broadcast_le(y)),
    &compare("logical_and", BOOL, |x, y| x.broadcast_mul(y)),
    &compare("logical_or", BOOL, |x, y| x.broadcast_maximum(y)),
    &compare("logical_xor", BOOL, |x, y| x.broadcast_ne(y)),
    &Spec { tolerance: Tolerance::Exact, ..unary("logical_not", LOGIC, 1, |x| x.eq(0u8)) },
    &SELECT,
    &CAST,
    &CLIP,
    &Spec { tolerance: Tolerance::Exact, ..unary("identity", ANYTHING, 0, |x| Ok(x.clone())) },
    &unary("abs", NUMBERS, 1, |x| map(x, f32::abs, i64::wrapping_abs)),
    &unary("sign", NUMBERS, 1, |x| map(x, sign, i64::signum)),
    &unary("square", NUMBERS, 1, |x| map(x, |v| v * v, |v| v.wrapping_mul(v))),
    &unary("exp2", NUMBERS, 4, |x| map(x, f32::exp2, |v| int_pow(2, v))),
    &unary("sqrt", FLOATS, 2, |x| each(x, f32::sqrt)),
    &unary("exp", FLOATS, 4, |x| each(x, f32::exp)),
    &unary("erf", FLOATS, 8, |x| each(x, erf_f32)),
    &unary("sin", FLOATS, 4, |x| each(x, f32::sin)),
    &unary("cos", FLOATS, 4, |x| each(x, f32::cos)),
    &unary("tan", FLOATS, 4, |x| each(x, f32::tan)),
    &unary("asin", FLOATS, 4, |x| each(x, f32::asin)),
    &unary("acos", FLOATS, 4, |x| each(x, f32::acos)),
    &unary("atan", FLOATS, 4, |x| each(x, f32::atan)),
    &unary("sinh", FLOATS, 4, |x| each(x, f32::sinh)),
    &unary("cosh", FLOATS, 4, |x| each(x, f32::cosh)),
    &unary("atanh", FLOATS, 4, |x| each(x, f32::atanh)),
    &Spec { tolerance: Tolerance::Exact, ..unary("floor", FLOATS, 1, |x| each(x, f32::floor)) },
    &Spec { tolerance: Tolerance::Exact, ..unary("ceil", FLOATS, 1, |x| each(x, f32::ceil)) },
    &Spec { tolerance: Tolerance::Exact, ..unary("round", FLOATS, 1, |x| each(x, f32::round_ties_even)) },
    &RSQRT,
    &INVERSE,
    &LOG,
    &THRESHOLD,
    &activation::RELU,
    &activation::RELU6,
    &activation::SIGMOID,
    &activation::SILU,
    &activation::TANH,
    &activation::GELU,
    &activation::SOFTPLUS,
    &activation::SOFTSIGN,
    &activation::SOFTPLUS_PARAMETRIC,
    &activation::ELU,
    &activation::LEAKY_RELU,
    &activation::PRELU,
    &activation::CLAMPED_RELU,
    &activation::THRESHOLDED_RELU,
    &activation::LINEAR_ACTIVATION,
    &activation::SIGMOID_HARD,
    &activation::SCALED_TANH,
    &quantize::QUANTIZE,
    &quantize::DEQUANTIZE,
];

static SELECT: Spec = Spec {
    name: "select",
    since: Opset::Ios15,
    params: &[need("cond", BOOL), need("a", VALUE), need("b", VALUE)],
    infer: |a| {
        let dtype = a.same_dtype(&["a", "b"])?;
        // The type is that of `a` and `b` alone: a condition that is larger is refused.
        let (dims, cond) = (broadcast(a.dims("a")?, a.dims("b")?), a.dims("cond")?);
        let fits = |d: &Vec<Dim>| {
            broadcast(d, cond)
                .is_some_and(|all| all.len() == d.len() && all.iter().zip(d).all(|(x, y)| x.agrees(*y)))
        };
        let Some(dims) = dims.filter(fits) else {
            bail!(
                "{}, {} and {} do not broadcast",
                named("cond", a.tensor("cond")?),
                named("a", a.tensor("a")?),
                named("b", a.tensor("b")?)
            );
        };
        Ok(vec![Type::tensor(dtype, dims)])
    },
    eval: Eval::Call(|c| {
        let (cond, a, b) = (c.tensor("cond")?, c.tensor("a")?, c.tensor("b")?);
        let shape = a.shape().broadcast_shape_binary_op(b.shape(), "select")?;
        let shape = cond.shape().broadcast_shape_binary_op(&shape, "select")?;
        let cond = cond.ne(&cond.zeros_like()?)?.broadcast_as(&shape)?;
        one(cond.where_cond(&a.broadcast_as(&shape)?, &b.broadcast_as(&shape)?)?)
    }),
    flops: |a| a.out_count(),
    tolerance: Tolerance::Exact,
};

static CAST: Spec = Spec {
    name: "cast",
    since: Opset::Ios15,
    params: &[need("x", super::ACTIVATION), fixed("dtype", STRING)],
    infer: |a| {
        let name = a.str_or("dtype", "");
        let Some(dtype) = DType::from_name(name).filter(|d| super::ACTIVATION.has(*d)) else {
            bail!("`dtype` is `{name}`"; hint: "fp16, fp32, int32, bool and, from iOS 17 on, int8, uint8, int16 and uint16 are possible");
        };
        Ok(vec![Type::tensor(dtype, a.dims("x")?.to_vec())])
    },
    eval: Eval::Call(|c| {
        let x = c.tensor("x")?;
        one(match DType::from_name(c.str_or("dtype", "")) {
            Some(DType::Bool) => x.ne(&x.zeros_like()?)?,
            Some(d) if d.is_int() => x.to_dtype(CandleType::I64)?,
            Some(d) if d.is_float() => x.to_dtype(CandleType::F32)?,
            _ => bail!("`dtype` is `{}`", c.str_or("dtype", "")),
        })
    }),
    flops: |_| 0,
    tolerance: Tolerance::Rounding,
};

static CLIP: Spec = scaled("clip", &[need("x", FLOAT), fixed("alpha", FLOAT), fixed("beta", FLOAT)], |c| {
    let (low, high) = (c.float_or("alpha", f32::MIN)?, c.float_or("beta", f32::MAX)?);
    let clip = |v: f32| if v < low { low } else { v };
    each_of(c, |v| if clip(v) > high { high } else { clip(v) })
});

static THRESHOLD: Spec = scaled("threshold", &[need("x", FLOAT), fixed("alpha", FLOAT)], |c| {
    let low = c.float_or("alpha", 0.0)?;
    each_of(c, |v| if v < low { low } else { v })
});

static RSQRT: Spec =
    scaled("rsqrt", &[need("x", FLOAT), written("epsilon", FLOAT, Preset::Float(1e-12))], |c| {
        let epsilon = c.float_or("epsilon", 1e-12)?;
        each_of(c, |v| 1.0 / (v + epsilon).sqrt())
    });

static INVERSE: Spec =
    scaled("inverse", &[need("x", FLOAT), written("epsilon", FLOAT, Preset::Float(1e-4))], |c| {
        let epsilon = c.float_or("epsilon", 1e-4)?;
        each_of(c, |v| 1.0 / (v + epsilon))
    });

static LOG: Spec = scaled("log", &[need("x", FLOAT), written("epsilon", FLOAT, Preset::Float(1e-45))], |c| {
    let epsilon = c.float_or("epsilon", 1e-45)?;
    each_of(c, |v| (v + epsilon).ln())
});

const FLOATS: &[Param] = &[need("x", FLOAT)];
const NUMBERS: &[Param] = &[need("x", NUMBER)];
const LOGIC: &[Param] = &[need("x", BOOL)];
const ANYTHING: &[Param] = &[need("x", super::ANY)];

/// An op on `x` alone; `work` operations an element.
const fn unary(
    name: &'static str,
    params: &'static [Param],
    work: u64,
    f: fn(&Tensor) -> candle_core::Result<Tensor>,
) -> Spec {
    let flops: fn(&Args<'_>) -> u64 = match work {
        0 => |_| 0,
        1 => |a| a.out_count(),
        2..=4 => |a| a.out_count().saturating_mul(4),
        _ => |a| a.out_count().saturating_mul(8),
    };
    Spec {
        name,
        since: Opset::Ios15,
        params,
        infer: |a| a.like("x"),
        eval: Eval::Unary(f),
        flops,
        tolerance: Tolerance::Rounding,
    }
}

/// Numbers of one type to a number of that type.
const fn binary(name: &'static str, f: fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>) -> Spec {
    const PARAMS: &[Param] = &[need("x", NUMBER), need("y", NUMBER)];
    Spec {
        name,
        since: Opset::Ios15,
        params: PARAMS,
        infer: |a| {
            let dtype = a.same_dtype(&["x", "y"])?;
            broadcast_to(a, dtype)
        },
        eval: Eval::Binary(f),
        flops: |a| a.out_count(),
        tolerance: Tolerance::Rounding,
    }
}

/// Two operands of one type to a bool.
const fn compare(
    name: &'static str,
    accepts: DTypes,
    f: fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
) -> Spec {
    const NUMBERS: &[Param] = &[need("x", NUMBER), need("y", NUMBER)];
    const BOOLS: &[Param] = &[need("x", BOOL), need("y", BOOL)];
    Spec {
        name,
        since: Opset::Ios15,
        params: if accepts.has(DType::Bool) { BOOLS } else { NUMBERS },
        infer: |a| {
            a.same_dtype(&["x", "y"])?;
            broadcast_to(a, DType::Bool)
        },
        eval: Eval::Binary(f),
        flops: |a| a.out_count(),
        tolerance: Tolerance::Exact,
    }
}

/// A float op on `x` with further parameters.
const fn scaled(name: &'static str, params: &'static [Param], f: fn(&Call<'_>) -> Result<Vec<Val>>) -> Spec {
    Spec { eval: Eval::Call(f), ..unary(name, params, 4, |x| Ok(x.clone())) }
}

/// The result of `f` on each element of `x`.
fn each_of(c: &Call<'_>, f: impl Fn(f32) -> f32 + Sync) -> Result<Vec<Val>> {
    one(each(c.tensor("x")?, f)?)
}

pub(super) fn each(x: &Tensor, f: impl Fn(f32) -> f32 + Sync) -> candle_core::Result<Tensor> {
    let mut v: Vec<f32> = x.flatten_all()?.to_vec1()?;
    let part = |part: &mut [f32]| part.iter_mut().for_each(|v| *v = f(*v));
    match v.len() {
        0..=16384 => part(&mut v),
        _ => v.par_chunks_mut(8192).for_each(part),
    }
    Tensor::from_vec(v, x.shape(), &Device::Cpu)
}

/// `f` on floats, `g` on integers.
fn map(x: &Tensor, f: impl Fn(f32) -> f32 + Sync, g: impl Fn(i64) -> i64) -> candle_core::Result<Tensor> {
    if x.dtype() == CandleType::F32 {
        return each(x, f);
    }
    let v: Vec<i64> = x.flatten_all()?.to_vec1()?;
    Tensor::from_vec(v.into_iter().map(g).collect(), x.shape(), &Device::Cpu)
}

/// `f` on floats, `g` on pairs of integers.
fn both(
    x: &Tensor,
    y: &Tensor,
    f: impl Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
    g: impl Fn(i64, i64) -> i64,
) -> candle_core::Result<Tensor> {
    if x.dtype() == CandleType::I64 { pairs(x, y, g) } else { f(x, y) }
}

fn pairs<T: candle_core::WithDType>(
    x: &Tensor,
    y: &Tensor,
    f: impl Fn(T, T) -> T,
) -> candle_core::Result<Tensor> {
    let shape = x.shape().broadcast_shape_binary_op(y.shape(), "binary")?;
    let x: Vec<T> = x.broadcast_as(&shape)?.flatten_all()?.to_vec1()?;
    let y: Vec<T> = y.broadcast_as(&shape)?.flatten_all()?.to_vec1()?;
    Tensor::from_vec(x.into_iter().zip(y).map(|(a, b)| f(a, b)).collect(), shape, &Device::Cpu)
}

fn floats(f: impl Fn(f32, f32) -> f32) -> impl Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor> {
    move |x, y| pairs(x, y, &f)
}

/// `f` in parallel where `y` is repeated along leading axes of a large `x`, and `g` elsewhere.
fn lined(
    f: impl Fn(f32, f32) -> f32 + Sync,
    g: impl Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
) -> impl Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor> {
    move |x, y| {
        let (count, length) = (x.elem_count(), y.elem_count());
        let leading = y.dims().iter().take_while(|n| **n == 1).count();
        let repeated = y.rank() == x.rank() && x.dims()[leading..] == y.dims()[leading..];
        if !repeated || count < 1 << 14 || length < 64 {
            return g(x, y);
        }
        let (mut a, b): (Vec<f32>, Vec<f32>) = (x.flatten_all()?.to_vec1()?, y.flatten_all()?.to_vec1()?);
        let step = if length == count { 8192 } else { length };
        a.par_chunks_mut(step).enumerate().for_each(|(i, part)| {
            part.iter_mut().zip(&b[i * step % length..]).for_each(|(a, b)| *a = f(*a, *b));
        });
        Tensor::from_vec(a, x.shape(), &Device::Cpu)
    }
}

/// A vector of one entry a channel, shaped to broadcast against a tensor of that rank.
pub(super) fn channels(v: &Tensor, rank: usize) -> candle_core::Result<Tensor> {
    let mut shape = vec![1; rank.max(2)];
    shape[1] = v.elem_count();
    v.reshape(shape)
}

fn broadcast_to(a: &Args<'_>, dtype: DType) -> Result<Vec<Type>> {
    match broadcast(a.dims("x")?, a.dims("y")?) {
        Some(dims) => Ok(vec![Type::tensor(dtype, dims)]),
        None => bail!("{} and {} do not broadcast", named("x", a.tensor("x")?), named("y", a.tensor("y")?)),
    }
}

fn sign(v: f32) -> f32 {
    if v == 0.0 || v.is_nan() { v } else { v.signum() }
}

/// Rounds down; zero where the divisor is zero.
fn floor_div(a: i64, b: i64) -> i64 {
    match a.checked_rem(b) {
        None => 0,
        Some(r) => a.wrapping_div(b) - i64::from(r != 0 && (r < 0) != (b < 0)),
    }
}

/// A negative exponent truncates what a float would be.
fn int_pow(a: i64, b: i64) -> i64 {
    match (a, u32::try_from(b)) {
        (_, Ok(b)) => a.wrapping_pow(b),
        (1, _) => 1,
        (-1, _) => {
            if b % 2 == 0 {
                1
            } else {
                -1
            }
        }
        _ => 0,
    }
}
