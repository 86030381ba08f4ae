//! What each op means, once: one [`Spec`] per op, in one table.
//!
//! A spec says which parameters an op has, which type its results have, what it computes, and what it
//! costs. The builder, the checker, the interpreter, the folder, the printer and the cost report all read
//! that entry. An op outside the table is carried through and counted, never dropped.
//!
//! How types work in MIL: tensors have an element type and a fixed rank; a size may be unknown until run
//! time, and every unknown size is a symbol of its own. Binary ops broadcast as numpy does, and want equal
//! element types. A parameter that is *fixed* must be known when the program is compiled.
//!
//! How values work in `eval`: every float is a candle `F32` tensor, every integer `I64`, every bool `U8`;
//! the interpreter rounds each result to its declared type afterwards, in one place.

mod args;
pub mod attention;
pub mod constexpr;
pub mod control;
pub mod elementwise;
pub mod gather;
pub mod image;
pub mod linear;
pub mod list;
pub mod norm;
pub mod recurrent;
pub mod reduce;
pub mod shape;
pub mod state;
mod value;

use std::{collections::HashMap, fmt, sync::LazyLock};

pub use args::{Args, Known, Scope, axis as axis_of};
use candle_core::Tensor;
pub use value::{Call, Val, one};

use crate::{
    error::Result,
    mil::{Const, DType, Dim, Type},
};

/// What one op is.
pub struct Spec {
    /// The op's type on the wire.
    pub name: &'static str,
    /// The first opset that has it.
    pub since: Opset,
    pub params: &'static [Param],
    /// Types of the results from the types of the arguments.
    pub infer: fn(&Args<'_>) -> Result<Vec<Type>>,
    pub eval: Eval,
    /// Arithmetic work; bytes are counted from the operands, the same for every op.
    pub flops: fn(&Args<'_>) -> u64,
    pub tolerance: Tolerance,
}

pub struct Param {
    pub name: &'static str,
    pub need: Need,
    /// Element types that are accepted.
    pub accepts: DTypes,
    /// Must be known when the program is compiled.
    pub fixed: bool,
    /// Takes any number of arguments.
    pub variadic: bool,
    /// The first opset that has the parameter.
    pub since: Opset,
}

/// Whether a parameter must be there.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Need {
    Required,
    /// Optional in coremltools, but it always writes it and some Core ML compilers require it: silane
    /// always writes it too. The builder fills the default in; `Preset::Caller` is the caller's task.
    Written(Preset),
    Optional,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Preset {
    Bool(bool),
    Int(i32),
    Str(&'static str),
    /// A float scalar of the element type of `x`.
    Float(f32),
    /// Depends on the rank or on other parameters.
    Caller,
}

/// How exactly results can be compared between two executors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tolerance {
    /// Movement, integers, comparisons: bit for bit.
    Exact,
    /// One rounding of each result, or sums whose order is free.
    Rounding,
}

/// What an op computes.
#[derive(Clone, Copy)]
pub enum Eval {
    /// One float tensor to another, parameter `x`.
    Unary(fn(&Tensor) -> candle_core::Result<Tensor>),
    /// Two tensors of one type, `x` and `y`, broadcast.
    Binary(fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>),
    Call(fn(&Call<'_>) -> Result<Vec<Val>>),
    /// States and nested blocks: the interpreter itself does it.
    Flow,
    /// Known to the checker, with no meaning here.
    Unknown,
}

/// An operating system generation's set of ops, which also fixes the specification version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Opset {
    Ios15,
    Ios16,
    Ios17,
    Ios18,
    Ios26,
}

impl Opset {
    pub const ALL: [Opset; 5] = [Opset::Ios15, Opset::Ios16, Opset::Ios17, Opset::Ios18, Opset::Ios26];

    /// The name on the wire.
    pub fn wire(self) -> &'static str {
        ["CoreML5", "CoreML6", "CoreML7", "CoreML8", "CoreML9"][self as usize]
    }

    pub fn spec_version(self) -> i32 {
        6 + self as i32
    }

    /// The operating systems that first had it.
    pub fn os(self) -> &'static str {
        ["iOS 15, macOS 12", "iOS 16, macOS 13", "iOS 17, macOS 14", "iOS 18, macOS 15", "iOS 26, macOS 26"]
            [self as usize]
    }

    pub fn from_wire(name: &str) -> Option<Opset> {
        Opset::ALL.into_iter().find(|o| o.wire() == name)
    }
}

impl fmt::Display for Opset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.wire(), self.os())
    }
}

/// A set of element types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DTypes(u32);

impl DTypes {
    pub const fn of(list: &[DType]) -> Self {
        let (mut bits, mut i) = (0, 0);
        while i < list.len() {
            bits |= 1 << list[i] as u32;
            i += 1;
        }
        DTypes(bits)
    }

