//! Reading an op's arguments: their types, and the values of those that are known.

use crate::{
    bail,
    error::{Error, Result},
    mil::{
        Arg, Block, Const, DType, Dim, Function, Numbers, Op, TensorType, Type, ValueId, types::shape_text,
    },
};

/// What is known about a value when the program is compiled.
#[derive(Debug, Clone, Copy, Default)]
pub enum Known<'a> {
    /// Computed at run time.
    #[default]
    No,
    /// The result of a constexpr op: fixed, though not spelt out.
    Constexpr,
    Const(&'a Const),
}

/// A function with what is known about each of its values.
pub struct Scope<'a> {
    pub function: &'a Function,
    known: Vec<Known<'a>>,
}

impl<'a> Scope<'a> {
    pub fn new(function: &'a Function) -> Self {
        let mut scope = Self { function, known: vec![Known::No; function.values.len()] };
        scope.learn(&function.body);
        scope
    }

    fn learn(&mut self, block: &'a Block) {
        block.walk(&mut |op| {
            let known = match op.constant() {
                Some(c) => Known::Const(c),
                None if op.kind.starts_with("constexpr_") => Known::Constexpr,
                None => return,
            };
            for id in &op.outputs {
                if let Some(slot) = self.known.get_mut(id.0 as usize) {
                    *slot = known;
                }
            }
        });
    }

    pub fn known(&self, id: ValueId) -> Known<'a> {
        self.known.get(id.0 as usize).copied().unwrap_or_default()
    }

    pub fn args(&'a self, op: &'a Op) -> Args<'a> {
        Args { function: self.function, scope: Some(self), op }
    }
}

/// The arguments of one op. A parameter is looked up among the inputs, then among the attributes, where
/// iOS16-style constexpr ops keep theirs.
pub struct Args<'a> {
    pub function: &'a Function,
    /// Without a scope only literals bound directly are known.
    pub scope: Option<&'a Scope<'a>>,
    pub op: &'a Op,
}

impl<'a> Args<'a> {
    pub fn has(&self, name: &str) -> bool {
        self.op.params.get(name).is_some_and(|a| !a.is_empty())
            || (name != "name" && self.op.attrs.contains_key(name))
    }

