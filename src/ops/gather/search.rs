//! Finding indices: the largest, the order, the ones that are not zero.

use std::cmp::Ordering;

use candle_core::{DType as CandleType, Tensor};

use crate::{
    bail,
    error::Result,
    mil::{DType, Dim, Type, types::shape_text},
    ops::{
        ACTIVATION, Args, BOOL, Eval, FLOAT, INDEX, INT, NUMBER, Opset, Preset, STRING, Spec, Tolerance, Val,
        from, need, one, option,
        shape::{bounded, free, result, take},
        written,
    },
};

/// The `k` largest along an axis and where they are; of equals the first comes first.
pub(super) static TOPK: Spec = Spec {
    name: "topk",
    since: Opset::Ios15,
    params: &[
        need("x", ACTIVATION),
        written("k", INDEX, Preset::Int(1)),
        written("axis", INT, Preset::Int(-1)),
        written("ascending", BOOL, Preset::Bool(false)),
        from(Opset::Ios16, written("sort", BOOL, Preset::Bool(true))),
        from(Opset::Ios16, written("return_indices", BOOL, Preset::Bool(true))),
        from(Opset::Ios17, written("output_indices_dtype", STRING, Preset::Str("int32"))),
    ],
    infer: |a| {
        let x = a.tensor("x")?;
        let axis = a.axis("axis", "x", -1)?;
        let mut dims = x.dims.clone();
        dims[axis] = Dim::Fixed(count(a.int_or("k", 1)?, dims[axis])?);
        let values = Type::tensor(x.dtype, dims.clone());
        if !a.bool_or("return_indices", true)? {
            return Ok(vec![values]);
        }
        let dtype = match a.str_or("output_indices_dtype", "int32") {
            "int32" => DType::I32,
            "uint16" => DType::U16,
            other => bail!("`output_indices_dtype` is `{other}`"; hint: "int32 or uint16"),
        };
        Ok(vec![values, Type::tensor(dtype, dims)])
    },
    eval: Eval::Call(|c| {
        let x = c.tensor("x")?;
        let axis = c.axis("axis", x, -1)?;
        let k = count(c.int_or("k", 1)?, Dim::Fixed(x.dims()[axis]))?;
        let order = order(x, axis, c.bool_or("ascending", false)?)?.narrow(axis, 0, k)?.contiguous()?;
        let ids = order.flatten_all()?.to_vec1::<i64>()?;
        let places = super::pick::along(x.dims(), order.dims(), &ids, axis)?;
        let mut results = one(take(x, places, order.dims())?)?;
        if c.bool_or("return_indices", true)? {
            results.push(Val::Tensor(order));
        }
        Ok(results)
    }),
    flops: |a| a.count("x"),
    tolerance: Tolerance::Exact,
};

/// Where each element would come from if the axis were sorted, the largest first by default.
pub(super) static ARGSORT: Spec = Spec {
    name: "argsort",
    since: Opset::Ios15,
    params: &[
        need("x", NUMBER),
        written("axis", INT, Preset::Int(-1)),
        written("ascending", BOOL, Preset::Bool(false)),
    ],
    infer: |a| {
        a.axis("axis", "x", -1)?;
        result(DType::I32, a.dims("x")?.to_vec())
    },
    eval: Eval::Call(|c| {
        let x = c.tensor("x")?;
        one(order(x, c.axis("axis", x, -1)?, c.bool_or("ascending", false)?)?)
    }),
    flops: |a| a.count("x"),
    tolerance: Tolerance::Exact,
};

