//! When each value is no longer needed.

use std::collections::{BTreeMap, BTreeSet};

use super::reuse::Reuse;
use crate::mil::{Arg, Block, Function, ValueId};

/// For each op of a block: the values whose last use it is, and the plans of its blocks.
#[derive(Default)]
pub(super) struct Plan {
    frees: Vec<Vec<ValueId>>,
    blocks: Vec<Vec<Plan>>,
    pub(super) reuse: Reuse,
}

impl Plan {
    pub(super) fn of_function(function: &Function) -> Plan {
        let (mut plan, _) = Plan::of_block(&function.body, &function.inputs);
        let last = plan.frees.iter().enumerate().flat_map(|(i, ids)| ids.iter().map(move |id| (*id, i)));
        plan.reuse = Reuse::of(function, &last.collect());
        plan
    }

    pub(super) fn frees(&self, op: usize) -> &[ValueId] {
        self.frees.get(op).map_or(&[], Vec::as_slice)
    }

    pub(super) fn blocks(&self, op: usize) -> &[Plan] {
        self.blocks.get(op).map_or(&[], Vec::as_slice)
    }

    /// The plan of a block, and the values that it uses from outside. A block frees only what it defines,
    /// since a loop runs it again.
    fn of_block(block: &Block, inputs: &[ValueId]) -> (Plan, BTreeSet<ValueId>) {
        let mut own: BTreeSet<ValueId> = inputs.iter().chain(&block.inputs).copied().collect();
        let mut last: BTreeMap<ValueId, usize> = BTreeMap::new();
        let mut plan = Plan { frees: vec![Vec::new(); block.ops.len()], ..Plan::default() };
        for (i, op) in block.ops.iter().enumerate() {
            own.extend(&op.outputs);
            last.extend(op.outputs.iter().map(|id| (*id, i)));
            last.extend(op.args().filter_map(|arg| match arg {
                Arg::Value(id) => Some((*id, i)),
                Arg::Const(_) => None,
            }));
            let (plans, outside): (Vec<Plan>, Vec<BTreeSet<ValueId>>) =
                op.blocks.iter().map(|b| Plan::of_block(b, &[])).unzip();
            last.extend(outside.into_iter().flatten().map(|id| (id, i)));
            plan.blocks.push(plans);
        }
        for (id, i) in last.iter().filter(|(id, _)| own.contains(id) && !block.outputs.contains(id)) {
            plan.frees[*i].push(*id);
        }
        let used = last.into_keys().chain(block.outputs.iter().copied());
        let outside = used.filter(|id| !own.contains(id)).collect();
        (plan, outside)
    }
}
