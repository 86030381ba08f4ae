//! Lists of tensors, for loops.
//!
//! An element that was never written holds zeros.

use candle_core::{DType as CandleType, Device, Tensor};

use super::{
    ACTIVATION, ANY, BOOL, Call, DTypes, Eval, INT, Opset, Param, Preset, STRING, Spec, Tolerance, Val, many,
    need, one, option,
    shape::{bounded, free, index, result},
    written,
};
use crate::{
    bail,
    error::{Context, Result},
    mil::{Arg, Const, DType, Dim, TensorType, Type, types::shape_text},
    ops::{Args, Known},
};

pub static SPECS: &[&Spec] =
    &[&MAKE_LIST, &LIST_LENGTH, &LIST_READ, &LIST_WRITE, &LIST_GATHER, &LIST_SCATTER];

/// Elements that a list may have.
const LIMIT: usize = 1 << 24;

const LS: Param = need("ls", ANY);
const INDICES: Param = need("indices", INT);
const VALUE: Param = need("value", ACTIVATION);

/// A list of `init_length` elements of `elem_shape`.
static MAKE_LIST: Spec = Spec {
    name: "make_list",
    since: Opset::Ios15,
    params: &[
        option("init_length", INT),
        written("dynamic_length", BOOL, Preset::Bool(true)),
        // A size that is not known is a name.
        many("elem_shape", DTypes::of(&[DType::I32, DType::String])),
        written("dtype", STRING, Preset::Str("fp32")),
    ],
    infer: |a| {
        let Some(dtype) = DType::from_name(a.str_or("dtype", "fp32")) else {
            bail!("`dtype` `{}` is no element type", a.str_or("dtype", ""));
        };
        let dims: Vec<Dim> =
            a.list("elem_shape").iter().map(|arg| size(a, arg)).collect::<Result<Vec<_>>>()?.concat();
        let length = match (a.bool_or("dynamic_length", true)?, a.int("init_length")?) {
            (false, Some(n)) => Some(Dim::Fixed(length(n)?)),
            _ => None,
        };
        Ok(vec![Type::List { element: Box::new(Type::tensor(dtype, dims)), length }])
    },
    eval: Eval::Call(|c| {
        let count = length(c.int_or("init_length", 1)?)?;
        Ok(vec![Val::List(vec![blank(c)?; count])])
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

static LIST_LENGTH: Spec = Spec {
    name: "list_length",
    since: Opset::Ios15,
    params: &[LS],
    infer: |a| {
        element(a)?;
        result(DType::I32, Vec::new())
    },
    eval: Eval::Call(|c| {
        let count = i64::try_from(items(c)?.len()).unwrap_or(i64::MAX);
        one(Val::ints(vec![count], &[])?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

static LIST_READ: Spec = Spec {
    name: "list_read",
    since: Opset::Ios15,
    params: &[LS, need("index", INT)],
    infer: |a| Ok(vec![element(a)?.clone().into()]),
    eval: Eval::Call(|c| {
        let items = items(c)?;
        one(items[index(c.int_or("index", 0)?, items.len()).at("index")?].clone())
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// Past the end, a list of dynamic length grows.
static LIST_WRITE: Spec = Spec {
    name: "list_write",
    since: Opset::Ios15,
    params: &[LS, need("index", INT), VALUE],
    infer: |a| {
        accepts(element(a)?, a.tensor("value")?)?;
        a.like("ls")
    },
    eval: Eval::Call(|c| {
        let mut items = items(c)?.to_vec();
        place(c, &mut items, c.int_or("index", 0)?, c.get("value")?.clone())?;
        Ok(vec![Val::List(items)])
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// The elements at `indices`, stacked.
static LIST_GATHER: Spec = Spec {
    name: "list_gather",
    since: Opset::Ios15,
    params: &[LS, INDICES],
    infer: |a| {
        let element = element(a)?;
        let [count] = a.dims("indices")? else { bail!("`indices` is no vector") };
        result(element.dtype, [&[*count], element.dims.as_slice()].concat())
    },
    eval: Eval::Call(|c| {
        let items = items(c)?;
        let pick = |i: &i64| items[index(*i, items.len()).at("indices")?].tensor();
        let picked: Vec<&Tensor> = c.ints("indices")?.iter().map(pick).collect::<Result<_>>()?;
        if picked.is_empty() {
            let Some(Type::Tensor(t)) = c.outputs.first() else { bail!("`indices` is empty") };
            let shape: Vec<usize> = t.dims.iter().map(|d| d.fixed().unwrap_or(0)).collect();
            return one(Tensor::zeros(shape, kind(t.dtype), &Device::Cpu)?);
        }
        one(Tensor::stack(&picked, 0)?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// The slices of `value` become the elements at `indices`.
static LIST_SCATTER: Spec = Spec {
    name: "list_scatter",
    since: Opset::Ios15,
    params: &[LS, INDICES, VALUE],
    infer: |a| {
        let value = a.tensor("value")?;
        let Some((_, dims)) = value.dims.split_first() else { bail!("`value` is a scalar") };
        accepts(element(a)?, &TensorType::new(value.dtype, dims.iter().copied()))?;
        a.like("ls")
    },
    eval: Eval::Call(|c| {
        let mut items = items(c)?.to_vec();
        let (value, indices) = (c.tensor("value")?, c.ints("indices")?);
        if value.dims().first() != Some(&indices.len()) {
            bail!("{} indices for value {}", indices.len(), shape_text(value.dims()));
        }
        for (i, at) in indices.into_iter().enumerate() {
            place(c, &mut items, at, Val::Tensor(value.get(i)?))?;
        }
        Ok(vec![Val::List(items)])
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// The sizes that one entry of `elem_shape` gives.
fn size(a: &Args<'_>, arg: &Arg) -> Result<Vec<Dim>> {
    let constant: Option<&Const> = match arg {
        Arg::Const(c) => Some(c),
        Arg::Value(id) => match a.scope.map(|s| s.known(*id)) {
            Some(Known::Const(c)) => Some(c),
            _ => None,
        },
    };
    let Some(c) = constant else { return Ok(vec![Dim::ANY]) };
    // A size without a value is named by a string.
    if c.str().is_some() {
        return Ok(vec![Dim::ANY]);
    }
    let dim = |n: i64| usize::try_from(n).map_or(Dim::ANY, Dim::Fixed);
    Ok(c.numbers()?.into_ints().into_iter().map(dim).collect())
}

fn element<'a>(a: &Args<'a>) -> Result<&'a TensorType> {
    match a.ty("ls")? {
        Type::List { element, .. } => match element.as_tensor() {
            Some(t) => Ok(t),
            None => bail!("`ls` is a list of {element}, one of tensors is expected"),
        },
        other => bail!("`ls` is {other}, a list is expected"),
    }
}

fn accepts(element: &TensorType, value: &TensorType) -> Result<()> {
    if !element.agrees(value) {
        bail!("a list of {element} cannot take {value}");
    }
    Ok(())
}

fn length(n: i64) -> Result<usize> {
    match usize::try_from(n) {
        Ok(n) if n <= LIMIT => Ok(n),
        _ => bail!("a list of {n} elements, up to {LIMIT} are supported"),
    }
}

fn items<'a>(c: &'a Call<'_>) -> Result<&'a [Val]> {
    match c.get("ls")? {
        Val::List(items) => Ok(items),
        _ => bail!("`ls` is no list"),
    }
}

fn kind(dtype: DType) -> CandleType {
    match dtype {
        DType::Bool => CandleType::U8,
        d if d.is_int() => CandleType::I64,
        _ => CandleType::F32,
    }
}

/// An element as it is before it is written.
fn blank(c: &Call<'_>) -> Result<Val> {
    let Some(Type::List { element, .. }) = c.outputs.first() else { bail!("the result is no list") };
    let Some(t) = element.as_tensor() else { bail!("the result is a list of {element}") };
    let shape: Vec<usize> = t.dims.iter().map(|d| d.fixed().unwrap_or(0)).collect();
    bounded(&shape)?;
    Ok(Tensor::zeros(shape, kind(t.dtype), &Device::Cpu)?.into())
}

fn place(c: &Call<'_>, items: &mut Vec<Val>, at: i64, value: Val) -> Result<()> {
    let grows =
        matches!(c.outputs.first(), Some(Type::List { length: None | Some(Dim::Unknown { .. }), .. }));
    if grows && usize::try_from(at).is_ok_and(|i| i >= items.len() && i < LIMIT) {
        let blank = blank(c)?;
        items.resize(usize::try_from(at).unwrap_or(0) + 1, blank);
    }
    let i = index(at, items.len()).at("index")?;
    items[i] = value;
    Ok(())
}
