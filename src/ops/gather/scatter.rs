//! Writing by index.

use candle_core::{Tensor, WithDType};

use super::{
    VALIDATE,
    pick::{along, rows},
};
use crate::{
    bail,
    error::{Context, Result},
    mil::types::shape_text,
    ops::{
        Args, Call, Eval, INT, NUMBER, Opset, Param, Preset, STRING, Spec, Tolerance, Val, need, one,
        shape::{index, typed},
        written,
    },
};

const DATA: Param = need("data", NUMBER);
const INDICES: Param = need("indices", INT);
const UPDATES: Param = need("updates", NUMBER);
const AXIS: Param = written("axis", INT, Preset::Int(0));
const MODE: Param = written("mode", STRING, Preset::Str("add"));

/// Slices of `updates` go to the places along `axis` that `indices` names.
pub(super) static SCATTER: Spec = Spec {
    name: "scatter",
    since: Opset::Ios15,
    params: &[DATA, INDICES, UPDATES, AXIS, MODE, VALIDATE],
    infer: |a| {
        let (data, axis) = (a.dims("data")?, a.axis("axis", "data", 0)?);
        fits(a, &[&data[..axis], a.dims("indices")?, &data[axis + 1..]].concat())
    },
    eval: Eval::Call(|c| {
        let (data, ids) = (c.tensor("data")?, c.tensor("indices")?);
        let axis = c.axis("axis", data, 0)?;
        let dims = data.dims();
        expect(c.tensor("updates")?, &[&dims[..axis], ids.dims(), &dims[axis + 1..]].concat())?;
        let at = c.ints("indices")?.iter().map(|i| index(*i, dims[axis])).collect::<Result<Vec<_>>>();
        let at = at.at("indices")?;
        let (outer, inner): (usize, usize) =
            (dims[..axis].iter().product(), dims[axis + 1..].iter().product());
        let mut places = Vec::new();
        for o in 0..outer {
            for i in &at {
                let start = (o * dims[axis] + i) * inner;
                places.extend(start..start + inner);
            }
        }
        combine(c, &places)
    }),
    flops: |a| a.count("updates"),
    tolerance: Tolerance::Rounding,
};

/// Each element of `updates` goes to its own place, with `axis` replaced by the index there.
pub(super) static SCATTER_ALONG_AXIS: Spec = Spec {
    name: "scatter_along_axis",
    since: Opset::Ios15,
    params: &[DATA, INDICES, UPDATES, AXIS, MODE, VALIDATE],
    infer: |a| {
        a.axis("axis", "data", 0)?;
        let (data, ids) = (a.dims("data")?, a.dims("indices")?);
        if data.len() != ids.len() {
            bail!("data {} and indices {} differ in rank", shape_text(data), shape_text(ids));
        }
        fits(a, ids)
    },
    eval: Eval::Call(|c| {
        let (data, ids) = (c.tensor("data")?, c.tensor("indices")?);
        let axis = c.axis("axis", data, 0)?;
        expect(c.tensor("updates")?, ids.dims())?;
        let places = along(data.dims(), ids.dims(), &c.ints("indices")?, axis)?;
        let places: Vec<usize> = places.into_iter().filter_map(|p| usize::try_from(p).ok()).collect();
        combine(c, &places)
    }),
    flops: |a| a.count("updates"),
    tolerance: Tolerance::Rounding,
};

/// The last axis of `indices` names the leading axes of `data`.
pub(super) static SCATTER_ND: Spec = Spec {
    name: "scatter_nd",
    since: Opset::Ios15,
    params: &[DATA, INDICES, UPDATES, MODE, VALIDATE],
    infer: |a| {
        let (data, ids) = (a.dims("data")?, a.dims("indices")?);
        let Some((depth, outer)) = ids.split_last() else { bail!("`indices` is a scalar") };
        match depth.fixed() {
            Some(depth) if depth <= data.len() => fits(a, &[outer, &data[depth..]].concat()),
            _ => bail!("indices {} do not fit data {}", shape_text(ids), shape_text(data)),
        }
    },
    eval: Eval::Call(|c| {
        let (data, ids) = (c.tensor("data")?, c.tensor("indices")?);
        let Some((depth, outer)) = ids.dims().split_last() else { bail!("`indices` is a scalar") };
        if *depth > data.rank() {
            bail!("indices {} do not fit data {}", shape_text(ids.dims()), shape_text(data.dims()));
        }
        let (leading, rest) = data.dims().split_at(*depth);
        expect(c.tensor("updates")?, &[outer, rest].concat())?;
        let inner: usize = rest.iter().product();
        let rows = rows(&c.ints("indices")?, leading, outer.iter().product())?;
        let places: Vec<usize> = rows.into_iter().flat_map(|r| r * inner..(r + 1) * inner).collect();
        combine(c, &places)
    }),
    flops: |a| a.count("updates"),
    tolerance: Tolerance::Rounding,
};

fn fits(a: &Args<'_>, want: &[crate::mil::Dim]) -> Result<Vec<crate::mil::Type>> {
    a.same_dtype(&["data", "updates"])?;
    Mode::named(a.str_or("mode", "add"))?;
    let updates = a.dims("updates")?;
    if updates.len() != want.len() || updates.iter().zip(want).any(|(u, w)| !u.agrees(*w)) {
        bail!("updates {} are given, {} are expected", shape_text(updates), shape_text(want));
    }
    a.like("data")
}

fn expect(updates: &Tensor, want: &[usize]) -> Result<()> {
    if updates.dims() != want {
        bail!("updates {} are given, {} are expected", shape_text(updates.dims()), shape_text(want));
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum Mode {
    Update,
    Add,
    Sub,
    Mul,
    Div,
    Max,
    Min,
}

impl Mode {
    fn named(name: &str) -> Result<Mode> {
        Ok(match name {
            "update" => Mode::Update,
            "add" => Mode::Add,
            "sub" => Mode::Sub,
            "mul" => Mode::Mul,
            "div" => Mode::Div,
            "max" => Mode::Max,
            "min" => Mode::Min,
            other => bail!("mode `{other}` is unknown"; hint: "add, div, max, min, mul, sub or update"),
        })
    }
}

/// Puts the elements of `updates` to their places, one after the other.
fn combine(c: &Call<'_>, places: &[usize]) -> Result<Vec<Val>> {
    let (data, updates) = (c.tensor("data")?, c.tensor("updates")?);
    let mode = Mode::named(c.str_or("mode", "add"))?;
    one(typed!(data, put(data, updates, places, mode))?)
}

fn put<T: WithDType>(data: &Tensor, updates: &Tensor, places: &[usize], mode: Mode) -> Result<Tensor> {
    let mut to = data.flatten_all()?.to_vec1::<T>()?;
    let from = updates.to_dtype(data.dtype())?.flatten_all()?.to_vec1::<T>()?;
    for (place, v) in places.iter().zip(from) {
        let old = to[*place];
        to[*place] = match mode {
            Mode::Update => v,
            Mode::Add => old + v,
            Mode::Sub => old - v,
            Mode::Mul => old * v,
            // An integer has no quotient by zero.
            Mode::Div if v == T::zero() && !data.dtype().is_float() => T::zero(),
            Mode::Div => old / v,
            Mode::Max => {
                if v > old {
                    v
                } else {
                    old
                }
            }
            Mode::Min => {
                if v < old {
                    v
                } else {
                    old
                }
            }
        };
    }
    Ok(Tensor::from_vec(to, data.dims(), data.device())?)
}
