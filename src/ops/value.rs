//! Run-time values, and an op about to be run on them.

use std::collections::BTreeMap;

use candle_core::{DType as CandleType, Device, Tensor};

use crate::{
    bail,
    error::{Error, Result},
    mil::{Const, Data, Literal, Numbers, Op, Type},
};

/// A value while a program runs.
#[derive(Debug, Clone)]
pub enum Val {
    /// Floats as `F32`, integers as `I64`, bools as `U8`.
    Tensor(Tensor),
    Str(String),
    List(Vec<Val>),
    /// A reference to a state, by its name.
    State(String),
}

/// An op with its arguments at hand.
pub struct Call<'a> {
    pub op: &'a Op,
    /// Parameter → values; iOS16-style attributes are among them.
    pub args: BTreeMap<&'a str, Vec<Val>>,
    /// Declared types of the results.
    pub outputs: Vec<&'a Type>,
}

impl Val {
    pub fn floats(values: Vec<f32>, shape: &[usize]) -> Result<Val> {
        Ok(Val::Tensor(Tensor::from_vec(values, shape, &Device::Cpu)?))
    }

    pub fn ints(values: Vec<i64>, shape: &[usize]) -> Result<Val> {
        Ok(Val::Tensor(Tensor::from_vec(values, shape, &Device::Cpu)?))
    }

    pub fn bools(values: Vec<bool>, shape: &[usize]) -> Result<Val> {
        let values: Vec<u8> = values.into_iter().map(u8::from).collect();
        Ok(Val::Tensor(Tensor::from_vec(values, shape, &Device::Cpu)?))
    }

    pub fn numbers(numbers: Numbers, shape: &[usize]) -> Result<Val> {
        match numbers {
            Numbers::Floats(v) => Val::floats(v, shape),
            Numbers::Ints(v) => Val::ints(v, shape),
            Numbers::Bools(v) => Val::bools(v, shape),
        }
    }

    pub fn constant(c: &Const) -> Result<Val> {
        match (&c.ty, &c.data) {
            (_, Data::Literal(Literal::Strings(v))) => match v.as_slice() {
                [one] => Ok(Val::Str(one.clone())),
                many => Ok(Val::List(many.iter().cloned().map(Val::Str).collect())),
            },
            (_, Data::Literal(Literal::List(v) | Literal::Tuple(v))) => {
                Ok(Val::List(v.iter().map(Val::constant).collect::<Result<_>>()?))
            }
            (Type::Tensor(t), _) => {
                let Some(shape) = t.shape() else { bail!("constant {t} has a size that is not fixed") };
                Val::numbers(c.numbers()?, &shape)
            }
            (other, _) => bail!("a constant of type {other} cannot be run"),
        }
    }

    pub fn tensor(&self) -> Result<&Tensor> {
        match self {
            Val::Tensor(t) => Ok(t),
            other => bail!("{} is given, a tensor is expected", other.what()),
        }
    }

    fn what(&self) -> &'static str {
        match self {
            Val::Tensor(_) => "a tensor",
            Val::Str(_) => "a string",
            Val::List(_) => "a list",
            Val::State(_) => "a state",
        }
    }

    /// All elements as floats, row-major.
    pub fn to_floats(&self) -> Result<Vec<f32>> {
        Ok(self.tensor()?.flatten_all()?.to_dtype(CandleType::F32)?.to_vec1()?)
    }

    /// All elements as integers, row-major; floats are truncated.
    pub fn to_ints(&self) -> Result<Vec<i64>> {
        Ok(self.tensor()?.flatten_all()?.to_dtype(CandleType::I64)?.to_vec1()?)
    }
}

impl From<Tensor> for Val {
    fn from(t: Tensor) -> Self {
        Val::Tensor(t)
    }
}

impl Call<'_> {
    pub fn has(&self, name: &str) -> bool {
        self.args.get(name).is_some_and(|v| !v.is_empty())
    }

    pub fn get(&self, name: &str) -> Result<&Val> {
        self.args
            .get(name)
            .and_then(|v| v.first())
            .ok_or_else(|| Error::new(format!("parameter `{name}` is missing")))
    }

    pub fn list(&self, name: &str) -> &[Val] {
        self.args.get(name).map_or(&[], Vec::as_slice)
    }

    pub fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.get(name)?.tensor().map_err(|e| e.at(name))
    }

    pub fn tensors(&self, name: &str) -> Result<Vec<&Tensor>> {
        self.list(name).iter().map(Val::tensor).collect()
    }

    pub fn maybe(&self, name: &str) -> Option<&Tensor> {
        self.tensor(name).ok()
    }

    pub fn ints(&self, name: &str) -> Result<Vec<i64>> {
        self.get(name)?.to_ints()
    }

    pub fn ints_or(&self, name: &str, default: &[i64]) -> Result<Vec<i64>> {
        if self.has(name) { self.ints(name) } else { Ok(default.to_vec()) }
    }

    pub fn int_or(&self, name: &str, default: i64) -> Result<i64> {
        Ok(self.ints_or(name, &[default])?.first().copied().unwrap_or(default))
    }

    pub fn bool_or(&self, name: &str, default: bool) -> Result<bool> {
        Ok(self.int_or(name, i64::from(default))? != 0)
    }

    pub fn bools(&self, name: &str, count: usize) -> Result<Vec<bool>> {
        let mut v: Vec<bool> = self.ints_or(name, &[])?.into_iter().map(|b| b != 0).collect();
        v.resize(count, false);
        Ok(v)
    }

    pub fn float_or(&self, name: &str, default: f32) -> Result<f32> {
        match self.args.get(name).and_then(|v| v.first()) {
            Some(v) => Ok(v.to_floats()?.first().copied().unwrap_or(default)),
            None => Ok(default),
        }
    }

    pub fn str_or<'b>(&'b self, name: &str, default: &'b str) -> &'b str {
        match self.args.get(name).and_then(|v| v.first()) {
            Some(Val::Str(s)) => s,
            _ => default,
        }
    }

    /// An axis of a tensor, counted from the front.
    pub fn axis(&self, name: &str, of: &Tensor, default: i64) -> Result<usize> {
        super::args::axis(self.int_or(name, default)?, of.rank()).map_err(|e| e.at(name))
    }
}

/// One result.
pub fn one(t: impl Into<Val>) -> Result<Vec<Val>> {
    Ok(vec![t.into()])
}
