//! The rules that a program must keep before it may be saved. Breaking one is an *error* where Core ML
//! refuses the program or computes something else, a *note* where it is only worth knowing.
//!
//! Structure, first; a function that breaks it is examined no further:
//! * `structure`: ids are in range; a value is defined once, and used after that, in its block or inside it.
//!
//! The program:
//! * `function`: there is one; with several, or one that is not `main`, the default function is one of them.
//! * `opset`: all functions declare the same known one, and nothing they use is newer.
//!
//! Names:
//! * `identifier`: functions, values and ops have names that MIL text can print, no reserved words.
//! * `unique name`: no two visible values share a name; no two ops of a function do.
//! * `op name`: every op has one (note).
//!
//! The interface of a function:
//! * `input`: of rank 1 or more, fp16, fp32 or int32 (int8 from iOS 26 on), used; above 16384 wide (note).
//! * `output`: at least one, each once, no input among them, of a type that Core ML hands out; rank 0 (note).
//! * `state`: fp16 of fixed shape, used only by state ops; int8, a width that is no multiple of 32, more
//!   than one state (notes).
//!
//! Ops:
//! * `required`: required parameters are there, and those that some Core ML compiler insists on.
//! * `written`: so are the others that coremltools always writes (note).
//! * `parameter`: there are no others; only variadic ones take several arguments; no odd attributes (note).
//! * `fixed`: parameters of compile time are constants.
//! * `dtype`: arguments have accepted element types; before iOS 17 mixed or narrow ones are refused.
//! * `type`: arguments fit each other, and results have the type that follows from them.
//! * `rank`: tensors have rank 5 at most, tables of a constexpr op excepted.
//! * `matmul`: no operand of rank 1 or of integers.
//! * `16-bit index`: a table of more rows than computed 8- or 16-bit indices can count is not gathered.
//!
//! Constants:
//! * `const`: has one value, of the type of its one result.
//! * `literal`: the right field of the wire for its element type, as many elements as the type says.
//! * `weight`: a promise of the declared type, storable, on const and constexpr ops only.
//! * `constexpr`: parameters are attributes, beside a `shape`, before iOS 18, and inputs from then on.
//! * `non-finite constant`: a literal is infinite or no number, or would be in fp16 (note).
//!
//! Size:
//! * `size`: more than 8000 ops in a function (note). `unknown op`: ops outside the table (note).

mod constants;
mod interface;
mod names;
mod params;
mod structure;
mod types;

use std::fmt;

use crate::{
    error::{Error, Result},
    mil::{Function, Op, Program},
    ops::{Opset, Scope},
};

pub use structure::use_counts;

/// A program that passed every rule; the only thing that can be saved.
#[derive(Debug)]
pub struct Checked {
    program: Program,
    /// The opset that all functions declare, which fixes the specification version.
    pub opset: Opset,
    /// The lowest opset that has everything the program uses.
    pub needs: Opset,
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

/// Checks every rule; the error names the first one broken and counts the others.
pub fn check(program: Program) -> Result<Checked> {
    let (problems, needs) = examine(&program);
    let errors: Vec<Problem> = problems.into_iter().filter(|p| p.severity == Severity::Error).collect();
    match errors.as_slice() {
        [] => Ok(Checked { opset: declared(&program).unwrap_or(needs), needs, program }),
        [one] => Err(Error::new(one.to_string())),
        [first, rest @ ..] => Err(Error::new(format!("{first}, and {} more", count(rest.len(), "problem")))),
    }
}

/// Everything that the rules find, function by function.
pub fn problems(program: &Program) -> Vec<Problem> {
    examine(program).0
}

/// A function under examination.
struct Exam<'a> {
    name: &'a str,
    function: &'a Function,
    scope: &'a Scope<'a>,
    /// What the function declares; the newest when that is not known.
    opset: Opset,
    needs: Opset,
    errors: usize,
    problems: Vec<Problem>,
}

