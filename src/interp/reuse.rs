//! Which updates of a state can be made in its own buffer.
//!
//! `slice_update` of what a state holds now, written back to that state at once, may change the buffer
//! itself, unless a value that shares the buffer is needed later. What may share it is everything computed
//! from a read of the state, up to ops whose results are always tensors of their own. A slice that is
//! needed beyond the next update is copied, which is less than to copy the state.

use std::collections::{BTreeMap, BTreeSet};

use crate::mil::{Arg, Block, Function, Op, Type, ValueId};

/// Found for the body of a function; nested blocks always copy.
#[derive(Default)]
pub(super) struct Reuse {
    /// The op, and the state whose buffer it changes.
    pub updates: BTreeMap<usize, ValueId>,
    /// Writes that the update before them has already made.
    pub written: BTreeSet<usize>,
    /// Slices to copy.
    pub copies: BTreeSet<usize>,
    /// States whose buffers can outlive the run in one of its results, or in another state.
    pub exposed: BTreeSet<ValueId>,
}

/// Ops whose results never share memory with their arguments.
pub(super) const OWN: &[&str] = &[
    "add",
    "conv",
    "gather",
    "gelu",
    "layer_norm",
    "linear",
    "matmul",
    "mul",
    "real_div",
    "scaled_dot_product_attention",
    "silu",
    "softmax",
    "sub",
];

impl Reuse {
    /// `last` is the last op that uses each value, values that are results left out.
    pub(super) fn of(function: &Function, last: &BTreeMap<ValueId, usize>) -> Reuse {
        let mut reuse = Reuse::default();
        let reach = reach(function);
        for id in &function.inputs {
            if let Type::State(held) = function.ty(*id) {
                let (all, now) = (BTreeSet::new(), BTreeSet::new());
                Sharers { function, last, reach: &reach, state: *id, all, now }.find(held, &mut reuse);
            }
        }
        reuse
    }
}

/// The values that may share the buffer of one state.
struct Sharers<'a> {
    function: &'a Function,
    last: &'a BTreeMap<ValueId, usize>,
    reach: &'a BTreeMap<ValueId, usize>,
    state: ValueId,
    all: BTreeSet<ValueId>,
    /// Those that are what the state holds now.
    now: BTreeSet<ValueId>,
}

impl Sharers<'_> {
    fn find(mut self, held: &Type, reuse: &mut Reuse) {
        let body = &self.function.body;
        let mut exposed = false;
        for (i, op) in body.ops.iter().enumerate() {
            if let Some(write) = self.update(held, i, op) {
                reuse.updates.insert(i, self.state);
                reuse.written.insert(write);
                self.all.extend(&op.outputs);
                self.now = op.outputs.iter().copied().collect();
                continue;
            }
            if reuse.written.contains(&i) {
                continue;
            }
            if self.outlives(i, op) {
                reuse.copies.insert(i);
                continue;
            }
            exposed |= self.pass(op);
        }
        if exposed || body.outputs.iter().any(|id| self.all.contains(id)) {
            reuse.exposed.insert(self.state);
        }
    }

    /// Whether this is a slice of the state that is still needed when the state is written next.
    fn outlives(&self, i: usize, op: &Op) -> bool {
        let ops = &self.function.body.ops;
        let writes = |op: &Op| op.kind == "write_state" && argument(op, "input") == Some(self.state);
        let slice = matches!(op.kind.as_str(), "slice_by_size" | "slice_by_index");
        slice
            && argument(op, "x").is_some_and(|x| self.all.contains(&x))
            && (i + 1..ops.len()).find(|j| writes(&ops[*j])).is_some_and(|write| {
                op.outputs.iter().any(|id| self.reach.get(id).is_some_and(|last| *last > write))
            })
    }

    /// The op that writes the result of this update back, if the two can be one.
    fn update(&self, held: &Type, i: usize, op: &Op) -> Option<usize> {
        let [new] = op.outputs.as_slice() else { return None };
        let x = argument(op, "x").filter(|x| op.kind == "slice_update" && self.now.contains(x))?;
        let ops = &self.function.body.ops;
        let write = (i + 1..ops.len()).find(|j| ops[*j].kind != "const")?;
        let back = ops[write].kind == "write_state"
            && argument(&ops[write], "input") == Some(self.state)
            && argument(&ops[write], "data") == Some(*new);
        let update = argument(op, "update").is_none_or(|u| !self.all.contains(&u));
        let done = |id: &ValueId| self.last.get(id).is_some_and(|last| *last <= i);
        let same = self.function.ty(*new) == held && self.function.ty(x) == held;
        (back && update && same && self.all.iter().all(done)).then_some(write)
    }

    /// Follows an op; true if it keeps the buffer in another state.
    fn pass(&mut self, op: &Op) -> bool {
        let mut mentions = Mentions::default();
        mentions.op(op, self.state, &self.all);
        match op.kind.as_str() {
            "read_state" if mentions.state => {
                self.all.extend(&op.outputs);
                self.now.extend(&op.outputs);
            }
            "write_state" if mentions.state => self.now.clear(),
            "write_state" => return mentions.sharer,
            kind if (mentions.state || mentions.sharer) && !OWN.contains(&kind) => {
                self.all.extend(&op.outputs);
            }
            _ => {}
        }
        if mentions.writes {
            self.now.clear();
        }
        mentions.writes && !op.blocks.is_empty()
    }
}

/// What an op and its blocks make use of.
#[derive(Default)]
struct Mentions {
    state: bool,
    sharer: bool,
    /// Any state is written.
    writes: bool,
}

