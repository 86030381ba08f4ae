//! Reductions along axes, and their positions.

use candle_core::{DType as CandleType, Device, Tensor};
use rayon::prelude::*;

use super::{
    BOOL, Call, Eval, INT, NUMBER, Opset, Param, Preset, STRING, Spec, Tolerance, Val, args, from, need, one,
    option, written,
};
use crate::{
    bail,
    error::Result,
    mil::{DType, Dim, Type},
    ops::Args,
};

pub static SPECS: &[&Spec] = &[
    &reduction("reduce_sum", |c| fold(c, sum, |v| v.iter().fold(0, |s: i64, x| s.wrapping_add(*x)))),
    &reduction("reduce_mean", |c| fold(c, mean, |v| integer(mean(&wide(v))))),
    &reduction("reduce_max", |c| fold(c, max, |v| v.iter().copied().max().unwrap_or(i64::MIN))),
    &reduction("reduce_min", |c| {
        fold(c, |v| -max(&negated(v)), |v| v.iter().copied().min().unwrap_or(i64::MAX))
    }),
    &reduction("reduce_prod", |c| fold(c, product, |v| v.iter().fold(1, |s: i64, x| s.wrapping_mul(*x)))),
    &reduction("reduce_sum_square", |c| fold(c, square_sum, |v| integer(square_sum(&wide(v))))),
    &reduction("reduce_l1_norm", |c| fold(c, magnitude, |v| integer(magnitude(&wide(v))))),
    &reduction("reduce_l2_norm", |c| {
        fold(c, |v| square_sum(v).sqrt(), |v| integer(square_sum(&wide(v)).sqrt()))
    }),
    &reduction("reduce_log_sum", |c| fold(c, |v| sum(v).ln(), |v| integer(sum(&wide(v)).ln()))),
    &reduction("reduce_log_sum_exp", |c| fold(c, log_sum_exp, |v| integer(log_sum_exp(&wide(v))))),
    &position("reduce_argmax", |c| positions(c, |new, best| new > best)),
    &position("reduce_argmin", |c| positions(c, |new, best| new < best)),
];

const fn reduction(name: &'static str, f: fn(&Call<'_>) -> Result<Vec<Val>>) -> Spec {
    const PARAMS: &[Param] =
        &[need("x", NUMBER), option("axes", INT), written("keep_dims", BOOL, Preset::Bool(false))];
    Spec {
        name,
        since: Opset::Ios15,
        params: PARAMS,
        infer: |a| {
            let axes = known_axes(a)?;
            let keep = a.bool_or("keep_dims", false)?;
            Ok(vec![Type::tensor(a.dtype("x")?, reduced(a.dims("x")?, &axes, keep))])
        },
        eval: Eval::Call(f),
        flops: |a| a.count("x"),
        tolerance: Tolerance::Rounding,
    }
}

const fn position(name: &'static str, f: fn(&Call<'_>) -> Result<Vec<Val>>) -> Spec {
    const PARAMS: &[Param] = &[
        need("x", NUMBER),
        written("axis", INT, Preset::Int(-1)),
        written("keep_dims", BOOL, Preset::Bool(false)),
        from(Opset::Ios17, written("output_dtype", STRING, Preset::Str("int32"))),
    ];
    Spec {
        name,
        since: Opset::Ios15,
        params: PARAMS,
        infer: |a| {
            let axis = a.axis("axis", "x", -1)?;
            let dtype = match a.str_or("output_dtype", "int32") {
                "int32" => DType::I32,
                "uint16" => DType::U16,
                other => bail!("`output_dtype` is `{other}`, int32 or uint16 is expected"),
            };
            Ok(vec![Type::tensor(dtype, reduced(a.dims("x")?, &[axis], a.bool_or("keep_dims", false)?))])
        },
        eval: Eval::Call(f),
        flops: |a| a.count("x"),
        tolerance: Tolerance::Exact,
    }
}

/// The axes of `x` that are named, all of them by default.
pub(super) fn known_axes(a: &Args<'_>) -> Result<Vec<usize>> {
    match a.axes("axes", "x")? {
        Some(axes) => distinct(axes),
        None if a.has("axes") => bail!("`axes` must be known when the program is compiled"),
        None => Ok((0..a.rank("x")?).collect()),
    }
}

