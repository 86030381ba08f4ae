//! Removes pairs of transposes that undo each other, and transposes, casts and identities that do
//! nothing.

use std::collections::HashMap;

use super::{is_output, replace};
use crate::{
    error::Result,
    mil::{Arg, Function, Op, ValueId},
};

pub(super) fn cancel(function: &mut Function) -> Result<bool> {
    let makers: HashMap<ValueId, usize> = function
        .body
        .ops
        .iter()
        .enumerate()
        .flat_map(|(i, op)| op.outputs.iter().map(move |id| (*id, i)))
        .collect();
    let mut shortcuts = Vec::new();
    for op in &function.body.ops {
        let [out] = op.outputs[..] else { continue };
        if is_output(&function.body, out) {
            continue;
        }
        let Some(Arg::Value(x)) = op.params.get("x").and_then(|a| a.first()) else { continue };
        let before = makers.get(x).map(|i| &function.body.ops[*i]);
        let source = match op.kind.as_str() {
            "identity" => Some(*x),
            "cast" if function.ty(*x) == function.ty(out) => Some(*x),
            "transpose" if is_identity(op)? => Some(*x),
            "transpose" => match before {
                Some(first) if first.kind == "transpose" && undo(first, op)? => operand(first),
                _ => None,
            },
            _ => None,
        };
        if let Some(source) = source {
            shortcuts.push((out, source));
        }
    }
    for (out, source) in &shortcuts {
        replace(function, *out, &Arg::Value(*source));
    }
    Ok(!shortcuts.is_empty() && super::dead::remove_dead(function)?)
}

fn operand(op: &Op) -> Option<ValueId> {
    match op.params.get("x").and_then(|a| a.first()) {
        Some(Arg::Value(id)) => Some(*id),
        _ => None,
    }
}

fn perm(op: &Op) -> Result<Option<Vec<i64>>> {
    match op.params.get("perm").and_then(|a| a.first()) {
        Some(Arg::Const(c)) => Ok(Some(c.numbers()?.into_ints())),
        _ => Ok(None),
    }
}

fn is_identity(op: &Op) -> Result<bool> {
    Ok(perm(op)?.is_some_and(|p| p.iter().enumerate().all(|(i, a)| usize::try_from(*a) == Ok(i))))
}

/// Whether `second` brings every axis back to where it was before `first`.
fn undo(first: &Op, second: &Op) -> Result<bool> {
    let (Some(a), Some(b)) = (perm(first)?, perm(second)?) else { return Ok(false) };
    let back = |i: usize, axis: &i64| {
        usize::try_from(*axis).ok().and_then(|j| a.get(j)).is_some_and(|k| usize::try_from(*k) == Ok(i))
    };
    Ok(a.len() == b.len() && b.iter().enumerate().all(|(i, axis)| back(i, axis)))
}
