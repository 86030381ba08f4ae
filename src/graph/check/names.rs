//! Names: what MIL text can print, each once.

use std::collections::HashSet;

use super::{Exam, count};
use crate::{
    graph::build::RESERVED,
    mil::{Block, Op, ValueId},
};

pub(super) fn function(exam: &mut Exam<'_>) {
    identifier(exam, exam.name, "function");
    let function = exam.function;
    let mut names = Names { values: HashSet::new(), ops: HashSet::new(), nameless: 0 };
    for id in &function.inputs {
        names.value(exam, *id, &mut Vec::new());
    }
    names.block(exam, &function.body);
    if names.nameless > 0 {
        exam.note("op name", "", format!("{} without a name", count(names.nameless, "op")));
    }
}

struct Names<'a> {
    /// Names of the values that are visible.
    values: HashSet<&'a str>,
    ops: HashSet<&'a str>,
    nameless: usize,
}

impl<'a> Names<'a> {
    fn block(&mut self, exam: &mut Exam<'a>, block: &'a Block) {
        let mut own = Vec::new();
        for id in &block.inputs {
            self.value(exam, *id, &mut own);
        }
        for op in &block.ops {
            self.op(exam, op);
            for inner in &op.blocks {
                self.block(exam, inner);
            }
            for id in &op.outputs {
                self.value(exam, *id, &mut own);
            }
        }
        for name in own {
            self.values.remove(name);
        }
    }

    fn value(&mut self, exam: &mut Exam<'a>, id: ValueId, own: &mut Vec<&'a str>) {
        let name = exam.function.name(id);
        identifier(exam, name, "value");
        if self.values.insert(name) {
            own.push(name);
        } else {
            exam.error("unique name", name, "two values have this name".into());
        }
    }

    fn op(&mut self, exam: &mut Exam<'a>, op: &'a Op) {
        let name = op.name();
        if name.is_empty() {
            self.nameless += 1;
            return;
        }
        identifier(exam, name, "op");
        if !self.ops.insert(name) {
            exam.error("unique name", name, "two ops have this name".into());
        }
    }
}

/// Third-party names may hold `@`, which MIL text takes too.
fn identifier(exam: &mut Exam<'_>, name: &str, what: &str) {
    let mut chars = name.chars();
    let printable = chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '@');
    if !printable {
        exam.error("identifier", name, format!("`{name}` cannot be the name of a {what}"));
    } else if RESERVED.contains(&name) {
        exam.error("identifier", name, format!("`{name}` is a reserved word"));
    }
}