/// The same at run time.
pub(super) fn axes(c: &Call<'_>, x: &Tensor) -> Result<Vec<usize>> {
    if !c.has("axes") {
        return Ok((0..x.rank()).collect());
    }
    let axes = c.ints("axes")?.into_iter().map(|a| args::axis(a, x.rank()).map_err(|e| e.at("axes")));
    distinct(axes.collect::<Result<_>>()?)
}

fn distinct(axes: Vec<usize>) -> Result<Vec<usize>> {
    match axes.iter().enumerate().find(|(i, a)| axes[..*i].contains(a)) {
        Some((_, twice)) => bail!("axis {twice} is named twice"),
        None => Ok(axes),
    }
}

fn reduced(dims: &[Dim], axes: &[usize], keep: bool) -> Vec<Dim> {
    let size = |(i, d): (usize, &Dim)| match axes.contains(&i) {
        true => keep.then_some(Dim::Fixed(1)),
        false => Some(*d),
    };
    dims.iter().enumerate().filter_map(size).collect()
}

/// `x` with the given axes moved to the back in their own order, and how many elements they span.
pub(super) fn gathered(x: &Tensor, axes: &[usize]) -> Result<(Tensor, Vec<usize>, usize)> {
    if let Some(axis) = axes.iter().find(|a| **a >= x.rank()) {
        bail!("axis {axis} is outside a tensor of rank {}", x.rank());
    }
    let mut order: Vec<usize> = (0..x.rank()).filter(|i| !axes.contains(i)).collect();
    order.extend((0..x.rank()).filter(|i| axes.contains(i)));
    let span = axes.iter().map(|a| x.dims()[*a]).product();
    Ok((x.permute(order.as_slice())?, order, span))
}

fn fold(c: &Call<'_>, f: impl Fn(&[f32]) -> f32 + Sync, g: impl Fn(&[i64]) -> i64) -> Result<Vec<Val>> {
    let x = c.tensor("x")?;
    let axes = axes(c, x)?;
    let keep = c.bool_or("keep_dims", false)?;
    let shape: Vec<usize> = (0..x.rank())
        .filter_map(|i| if axes.contains(&i) { keep.then_some(1) } else { Some(x.dims()[i]) })
        .collect();
    if let (CandleType::F32, Some(sizes)) = (x.dtype(), together(x, &axes)) {
        return Ok(vec![Val::floats(each_column(&x.flatten_all()?.to_vec1()?, sizes, f), &shape)?]);
    }
    let (moved, order, span) = gathered(x, &axes)?;
    let rows: usize = order[..order.len() - axes.len()].iter().map(|i| x.dims()[*i]).product();
    let flat = moved.flatten_all()?;
    if x.dtype() == CandleType::F32 {
        let v: Vec<f32> = flat.to_vec1()?;
        Ok(vec![Val::floats((0..rows).map(|r| f(&v[r * span..(r + 1) * span])).collect(), &shape)?])
    } else {
        let v: Vec<i64> = flat.to_dtype(CandleType::I64)?.to_vec1()?;
        Ok(vec![Val::ints((0..rows).map(|r| g(&v[r * span..(r + 1) * span])).collect(), &shape)?])
    }
}

/// Where the axes follow each other: how many elements they span, and how far apart those are. None too
/// where there is nothing to reduce.
pub(super) fn together(x: &Tensor, axes: &[usize]) -> Option<[usize; 2]> {
    let (first, last) = (axes.first()?, axes.last()?);
    let neighbours = axes.windows(2).all(|w| w[0] + 1 == w[1]) && *last < x.rank();
    (neighbours && x.elem_count() > 0)
        .then(|| [&x.dims()[*first..=*last], &x.dims()[last + 1..]].map(|d| d.iter().product()))
}

/// Columns taken side by side, as many as fill a cache line.
pub(super) const BESIDE: usize = 16;

/// `f` of each column of `span` elements, of which each is a step of `inner` from the next.
fn each_column(v: &[f32], [span, inner]: [usize; 2], f: impl Fn(&[f32]) -> f32 + Sync) -> Vec<f32> {
    if inner == 1 {
        return v.par_chunks(span).with_min_len(8192 / span + 1).map(&f).collect();
    }
    let mut results = vec![0.0; v.len() / span];
    results.par_chunks_mut(inner).zip(v.par_chunks(span * inner)).for_each(|(to, from)| {
        to.par_chunks_mut(BESIDE).with_min_len(1024 / span + 1).enumerate().for_each_init(
            || vec![0.0; BESIDE * span],
            |columns, (block, to)| {
                turn(from, inner, block * BESIDE, &mut columns[..to.len() * span]);
                to.iter_mut().zip(columns.chunks(span)).for_each(|(to, column)| *to = f(column));
            },
        );
    });
    results
}