impl Exam<'_> {
    fn report(&mut self, severity: Severity, rule: &'static str, place: &str, message: String) {
        let place = if place.is_empty() { self.name.to_string() } else { format!("{}: {place}", self.name) };
        self.problems.push(Problem { severity, rule, place, message });
    }

    fn error(&mut self, rule: &'static str, place: &str, message: String) {
        self.errors += 1;
        self.report(Severity::Error, rule, place, message);
    }

    fn note(&mut self, rule: &'static str, place: &str, message: String) {
        self.report(Severity::Note, rule, place, message);
    }

    /// Records that `what` came with `since`, which the function must declare or pass.
    fn needs(&mut self, since: Opset, place: &str, what: &str) {
        self.needs = self.needs.max(since);
        if since > self.opset {
            self.error("opset", place, format!("{what} needs {since}, the function declares {}", self.opset));
        }
    }

    /// What to call an op: its name, or that of its first result.
    fn label<'b>(&'b self, op: &'b Op) -> &'b str {
        match (op.name(), op.outputs.first()) {
            ("", Some(id)) => self.function.name(*id),
            ("", None) => &op.kind,
            (name, _) => name,
        }
    }
}

fn examine(program: &Program) -> (Vec<Problem>, Opset) {
    let mut problems = whole(program);
    let mut needs = Opset::Ios15;
    for (name, function) in &program.functions {
        let broken = structure::breaches(function);
        if !broken.is_empty() {
            problems.extend(broken.into_iter().map(|message| Problem {
                severity: Severity::Error,
                rule: "structure",
                place: name.clone(),
                message,
            }));
            continue;
        }
        let scope = Scope::new(function);
        let opset = Opset::from_wire(&function.opset).unwrap_or(Opset::Ios26);
        let mut exam = Exam {
            name,
            function,
            scope: &scope,
            opset,
            needs: Opset::Ios15,
            errors: 0,
            problems: Vec::new(),
        };
        if program.functions.len() > 1 || !program.default_function.is_empty() {
            exam.needs(Opset::Ios18, "", "a choice of functions");
        }
        examine_function(&mut exam);
        problems.append(&mut exam.problems);
        needs = needs.max(exam.needs);
    }
    (problems, needs)
}

fn examine_function(exam: &mut Exam<'_>) {
    let function = exam.function;
    names::function(exam);
    interface::function(exam);
    let (mut ops, mut unknown) = (0usize, Vec::new());
    function.body.walk(&mut |op| {
        constants::op(exam, op);
        if op.kind == "const" {
            return;
        }
        ops += 1;
        match crate::ops::find(&op.kind) {
            Some(spec) => {
                let before = exam.errors;
                params::op(exam, op, spec);
                types::op(exam, op, spec, exam.errors == before);
            }
            None => unknown.push(op.kind.as_str()),
        }
        types::ranks(exam, op);
    });
    if ops > 8000 {
        exam.note(
            "size",
            "",
            format!("{ops} ops; Core ML has failed to load programs beyond a few thousand"),
        );
    }
    if !unknown.is_empty() {
        let total = unknown.len();
        unknown.sort_unstable();
        unknown.dedup();
        let message = format!("{} not in the table: `{}`", count(total, "op"), unknown.join("`, `"));
        exam.note("unknown op", "", message);
    }
}

/// The rules about the functions together.
fn whole(program: &Program) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut error = |rule, place: &str, message: String| {
        let place = place.to_string();
        problems.push(Problem { severity: Severity::Error, rule, place, message });
    };
    let default = program.default_function.as_str();
    let names: Vec<&str> = program.functions.keys().map(String::as_str).collect();
    match names.as_slice() {
        [] => error("function", "program", "there is no function".into()),
        ["main"] if default.is_empty() => {}
        _ if names.contains(&default) => {}
        _ => error(
            "function",
            "program",
            format!("the default function is `{default}`, the functions are `{}`", names.join("`, `")),
        ),
    }
    let first = program.functions.values().next().map_or("", |f| f.opset.as_str());
    for (name, function) in &program.functions {
        if Opset::from_wire(&function.opset).is_none() {
            error("opset", name, format!("the opset `{}` is not known", function.opset));
        } else if function.opset != first {
            error(
                "opset",
                name,
                format!("the opset is `{}`, another function has `{first}`", function.opset),
            );
        }
    }
    problems
}

fn declared(program: &Program) -> Option<Opset> {
    program.functions.values().filter_map(|f| Opset::from_wire(&f.opset)).max()
}

/// `1 op`, `2 ops`
fn count(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}
