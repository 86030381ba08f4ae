//! Constants, branches and loops.

use super::{ANY, BOOL, Eval, Opset, Spec, Tolerance, many, need, shape::free};
use crate::{
    bail,
    error::Result,
    mil::{Arg, Block, DType, Type},
    ops::Args,
};

pub static SPECS: &[&Spec] = &[&CONST, &COND, &WHILE_LOOP];

/// Holds its value in the attribute `val`.
static CONST: Spec = Spec {
    name: "const",
    since: Opset::Ios15,
    params: &[],
    infer: |a| match a.op.constant() {
        Some(c) => Ok(vec![c.ty.clone()]),
        None => bail!("attribute `val` is missing"),
    },
    eval: Eval::Flow,
    flops: free,
    tolerance: Tolerance::Exact,
};

/// Runs its first block, or its second.
static COND: Spec = Spec {
    name: "cond",
    since: Opset::Ios15,
    params: &[need("pred", BOOL)],
    infer: |a| {
        let [yes, no] = a.op.blocks.as_slice() else {
            bail!("{} blocks, two are expected", a.op.blocks.len());
        };
        let (yes, no) = (outputs(a, yes), outputs(a, no));
        if yes.len() != no.len() {
            bail!("one block has {} results, the other {}", yes.len(), no.len());
        }
        yes.into_iter().zip(no).map(|(y, n)| either(y, n)).collect()
    },
    eval: Eval::Flow,
    flops: free,
    tolerance: Tolerance::Exact,
};

/// Runs its second block while the first says so, on the results of the last time.
static WHILE_LOOP: Spec = Spec {
    name: "while_loop",
    since: Opset::Ios15,
    params: &[many("loop_vars", ANY)],
    infer: |a| {
        let [test, body] = a.op.blocks.as_slice() else {
            bail!("{} blocks, two are expected", a.op.blocks.len());
        };
        let vars: Vec<&Type> = a
            .list("loop_vars")
            .iter()
            .map(|arg| match arg {
                Arg::Value(id) => a.function.ty(*id),
                Arg::Const(c) => &c.ty,
            })
            .collect();
        let results = outputs(a, body);
        for n in [test.inputs.len(), body.inputs.len(), results.len()] {
            if n != vars.len() {
                bail!("{} loop variables, the blocks have {n}", vars.len());
            }
        }
        match outputs(a, test).as_slice() {
            [Type::Tensor(t)] if t.dtype == DType::Bool => {}
            other => bail!("the test has {} results, one bool is expected", other.len()),
        }
        vars.into_iter().zip(results).map(|(v, r)| either(v, r)).collect()
    },
    eval: Eval::Flow,
    flops: free,
    tolerance: Tolerance::Exact,
};

fn outputs<'a>(a: &Args<'a>, block: &Block) -> Vec<&'a Type> {
    block.outputs.iter().map(|id| a.function.ty(*id)).collect()
}

/// The type of a value that comes from one of two places.
fn either(a: &Type, b: &Type) -> Result<Type> {
    if !a.agrees(b) {
        bail!("{a} and {b} are the same result");
    }
    let (Type::Tensor(x), Type::Tensor(y)) = (a, b) else { return Ok(a.clone()) };
    let mut t = x.clone();
    for (d, other) in t.dims.iter_mut().zip(&y.dims) {
        if other.fixed().is_none() {
            *d = *other;
        }
    }
    Ok(t.into())
}
