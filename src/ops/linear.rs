//! Convolutions and matrix products.

use candle_core::{DType as CandleType, Tensor};
use rayon::prelude::*;

use super::{
    Args, BOOL, Eval, NUMBER, Opset, Preset, STRING, Spec, Tolerance, args::named, broadcast, fixed, many,
    need, one, written,
};
use crate::{
    bail,
    error::Result,
    mil::{Dim, Type, types::shape_text},
};

mod conv;
mod deconv;
mod einsum;
pub(super) mod window;

pub static SPECS: &[&Spec] = &[&LINEAR, &MATMUL, &EINSUM, &conv::CONV, &deconv::CONV_TRANSPOSE];

static LINEAR: Spec = Spec {
    name: "linear",
    since: Opset::Ios15,
    params: &[need("x", NUMBER), fixed("weight", NUMBER), written("bias", NUMBER, Preset::Caller)],
    infer: |a| {
        let (x, w) = (a.tensor("x")?, a.tensor("weight")?);
        let (Some(last), [out, inner]) = (x.dims.last(), w.dims.as_slice()) else {
            bail!("{} wants [out, in], {} at least rank 1", named("weight", w), named("x", x));
        };
        if !last.agrees(*inner) {
            bail!("{} has {last} features, {} takes {inner}", named("x", x), named("weight", w));
        }
        if a.has("bias") {
            let b = a.tensor("bias")?;
            if b.rank() != 1 || !b.dims[0].agrees(*out) {
                bail!("{} gives {out} features, {} does not fit", named("weight", w), named("bias", b));
            }
        }
        let mut dims = x.dims.clone();
        *dims.last_mut().unwrap_or(&mut Dim::ANY.clone()) = *out;
        Ok(vec![Type::tensor(x.dtype, dims)])
    },
    eval: Eval::Call(|c| {
        let (x, w) = (c.tensor("x")?, c.tensor("weight")?);
        let (Some(inner), [out, _]) = (x.dims().last().copied(), w.dims()) else {
            bail!("`weight` has rank {}, 2 is expected", w.rank());
        };
        let mut shape = x.dims().to_vec();
        shape.pop();
        let rows = shape.iter().product::<usize>();
        shape.push(*out);
        let y = product(&x.contiguous()?.reshape((rows, inner))?, &w.t()?)?;
        let y = if c.has("bias") { y.broadcast_add(c.tensor("bias")?)? } else { y };
        one(y.reshape(shape)?)
    }),
    flops: |a| a.out_count().saturating_mul(2).saturating_mul(last_size(a, "x")),
    tolerance: Tolerance::Rounding,
};

static MATMUL: Spec = Spec {
    name: "matmul",
    since: Opset::Ios15,
    params: &[
        need("x", NUMBER),
        need("y", NUMBER),
        written("transpose_x", BOOL, Preset::Bool(false)),
        written("transpose_y", BOOL, Preset::Bool(false)),
    ],
    infer: |a| {
        let dtype = matmul_dtype(a)?;
        let x = sides(a.dims("x")?, a.bool_or("transpose_x", false)?, true);
        let y = sides(a.dims("y")?, a.bool_or("transpose_y", false)?, false);
        let (Some((xb, m, k)), Some((yb, l, n))) = (x, y) else {
            bail!("a scalar cannot be multiplied as a matrix");
        };
        let Some(mut dims) = broadcast(xb, yb).filter(|_| k.agrees(l)) else {
            bail!(
                "{} and {} do not multiply: {k} and {l} are summed, {} and {} broadcast",
                named("x", a.tensor("x")?),
                named("y", a.tensor("y")?),
                shape_text(xb),
                shape_text(yb)
            );
        };
        dims.extend((a.rank("x")? > 1).then_some(m));
        dims.extend((a.rank("y")? > 1).then_some(n));
        Ok(vec![Type::tensor(dtype, dims)])
    },
    eval: Eval::Call(|c| {
        let (x, y) = (c.tensor("x")?, c.tensor("y")?);
        let (row, column) = (x.rank() == 1, y.rank() == 1);
        let x = if row { x.unsqueeze(0)? } else { swapped(x, c.bool_or("transpose_x", false)?)? };
        let y = if column { y.unsqueeze(1)? } else { swapped(y, c.bool_or("transpose_y", false)?)? };
        let mut z = product(&x, &y)?;
        if column {
            z = z.squeeze(z.rank() - 1)?;
        }
        if row {
            z = z.squeeze(z.rank() - if column { 1 } else { 2 })?;
        }
        one(z)
    }),
    flops: |a| {
        let k =
            a.dims("x").ok().and_then(|d| sides(d, a.bool_or("transpose_x", false).unwrap_or(false), true));
        let k = k.and_then(|(_, _, k)| k.fixed()).unwrap_or(1) as u64;
        a.out_count().saturating_mul(2).saturating_mul(k)
    },
    tolerance: Tolerance::Rounding,
};

