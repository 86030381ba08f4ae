//! Programs, functions, blocks and ops.

use std::collections::BTreeMap;

use super::{Const, Type};

/// A whole ML Program: its functions, and what is said about it as a whole.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Program {
    pub functions: BTreeMap<String, Function>,
    /// The function that runs when none is named; empty for a program with the one function `main`.
    pub default_function: String,
    pub attrs: BTreeMap<String, Const>,
    pub doc: String,
}

/// One entry point. Inputs, states included, come first in the arena and are read by name from outside.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Function {
    /// The wire name of the opset, e.g. `CoreML8`; it selects `body`.
    pub opset: String,
    pub inputs: Vec<ValueId>,
    pub values: Vec<Value>,
    pub body: Block,
    /// Blocks for other opsets, carried as found.
    pub other_bodies: BTreeMap<String, Block>,
    pub attrs: BTreeMap<String, Const>,
}

/// An index into [`Function::values`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

#[derive(Debug, Clone, PartialEq)]
pub struct Value {
    pub name: String,
    pub ty: Type,
}

/// Ops in order. Inner blocks see the values of the blocks around them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Block {
    /// Only the blocks of `while_loop` have inputs.
    pub inputs: Vec<ValueId>,
    pub ops: Vec<Op>,
    pub outputs: Vec<ValueId>,
    pub attrs: BTreeMap<String, Const>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Op {
    /// The op's type on the wire, e.g. `conv`; `const` holds its value in the attribute `val`.
    pub kind: String,
    /// Parameter → its arguments: one, or several for a variadic parameter such as `values` of `concat`.
    pub params: BTreeMap<String, Vec<Arg>>,
    pub outputs: Vec<ValueId>,
    pub blocks: Vec<Block>,
    /// `name`, the `val` of a const, and all parameters of an iOS16-style constexpr.
    pub attrs: BTreeMap<String, Const>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Arg {
    Value(ValueId),
    Const(Const),
}

impl Function {
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }

    pub fn value_mut(&mut self, id: ValueId) -> &mut Value {
        &mut self.values[id.0 as usize]
    }

    pub fn add(&mut self, name: impl Into<String>, ty: Type) -> ValueId {
        let id = ValueId(u32::try_from(self.values.len()).unwrap_or(u32::MAX));
        self.values.push(Value { name: name.into(), ty });
        id
    }

    pub fn name(&self, id: ValueId) -> &str {
        &self.value(id).name
    }

    pub fn ty(&self, id: ValueId) -> &Type {
        &self.value(id).ty
    }
}

impl Block {
    /// Calls `f` on every op of the block and of the blocks inside it, in order.
    pub fn walk<'a>(&'a self, f: &mut impl FnMut(&'a Op)) {
        for op in &self.ops {
            f(op);
            for b in &op.blocks {
                b.walk(f);
            }
        }
    }

    /// Calls `f` on the block and on the blocks inside it.
    pub fn walk_blocks(&mut self, f: &mut impl FnMut(&mut Block)) {
        f(self);
        for op in &mut self.ops {
            for b in &mut op.blocks {
                b.walk_blocks(f);
            }
        }
    }

    pub fn walk_mut(&mut self, f: &mut impl FnMut(&mut Op)) {
        for op in &mut self.ops {
            f(op);
            for b in &mut op.blocks {
                b.walk_mut(f);
            }
        }
    }
}

impl Op {
    /// The `name` attribute; empty where there is none.
    pub fn name(&self) -> &str {
        self.attrs.get("name").and_then(Const::str).unwrap_or("")
    }

    /// The value of a `const` op.
    pub fn constant(&self) -> Option<&Const> {
        (self.kind == "const").then(|| self.attrs.get("val")).flatten()
    }

    /// Every argument of every parameter.
    pub fn args(&self) -> impl Iterator<Item = &Arg> {
        self.params.values().flatten()
    }
}
