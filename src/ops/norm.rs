//! Normalisation and softmax.

use candle_core::Tensor;
use rayon::prelude::*;

use super::{
    Call, Eval, FLOAT, INT, Opset, Preset, Spec, Tolerance, Val,
    args::named,
    elementwise::{channels, each},
    fixed, need, one, option,
    reduce::{BESIDE, abreast, axes, gathered, known_axes, max, mean, square_sum, together, turn},
    written,
};
use crate::{
    bail,
    error::Result,
    mil::{Dim, types::shape_text},
};

pub static SPECS: &[&Spec] =
    &[&SOFTMAX, &LAYER_NORM, &BATCH_NORM, &INSTANCE_NORM, &L2_NORM, &LOCAL_RESPONSE_NORM];

static SOFTMAX: Spec = Spec {
    name: "softmax",
    since: Opset::Ios15,
    params: &[need("x", FLOAT), written("axis", INT, Preset::Int(-1))],
    infer: |a| {
        a.axis("axis", "x", -1)?;
        a.like("x")
    },
    eval: Eval::Call(|c| {
        let x = c.tensor("x")?;
        let axis = c.axis("axis", x, -1)?;
        one(softmax(x, axis)?)
    }),
    flops: |a| a.out_count().saturating_mul(8),
    tolerance: Tolerance::Rounding,
};

static LAYER_NORM: Spec = Spec {
    name: "layer_norm",
    since: Opset::Ios15,
    params: &[
        need("x", FLOAT),
        option("axes", INT),
        option("gamma", FLOAT),
        option("beta", FLOAT),
        written("epsilon", FLOAT, Preset::Float(1e-5)),
    ],
    infer: |a| {
        let axes = known_axes(a)?;
        let x = a.tensor("x")?;
        let spanned: Vec<Dim> =
            x.dims.iter().enumerate().filter(|(i, _)| axes.contains(i)).map(|(_, d)| *d).collect();
        for name in ["gamma", "beta"].into_iter().filter(|n| a.has(n)) {
            let t = a.tensor(name)?;
            if t.rank() != spanned.len() || !t.dims.iter().zip(&spanned).all(|(a, b)| a.agrees(*b)) {
                bail!(
                    "{} has {} on the axes, {} does not fit",
                    named("x", x),
                    shape_text(&spanned),
                    named(name, t)
                );
            }
        }
        a.like("x")
    },
    eval: Eval::Call(|c| {
        let x = c.tensor("x")?;
        let axes = axes(c, x)?;
        let epsilon = c.float_or("epsilon", 1e-5)?;
        let scale = |name| c.has(name).then(|| c.get(name)?.to_floats()).transpose();
        let (gamma, beta) = (scale("gamma")?, scale("beta")?);
        one(rows(x, &axes, |row| {
            standardize(row, epsilon);
            affine(row, gamma.as_deref(), beta.as_deref());
        })?)
    }),
    flops: |a| a.out_count().saturating_mul(8),
    tolerance: Tolerance::Rounding,
};

static BATCH_NORM: Spec = Spec {
    params: &[
        need("x", FLOAT),
        fixed("mean", FLOAT),
        fixed("variance", FLOAT),
        option("gamma", FLOAT),
        option("beta", FLOAT),
        written("epsilon", FLOAT, Preset::Float(1e-5)),
    ],
    ..per_channel("batch_norm", |c| {
        let x = c.tensor("x")?;
        let epsilon = c.float_or("epsilon", 1e-5)?;
        let deviation = channels(&each(c.tensor("variance")?, |v| (v + epsilon).sqrt())?, x.rank())?;
        let y = x.broadcast_sub(&channels(c.tensor("mean")?, x.rank())?)?.broadcast_div(&deviation)?;
        one(channel_affine(c, y)?)
    })
};

