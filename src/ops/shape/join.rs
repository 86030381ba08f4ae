//! Joining, splitting, repeating and padding.

use candle_core::Tensor;

use super::{bounded, elements::select, free, result};
use crate::{
    bail,
    error::{Context, Result},
    mil::{Dim, Type, types::shape_text},
    ops::{
        ACTIVATION, ANY, Args, BOOL, Eval, INT, Opset, Preset, STRING, Spec, Tolerance, Val, args, fixed,
        many, need, one, option, written,
    },
};

/// Interleaved, the slices of the values take turns.
pub(super) static CONCAT: Spec = Spec {
    name: "concat",
    since: Opset::Ios15,
    params: &[many("values", ANY), fixed("axis", INT), written("interleave", BOOL, Preset::Bool(false))],
    infer: |a| {
        let values = a.tensors("values")?;
        let Some(first) = values.first() else { bail!("`values` is empty") };
        // Scalars join as vectors of one element.
        let shapes: Vec<Vec<Dim>> = values
            .iter()
            .map(|t| if t.dims.is_empty() { vec![Dim::Fixed(1)] } else { t.dims.clone() })
            .collect();
        if let Some(other) = values.iter().find(|t| t.dtype != first.dtype) {
            bail!("values of {} and {} do not join", first.dtype, other.dtype);
        }
        let axis = args::axis(a.int_or("axis", 0)?, shapes[0].len()).at("axis")?;
        let dims = joined(&shapes, axis)?;
        if a.bool_or("interleave", false)? && shapes.iter().any(|s| !s[axis].agrees(shapes[0][axis])) {
            bail!("interleaved values differ along axis {axis}");
        }
        result(first.dtype, dims)
    },
    eval: Eval::Call(|c| {
        let values = c.tensors("values")?;
        let flat = |t: &&Tensor| if t.rank() == 0 { t.reshape(1) } else { Ok((*t).clone()) };
        let values: Vec<Tensor> = values.iter().map(flat).collect::<candle_core::Result<_>>()?;
        let Some(first) = values.first() else { bail!("`values` is empty") };
        let axis = args::axis(c.int_or("axis", 0)?, first.rank()).at("axis")?;
        bounded(&[values.len(), values.iter().map(Tensor::elem_count).max().unwrap_or(0)])?;
        if !c.bool_or("interleave", false)? {
            return one(Tensor::cat(&values, axis)?);
        }
        let mut shape = first.dims().to_vec();
        shape[axis] *= values.len();
        one(Tensor::stack(&values, axis + 1)?.reshape(shape)?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

pub(super) static STACK: Spec = Spec {
    name: "stack",
    since: Opset::Ios15,
    params: &[many("values", ANY), fixed("axis", INT)],
    infer: |a| {
        let values = a.tensors("values")?;
        let Some(first) = values.first() else { bail!("`values` is empty") };
        if let Some(other) = values.iter().find(|t| !t.agrees(first)) {
            bail!("values of {first} and {other} do not stack");
        }
        let axis = args::axis(a.int_or("axis", 0)?, first.rank() + 1).at("axis")?;
        let mut dims = first.dims.clone();
        dims.insert(axis, Dim::Fixed(values.len()));
        result(first.dtype, dims)
    },
    eval: Eval::Call(|c| {
        let values = c.tensors("values")?;
        let Some(first) = values.first() else { bail!("`values` is empty") };
        let axis = args::axis(c.int_or("axis", 0)?, first.rank() + 1).at("axis")?;
        one(Tensor::stack(&values, axis)?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// Into `num_splits` equal pieces, or pieces of `split_sizes`.
pub(super) static SPLIT: Spec = Spec {
    name: "split",
    since: Opset::Ios15,
    params: &[
        need("x", ACTIVATION),
        option("num_splits", INT),
        option("split_sizes", INT),
        fixed("axis", INT),
    ],
    infer: |a| {
        let x = a.tensor("x")?;
        let axis = a.axis("axis", "x", 0)?;
        let pieces = pieces(x.dims[axis], a.int("num_splits")?, a.ints("split_sizes")?)?;
        let piece = |size: &Dim| {
            let mut dims = x.dims.clone();
            dims[axis] = *size;
            Type::tensor(x.dtype, dims)
        };
        Ok(pieces.iter().map(piece).collect())
    },
    eval: Eval::Call(|c| {
        let x = c.tensor("x")?;
        let axis = c.axis("axis", x, 0)?;
        let count = if c.has("num_splits") { c.ints("num_splits")?.first().copied() } else { None };
        let given = if c.has("split_sizes") { Some(c.ints("split_sizes")?) } else { None };
        let sizes = super::sizes(&pieces(Dim::Fixed(x.dims()[axis]), count, given)?)?;
        let mut start = 0;
        let mut out = Vec::with_capacity(sizes.len());
        for size in sizes {
            out.push(Val::Tensor(x.narrow(axis, start, size)?.contiguous()?));
            start += size;
        }
        Ok(out)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

pub(super) static TILE: Spec = Spec {
    name: "tile",
    since: Opset::Ios15,
    params: &[need("x", ACTIVATION), need("reps", INT)],
    infer: |a| {
        let x = a.tensor("x")?;
        let dims = match a.ints("reps")? {
            Some(reps) => tiled(&x.dims, &reps)?,
            None => vec![Dim::ANY; x.rank()],
        };
        result(x.dtype, dims)
    },
    eval: Eval::Call(|c| {
        let x = c.tensor("x")?;
        let reps = c.ints("reps")?;
        let dims: Vec<Dim> = x.dims().iter().map(|d| Dim::Fixed(*d)).collect();
        bounded(&super::sizes(&tiled(&dims, &reps)?)?)?;
        let mut t = x.clone();
        for (axis, n) in reps.iter().enumerate().filter(|(_, n)| **n != 1) {
            t = match usize::try_from(*n) {
                Ok(0) | Err(_) => t.narrow(axis, 0, 0)?,
                Ok(n) => Tensor::cat(&vec![&t; n], axis)?,
            };
        }
        one(t)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// `pad` holds the sizes before and after, of the last axes.
pub(super) static PAD: Spec = Spec {
    name: "pad",
    since: Opset::Ios15,
    params: &[
        need("x", ACTIVATION),
        need("pad", INT),
        written("mode", STRING, Preset::Str("constant")),
        written("constant_val", ACTIVATION, Preset::Float(0.0)),
    ],
    infer: |a| {
        let x = a.tensor("x")?;
        let mode = Mode::named(a.str_or("mode", "constant"))?;
        let Some(pad) = a.ints("pad")? else { return unknown_pad(a) };
        let mut dims = x.dims.clone();
        for (axis, before, after) in amounts(&pad, x.rank())? {
            if let Dim::Fixed(n) = dims[axis] {
                dims[axis] = Dim::Fixed(mode.padded(n, before, after).at(format!("axis {axis}"))?);
            }
        }
        result(x.dtype, dims)
    },
    eval: Eval::Call(|c| {
        let mut t = c.tensor("x")?.clone();
        let mode = Mode::named(c.str_or("mode", "constant"))?;
        let value = if c.has("constant_val") { Some(c.tensor("constant_val")?.clone()) } else { None };
        for (axis, before, after) in amounts(&c.ints("pad")?, t.rank())? {
            if (before, after) == (0, 0) {
                continue;
            }
            let mut shape = t.dims().to_vec();
            shape[axis] = mode.padded(shape[axis], before, after).at(format!("axis {axis}"))?;
            bounded(&shape)?;
            t = mode.apply(&t, axis, before, after, value.as_ref())?;
        }
        one(t)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

fn joined(shapes: &[Vec<Dim>], axis: usize) -> Result<Vec<Dim>> {
    let mut dims = shapes[0].clone();
    for shape in &shapes[1..] {
        if shape.len() != dims.len() {
            bail!("values of {} and {} do not join", shape_text(&dims), shape_text(shape));
        }
        for (i, d) in shape.iter().enumerate() {
            dims[i] = match (dims[i], *d) {
                (Dim::Fixed(a), Dim::Fixed(b)) if i == axis => match a.checked_add(b) {
                    Some(n) => Dim::Fixed(n),
                    None => bail!("sizes {a} and {b} overflow"),
                },
                _ if i == axis => Dim::ANY,
                (a, b) if !a.agrees(b) => {
                    bail!(
                        "values of {} and {} do not join along axis {axis}",
                        shape_text(&dims),
                        shape_text(shape)
                    )
                }
                (Dim::Unknown { .. }, b) => b,
                (a, _) => a,
            };
        }
    }
    Ok(dims)
}

fn pieces(size: Dim, count: Option<i64>, given: Option<Vec<i64>>) -> Result<Vec<Dim>> {
    if let Some(given) = given {
        if let Some(n) = count.filter(|n| usize::try_from(*n) != Ok(given.len())) {
            bail!("`num_splits` is {n}, `split_sizes` has {} entries", given.len());
        }
        let sizes: Option<Vec<usize>> = given.iter().map(|s| usize::try_from(*s).ok()).collect();
        let total = sizes.as_ref().and_then(|s| s.iter().try_fold(0usize, |n, s| n.checked_add(*s)));
        return match (sizes, total, size) {
            (Some(sizes), Some(total), size) if size.agrees(Dim::Fixed(total)) => {
                Ok(sizes.into_iter().map(Dim::Fixed).collect())
            }
            _ => bail!("`split_sizes` {} do not add up to {size}", shape_text(&given)),
        };
    }
    match (count.and_then(|n| usize::try_from(n).ok()), size) {
        (Some(n), Dim::Fixed(size)) if n > 0 && n <= 1 << 16 && size % n == 0 => {
            Ok(vec![Dim::Fixed(size / n); n])
        }
        (Some(n), Dim::Unknown { .. }) if n > 0 && n <= 1 << 16 => Ok(vec![Dim::ANY; n]),
        (Some(n), size) => bail!("a size of {size} does not split into {n} equal pieces"),
        (None, _) => bail!("neither `num_splits` nor `split_sizes` is known"),
    }
}

fn tiled(dims: &[Dim], reps: &[i64]) -> Result<Vec<Dim>> {
    if reps.len() != dims.len() {
        bail!("`reps` has {} entries, x {} has rank {}", reps.len(), shape_text(dims), dims.len());
    }
    let times = |(d, n): (&Dim, &i64)| {
        let Ok(n) = usize::try_from(*n) else { bail!("`reps` {} has a negative entry", shape_text(reps)) };
        match d {
            Dim::Fixed(d) => match d.checked_mul(n) {
                Some(n) => Ok(Dim::Fixed(n)),
                None => bail!("{d} repeated {n} times overflows"),
            },
            unknown => Ok(*unknown),
        }
    };
    dims.iter().zip(reps).map(times).collect()
}

fn unknown_pad(a: &Args<'_>) -> Result<Vec<Type>> {
    let x = a.tensor("x")?;
    result(x.dtype, vec![Dim::ANY; x.rank()])
}

/// Axis, before and after, of each padded axis.
fn amounts(pad: &[i64], rank: usize) -> Result<Vec<(usize, usize, usize)>> {
    if !pad.len().is_multiple_of(2) || pad.len() / 2 > rank {
        bail!("`pad` has {} entries, two for each of up to {rank} axes are expected", pad.len());
    }
    let first = rank - pad.len() / 2;
    let pair = |(i, p): (usize, &[i64])| match (usize::try_from(p[0]), usize::try_from(p[1])) {
        (Ok(before), Ok(after)) => Ok((first + i, before, after)),
        _ => bail!("`pad` {} has a negative entry", shape_text(pad)),
    };
    pad.chunks_exact(2).enumerate().map(pair).collect()
}

#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Constant,
    Reflect,
    Replicate,
}

impl Mode {
    fn named(name: &str) -> Result<Mode> {
        Ok(match name {
            "constant" => Mode::Constant,
            "reflect" | "reflection" => Mode::Reflect,
            "replicate" => Mode::Replicate,
            other => bail!("mode `{other}` is unknown"; hint: "constant, reflect or replicate"),
        })
    }

    fn padded(self, size: usize, before: usize, after: usize) -> Result<usize> {
        match self {
            Mode::Reflect if before.max(after) >= size.max(1) => {
                bail!("a size of {size} cannot be reflected by {}", before.max(after))
            }
            Mode::Replicate if size == 0 => bail!("a size of 0 has no edge to repeat"),
            _ => match size.checked_add(before).and_then(|n| n.checked_add(after)) {
                Some(n) => Ok(n),
                None => bail!("padding by {before} and {after} overflows"),
            },
        }
    }

    fn apply(
        self,
        t: &Tensor,
        axis: usize,
        before: usize,
        after: usize,
        value: Option<&Tensor>,
    ) -> Result<Tensor> {
        let size = t.dims()[axis];
        let picks =
            |f: &dyn Fn(usize) -> usize| -> Vec<usize> { (0..before + size + after).map(f).collect() };
        match self {
            Mode::Reflect => {
                let at = |i: usize| {
                    let from_start = i.abs_diff(before);
                    if from_start < size { from_start } else { 2 * (size - 1) - from_start }
                };
                select(t, axis, &picks(&at))
            }
            Mode::Replicate => select(t, axis, &picks(&|i| i.saturating_sub(before).min(size - 1))),
            Mode::Constant => {
                let block = |n: usize| -> Result<Tensor> {
                    let mut shape = t.dims().to_vec();
                    shape[axis] = n;
                    Ok(match value {
                        Some(v) => {
                            v.flatten_all()?.narrow(0, 0, 1)?.to_dtype(t.dtype())?.broadcast_as(shape)?
                        }
                        None => Tensor::zeros(shape, t.dtype(), t.device())?,
                    })
                };
                let mut parts = Vec::new();
                if before > 0 {
                    parts.push(block(before)?);
                }
                parts.push(t.clone());
                if after > 0 {
                    parts.push(block(after)?);
                }
                Ok(Tensor::cat(&parts, axis)?)
            }
        }
    }
}
