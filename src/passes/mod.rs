//! Tidying programs to a fixpoint. Passes remove what is not needed; they never change the layout, which
//! the architecture's author wrote.
//!
//! Passes see constants bound to parameters directly, as the builder leaves them; [`tidy`] ends by
//! spelling them as `const` ops.

mod cancel;
mod dead;
mod dedup;
mod fold;

use crate::{
    error::{Context, Result},
    graph::build::spell_constants,
    mil::{Arg, Block, Function, Program, ValueId},
};

/// A pass says whether it changed anything.
type Pass = fn(&mut Function) -> Result<bool>;

const PASSES: [(&str, Pass); 4] =
    [("fold", fold::fold), ("dedup", dedup::dedup), ("cancel", cancel::cancel), ("dead", dead::remove_dead)];

/// Runs every pass until none changes anything, then spells the constants.
pub fn tidy(program: &mut Program) -> Result<()> {
    for (name, function) in &mut program.functions {
        loop {
            let mut changed = false;
            for (pass, run) in PASSES {
                changed |= run(function).within(|| format!("in pass {pass} on function `{name}`"))?;
            }
            if !changed {
                break;
            }
        }
        spell_constants(function);
        sweep(function);
    }
    Ok(())
}

/// Makes every use of `old` a use of `new`.
fn replace(function: &mut Function, old: ValueId, new: &Arg) {
    function.body.walk_mut(&mut |op| {
        for arg in op.params.values_mut().flatten() {
            if *arg == Arg::Value(old) {
                *arg = new.clone();
            }
        }
    });
}

/// Whether a value leaves its block: then its name is part of the contract.
fn is_output(block: &Block, id: ValueId) -> bool {
    block.outputs.contains(&id)
        || block.ops.iter().flat_map(|op| &op.blocks).any(|inner| is_output(inner, id))
}

/// Forgets values that nothing defines any more.
fn sweep(function: &mut Function) {
    let mut kept = vec![None; function.values.len()];
    let mut values = Vec::new();
    let mut keep = |id: &mut ValueId| {
        let slot = &mut kept[id.0 as usize];
        let new = *slot.get_or_insert_with(|| {
            values.push(function.values[id.0 as usize].clone());
            ValueId(u32::try_from(values.len() - 1).unwrap_or(u32::MAX))
        });
        *id = new;
    };
    function.inputs.iter_mut().for_each(&mut keep);
    renumber(&mut function.body, &mut keep);
    for body in function.other_bodies.values_mut() {
        renumber(body, &mut keep);
    }
    function.values = values;
}

fn renumber(block: &mut Block, keep: &mut impl FnMut(&mut ValueId)) {
    block.inputs.iter_mut().for_each(&mut *keep);
    for op in &mut block.ops {
        for arg in op.params.values_mut().flatten() {
            if let Arg::Value(id) = arg {
                keep(id);
            }
        }
        for inner in &mut op.blocks {
            renumber(inner, keep);
        }
        op.outputs.iter_mut().for_each(&mut *keep);
    }
    block.outputs.iter_mut().for_each(&mut *keep);
}
