//! The first storey: after it, ids may be followed without looking. Only a bug or a damaged file breaks
//! these rules, so the messages are terse.

use crate::mil::{Arg, Block, Function, ValueId};

/// How often each value is used: by ops, as a result of a block, or as an output.
pub fn use_counts(function: &Function) -> Vec<usize> {
    fn count(block: &Block, uses: &mut [usize]) {
        let mut add = |id: &ValueId| {
            if let Some(n) = uses.get_mut(id.0 as usize) {
                *n += 1;
            }
        };
        block.outputs.iter().for_each(&mut add);
        for op in &block.ops {
            for arg in op.args() {
                if let Arg::Value(id) = arg {
                    add(id);
                }
            }
        }
        for inner in block.ops.iter().flat_map(|op| &op.blocks) {
            count(inner, uses);
        }
    }
    let mut uses = vec![0; function.values.len()];
    count(&function.body, &mut uses);
    uses
}

#[derive(Clone, Copy, PartialEq)]
enum Sight {
    Undefined,
    Visible,
    Gone,
}

struct Walk<'a> {
    function: &'a Function,
    sight: Vec<Sight>,
    /// Visible values, innermost block last.
    open: Vec<ValueId>,
    breaches: Vec<String>,
}

pub(super) fn breaches(function: &Function) -> Vec<String> {
    let sight = vec![Sight::Undefined; function.values.len()];
    let mut walk = Walk { function, sight, open: Vec::new(), breaches: Vec::new() };
    for id in &function.inputs {
        walk.define(*id);
    }
    walk.block(&function.body);
    for body in function.other_bodies.values() {
        walk.block(body);
    }
    walk.breaches
}

impl Walk<'_> {
    fn block(&mut self, block: &Block) {
        let outside = self.open.len();
        for id in &block.inputs {
            self.define(*id);
        }
        for op in &block.ops {
            for arg in op.args() {
                if let Arg::Value(id) = arg {
                    self.see(*id, &op.kind);
                }
            }
            for inner in &op.blocks {
                self.block(inner);
            }
            for id in &op.outputs {
                self.define(*id);
            }
        }
        for id in &block.outputs {
            self.see(*id, "the block's output");
        }
        for id in self.open.drain(outside..) {
            self.sight[id.0 as usize] = Sight::Gone;
        }
    }

    fn define(&mut self, id: ValueId) {
        match self.sight.get(id.0 as usize) {
            None => self.breaches.push(self.out_of_range(id)),
            Some(Sight::Undefined) => {
                self.sight[id.0 as usize] = Sight::Visible;
                self.open.push(id);
            }
            Some(_) => self.breaches.push(format!("`{}` is defined twice", self.function.name(id))),
        }
    }

    fn see(&mut self, id: ValueId, by: &str) {
        let message = match self.sight.get(id.0 as usize) {
            Some(Sight::Visible) => return,
            None => self.out_of_range(id),
            Some(Sight::Undefined) => {
                format!("`{}` is used by {by} before it is defined", self.function.name(id))
            }
            Some(Sight::Gone) => {
                format!("`{}` is used by {by} outside of its block", self.function.name(id))
            }
        };
        self.breaches.push(message);
    }

    fn out_of_range(&self, id: ValueId) -> String {
        format!("value {} of {}", id.0, self.function.values.len())
    }
}
