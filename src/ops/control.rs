//! Constants, branches and loops.

use super::{ANY, BOOL, Eval, FLOAT, Opset, Spec, Tolerance, Val, fixed, many, need, shape::free};
use crate::{
    bail,
    error::Result,
    mil::{Arg, Block, DType, Type},
    ops::Args,
};

pub static SPECS: &[&Spec] = &[&CONST, &COND, &WHILE_LOOP, &CLASSIFY];

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

/// The most probable class, and every class with its probability.
static CLASSIFY: Spec = Spec {
    name: "classify",
    since: Opset::Ios15,
    params: &[need("probabilities", FLOAT), fixed("classes", ANY)],
    infer: |a| {
        a.tensor("probabilities")?;
        let label = match a.ty("classes")? {
            Type::List { element, .. } => match element.as_tensor() {
                Some(t) => Type::scalar(t.dtype),
                None => bail!("`classes` is a list of {element}"),
            },
            other => bail!("`classes` is {other}, a list is expected"),
        };
        let table = Type::Dict(Box::new(label.clone()), Box::new(Type::scalar(DType::F64)));
        Ok(vec![label, table])
    },
    eval: Eval::Call(|c| {
        let Val::List(classes) = c.get("classes")? else { bail!("`classes` is no list") };
        let probabilities = c.get("probabilities")?.to_floats()?;
        if probabilities.len() != classes.len() || classes.is_empty() {
            bail!("{} probabilities for {} classes", probabilities.len(), classes.len());
        }
        let above = |best: usize, i: usize| if probabilities[i] > probabilities[best] { i } else { best };
        let best = (1..classes.len()).fold(0, above);
        let row = |(class, p): (&Val, &f32)| Ok(Val::List(vec![class.clone(), Val::floats(vec![*p], &[])?]));
        let table = classes.iter().zip(&probabilities).map(row).collect::<Result<_>>()?;
        Ok(vec![classes[best].clone(), Val::List(table)])
    }),
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
