//! Computes equal things once: ops of one kind with the same arguments.

use std::collections::HashMap;

use super::{is_output, replace};
use crate::{
    error::Result,
    mil::{Arg, Function, Op},
    ops,
};

pub(super) fn dedup(function: &mut Function) -> Result<bool> {
    let mut seen: HashMap<String, usize> = HashMap::new();
    let mut doubles = Vec::new();
    for (i, op) in function.body.ops.iter().enumerate() {
        if !repeatable(op) {
            continue;
        }
        // The text of the arguments narrows the search, equality decides.
        let key = format!("{} {:?}", op.kind, op.params);
        match seen.get(&key) {
            Some(first) if function.body.ops[*first].params == op.params => doubles.push((*first, i)),
            _ => {
                seen.insert(key, i);
            }
        }
    }
    let mut changed = false;
    for (first, second) in doubles {
        let (kept, gone) =
            (function.body.ops[first].outputs.clone(), function.body.ops[second].outputs.clone());
        if gone.iter().any(|id| is_output(&function.body, *id)) {
            continue;
        }
        for (kept, gone) in kept.iter().zip(&gone) {
            replace(function, *gone, &Arg::Value(*kept));
            changed = true;
        }
        function.body.ops[second].params.clear();
        function.body.ops[second].outputs.clear();
        function.body.ops[second].kind = "removed".into();
    }
    function.body.ops.retain(|op| op.kind != "removed");
    Ok(changed)
}

/// Whether running the op twice gives the same: it has no blocks, reads no state, and is known.
fn repeatable(op: &Op) -> bool {
    let pure = ops::find(&op.kind).is_some_and(|s| !matches!(s.eval, ops::Eval::Flow | ops::Eval::Unknown));
    pure && op.blocks.is_empty() && !op.outputs.is_empty() && !op.kind.starts_with("constexpr_")
}
