//! Reversing, windows, bands and cumulative sums.

use candle_core::{Tensor, WithDType};

use super::{
    bounded,
    elements::{select, strides},
    free, result, take, typed,
};
use crate::{
    bail,
    error::{Context, Result},
    mil::{Dim, types::shape_text},
    ops::{
        ACTIVATION, BOOL, Eval, INDEX, INT, NUMBER, Opset, Preset, Spec, Tolerance, args, fixed, need, one,
        option, written,
    },
};

/// Without `axes`, along all of them.
pub(super) static REVERSE: Spec = Spec {
    name: "reverse",
    since: Opset::Ios15,
    params: &[need("x", ACTIVATION), option("axes", INT)],
    infer: |a| {
        a.axes("axes", "x")?;
        a.like("x")
    },
    eval: Eval::Call(|c| {
        let mut t = c.tensor("x")?.clone();
        let axes = match c.has("axes") {
            true => c
                .ints("axes")?
                .into_iter()
                .map(|v| args::axis(v, t.rank()))
                .collect::<Result<_>>()
                .at("axes")?,
            false => (0..t.rank()).collect::<Vec<usize>>(),
        };
        for axis in axes {
            let backwards: Vec<usize> = (0..t.dims()[axis]).rev().collect();
            t = select(&t, axis, &backwards)?;
        }
        one(t.contiguous()?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// Reverses the first `lengths[i]` elements of each batch entry.
pub(super) static REVERSE_SEQUENCE: Spec = Spec {
    name: "reverse_sequence",
    since: Opset::Ios15,
    params: &[
        need("x", ACTIVATION),
        need("lengths", INDEX),
        written("seq_axis", INT, Preset::Int(0)),
        written("batch_axis", INT, Preset::Int(0)),
    ],
    infer: |a| {
        a.axis("seq_axis", "x", 0)?;
        a.axis("batch_axis", "x", 0)?;
        a.like("x")
    },
    eval: Eval::Call(|c| {
        let x = c.tensor("x")?;
        let (along, batch) = (c.axis("seq_axis", x, 0)?, c.axis("batch_axis", x, 0)?);
        let lengths = c.ints("lengths")?;
        if lengths.len() != x.dims()[batch] {
            bail!("`lengths` has {} entries for {} sequences", lengths.len(), x.dims()[batch]);
        }
        let size = i64::try_from(x.dims()[along]).unwrap_or(i64::MAX);
        if let Some(bad) = lengths.iter().find(|n| !(0..=size).contains(*n)) {
            bail!("length {bad} is outside a size of {size}");
        }
        let steps: Vec<i64> = strides(x.dims()).iter().filter_map(|s| i64::try_from(*s).ok()).collect();
        let positions = (0i64..).take(x.elem_count()).map(|p| {
            let at = |axis: usize| p / steps[axis] % i64::try_from(x.dims()[axis]).unwrap_or(1);
            let (i, length) = (at(along), usize::try_from(at(batch)).map_or(0, |b| lengths[b]));
            if i < length { p + (length - 1 - 2 * i) * steps[along] } else { p }
        });
        one(take(x, positions.collect(), x.dims())?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// Windows of `size` along `axis`, which becomes two axes.
pub(super) static SLIDING_WINDOWS: Spec = Spec {
    name: "sliding_windows",
    since: Opset::Ios15,
    params: &[
        need("x", ACTIVATION),
        fixed("axis", INT),
        fixed("size", INT),
        written("stride", INT, Preset::Int(1)),
    ],
    infer: |a| {
        let x = a.tensor("x")?;
        let axis = a.axis("axis", "x", 0)?;
        let (size, stride) = window(a.int("size")?.unwrap_or(0), a.int_or("stride", 1)?)?;
        let mut dims = x.dims.clone();
        dims[axis] = match dims[axis] {
            Dim::Fixed(n) => Dim::Fixed(windows(n, size, stride)?),
            unknown => unknown,
        };
        dims.insert(axis + 1, Dim::Fixed(size));
        result(x.dtype, dims)
    },
    eval: Eval::Call(|c| {
        let x = c.tensor("x")?;
        let axis = c.axis("axis", x, 0)?;
        let (size, stride) = window(c.int_or("size", 0)?, c.int_or("stride", 1)?)?;
        let count = windows(x.dims()[axis], size, stride)?;
        let mut shape = x.dims().to_vec();
        shape[axis] = count;
        shape.insert(axis + 1, size);
        bounded(&shape)?;
        let picks: Vec<usize> = (0..count).flat_map(|w| w * stride..w * stride + size).collect();
        one(select(x, axis, &picks)?.reshape(shape)?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// Keeps a band around the diagonal; a negative bound keeps the whole side.
pub(super) static BAND_PART: Spec = Spec {
    name: "band_part",
    since: Opset::Ios15,
    params: &[
        need("x", ACTIVATION),
        written("lower", INT, Preset::Int(-1)),
        written("upper", INT, Preset::Int(-1)),
    ],
    infer: |a| {
        if a.rank("x")? < 2 {
            bail!("x {} is no matrix", shape_text(a.dims("x")?));
        }
        a.like("x")
    },
    eval: Eval::Call(|c| {
        let x = c.tensor("x")?;
        let [.., rows, columns] = x.dims() else { bail!("x {} is no matrix", shape_text(x.dims())) };
        let (lower, upper) = (c.int_or("lower", -1)?, c.int_or("upper", -1)?);
        let inside = |p: usize| {
            let (i, j) = (p / columns, p % columns);
            let within = |distance: usize, bound: i64| usize::try_from(bound).is_ok_and(|b| distance <= b);
            (lower < 0 || i <= j || within(i - j, lower)) && (upper < 0 || j <= i || within(j - i, upper))
        };
        let mask: Vec<u8> = (0..rows * columns).map(|p| u8::from(inside(p))).collect();
        let mask = Tensor::from_vec(mask, (*rows, *columns), x.device())?.broadcast_as(x.dims())?;
        one(mask.where_cond(x, &x.zeros_like()?)?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

pub(super) static CUMSUM: Spec = Spec {
    name: "cumsum",
    since: Opset::Ios15,
    params: &[
        need("x", NUMBER),
        written("axis", INT, Preset::Int(0)),
        written("exclusive", BOOL, Preset::Bool(false)),
        written("reverse", BOOL, Preset::Bool(false)),
    ],
    infer: |a| {
        a.axis("axis", "x", 0)?;
        a.like("x")
    },
    eval: Eval::Call(|c| {
        let x = c.tensor("x")?;
        let axis = c.axis("axis", x, 0)?;
        let (exclusive, reverse) = (c.bool_or("exclusive", false)?, c.bool_or("reverse", false)?);
        one(typed!(x, sums(x, axis, exclusive, reverse))?)
    }),
    flops: |a| a.out_count(),
    tolerance: Tolerance::Rounding,
};

fn window(size: i64, stride: i64) -> Result<(usize, usize)> {
    match (usize::try_from(size), usize::try_from(stride)) {
        (Ok(size), Ok(stride)) if size > 0 && stride > 0 => Ok((size, stride)),
        _ => bail!("a window of {size} every {stride} elements is no window"),
    }
}

fn windows(of: usize, size: usize, stride: usize) -> Result<usize> {
    match of.checked_sub(size) {
        Some(rest) => Ok(rest / stride + 1),
        None => bail!("a window of {size} does not fit a size of {of}"),
    }
}

fn sums<T: WithDType>(x: &Tensor, axis: usize, exclusive: bool, reverse: bool) -> Result<Tensor> {
    let mut data = x.flatten_all()?.to_vec1::<T>()?;
    let (size, step) = (x.dims()[axis], strides(x.dims())[axis]);
    for start in (0..data.len()).filter(|p| p / step % size == 0) {
        let mut sum = T::zero();
        for i in 0..size {
            let at = start + step * if reverse { size - 1 - i } else { i };
            let before = sum;
            sum += data[at];
            data[at] = if exclusive { before } else { sum };
        }
    }
    Ok(Tensor::from_vec(data, x.dims(), x.device())?)
}
