//! What a program is: MIL, with Apple's own names for ops, parameters and types.
//!
//! Values live in one arena per function and are referred to by [`ValueId`]; an [`Op`] is generic, so
//! ops that silane does not know are carried like any other. Constants are either literals or
//! [`Weight`]s, promises of bytes that are produced only when they are written or run.

pub mod constant;
pub mod print;
pub mod program;
pub mod types;

pub use constant::{Bytes, Const, Data, Literal, Numbers, Weight};
pub use program::{Arg, Block, Function, Op, Program, Value, ValueId};
pub use types::{DType, Dim, TensorType, Type};
