//! Removes ops whose results nothing uses. Writes to states stay.

use std::collections::HashSet;

use crate::{
    error::Result,
    mil::{Arg, Block, Function, Op, ValueId},
};

pub(super) fn remove_dead(function: &mut Function) -> Result<bool> {
    let mut used: HashSet<ValueId> = HashSet::new();
    mark(&function.body, &mut used);
    let before = function.body.ops.len();
    function.body.ops.retain(|op| lives(op, &used));
    Ok(function.body.ops.len() != before)
}

/// Marks from the end, so that the arguments of a dead op are dead with it.
fn mark(block: &Block, used: &mut HashSet<ValueId>) {
    used.extend(&block.outputs);
    for op in block.ops.iter().rev().filter(|op| !op.blocks.is_empty() || op.outputs.is_empty()) {
        op.blocks.iter().for_each(|b| mark(b, used));
    }
    for op in block.ops.iter().rev() {
        if lives(op, used) {
            used.extend(op.args().filter_map(|a| match a {
                Arg::Value(id) => Some(*id),
                Arg::Const(_) => None,
            }));
        }
    }
}

fn lives(op: &Op, used: &HashSet<ValueId>) -> bool {
    op.outputs.is_empty() || op.outputs.iter().any(|id| used.contains(id))
}
