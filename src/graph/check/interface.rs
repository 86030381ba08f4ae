//! What a function shows to the outside: inputs, outputs and states.

use std::collections::HashSet;

use super::{Exam, structure::use_counts};
use crate::{
    mil::{Arg, DType, Dim, TensorType, Type, ValueId},
    ops::Opset,
};

pub(super) fn function(exam: &mut Exam<'_>) {
    let function = exam.function;
    let uses = use_counts(function);
    let mut states = 0;
    for id in &function.inputs {
        if uses[id.0 as usize] == 0 {
            exam.error("input", function.name(*id), "no op uses it".into());
        }
        match function.ty(*id) {
            Type::Tensor(t) => input(exam, function.name(*id), t),
            Type::State(inner) => {
                states += 1;
                state(exam, function.name(*id), inner);
            }
            other => exam.error("input", function.name(*id), format!("{other} is no tensor")),
        }
    }
    if states > 1 {
        exam.note(
            "state",
            "",
            format!("{states} states; several in one package have failed on the Neural Engine"),
        );
    }
    if states == function.inputs.len() {
        exam.needs(Opset::Ios18, "", "a function without inputs");
    }
    outputs(exam);
    state_uses(exam);
}

fn input(exam: &mut Exam<'_>, name: &str, t: &TensorType) {
    if t.rank() == 0 {
        exam.error("input", name, "the rank is 0, 1 is the least".into());
    }
    match t.dtype {
        DType::U8 if t.rank() == 4 => exam.note("input", name, "uint8 is only taken for an image".into()),
        _ => handed("input", exam, name, t.dtype),
    }
    if let Some(Dim::Fixed(n)) = t.dims.iter().find(|d| d.fixed().is_some_and(|n| n > 16384)) {
        exam.note("input", name, format!("{t} has a size of {n}, above 16384 a model may fail to load"));
    }
}

/// Whether Core ML hands tensors of this type in or out.
fn handed(rule: &'static str, exam: &mut Exam<'_>, name: &str, dtype: DType) {
    match dtype {
        DType::F32 | DType::I32 => {}
        DType::F16 => exam.needs(Opset::Ios16, name, "an fp16 input or output"),
        DType::I8 => exam.needs(Opset::Ios26, name, "an int8 input or output"),
        other => exam.error(rule, name, format!("{other} cannot cross the interface")),
    }
}

fn outputs(exam: &mut Exam<'_>) {
    let function = exam.function;
    if function.body.outputs.is_empty() {
        exam.error("output", "", "there is no output".into());
    }
    let inputs: HashSet<ValueId> = function.inputs.iter().copied().collect();
    let mut seen = HashSet::new();
    for id in &function.body.outputs {
        let name = function.name(*id);
        if inputs.contains(id) {
            exam.error("output", name, "an input is an output; an `identity` goes between them".into());
            continue;
        }
        if !seen.insert(id) {
            exam.error("output", name, "it is an output twice".into());
        }
        match function.ty(*id) {
            // The label and the probabilities of `classify`.
            Type::Tensor(t) if t.dtype == DType::String => {}
            Type::Dict(..) => {}
            Type::Tensor(t) => {
                handed("output", exam, name, t.dtype);
                if t.rank() == 0 {
                    exam.note("output", name, "the rank is 0".into());
                }
            }
            other => exam.error("output", name, format!("{other} cannot cross the interface")),
        }
    }
}

fn state(exam: &mut Exam<'_>, name: &str, inner: &Type) {
    exam.needs(Opset::Ios18, name, "a state");
    let Some(t) = inner.as_tensor() else {
        return exam.error("state", name, format!("it holds {inner}, a tensor is expected"));
    };
    match t.dtype {
        DType::F16 => {}
        DType::I8 => exam.note("state", name, "it holds int8, coremltools writes fp16 only".into()),
        other => exam.error("state", name, format!("it holds {other}, only fp16 is taken")),
    }
    if t.shape().is_none() {
        exam.error("state", name, format!("{t} has a size that is not fixed"));
    }
    if let Some(Dim::Fixed(n)) = t.dims.last().filter(|d| d.fixed().is_some_and(|n| n % 32 != 0)) {
        exam.note("state", name, format!("the last size is {n}, the Neural Engine wants a multiple of 32"));
    }
}

/// States go to state ops only.
fn state_uses(exam: &mut Exam<'_>) {
    let function = exam.function;
    function.body.walk(&mut |op| {
        let known = crate::ops::find(&op.kind).is_some();
        let is_state_op = matches!(op.kind.as_str(), "read_state" | "write_state");
        for (param, args) in &op.params {
            let is_state = |a: &Arg| matches!(a, Arg::Value(id) if function.ty(*id).as_state().is_some());
            if known && !is_state_op && args.iter().any(is_state) {
                let place = exam.label(op).to_string();
                exam.error("state", &place, format!("{} takes a state as `{param}`", op.kind));
            }
        }
    });
}
