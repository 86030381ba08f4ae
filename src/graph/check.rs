//! The rules that a program must keep before it may be saved.

use std::fmt;

use crate::{
    error::{Error, Result},
    mil::Program,
    ops::Opset,
};

/// A program that passed every rule; the only thing that can be saved.
#[derive(Debug)]
pub struct Checked {
    program: Program,
    /// The lowest opset that has everything the program uses.
    pub opset: Opset,
}

impl Checked {
    pub fn program(&self) -> &Program {
        &self.program
    }

    pub fn into_program(self) -> Program {
        self.program
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Worth knowing; Core ML takes it.
    Note,
    /// Core ML refuses it, or computes something else.
    Error,
}

/// A rule that is broken, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    pub severity: Severity,
    /// A short name for the rule.
    pub rule: &'static str,
    /// `function: op`
    pub place: String,
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} [{}]", self.place, self.message, self.rule)
    }
}

/// Checks every rule; the error lists what is broken.
pub fn check(program: Program) -> Result<Checked> {
    let problems: Vec<Problem> =
        problems(&program).into_iter().filter(|p| p.severity == Severity::Error).collect();
    match problems.as_slice() {
        [] => Ok(Checked { opset: Opset::Ios18, program }),
        [first, rest @ ..] => Err(Error::new(match rest.len() {
            0 => first.to_string(),
            n => format!("{first}, and {n} more problems"),
        })),
    }
}

/// Everything that the rules find.
pub fn problems(_program: &Program) -> Vec<Problem> {
    Vec::new()
}
