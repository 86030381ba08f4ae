//! States: tensors that outlive a call.

use super::{ACTIVATION, Eval, Opset, Spec, Tolerance, need, shape::free};
use crate::{bail, mil::Type, ops::ANY};

pub static SPECS: &[&Spec] = &[&READ_STATE, &WRITE_STATE];

static READ_STATE: Spec = Spec {
    name: "read_state",
    since: Opset::Ios18,
    params: &[need("input", ANY)],
    infer: |a| match a.ty("input")? {
        Type::State(held) => Ok(vec![(**held).clone()]),
        other => bail!("`input` is {other}, a state is expected"),
    },
    eval: Eval::Flow,
    flops: free,
    tolerance: Tolerance::Exact,
};

/// Has no result; what is needed afterwards is read again.
static WRITE_STATE: Spec = Spec {
    name: "write_state",
    since: Opset::Ios18,
    params: &[need("input", ANY), need("data", ACTIVATION)],
    infer: |a| match (a.ty("input")?, a.ty("data")?) {
        (Type::State(held), data) if held.agrees(data) => Ok(Vec::new()),
        (Type::State(held), data) => bail!("a state of {held} cannot take {data}"),
        (other, _) => bail!("`input` is {other}, a state is expected"),
    },
    eval: Eval::Flow,
    flops: free,
    tolerance: Tolerance::Exact,
};