static INSTANCE_NORM: Spec = Spec {
    params: &[
        need("x", FLOAT),
        option("gamma", FLOAT),
        option("beta", FLOAT),
        written("epsilon", FLOAT, Preset::Float(1e-5)),
    ],
    ..per_channel("instance_norm", |c| {
        let x = c.tensor("x")?;
        let epsilon = c.float_or("epsilon", 1e-5)?;
        let axes: Vec<usize> = (2..x.rank()).collect();
        one(channel_affine(c, rows(x, &axes, |row| standardize(row, epsilon))?)?)
    })
};

/// Divides by the length of the last three axes together.
static L2_NORM: Spec = Spec {
    name: "l2_norm",
    since: Opset::Ios15,
    params: &[need("x", FLOAT), written("epsilon", FLOAT, Preset::Float(1e-6))],
    infer: |a| {
        if a.rank("x")? < 3 {
            bail!("{} has a rank below 3", named("x", a.tensor("x")?));
        }
        a.like("x")
    },
    eval: Eval::Call(|c| {
        let x = c.tensor("x")?;
        let epsilon = c.float_or("epsilon", 1e-6)?;
        let axes: Vec<usize> = (x.rank().saturating_sub(3)..x.rank()).collect();
        one(rows(x, &axes, |row| {
            let length = (square_sum(row) + epsilon).sqrt();
            row.iter_mut().for_each(|v| *v /= length);
        })?)
    }),
    flops: |a| a.out_count().saturating_mul(4),
    tolerance: Tolerance::Rounding,
};

/// `x / (k + alpha / size · Σ x²)^beta` over neighbouring channels.
static LOCAL_RESPONSE_NORM: Spec = Spec {
    name: "local_response_norm",
    since: Opset::Ios15,
    params: &[
        need("x", FLOAT),
        fixed("size", INT),
        written("alpha", FLOAT, Preset::Float(1e-4)),
        written("beta", FLOAT, Preset::Float(0.75)),
        written("k", FLOAT, Preset::Float(1.0)),
    ],
    infer: |a| {
        if !(3..=4).contains(&a.rank("x")?) {
            bail!("{} has another rank than 3 and 4", named("x", a.tensor("x")?));
        }
        if a.int("size")?.is_some_and(|n| n < 1) {
            bail!("`size` is below 1");
        }
        a.like("x")
    },
    eval: Eval::Call(|c| {
        let x = c.tensor("x")?;
        let Some(size) = usize::try_from(c.int_or("size", 1)?).ok().filter(|n| *n > 0) else {
            bail!("`size` is below 1");
        };
        let (alpha, beta, k) = (c.float_or("alpha", 1e-4)?, c.float_or("beta", 0.75)?, c.float_or("k", 1.0)?);
        #[expect(clippy::cast_precision_loss, reason = "a count of channels")]
        let alpha = alpha / size as f32;
        let (before, after) = ((size - 1) / 2, size - (size - 1) / 2);
        one(rows(x, &[1], |row| {
            let old = row.to_vec();
            for (i, v) in row.iter_mut().enumerate() {
                let near = &old[i.saturating_sub(before)..i.saturating_add(after).min(old.len())];
                *v /= (k + alpha * square_sum(near)).powf(beta);
            }
        })?)
    }),
    flops: |a| a.out_count().saturating_mul(8),
    tolerance: Tolerance::Rounding,
};

/// An op on `[N, C, *D]` whose vectors have one entry a channel.
const fn per_channel(name: &'static str, f: fn(&Call<'_>) -> Result<Vec<Val>>) -> Spec {
    Spec {
        name,
        since: Opset::Ios15,
        params: &[],
        infer: |a| {
            let x = a.tensor("x")?;
            if !(3..=5).contains(&x.rank()) {
                bail!("{} has rank {}, 3 to 5 is expected", named("x", x), x.rank());
            }
            for name in ["mean", "variance", "gamma", "beta"].into_iter().filter(|n| a.has(n)) {
                let t = a.tensor(name)?;
                if t.rank() != 1 || !t.dims[0].agrees(x.dims[1]) {
                    bail!("{} has {} channels, {} does not fit", named("x", x), x.dims[1], named(name, t));
                }
            }
            a.like("x")
        },
        eval: Eval::Call(f),
        flops: |a| a.out_count().saturating_mul(8),
        tolerance: Tolerance::Rounding,
    }
}

