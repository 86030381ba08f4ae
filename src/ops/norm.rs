//! Normalisation and softmax.

use candle_core::Tensor;

use super::{
    Eval, FLOAT, INT, Opset, Preset, Spec, Tolerance,
    args::named,
    need, one, option,
    reduce::{axes, gathered, known_axes, mean},
    written,
};
use crate::{
    bail,
    error::Result,
    mil::{Dim, types::shape_text},
};

pub static SPECS: &[&Spec] = &[&SOFTMAX, &LAYER_NORM];

pub static SOFTMAX: Spec = Spec {
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
        one(rows(x, &[axis], softmax_row)?)
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

/// Changes `x` in rows, each of which spans the given axes.
fn rows(x: &Tensor, axes: &[usize], f: impl Fn(&mut [f32])) -> Result<Tensor> {
    let (moved, order, span) = gathered(x, axes)?;
    let mut v: Vec<f32> = moved.flatten_all()?.to_vec1()?;
    v.chunks_mut(span.max(1)).for_each(f);
    let mut back = vec![0; order.len()];
    for (i, o) in order.into_iter().enumerate() {
        back[o] = i;
    }
    Ok(Tensor::from_vec(v, moved.shape(), x.device())?.permute(back.as_slice())?.contiguous()?)
}

pub(super) fn softmax_row(row: &mut [f32]) {
    let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for v in row.iter_mut() {
        *v = (*v - top).exp();
    }
    let sum: f32 = row.iter().sum();
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
    let variance = mean(&row.iter().map(|v| v * v).collect::<Vec<_>>());
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