/// An axis of `one_hot_vector_size` with `on_value` where the index says, `off_value` elsewhere.
pub(super) static ONE_HOT: Spec = Spec {
    name: "one_hot",
    since: Opset::Ios15,
    params: &[
        need("indices", INDEX),
        need("one_hot_vector_size", INDEX),
        written("axis", INT, Preset::Int(-1)),
        written("on_value", ACTIVATION, Preset::Int(1)),
        written("off_value", ACTIVATION, Preset::Int(0)),
    ],
    infer: |a| {
        let mut dims = a.dims("indices")?.to_vec();
        let axis = crate::ops::args::axis(a.int_or("axis", -1)?, dims.len() + 1).map_err(|e| e.at("axis"))?;
        let size = match a.int("one_hot_vector_size")? {
            Some(n) => Dim::Fixed(size(n)?),
            None => Dim::ANY,
        };
        dims.insert(axis, size);
        result(value_type(a)?, dims)
    },
    eval: Eval::Call(|c| {
        let ids = c.tensor("indices")?;
        let axis = crate::ops::args::axis(c.int_or("axis", -1)?, ids.rank() + 1).map_err(|e| e.at("axis"))?;
        let size = size(c.int_or("one_hot_vector_size", 0)?)?;
        let mut shape = ids.dims().to_vec();
        shape.insert(axis, size);
        bounded(&shape)?;
        let value = |name, default: i64| match c.maybe(name) {
            Some(t) => Ok(t.flatten_all()?.get(0)?),
            None => Tensor::new(default, ids.device()),
        };
        let (on, off) = (value("on_value", 1)?, value("off_value", 0)?);
        let range = Tensor::arange(0i64, i64::try_from(size).unwrap_or(0), ids.device())?;
        let mut column = vec![1; shape.len()];
        column[axis] = size;
        let hit = ids.unsqueeze(axis)?.broadcast_as(shape.as_slice())?;
        let hit = hit.eq(&range.reshape(column)?.broadcast_as(shape.as_slice())?)?;
        one(hit.where_cond(&on.broadcast_as(shape.as_slice())?, &off.broadcast_as(shape.as_slice())?)?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// The indices of the elements that are not zero, a row each.
pub(super) static NON_ZERO: Spec = Spec {
    name: "non_zero",
    since: Opset::Ios15,
    params: &[need("x", ACTIVATION)],
    infer: |a| result(DType::I32, vec![Dim::ANY, Dim::Fixed(a.rank("x")?)]),
    eval: Eval::Call(|c| {
        let x = c.tensor("x")?;
        let values = x.to_dtype(CandleType::F64)?.flatten_all()?.to_vec1::<f64>()?;
        let mut rows = Vec::new();
        let found: Vec<usize> = (0..values.len()).filter(|i| values[*i] != 0.0).collect();
        for place in &found {
            let mut rest = *place;
            let mut row: Vec<i64> = Vec::new();
            for n in x.dims().iter().rev() {
                row.push(i64::try_from(rest % n).unwrap_or(0));
                rest /= n;
            }
            rows.extend(row.into_iter().rev());
        }
        one(Val::ints(rows, &[found.len(), x.rank()])?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

pub(super) static NON_MAXIMUM_SUPPRESSION: Spec = Spec {
    name: "non_maximum_suppression",
    since: Opset::Ios15,
    params: &[
        need("boxes", FLOAT),
        need("scores", FLOAT),
        written("iou_threshold", FLOAT, Preset::Caller),
        option("score_threshold", FLOAT),
        written("max_boxes", INT, Preset::Caller),
        written("per_class_suppression", BOOL, Preset::Bool(false)),
    ],
    infer: |a| {
        let (boxes, scores) = (a.tensor("boxes")?, a.tensor("scores")?);
        let ([batch, _, _], [_, _, classes]) = (boxes.dims.as_slice(), scores.dims.as_slice()) else {
            bail!(
                "boxes {} and scores {} are not of rank 3",
                shape_text(&boxes.dims),
                shape_text(&scores.dims)
            );
        };
        let kept = Dim::Fixed(size(a.int_or("max_boxes", 0)?)?);
        Ok(vec![
            Type::tensor(boxes.dtype, [*batch, kept, Dim::Fixed(4)]),
            Type::tensor(scores.dtype, [*batch, kept, *classes]),
            Type::tensor(DType::I32, [*batch, kept]),
            Type::tensor(DType::I32, [*batch]),
        ])
    },
    eval: Eval::Unknown,
    flops: |a| a.count("boxes"),
    tolerance: Tolerance::Rounding,
};

fn value_type(a: &Args<'_>) -> Result<DType> {
    match (a.has("on_value"), a.has("off_value")) {
        (true, true) => a.same_dtype(&["on_value", "off_value"]),
        (true, false) => a.dtype("on_value"),
        (false, true) => a.dtype("off_value"),
        (false, false) => Ok(DType::I32),
    }
}

fn size(n: i64) -> Result<usize> {
    match usize::try_from(n) {
        Ok(n) if n <= 1 << 31 => Ok(n),
        _ => bail!("{n} is no size"),
    }
}

fn count(k: i64, of: Dim) -> Result<usize> {
    match usize::try_from(k) {
        Ok(k) if of.fixed().is_none_or(|n| k <= n) => Ok(k),
        _ => bail!("`k` is {k}, of a size of {of}"),
    }
}

/// The stable order of the elements along an axis; what is no number goes last.
fn order(x: &Tensor, axis: usize, ascending: bool) -> Result<Tensor> {
    let last = x.rank().saturating_sub(1);
    let rows = x.transpose(axis, last)?.to_dtype(CandleType::F64)?.contiguous()?;
    let shape = rows.dims().to_vec();
    let values = rows.flatten_all()?.to_vec1::<f64>()?;
    let mut ids: Vec<i64> = Vec::with_capacity(values.len());
    for row in values.chunks(shape[last].max(1)) {
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|a, b| {
            let (a, b) = (row[*a], row[*b]);
            let by_value = a.partial_cmp(&b).unwrap_or(Ordering::Equal);
            let by_value = if ascending { by_value } else { by_value.reverse() };
            a.is_nan().cmp(&b.is_nan()).then(by_value)
        });
        ids.extend(order.into_iter().filter_map(|i| i64::try_from(i).ok()));
    }
    Ok(Tensor::from_vec(ids, shape, x.device())?.transpose(axis, last)?.contiguous()?)
}
