//! The same elements in another shape, and transposition.

use super::{free, result, sizes};
use crate::{
    bail,
    error::{Context, Result},
    mil::{Arg, Const, Dim, types::shape_text},
    ops::{
        ACTIVATION, ANY, Args, BOOL, Eval, INDEX, INT, Opset, Preset, Spec, Tolerance, args, fixed, many,
        need, one, option, written,
    },
};

/// `0` copies a size of `x`, counted from the right, `-1` takes what is left.
pub(super) static RESHAPE: Spec = Spec {
    name: "reshape",
    since: Opset::Ios15,
    params: &[need("x", ACTIVATION), need("shape", INDEX)],
    infer: |a| {
        let x = a.tensor("x")?;
        let dims = match (a.ints("shape")?, a.dims("shape")?) {
            (Some(shape), _) => reshaped(&x.dims, &shape)?,
            (None, [rank]) => vec![Dim::ANY; rank_of(*rank)?],
            (None, other) => bail!("shape {} is no vector", shape_text(other)),
        };
        result(x.dtype, dims)
    },
    eval: Eval::Call(|c| {
        let x = c.tensor("x")?;
        let dims: Vec<Dim> = x.dims().iter().map(|d| Dim::Fixed(*d)).collect();
        one(x.reshape(sizes(&reshaped(&dims, &c.ints("shape")?)?)?)?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// The shape is put together from pieces of other tensors' shapes.
pub(super) static RESHAPE_LIKE: Spec = Spec {
    name: "reshape_like",
    since: Opset::Ios16,
    params: &[
        need("x", ACTIVATION),
        many("ref_tensors", ANY),
        many("begins", INT),
        many("ends", INT),
        many("end_masks", BOOL),
    ],
    infer: |a| {
        let x = a.tensor("x")?;
        let shapes: Vec<&[Dim]> = a.tensors("ref_tensors")?.iter().map(|t| t.dims.as_slice()).collect();
        let pieces = (scalars(a, "begins")?, scalars(a, "ends")?, scalars(a, "end_masks")?);
        let dims = alike(&shapes, &pieces.0, &pieces.1, &pieces.2)?;
        same_count(&x.dims, &dims)?;
        result(x.dtype, dims)
    },
    eval: Eval::Call(|c| {
        let dims = |t: &&candle_core::Tensor| t.dims().iter().map(|d| Dim::Fixed(*d)).collect();
        let shapes: Vec<Vec<Dim>> = c.tensors("ref_tensors")?.iter().map(dims).collect();
        let shapes: Vec<&[Dim]> = shapes.iter().map(Vec::as_slice).collect();
        let ints = |name| -> Result<Vec<i64>> {
            let all: Vec<Vec<i64>> = c.list(name).iter().map(|v| v.to_ints()).collect::<Result<_>>()?;
            Ok(all.concat())
        };
        let dims = alike(&shapes, &ints("begins")?, &ints("ends")?, &ints("end_masks")?)?;
        one(c.tensor("x")?.reshape(sizes(&dims)?)?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

pub(super) static TRANSPOSE: Spec = Spec {
    name: "transpose",
    since: Opset::Ios15,
    params: &[need("x", ACTIVATION), fixed("perm", INT)],
    infer: |a| {
        let x = a.tensor("x")?;
        let dims = match a.ints("perm")? {
            Some(perm) => permutation(&perm, x.rank())?.into_iter().map(|p| x.dims[p]).collect(),
            None => vec![Dim::ANY; x.rank()],
        };
        result(x.dtype, dims)
    },
    eval: Eval::Call(|c| {
        let x = c.tensor("x")?;
        one(x.permute(permutation(&c.ints("perm")?, x.rank())?)?.contiguous()?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

pub(super) static EXPAND_DIMS: Spec = Spec {
    name: "expand_dims",
    since: Opset::Ios15,
    params: &[need("x", ACTIVATION), fixed("axes", INT)],
    infer: |a| {
        let x = a.tensor("x")?;
        let dims = match (a.ints("axes")?, a.dims("axes")?) {
            (Some(axes), _) => expanded(&x.dims, &axes, Dim::Fixed(1))?,
            (None, axes) => {
                vec![Dim::ANY; x.rank() + axes.iter().filter_map(|d| d.fixed()).sum::<usize>().min(8)]
            }
        };
        result(x.dtype, dims)
    },
    eval: Eval::Call(|c| {
        let x = c.tensor("x")?;
        one(x.reshape(expanded(x.dims(), &c.ints("axes")?, 1)?)?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// Without `axes` every size of one goes.
pub(super) static SQUEEZE: Spec = Spec {
    name: "squeeze",
    since: Opset::Ios15,
    params: &[need("x", ACTIVATION), option("axes", INT)],
    infer: |a| {
        let x = a.tensor("x")?;
        result(x.dtype, squeezed(&x.dims, a.axes("axes", "x")?)?)
    },
    eval: Eval::Call(|c| {
        let x = c.tensor("x")?;
        let axes = match c.has("axes") {
            true => {
                let axes = c.ints("axes")?.into_iter().map(|v| args::axis(v, x.rank()));
                Some(axes.collect::<Result<Vec<usize>>>().at("axes")?)
            }
            false => None,
        };
        let dims: Vec<Dim> = x.dims().iter().map(|d| Dim::Fixed(*d)).collect();
        one(x.reshape(sizes(&squeezed(&dims, axes)?)?)?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// The sizes before `axis` become one, and so do the others.
pub(super) static FLATTEN2D: Spec = Spec {
    name: "flatten2d",
    since: Opset::Ios15,
    params: &[need("x", ACTIVATION), written("axis", INT, Preset::Int(1))],
    infer: |a| {
        let x = a.tensor("x")?;
        let at = flat_axis(a.int_or("axis", 1)?, x.rank())?;
        result(x.dtype, vec![product(&x.dims[..at]), product(&x.dims[at..])])
    },
    eval: Eval::Call(|c| {
        let x = c.tensor("x")?;
        let at = flat_axis(c.int_or("axis", 1)?, x.rank())?;
        let (rows, columns): (usize, usize) =
            (x.dims()[..at].iter().product(), x.dims()[at..].iter().product());
        one(x.reshape((rows, columns))?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

fn rank_of(dim: Dim) -> Result<usize> {
    match dim.fixed() {
        Some(rank) if rank <= 8 => Ok(rank),
        Some(rank) => bail!("`shape` asks for rank {rank}"),
        None => bail!("`shape` has a length that is not fixed, so the rank of the result is unknown"),
    }
}

fn reshaped(x: &[Dim], shape: &[i64]) -> Result<Vec<Dim>> {
    let mut dims = Vec::with_capacity(shape.len());
    for (i, size) in shape.iter().enumerate() {
        dims.push(match *size {
            0 => match (x.len() + i).checked_sub(shape.len()) {
                Some(j) => x[j],
                None => Dim::Fixed(1),
            },
            -1 => Dim::ANY,
            n => match usize::try_from(n) {
                Ok(n) => Dim::Fixed(n),
                Err(_) => bail!("`shape` {} has a negative size", shape_text(shape)),
            },
        });
    }
    match shape.iter().filter(|s| **s == -1).count() {
        0 => {}
        1 => dims = with_rest(x, shape, dims)?,
        n => bail!("`shape` {} has {n} entries of -1, one at most is expected", shape_text(shape)),
    }
    same_count(x, &dims)?;
    Ok(dims)
}

/// Fills in the one size that is left over.
fn with_rest(x: &[Dim], shape: &[i64], mut dims: Vec<Dim>) -> Result<Vec<Dim>> {
    let rest = shape.iter().position(|s| *s == -1).unwrap_or(0);
    let (before, after) = dims.split_at(rest);
    let others: Vec<Dim> = before.iter().chain(&after[1..]).copied().collect();
    if let (Some(all), Some(known)) = (product(x).fixed(), product(&others).fixed()) {
        if known == 0 || all % known != 0 {
            bail!("x {} does not divide into `shape` {}", shape_text(x), shape_text(shape));
        }
        dims[rest] = Dim::Fixed(all / known);
    }
    Ok(dims)
}

fn same_count(x: &[Dim], to: &[Dim]) -> Result<()> {
    match (product(x).fixed(), product(to).fixed()) {
        (Some(a), Some(b)) if a != b => {
            bail!("x {} has {a} elements, {} takes {b}", shape_text(x), shape_text(to))
        }
        _ => Ok(()),
    }
}

/// Unknown when a factor is, or when it overflows.
fn product(dims: &[Dim]) -> Dim {
    let n = dims.iter().try_fold(1usize, |n, d| n.checked_mul(d.fixed()?));
    n.map_or(Dim::ANY, Dim::Fixed)
}

fn alike(shapes: &[&[Dim]], begins: &[i64], ends: &[i64], masks: &[i64]) -> Result<Vec<Dim>> {
    let n = shapes.len();
    if [begins.len(), ends.len(), masks.len()] != [n; 3] {
        bail!(
            "{n} `ref_tensors` with {} begins, {} ends, {} end masks",
            begins.len(),
            ends.len(),
            masks.len()
        );
    }
    let mut dims = Vec::new();
    for (i, shape) in shapes.iter().enumerate() {
        let at = |v: i64| {
            usize::try_from(if v < 0 { v.saturating_add_unsigned(shape.len() as u64) } else { v }).ok()
        };
        let end = if masks[i] != 0 { Some(shape.len()) } else { at(ends[i]) };
        match at(begins[i]).zip(end).and_then(|(b, e)| shape.get(b..e)) {
            Some(piece) => dims.extend_from_slice(piece),
            None => bail!("{}..{} is outside {}", begins[i], ends[i], shape_text(shape)),
        }
    }
    Ok(dims)
}

/// Known scalars of a variadic parameter.
fn scalars(a: &Args<'_>, name: &str) -> Result<Vec<i64>> {
    let mut all = Vec::new();
    for arg in a.list(name) {
        let constant: Option<&Const> = match arg {
            Arg::Const(c) => Some(c),
            Arg::Value(id) => match a.scope.map(|s| s.known(*id)) {
                Some(crate::ops::Known::Const(c)) => Some(c),
                _ => None,
            },
        };
        match constant {
            Some(c) => all.extend(c.numbers()?.into_ints()),
            None => bail!("`{name}` must be known when the program is compiled"),
        }
    }
    Ok(all)
}

fn permutation(perm: &[i64], rank: usize) -> Result<Vec<usize>> {
    let axes = perm.iter().map(|p| args::axis(*p, rank)).collect::<Result<Vec<_>>>().at("perm")?;
    if axes.len() != rank || (0..rank).any(|axis| !axes.contains(&axis)) {
        bail!("`perm` {} is no order of {rank} axes", shape_text(perm));
    }
    Ok(axes)
}

fn expanded<D: Copy>(x: &[D], axes: &[i64], unit: D) -> Result<Vec<D>> {
    let rank = x.len() + axes.len();
    let at = axes.iter().map(|p| args::axis(*p, rank)).collect::<Result<Vec<_>>>().at("axes")?;
    let mut rest = x.iter();
    let dims: Vec<D> =
        (0..rank).filter_map(|i| if at.contains(&i) { Some(unit) } else { rest.next().copied() }).collect();
    if dims.len() != rank {
        bail!("`axes` {} names an axis twice", shape_text(axes));
    }
    Ok(dims)
}

fn squeezed(x: &[Dim], axes: Option<Vec<usize>>) -> Result<Vec<Dim>> {
    let Some(axes) = axes else {
        return Ok(x.iter().copied().filter(|d| *d != Dim::Fixed(1)).collect());
    };
    if let Some(bad) = axes.iter().find(|i| !x[**i].agrees(Dim::Fixed(1))) {
        bail!("axis {bad} of x {} is not of size 1", shape_text(x));
    }
    Ok(x.iter().enumerate().filter(|(i, _)| !axes.contains(i)).map(|(_, d)| *d).collect())
}

fn flat_axis(axis: i64, rank: usize) -> Result<usize> {
    let at = if axis < 0 { axis.saturating_add_unsigned(rank as u64) } else { axis };
    match usize::try_from(at) {
        Ok(a) if a <= rank => Ok(a),
        _ => bail!("axis {axis} is outside a tensor of rank {rank}"),
    }
}