    pub const fn has(self, d: DType) -> bool {
        self.0 & (1 << d as u32) != 0
    }

    pub fn list(self) -> Vec<DType> {
        DType::ALL.into_iter().filter(|d| self.has(*d)).collect()
    }
}

/// fp16, fp32
pub const FLOAT: DTypes = DTypes::of(&[DType::F16, DType::F32]);
/// fp16, fp32, int32
pub const NUMBER: DTypes = DTypes::of(&[DType::F16, DType::F32, DType::I32]);
pub const INT: DTypes = DTypes::of(&[DType::I32]);
/// Integer parameters such as `axes`, which newer opsets take in narrow types too.
pub const INDEX: DTypes = DTypes::of(&[DType::I8, DType::U8, DType::I16, DType::U16, DType::I32, DType::U32]);
pub const BOOL: DTypes = DTypes::of(&[DType::Bool]);
pub const STRING: DTypes = DTypes::of(&[DType::String]);
/// What an activation can be from iOS 17 on.
pub const ACTIVATION: DTypes = DTypes::of(&[
    DType::F16,
    DType::F32,
    DType::Bool,
    DType::I8,
    DType::U8,
    DType::I16,
    DType::U16,
    DType::I32,
]);
pub const ANY: DTypes = DTypes(u32::MAX);

pub const fn need(name: &'static str, accepts: DTypes) -> Param {
    Param { name, need: Need::Required, accepts, fixed: false, variadic: false, since: Opset::Ios15 }
}

/// Required, and known at compile time.
pub const fn fixed(name: &'static str, accepts: DTypes) -> Param {
    Param { fixed: true, ..need(name, accepts) }
}

/// Really optional, may be computed.
pub const fn maybe(name: &'static str, accepts: DTypes) -> Param {
    Param { need: Need::Optional, ..need(name, accepts) }
}

/// Really optional, known at compile time.
pub const fn option(name: &'static str, accepts: DTypes) -> Param {
    Param { need: Need::Optional, ..fixed(name, accepts) }
}

/// Fixed, and always written with this default.
pub const fn written(name: &'static str, accepts: DTypes, preset: Preset) -> Param {
    Param { need: Need::Written(preset), ..fixed(name, accepts) }
}

pub const fn many(name: &'static str, accepts: DTypes) -> Param {
    Param { variadic: true, ..need(name, accepts) }
}

pub const fn from(since: Opset, param: Param) -> Param {
    Param { since, ..param }
}

/// The whole table.
pub fn all() -> impl Iterator<Item = &'static Spec> {
    FAMILIES.iter().flat_map(|f| f.iter()).copied()
}

static FAMILIES: &[&[&Spec]] = &[
    elementwise::SPECS,
    reduce::SPECS,
    linear::SPECS,
    shape::SPECS,
    gather::SPECS,
    norm::SPECS,
    attention::SPECS,
    state::SPECS,
    constexpr::SPECS,
    control::SPECS,
    list::SPECS,
    image::SPECS,
    recurrent::SPECS,
];

static BY_NAME: LazyLock<HashMap<&'static str, &'static Spec>> =
    LazyLock::new(|| all().map(|s| (s.name, s)).collect());

pub fn find(kind: &str) -> Option<&'static Spec> {
    BY_NAME.get(kind).copied()
}

impl Spec {
    pub fn param(&self, name: &str) -> Option<&'static Param> {
        self.params.iter().find(|p| p.name == name)
    }
}

impl Preset {
    /// The constant to write; `x` is the element type of the op's main operand.
    pub fn constant(self, x: DType) -> Option<Const> {
        Some(match self {
            Preset::Bool(b) => Const::bool(b),
            Preset::Int(i) => Const::int(i),
            Preset::Str(s) => Const::string(s),
            Preset::Float(v) => Const::float(if x == DType::F32 { x } else { DType::F16 }, v),
            Preset::Caller => return None,
        })
    }
}

/// numpy broadcasting of two shapes; an unknown size stays unknown unless the other side is above one.
pub fn broadcast(a: &[Dim], b: &[Dim]) -> Option<Vec<Dim>> {
    let rank = a.len().max(b.len());
    let at = |s: &[Dim], i: usize| (i + s.len()).checked_sub(rank).map_or(Dim::Fixed(1), |j| s[j]);
    (0..rank)
        .map(|i| match (at(a, i), at(b, i)) {
            (x, y) if x == y && x.fixed().is_some() => Some(x),
            (Dim::Fixed(1), y) => Some(y),
            (x, Dim::Fixed(1)) => Some(x),
            (Dim::Unknown { .. }, y) => Some(y),
            (x, Dim::Unknown { .. }) => Some(x),
            _ => None,
        })
        .collect()
}
