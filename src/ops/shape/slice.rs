//! Slices, read and written.

use candle_core::{CpuStorage, InplaceOp2, Layout, Tensor};

use super::{
    elements::{select, strides},
    free, index, result,
};
use crate::{
    bail,
    error::{Context, Result},
    mil::{Dim, types::shape_text},
    ops::{ACTIVATION, Args, BOOL, Call, Eval, INDEX, Opset, Param, Spec, Tolerance, need, one, option},
};

const X: Param = need("x", ACTIVATION);
const BEGIN: Param = need("begin", INDEX);
const END: Param = need("end", INDEX);
const STRIDE: Param = option("stride", INDEX);
const BEGIN_MASK: Param = option("begin_mask", BOOL);
const END_MASK: Param = option("end_mask", BOOL);
const SQUEEZE_MASK: Param = option("squeeze_mask", BOOL);

/// As numpy slices; a mask makes the op ignore its `begin` or `end`, or drop the axis.
pub(super) static SLICE_BY_INDEX: Spec = Spec {
    name: "slice_by_index",
    since: Opset::Ios15,
    params: &[X, BEGIN, END, STRIDE, BEGIN_MASK, END_MASK, SQUEEZE_MASK],
    infer: |a| result(a.dtype("x")?, sliced(a)?),
    eval: Eval::Call(|c| {
        let x = c.tensor("x")?;
        let bounds = Bounds::of_call(c, x.rank())?;
        let mut t = x.clone();
        let mut shape = Vec::new();
        for (axis, size) in x.dims().iter().enumerate() {
            let picks = bounds.picks(axis, *size).at(format!("axis {axis}"))?;
            t = select(&t, axis, &picks)?;
            if !bounds.squeeze_mask[axis] {
                shape.push(picks.len());
            }
        }
        one(t.reshape(shape)?.contiguous()?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// A size of -1 goes to the end.
pub(super) static SLICE_BY_SIZE: Spec = Spec {
    name: "slice_by_size",
    since: Opset::Ios15,
    params: &[X, BEGIN, need("size", INDEX)],
    infer: |a| {
        let x = a.tensor("x")?;
        let (begin, size) = (a.ints("begin")?, a.ints("size")?);
        for v in [&begin, &size].into_iter().flatten() {
            entries("`begin` or `size`", v, x.rank())?;
        }
        let mut dims = Vec::new();
        for (axis, of) in x.dims.iter().enumerate() {
            let at = begin.as_ref().map(|b| b[axis]);
            dims.push(match (at, size.as_ref().map(|s| s[axis]), of) {
                (Some(b), Some(s), Dim::Fixed(n)) => {
                    Dim::Fixed(range(b, s, *n).at(format!("axis {axis}"))?.1)
                }
                (_, Some(s), _) if s >= 0 => Dim::Fixed(usize::try_from(s).unwrap_or(0)),
                _ => Dim::ANY,
            });
        }
        result(x.dtype, dims)
    },
    eval: Eval::Call(|c| {
        let x = c.tensor("x")?;
        let (begin, size) = (c.ints("begin")?, c.ints("size")?);
        entries("`begin`", &begin, x.rank())?;
        entries("`size`", &size, x.rank())?;
        let mut t = x.clone();
        for (axis, n) in x.dims().iter().enumerate() {
            let (start, count) = range(begin[axis], size[axis], *n).at(format!("axis {axis}"))?;
            t = t.narrow(axis, start, count)?;
        }
        one(t.contiguous()?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// `x` with the elements that the slice names replaced.
pub(super) static SLICE_UPDATE: Spec = Spec {
    name: "slice_update",
    since: Opset::Ios18,
    params: &[X, need("update", ACTIVATION), BEGIN, END, STRIDE, BEGIN_MASK, END_MASK, SQUEEZE_MASK],
    infer: |a| {
        a.same_dtype(&["x", "update"])?;
        let (slice, update) = (sliced(a)?, a.dims("update")?);
        if slice.len() != update.len() || slice.iter().zip(update).any(|(s, u)| !s.agrees(*u)) {
            bail!("update {} does not fill the slice {}", shape_text(update), shape_text(&slice));
        }
        if update.is_empty() {
            bail!("the update is a scalar, which Core ML refuses"; hint: "keep one axis unsqueezed");
        }
        a.like("x")
    },
    eval: Eval::Call(|c| {
        let x = c.tensor("x")?.force_contiguous()?;
        update(c, &x)?;
        one(x)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// Makes a `slice_update` in the buffer of `x` itself, which is contiguous and shared with no argument.
pub(crate) fn update(c: &Call<'_>, x: &Tensor) -> Result<()> {
    let update = c.tensor("update")?;
    let bounds = Bounds::of_call(c, x.rank())?;
    let mut picks = Vec::new();
    for (axis, size) in x.dims().iter().enumerate() {
        picks.push(bounds.picks(axis, *size).at(format!("axis {axis}"))?);
    }
    let kept = picks.iter().zip(&bounds.squeeze_mask).filter(|(_, squeezed)| !**squeezed);
    let slice: Vec<usize> = kept.map(|(p, _)| p.len()).collect();
    if slice != update.dims() {
        bail!("update {} does not fill the slice {}", shape_text(update.dims()), shape_text(&slice));
    }
    let update = update.to_dtype(x.dtype())?.contiguous()?;
    Ok(x.inplace_op2(&update, &Assign(picks))?)
}

/// Where a slice begins and ends, as far as that is known.
struct Bounds {
    begin: Option<Vec<i64>>,
    end: Option<Vec<i64>>,
    stride: Vec<i64>,
    begin_mask: Vec<bool>,
    end_mask: Vec<bool>,
    squeeze_mask: Vec<bool>,
}

impl Bounds {
    fn of_args(a: &Args<'_>, rank: usize) -> Result<Bounds> {
        let masks =
            [a.bools("begin_mask", rank)?, a.bools("end_mask", rank)?, a.bools("squeeze_mask", rank)?];
        Bounds::new(a.ints("begin")?, a.ints("end")?, a.ints("stride")?, masks, rank)
    }

    fn of_call(c: &Call<'_>, rank: usize) -> Result<Bounds> {
        let masks =
            [c.bools("begin_mask", rank)?, c.bools("end_mask", rank)?, c.bools("squeeze_mask", rank)?];
        let stride = c.ints_or("stride", &[])?;
        Bounds::new(Some(c.ints("begin")?), Some(c.ints("end")?), Some(stride), masks, rank)
    }

    fn new(
        begin: Option<Vec<i64>>,
        end: Option<Vec<i64>>,
        stride: Option<Vec<i64>>,
        [begin_mask, end_mask, squeeze_mask]: [Vec<bool>; 3],
        rank: usize,
    ) -> Result<Bounds> {
        let stride = stride.filter(|s| !s.is_empty()).unwrap_or_else(|| vec![1; rank]);
        entries("`stride`", &stride, rank)?;
        if stride.contains(&0) {
            bail!("`stride` {} has a zero", shape_text(&stride));
        }
        for (name, v) in [("`begin`", &begin), ("`end`", &end)] {
            if let Some(v) = v {
                entries(name, v, rank)?;
            }
        }
        Ok(Bounds { begin, end, stride, begin_mask, end_mask, squeeze_mask })
    }

    /// The indices along one axis; begin and end must be known.
    fn picks(&self, axis: usize, size: usize) -> Result<Vec<usize>> {
        let value = |v: &Option<Vec<i64>>| v.as_ref().map_or(0, |v| v[axis]);
        let (begin, end, stride) = (value(&self.begin), value(&self.end), self.stride[axis]);
        if self.squeeze_mask[axis] {
            return Ok(vec![index(begin, size)?]);
        }
        let limit = i64::try_from(size).unwrap_or(i64::MAX);
        if !self.end_mask[axis] && stride > 0 && end > limit {
            bail!("the slice ends at {end}, past a size of {size}");
        }
        let from_front = |at: i64| if at < 0 { at.saturating_add(limit).max(0) } else { at };
        let (first, last) = if stride > 0 { (0, limit) } else { (limit - 1, -1) };
        let begin = if self.begin_mask[axis] { first } else { from_front(begin) };
        let end = if self.end_mask[axis] { last } else { from_front(end) };
        if begin > limit || (stride > 0 && begin > end) {
            bail!("a slice from {begin} to {end} is no slice of a size of {size}");
        }
        let begin = begin.min(limit.max(1) - i64::from(stride < 0));
        let step = usize::try_from(stride.unsigned_abs()).unwrap_or(usize::MAX);
        let picks = if stride > 0 { begin..end } else { end + 1..begin + 1 };
        let forward = |i: i64| usize::try_from(i).unwrap_or(0);
        Ok(match stride > 0 {
            true => picks.step_by(step).map(forward).collect(),
            false => picks.rev().step_by(step).map(forward).collect(),
        })
    }

    /// The size along one axis, as far as it can be known.
    fn size(&self, axis: usize, of: Dim) -> Result<Dim> {
        let known =
            (self.begin_mask[axis] || self.begin.is_some()) && (self.end_mask[axis] || self.end.is_some());
        match of {
            Dim::Fixed(n) if known => Ok(Dim::Fixed(self.picks(axis, n)?.len())),
            Dim::Fixed(1) => Ok(of),
            _ if self.begin_mask[axis] && self.end_mask[axis] && self.stride[axis].abs() == 1 => Ok(of),
            _ => Ok(self.short(axis).unwrap_or(Dim::ANY)),
        }
    }

    /// A slice of none or one has that size whatever it is taken from.
    fn short(&self, axis: usize) -> Option<Dim> {
        let (begin, stride) = (self.begin.as_ref()?[axis], self.stride[axis]);
        if self.begin_mask[axis] {
            return None;
        }
        if self.end_mask[axis] {
            return ((begin == 0 && stride < 0) || (begin == -1 && stride > 0)).then_some(Dim::Fixed(1));
        }
        let end = self.end.as_ref()?[axis];
        let same_side = (begin >= 0) == (end >= 0);
        let count = end.checked_sub(begin)?;
        (same_side && stride > 0 && (0..=1).contains(&count)).then(|| Dim::Fixed(usize::from(count == 1)))
    }
}

fn sliced(a: &Args<'_>) -> Result<Vec<Dim>> {
    let x = a.dims("x")?;
    let bounds = Bounds::of_args(a, x.len())?;
    let mut dims = Vec::new();
    for (axis, of) in x.iter().enumerate() {
        if !bounds.squeeze_mask[axis] {
            dims.push(bounds.size(axis, *of).at(format!("axis {axis}"))?);
        } else if let (Some(begin), Dim::Fixed(n)) = (&bounds.begin, of) {
            index(begin[axis], *n).at(format!("axis {axis}"))?;
        }
    }
    Ok(dims)
}

fn entries(what: &str, v: &[i64], rank: usize) -> Result<()> {
    if v.len() != rank {
        bail!("{what} has {} entries, x has rank {rank}", v.len());
    }
    Ok(())
}

/// Start and count of a slice by size.
fn range(begin: i64, size: i64, of: usize) -> Result<(usize, usize)> {
    let from_front = if begin < 0 { begin.saturating_add_unsigned(of as u64) } else { begin };
    let start = usize::try_from(from_front).ok().filter(|s| *s <= of);
    let Some(start) = start else { bail!("index {begin} is outside a size of {of}") };
    match (size, usize::try_from(size)) {
        (-1, _) => Ok((start, of - start)),
        (_, Ok(count)) if count <= of - start => Ok((start, count)),
        _ => bail!("{size} elements from {begin} pass a size of {of}"),
    }
}

/// Replaces the elements at the given indices of each axis.
struct Assign(Vec<Vec<usize>>);

impl InplaceOp2 for Assign {
    fn name(&self) -> &'static str {
        "slice_update"
    }

    fn cpu_fwd(
        &self,
        to: &mut CpuStorage,
        to_layout: &Layout,
        from: &CpuStorage,
        from_layout: &Layout,
    ) -> candle_core::Result<()> {
        let (Some((start, end)), Some((first, last))) =
            (to_layout.contiguous_offsets(), from_layout.contiguous_offsets())
        else {
            candle_core::bail!("the tensors are not contiguous");
        };
        let (to_range, from_range) = (start..end, first..last);
        match (to, from) {
            (CpuStorage::F32(to), CpuStorage::F32(from)) => {
                self.assign(&mut to[to_range], &from[from_range], to_layout.dims());
            }
            (CpuStorage::I64(to), CpuStorage::I64(from)) => {
                self.assign(&mut to[to_range], &from[from_range], to_layout.dims());
            }
            (CpuStorage::U8(to), CpuStorage::U8(from)) => {
                self.assign(&mut to[to_range], &from[from_range], to_layout.dims());
            }
            _ => candle_core::bail!("the tensors hold no values of a program"),
        }
        Ok(())
    }
}

impl Assign {
    fn assign<T: Copy>(&self, to: &mut [T], from: &[T], shape: &[usize]) {
        let Some((columns, rows)) = self.0.split_last() else {
            return to.copy_from_slice(from);
        };
        let steps = strides(shape);
        let mut starts = vec![0usize];
        for (picks, step) in rows.iter().zip(steps) {
            starts = starts.iter().flat_map(|s| picks.iter().map(move |p| s + p * step)).collect();
        }
        for (start, row) in starts.iter().zip(from.chunks(columns.len().max(1))) {
            for (column, v) in columns.iter().zip(row) {
                to[start + column] = *v;
            }
        }
    }
}
