//! Reading by index.

use candle_core::{Device, Tensor};

use super::VALIDATE;
use crate::{
    bail,
    error::{Context, Result},
    mil::{Dim, types::shape_text},
    ops::{
        ACTIVATION, Eval, INDEX, INT, Opset, Param, Preset, Spec, Tolerance, from, need, one,
        shape::{bounded, free, index, result, take},
        written,
    },
};

const AXIS: Param = written("axis", INT, Preset::Int(0));
const BATCH_DIMS: Param = from(Opset::Ios16, written("batch_dims", INT, Preset::Int(0)));

/// Slices of `x` along `axis`, for each of the leading `batch_dims` axes on its own.
pub(super) static GATHER: Spec = Spec {
    name: "gather",
    since: Opset::Ios15,
    params: &[need("x", ACTIVATION), need("indices", INDEX), AXIS, BATCH_DIMS, VALIDATE],
    infer: |a| {
        let (x, ids) = (a.tensor("x")?, a.dims("indices")?);
        let axis = a.axis("axis", "x", 0)?;
        let batch = batch(a.int_or("batch_dims", 0)?, axis, ids.len())?;
        if (0..batch).any(|i| !x.dims[i].agrees(ids[i])) {
            bail!(
                "x {} and indices {} differ in the first {batch} axes",
                shape_text(&x.dims),
                shape_text(ids)
            );
        }
        if let (Some(known), Dim::Fixed(size)) = (a.ints("indices")?, x.dims[axis]) {
            indices(&known, size)?;
        }
        result(x.dtype, gathered(&x.dims, ids, axis, batch))
    },
    eval: Eval::Call(|c| {
        let (x, ids) = (c.tensor("x")?, c.tensor("indices")?);
        let axis = c.axis("axis", x, 0)?;
        let batch = batch(c.int_or("batch_dims", 0)?, axis, ids.rank())?;
        if x.dims()[..batch] != ids.dims()[..batch] {
            bail!(
                "x {} and indices {} differ in the first {batch} axes",
                shape_text(x.dims()),
                shape_text(ids.dims())
            );
        }
        let shape = gathered(x.dims(), ids.dims(), axis, batch);
        bounded(&shape)?;
        let at = Tensor::new(indices(&c.ints("indices")?, x.dims()[axis])?, &Device::Cpu)?;
        if batch == 0 {
            return one(x.contiguous()?.index_select(&at, axis)?.reshape(shape)?);
        }
        let groups: usize = x.dims()[..batch].iter().product();
        let rows = x.reshape([&[groups], &x.dims()[batch..]].concat())?;
        let at = at.reshape((groups, at.elem_count() / groups.max(1)))?;
        let one_group = |i| rows.get(i)?.contiguous()?.index_select(&at.get(i)?, axis - batch);
        let parts = (0..groups).map(one_group).collect::<candle_core::Result<Vec<Tensor>>>()?;
        if parts.is_empty() {
            return one(Tensor::zeros(shape, x.dtype(), x.device())?);
        }
        one(Tensor::stack(&parts, 0)?.reshape(shape)?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// For each place of `indices`, the element of `x` there with `axis` replaced by the index.
pub(super) static GATHER_ALONG_AXIS: Spec = Spec {
    name: "gather_along_axis",
    since: Opset::Ios15,
    params: &[need("x", ACTIVATION), need("indices", INDEX), AXIS, VALIDATE],
    infer: |a| {
        let (x, ids) = (a.tensor("x")?, a.dims("indices")?);
        let axis = a.axis("axis", "x", 0)?;
        if ids.len() != x.rank() || (0..ids.len()).any(|i| i != axis && !ids[i].agrees(x.dims[i])) {
            bail!("indices {} do not go along axis {axis} of x {}", shape_text(ids), shape_text(&x.dims));
        }
        result(x.dtype, ids.to_vec())
    },
    eval: Eval::Call(|c| {
        let (x, ids) = (c.tensor("x")?, c.tensor("indices")?);
        let axis = c.axis("axis", x, 0)?;
        let places = along(x.dims(), ids.dims(), &c.ints("indices")?, axis)?;
        one(take(x, places, ids.dims())?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// The last axis of `indices` names the leading axes of `x`.
pub(super) static GATHER_ND: Spec = Spec {
    name: "gather_nd",
    since: Opset::Ios15,
    params: &[need("x", ACTIVATION), need("indices", INDEX), BATCH_DIMS, VALIDATE],
    infer: |a| {
        let (x, ids) = (a.tensor("x")?, a.dims("indices")?);
        let batch = usize::try_from(a.int_or("batch_dims", 0)?).unwrap_or(usize::MAX);
        let Some((Dim::Fixed(depth), outer)) = ids.split_last() else {
            bail!("the last size of indices {} is not known", shape_text(ids));
        };
        if batch > outer.len() || batch.saturating_add(*depth) > x.rank() {
            bail!("indices {} with {batch} batch axes do not fit x {}", shape_text(ids), shape_text(&x.dims));
        }
        result(x.dtype, [outer, &x.dims[batch + depth..]].concat())
    },
    eval: Eval::Call(|c| {
        let (x, ids) = (c.tensor("x")?, c.tensor("indices")?);
        let batch = usize::try_from(c.int_or("batch_dims", 0)?).unwrap_or(usize::MAX);
        let Some((depth, outer)) = ids.dims().split_last() else { bail!("`indices` is a scalar") };
        if batch > outer.len()
            || batch.saturating_add(*depth) > x.rank()
            || x.dims()[..batch] != outer[..batch]
        {
            bail!("indices {} do not fit x {}", shape_text(ids.dims()), shape_text(x.dims()));
        }
        let shape = [outer, &x.dims()[batch + depth..]].concat();
        bounded(&shape)?;
        let inner: usize = x.dims()[batch + depth..].iter().product();
        let group: usize = x.dims()[batch..].iter().product();
        let rows = rows(&c.ints("indices")?, &x.dims()[batch..batch + depth], outer.iter().product())?;
        let each = rows.len() / outer[..batch].iter().product::<usize>().max(1);
        let mut places = Vec::with_capacity(rows.len() * inner);
        for (i, row) in rows.iter().enumerate() {
            let start = i / each.max(1) * group + row * inner;
            places.extend((start..start + inner).filter_map(|p| i64::try_from(p).ok()));
        }
        one(take(x, places, &shape)?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

fn batch(batch: i64, axis: usize, rank: usize) -> Result<usize> {
    match usize::try_from(batch) {
        Ok(b) if b <= axis && b <= rank => Ok(b),
        _ => bail!("`batch_dims` is {batch}, with axis {axis} and indices of rank {rank}"),
    }
}

fn gathered<D: Copy>(x: &[D], ids: &[D], axis: usize, batch: usize) -> Vec<D> {
    [&x[..axis], &ids[batch..], &x[axis + 1..]].concat()
}

/// Indices counted from the front.
fn indices(ids: &[i64], size: usize) -> Result<Vec<i64>> {
    let front = |i: &i64| Ok(i64::try_from(index(*i, size)?).unwrap_or(0));
    ids.iter().map(front).collect::<Result<_>>().at("indices")
}

/// Row-major places in a tensor of `x` of the elements that `ids` names along an axis.
pub(super) fn along(x: &[usize], shape: &[usize], ids: &[i64], axis: usize) -> Result<Vec<i64>> {
    if shape.len() != x.len() || (0..x.len()).any(|i| i != axis && shape[i] > x[i]) {
        bail!("indices {} do not go along axis {axis} of {}", shape_text(shape), shape_text(x));
    }
    let mut places = Vec::with_capacity(ids.len());
    let mut at = vec![0usize; shape.len()];
    for id in ids {
        let picked = index(*id, x[axis]).at("indices")?;
        let place = (0..x.len()).fold(0, |p, i| p * x[i] + if i == axis { picked } else { at[i] });
        places.push(i64::try_from(place).unwrap_or(0));
        for i in (0..at.len()).rev() {
            at[i] += 1;
            if at[i] < shape[i] {
                break;
            }
            at[i] = 0;
        }
    }
    Ok(places)
}

/// The number of each row that `ids` names in a tensor whose leading axes are `sizes`.
pub(super) fn rows(ids: &[i64], sizes: &[usize], count: usize) -> Result<Vec<usize>> {
    if sizes.is_empty() {
        return Ok(vec![0; count]);
    }
    let row = |ids: &[i64]| ids.iter().zip(sizes).try_fold(0, |p, (i, n)| Ok(p * n + index(*i, *n)?));
    ids.chunks_exact(sizes.len()).map(row).collect::<Result<_>>().at("indices")
}