static EINSUM: Spec = Spec {
    name: "einsum",
    since: Opset::Ios15,
    params: &[many("values", NUMBER), fixed("equation", STRING)],
    infer: |a| {
        let values = a.tensors("values")?;
        let [x, y] = values.as_slice() else {
            bail!("`values` has {} operands, 2 are expected", values.len())
        };
        if x.dtype != y.dtype {
            bail!("`values` are {} and {}", x.dtype, y.dtype);
        }
        einsum::supported(a.str_or("equation", ""))?;
        Ok(vec![Type::tensor(x.dtype, einsum::infer(x, y)?)])
    },
    eval: Eval::Call(|c| {
        einsum::supported(c.str_or("equation", ""))?;
        match c.tensors("values")?.as_slice() {
            [x, y] => one(einsum::eval(x, y)?),
            other => bail!("`values` has {} operands, 2 are expected", other.len()),
        }
    }),
    flops: |a| match a.tensors("values").as_deref() {
        Ok([x, y]) => einsum::work(x, y),
        _ => 0,
    },
    tolerance: Tolerance::Rounding,
};

/// Matrix product of the last two axes, broadcast over the others.
pub(super) fn product(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    if x.dtype() == CandleType::I64 && y.dtype() == CandleType::I64 {
        let wide = product(&x.to_dtype(CandleType::F64)?, &y.to_dtype(CandleType::F64)?)?;
        return Ok(wide.to_dtype(CandleType::I64)?);
    }
    let ([a @ .., m, k], [b @ .., l, n]) = (x.dims(), y.dims()) else {
        bail!("matrices of rank {} and {} cannot be multiplied", x.rank(), y.rank());
    };
    let fixed = |d: &[usize]| d.iter().map(|n| Dim::Fixed(*n)).collect::<Vec<_>>();
    let Some(batch) = broadcast(&fixed(a), &fixed(b)).filter(|_| k == l) else {
        bail!("{} and {} do not multiply", shape_text(x.dims()), shape_text(y.dims()));
    };
    let mut shape: Vec<usize> = batch.into_iter().filter_map(Dim::fixed).collect();
    let batch = shape.clone();
    shape.extend([*m, *n]);
    if *k == 0 || shape.contains(&0) {
        return Ok(Tensor::zeros(shape, x.dtype(), x.device())?);
    }
    if batch.is_empty() {
        return if *n == 1 { vector(x, y) } else { Ok(x.matmul(y)?) };
    }
    let spread = |t: &Tensor, rows: usize, columns: usize| {
        t.broadcast_as(batch.iter().copied().chain([rows, columns]).collect::<Vec<usize>>())
    };
    let (x, y) = (spread(x, *m, *k)?, spread(y, *k, *n)?);
    if even(&x) && even(&y) {
        return Ok(x.matmul(&y)?);
    }
    if even(&x.get(0)?) && even(&y.get(0)?) {
        let each = (0..batch[0]).into_par_iter().map(|i| x.get(i)?.matmul(&y.get(i)?));
        return Ok(Tensor::stack(&each.collect::<candle_core::Result<Vec<_>>>()?, 0)?);
    }
    let stacked = |t: &Tensor, rows, columns| t.contiguous()?.reshape(((), rows, columns));
    Ok(stacked(&x, *m, *k)?.matmul(&stacked(&y, *k, *n)?)?.reshape(shape)?)
}

/// Matrix times column, which one thread cannot feed from memory fast enough.
fn vector(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    /// Always the same parts, so that no result depends on the number of threads.
    const ROWS: usize = 128;
    let rows = x.dims()[0];
    if rows * y.dims()[0] < 1 << 16 {
        return Ok(x.matmul(y)?);
    }
    let part = |i: usize| x.narrow(0, i * ROWS, ROWS.min(rows - i * ROWS))?.matmul(y);
    let parts = (0..rows.div_ceil(ROWS)).into_par_iter().map(part);
    Ok(Tensor::cat(&parts.collect::<candle_core::Result<Vec<_>>>()?, 0)?)
}

/// Whether the matrices follow each other at one distance, as candle wants it.
fn even(x: &Tensor) -> bool {
    match (&x.dims()[..x.rank() - 2], &x.stride()[..x.rank() - 2]) {
        ([], []) | ([_], [_]) => true,
        ([1, _] | [_, 1], [_, _]) => true,
        ([_, n], [outer, inner]) => *outer == inner * n,
        _ => false,
    }
}

fn swapped(x: &Tensor, transpose: bool) -> Result<Tensor> {
    if x.rank() < 2 {
        bail!("a scalar cannot be multiplied as a matrix");
    }
    Ok(if transpose { x.transpose(x.rank() - 2, x.rank() - 1)? } else { x.clone() })
}

/// Batch sizes, rows and columns; a vector is one row on the left and one column on the right.
fn sides(dims: &[Dim], transpose: bool, left: bool) -> Option<(&[Dim], Dim, Dim)> {
    match dims {
        [] => None,
        [n] if left => Some((&[], Dim::Fixed(1), *n)),
        [n] => Some((&[], *n, Dim::Fixed(1))),
        [batch @ .., a, b] if transpose => Some((batch, *b, *a)),
        [batch @ .., a, b] => Some((batch, *a, *b)),
    }
}

/// From iOS 17 on one constant operand may have another type; the result has that of the other.
fn matmul_dtype(a: &Args<'_>) -> Result<crate::mil::DType> {
    let (x, y) = (a.dtype("x")?, a.dtype("y")?);
    let constant = |name| !matches!(a.known(name), super::Known::No);
    match (constant("x"), constant("y")) {
        _ if x == y => Ok(x),
        (true, false) => Ok(y),
        (false, true) => Ok(x),
        _ => bail!("`x` is {x}, `y` is {y}"),
    }
}

fn last_size(a: &Args<'_>, name: &str) -> u64 {
    a.dims(name).ok().and_then(|d| d.last()?.fixed()).unwrap_or(1) as u64
}