/// Columns of lines of `length` elements from the one at `start` on, one after the other.
pub(super) fn turn(lines: &[f32], length: usize, start: usize, columns: &mut [f32]) {
    let span = lines.len() / length;
    let count = columns.len() / span;
    for (i, line) in lines.chunks_exact(length).enumerate() {
        for (v, to) in line[start..start + count].iter().zip(columns[i..].iter_mut().step_by(span)) {
            *to = *v;
        }
    }
}

fn positions(c: &Call<'_>, better: impl Fn(f64, f64) -> bool) -> Result<Vec<Val>> {
    let x = c.tensor("x")?;
    let axis = c.axis("axis", x, -1)?;
    let (moved, order, span) = gathered(x, &[axis])?;
    if span == 0 {
        bail!("axis {axis} of `x` is empty");
    }
    let mut shape: Vec<usize> = order[..order.len() - 1].iter().map(|i| x.dims()[*i]).collect();
    if c.bool_or("keep_dims", false)? {
        shape.insert(axis, 1);
    }
    let v: Vec<f64> = moved.flatten_all()?.to_dtype(CandleType::F64)?.to_vec1()?;
    let first = |row: &[f64]| {
        let best = (1..row.len()).fold(0, |b, i| if better(row[i], row[b]) { i } else { b });
        i64::try_from(best).unwrap_or(i64::MAX)
    };
    one(Tensor::from_vec(v.chunks(span).map(first).collect::<Vec<i64>>(), shape, &Device::Cpu)?)
}

#[expect(clippy::cast_possible_truncation, reason = "sums are kept wide and rounded once")]
fn narrow(v: f64) -> f32 {
    v as f32
}

#[expect(clippy::cast_possible_truncation, reason = "integer results of float formulas truncate")]
fn integer(v: f32) -> i64 {
    v as i64
}

#[expect(clippy::cast_precision_loss, reason = "only for formulas that are float anyway")]
fn wide(v: &[i64]) -> Vec<f32> {
    v.iter().map(|x| *x as f32).collect()
}

fn negated(v: &[f32]) -> Vec<f32> {
    v.iter().map(|x| -x).collect()
}

fn sum(v: &[f32]) -> f32 {
    narrow(v.iter().map(|x| f64::from(*x)).sum())
}

#[expect(clippy::cast_precision_loss, reason = "a count of elements in memory")]
pub(super) fn mean(v: &[f32]) -> f32 {
    narrow(v.iter().map(|x| f64::from(*x)).sum::<f64>() / v.len() as f64)
}

/// Not a number if any element is not.
pub(super) fn max(v: &[f32]) -> f32 {
    abreast(v, f32::NEG_INFINITY, |m, x| if x > m || x.is_nan() { x } else { m })
}

/// A fold of `f` that the processor can take many elements of at a time; always in the same order.
pub(super) fn abreast(v: &[f32], start: f32, f: impl Fn(f32, f32) -> f32) -> f32 {
    let (blocks, rest) = v.as_chunks::<16>();
    let mut lanes = [start; 16];
    for block in blocks {
        lanes.iter_mut().zip(block).for_each(|(lane, x)| *lane = f(*lane, *x));
    }
    lanes.iter().chain(rest).fold(start, |all, x| f(all, *x))
}

fn product(v: &[f32]) -> f32 {
    narrow(v.iter().map(|x| f64::from(*x)).product())
}

pub(super) fn square_sum(v: &[f32]) -> f32 {
    narrow(v.iter().map(|x| f64::from(*x).powi(2)).sum())
}

fn magnitude(v: &[f32]) -> f32 {
    narrow(v.iter().map(|x| f64::from(x.abs())).sum())
}

fn log_sum_exp(v: &[f32]) -> f32 {
    let top = f64::from(max(v));
    if top.is_infinite() {
        return narrow(top);
    }
    narrow(v.iter().map(|x| (f64::from(*x) - top).exp()).sum::<f64>().ln() + top)
}