    /// The arguments of a parameter, none when it is absent.
    pub fn list(&self, name: &str) -> &'a [Arg] {
        self.op.params.get(name).map_or(&[], Vec::as_slice)
    }

    pub fn ty(&self, name: &str) -> Result<&'a Type> {
        match self.list(name) {
            [Arg::Value(id), ..] => Ok(self.function.ty(*id)),
            [Arg::Const(c), ..] => Ok(&c.ty),
            [] => match self.op.attrs.get(name) {
                Some(c) => Ok(&c.ty),
                None => bail!("parameter `{name}` is missing"),
            },
        }
    }

    /// The tensor type of a parameter.
    pub fn tensor(&self, name: &str) -> Result<&'a TensorType> {
        match self.ty(name)? {
            Type::Tensor(t) => Ok(t),
            other => bail!("`{name}` is {other}, a tensor is expected"),
        }
    }

    pub fn dims(&self, name: &str) -> Result<&'a [Dim]> {
        Ok(&self.tensor(name)?.dims)
    }

    pub fn rank(&self, name: &str) -> Result<usize> {
        Ok(self.dims(name)?.len())
    }

    pub fn dtype(&self, name: &str) -> Result<DType> {
        Ok(self.tensor(name)?.dtype)
    }

    /// The tensor types of a variadic parameter.
    pub fn tensors(&self, name: &str) -> Result<Vec<&'a TensorType>> {
        let tensor = |arg: &'a Arg| match arg {
            Arg::Value(id) => self.function.ty(*id).as_tensor(),
            Arg::Const(c) => c.ty.as_tensor(),
        };
        self.list(name)
            .iter()
            .map(|a| {
                tensor(a).ok_or_else(|| Error::new(format!("`{name}` holds something that is no tensor")))
            })
            .collect()
    }

    /// The value of a parameter, when it is known.
    pub fn known(&self, name: &str) -> Known<'a> {
        match self.list(name) {
            [Arg::Const(c), ..] => Known::Const(c),
            [Arg::Value(id), ..] => self.scope.map(|s| s.known(*id)).unwrap_or_default(),
            [] => self.op.attrs.get(name).map_or(Known::No, Known::Const),
        }
    }

    pub fn constant(&self, name: &str) -> Option<&'a Const> {
        match self.known(name) {
            Known::Const(c) => Some(c),
            _ => None,
        }
    }

    pub fn numbers(&self, name: &str) -> Result<Option<Numbers>> {
        self.constant(name).map(Const::numbers).transpose()
    }

    /// The integers of a parameter, when they are known.
    pub fn ints(&self, name: &str) -> Result<Option<Vec<i64>>> {
        Ok(self.numbers(name)?.map(Numbers::into_ints))
    }

    pub fn int(&self, name: &str) -> Result<Option<i64>> {
        Ok(self.ints(name)?.and_then(|v| v.first().copied()))
    }

    pub fn int_or(&self, name: &str, default: i64) -> Result<i64> {
        Ok(self.int(name)?.unwrap_or(default))
    }

    pub fn bool_or(&self, name: &str, default: bool) -> Result<bool> {
        Ok(self.int(name)?.map_or(default, |v| v != 0))
    }

    /// A vector of bools, all false when absent.
    pub fn bools(&self, name: &str, count: usize) -> Result<Vec<bool>> {
        let mut v: Vec<bool> = self.ints(name)?.unwrap_or_default().into_iter().map(|b| b != 0).collect();
        if !v.is_empty() && v.len() != count {
            bail!("`{name}` has {} entries, {count} are expected", v.len());
        }
        v.resize(count, false);
        Ok(v)
    }

    pub fn float(&self, name: &str) -> Result<Option<f32>> {
        Ok(self.numbers(name)?.and_then(|n| n.into_floats().first().copied()))
    }

    pub fn str_or(&self, name: &str, default: &'a str) -> &'a str {
        self.constant(name).and_then(Const::str).unwrap_or(default)
    }

    /// An axis of `of`, counted from the front.
    pub fn axis(&self, name: &str, of: &str, default: i64) -> Result<usize> {
        axis(self.int_or(name, default)?, self.rank(of)?).map_err(|e| e.at(name))
    }

    /// Axes of `of`, counted from the front and in the order given; `None` when absent.
    pub fn axes(&self, name: &str, of: &str) -> Result<Option<Vec<usize>>> {
        let rank = self.rank(of)?;
        self.ints(name)?
            .map(|v| v.into_iter().map(|a| axis(a, rank).map_err(|e| e.at(name))).collect())
            .transpose()
    }

    /// The result has the type of this parameter.
    pub fn like(&self, name: &str) -> Result<Vec<Type>> {
        Ok(vec![self.ty(name)?.clone()])
    }

    /// Refuses operands of different element types.
    pub fn same_dtype(&self, names: &[&str]) -> Result<DType> {
        let first = self.dtype(names[0])?;
        for name in &names[1..] {
            if self.has(name) && self.dtype(name)? != first {
                bail!("`{}` is {first}, `{name}` is {}", names[0], self.dtype(name)?);
            }
        }
        Ok(first)
    }

    /// Number of elements of the first result, for costs; unknown sizes count as one.
    pub fn out_count(&self) -> u64 {
        self.op.outputs.first().map_or(0, |id| count(self.function.ty(*id)))
    }

    /// Number of elements of an argument; unknown sizes count as one.
    pub fn count(&self, name: &str) -> u64 {
        self.ty(name).map_or(0, count)
    }
}

fn count(ty: &Type) -> u64 {
    ty.as_tensor()
        .map_or(0, |t| t.dims.iter().fold(1u64, |n, d| n.saturating_mul(d.fixed().unwrap_or(1) as u64)))
}

/// An axis counted from the front, from one that may count from the back.
pub fn axis(axis: i64, rank: usize) -> Result<usize> {
    let at = if axis < 0 { axis + i64::try_from(rank).unwrap_or(i64::MAX) } else { axis };
    match usize::try_from(at) {
        Ok(a) if a < rank => Ok(a),
        _ => bail!("axis {axis} is outside a tensor of rank {rank}"),
    }
}

/// `x [1, 48, 1, 4]`, for messages.
pub(crate) fn named(name: &str, t: &TensorType) -> String {
    format!("{name} {}", shape_text(&t.dims))
}