fn channel_affine(c: &Call<'_>, mut y: Tensor) -> Result<Tensor> {
    if c.has("gamma") {
        y = y.broadcast_mul(&channels(c.tensor("gamma")?, y.rank())?)?;
    }
    if c.has("beta") {
        y = y.broadcast_add(&channels(c.tensor("beta")?, y.rank())?)?;
    }
    Ok(y)
}

/// Of rows along one axis, without overflow.
pub(super) fn softmax(x: &Tensor, axis: usize) -> Result<Tensor> {
    rows(x, &[axis], softmax_row)
}

/// Changes `x` in rows, each of which spans the given axes.
fn rows(x: &Tensor, axes: &[usize], f: impl Fn(&mut [f32]) + Sync) -> Result<Tensor> {
    if let Some(sizes) = together(x, axes) {
        return columns(x, sizes, f);
    }
    let (moved, order, span) = gathered(x, axes)?;
    let mut v: Vec<f32> = moved.flatten_all()?.to_vec1()?;
    v.chunks_mut(span.max(1)).for_each(f);
    let mut back = vec![0; order.len()];
    for (i, o) in order.into_iter().enumerate() {
        back[o] = i;
    }
    Ok(Tensor::from_vec(v, moved.shape(), x.device())?.permute(back.as_slice())?.contiguous()?)
}

/// Rows that span axes of `span` elements together, of which each is a step of `inner` from the next.
fn columns(x: &Tensor, [span, inner]: [usize; 2], f: impl Fn(&mut [f32]) + Sync) -> Result<Tensor> {
    let mut v: Vec<f32> = x.flatten_all()?.to_vec1()?;
    if inner == 1 {
        v.par_chunks_mut(span).with_min_len(8192 / span + 1).for_each(&f);
        return Ok(Tensor::from_vec(v, x.shape(), x.device())?);
    }
    let mut moved = vec![0.0; v.len()];
    moved.par_chunks_mut(span * inner).zip(v.par_chunks(span * inner)).for_each(|(to, from)| {
        to.par_chunks_mut(BESIDE * span).with_min_len(1024 / span + 1).enumerate().for_each(
            |(i, columns)| {
                turn(from, inner, i * BESIDE, columns);
                columns.chunks_mut(span).for_each(&f);
            },
        );
    });
    v.par_chunks_mut(span * inner).zip(moved.par_chunks(span * inner)).for_each(|(to, from)| {
        to.par_chunks_mut(BESIDE * inner).with_min_len(1024 / inner + 1).enumerate().for_each(
            |(i, lines)| {
                turn(from, span, i * BESIDE, lines);
            },
        );
    });
    Ok(Tensor::from_vec(v, x.shape(), x.device())?)
}

fn softmax_row(row: &mut [f32]) {
    let top = max(row);
    for v in row.iter_mut() {
        *v = (*v - top).exp();
    }
    let sum = abreast(row, 0.0, |sum, v| sum + v);
    for v in row.iter_mut() {
        *v /= sum;
    }
}

/// To mean zero and variance one.
fn standardize(row: &mut [f32], epsilon: f32) {
    let middle = mean(row);
    for v in row.iter_mut() {
        *v -= middle;
    }
    #[expect(clippy::cast_precision_loss, reason = "a count of elements in memory")]
    let variance = square_sum(row) / row.len() as f32;
    let scale = 1.0 / (variance + epsilon).sqrt();
    for v in row.iter_mut() {
        *v *= scale;
    }
}

fn affine(row: &mut [f32], gamma: Option<&[f32]>, beta: Option<&[f32]>) {
    for (v, g) in row.iter_mut().zip(gamma.unwrap_or_default()) {
        *v *= g;
    }
    for (v, b) in row.iter_mut().zip(beta.unwrap_or_default()) {
        *v += b;
    }
}