impl Mentions {
    fn op(&mut self, op: &Op, state: ValueId, sharers: &BTreeSet<ValueId>) {
        for id in op.args().filter_map(|arg| match arg {
            Arg::Value(id) => Some(id),
            Arg::Const(_) => None,
        }) {
            self.state |= *id == state;
            self.sharer |= sharers.contains(id);
        }
        self.writes |= op.kind == "write_state";
        for block in &op.blocks {
            self.block(block, state, sharers);
        }
    }

    fn block(&mut self, block: &Block, state: ValueId, sharers: &BTreeSet<ValueId>) {
        self.sharer |= block.outputs.iter().any(|id| sharers.contains(id));
        for op in &block.ops {
            self.op(op, state, sharers);
        }
    }
}

/// The last op that uses a value, or another one that may share its memory.
fn reach(function: &Function) -> BTreeMap<ValueId, usize> {
    let body = &function.body;
    let mut reach: BTreeMap<ValueId, usize> = body.outputs.iter().map(|id| (*id, body.ops.len())).collect();
    for (i, op) in body.ops.iter().enumerate().rev() {
        let shared = op.outputs.iter().filter_map(|id| reach.get(id)).max().copied();
        let last = shared.filter(|_| !OWN.contains(&op.kind.as_str())).unwrap_or(i);
        for arg in op.args() {
            if let Arg::Value(id) = arg {
                let known = reach.entry(*id).or_insert(last);
                *known = last.max(*known);
            }
        }
    }
    reach
}

fn argument(op: &Op, name: &str) -> Option<ValueId> {
    match op.params.get(name).map(Vec::as_slice) {
        Some([Arg::Value(id)]) => Some(*id),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::Plan;
    use crate::{
        graph::{Builder, In},
        mil::{Const, DType, TensorType, Type, ValueId},
        ops::Opset,
    };

    /// Two states, and the updates of the first that are made in place.
    fn in_place(make: impl Fn(&mut Builder, [ValueId; 2]) -> Vec<ValueId>) -> (usize, bool) {
        let mut b = Builder::new(Opset::Ios18);
        let ty = || Type::state(TensorType::new(DType::F16, [2usize, 4]));
        let states = [b.input("a", ty()).unwrap(), b.input("b", ty()).unwrap()];
        let outputs = make(&mut b, states);
        let function = b.finish(outputs);
        let reuse = Plan::of_function(&function).reuse;
        (reuse.updates.len(), reuse.exposed.contains(&states[0]))
    }

    fn read(b: &mut Builder, state: ValueId) -> ValueId {
        b.op("read_state", "read", [("input", state.into())]).unwrap()
    }

    fn write(b: &mut Builder, state: ValueId, data: ValueId) {
        b.ops("write_state", "write", [("input", state.into()), ("data", data.into())]).unwrap();
    }

    fn update(b: &mut Builder, x: ValueId, update: In) -> ValueId {
        let params = [("x", x.into()), ("update", update), ("begin", [1, 0].into()), ("end", [2, 4].into())];
        b.op("slice_update", "update", params).unwrap()
    }

    fn row(b: &mut Builder, x: ValueId) -> ValueId {
        b.op("slice_by_size", "row", [("x", x.into()), ("begin", [0, 0].into()), ("size", [1, 4].into())])
            .unwrap()
    }

    fn ones() -> In {
        Const::floats(DType::F16, &[1, 4], &[1.0; 4]).into()
    }

    #[test]
    fn only_updates_that_nothing_can_notice_are_made_in_place() {
        let updated = |b: &mut Builder, state, x| {
            let new = update(b, x, ones());
            write(b, state, new);
            read(b, state)
        };
        let double =
            |b: &mut Builder, x: ValueId| b.op("add", "double", [("x", x.into()), ("y", x.into())]).unwrap();
        // Two updates in a row, whose rows are used in between.
        let chain = in_place(|b, [a, _]| {
            let x = read(b, a);
            let x = updated(b, a, x);
            let used = row(b, x);
            let used = double(b, used);
            updated(b, a, x);
            vec![used]
        });
        assert_eq!(chain, (2, false));
        let output = in_place(|b, [a, _]| {
            let x = read(b, a);
            vec![updated(b, a, x)]
        });
        assert_eq!(output, (1, true));
        let older_row_needed = in_place(|b, [a, _]| {
            let x = read(b, a);
            let old = row(b, x);
            updated(b, a, x);
            vec![double(b, old)]
        });
        assert_eq!(older_row_needed, (1, false));
        let older_whole_needed = in_place(|b, [a, _]| {
            let x = read(b, a);
            updated(b, a, x);
            vec![double(b, x)]
        });
        assert_eq!(older_whole_needed, (0, false));
        let stale = in_place(|b, [a, _]| {
            let old = read(b, a);
            updated(b, a, old);
            let new = update(b, old, ones());
            write(b, a, new);
            vec![]
        });
        assert_eq!(stale, (0, false));
        let of_itself = in_place(|b, [a, _]| {
            let x = read(b, a);
            let own = row(b, x);
            let new = update(b, x, own.into());
            write(b, a, new);
            vec![]
        });
        assert_eq!(of_itself, (0, false));
        let kept_in_another_state = in_place(|b, [a, other]| {
            let x = read(b, a);
            write(b, other, x);
            updated(b, a, x);
            vec![]
        });
        assert_eq!(kept_in_another_state, (1, true));
        let written_elsewhere = in_place(|b, [a, other]| {
            let x = read(b, a);
            let new = update(b, x, ones());
            write(b, other, new);
            vec![]
        });
        assert_eq!(written_elsewhere, (0, true));
    }
}
