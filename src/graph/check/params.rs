//! Parameters: those that must be there are, and are what the op takes.

use super::Exam;
use crate::{
    mil::{Arg, DType, Op, Type},
    ops::{Known, Need, Opset, Param, Spec},
};

/// Parameters that coremltools thinks optional and that some Core ML compiler refuses to miss.
static INSISTED: &[(&str, &[&str])] = &[
    ("conv", &["strides", "pad_type", "pad", "dilations", "groups"]),
    ("conv_transpose", &["strides", "pad_type", "pad", "dilations", "groups"]),
    ("gelu", &["mode"]),
    ("slice_by_size", &["size"]),
    ("linear", &["bias"]),
    ("gather", &["validate_indices"]),
    ("gather_along_axis", &["validate_indices"]),
    ("gather_nd", &["validate_indices"]),
    ("scatter", &["validate_indices"]),
    ("scatter_along_axis", &["validate_indices"]),
    ("scatter_nd", &["validate_indices"]),
];

/// Parameters that have the element type of `x` before iOS 17.
static LIKE_X: &[(&str, &[&str])] = &[
    ("conv", &["weight", "bias"]),
    ("conv_transpose", &["weight", "bias"]),
    ("linear", &["weight", "bias"]),
    ("matmul", &["y"]),
    ("clip", &["alpha", "beta"]),
    ("rsqrt", &["epsilon"]),
    ("inverse", &["epsilon"]),
    ("log", &["epsilon"]),
    ("leaky_relu", &["alpha"]),
    ("elu", &["alpha"]),
    ("layer_norm", &["gamma", "beta", "epsilon"]),
    ("batch_norm", &["mean", "variance", "gamma", "beta", "epsilon"]),
    ("instance_norm", &["gamma", "beta", "epsilon"]),
    ("l2_norm", &["epsilon"]),
];

pub(super) fn op(exam: &mut Exam<'_>, op: &Op, spec: &Spec) {
    let place = exam.label(op).to_string();
    exam.needs(spec.since, &place, &format!("op `{}`", op.kind));
    let args = exam.scope.args(op);
    let opset = exam.opset;
    for p in spec.params.iter().filter(|p| p.since <= opset && !args.has(p.name)) {
        absent(exam, op, p, &place);
    }
    for (name, given) in &op.params {
        match spec.param(name) {
            Some(p) => {
                exam.needs(p.since, &place, &format!("parameter `{name}` of {}", op.kind));
                argument(exam, op, p, given, &place);
            }
            None => exam.error("parameter", &place, format!("{} has no parameter `{name}`", op.kind)),
        }
    }
    attributes(exam, op, spec, &place);
    if exam.opset < Opset::Ios17 {
        before_ios17(exam, op, &place);
    }
}

fn absent(exam: &mut Exam<'_>, op: &Op, p: &Param, place: &str) {
    let (kind, name) = (&op.kind, p.name);
    match p.need {
        Need::Required => exam.error("required", place, format!("{kind} wants `{name}`")),
        Need::Written(_) if listed(INSISTED, kind).contains(&name) => {
            exam.error("required", place, format!("{kind} wants `{name}` written out"));
        }
        Need::Written(_) => exam.note("written", place, format!("{kind} leaves `{name}` to its default")),
        Need::Optional => {}
    }
}

fn argument(exam: &mut Exam<'_>, op: &Op, p: &Param, given: &[Arg], place: &str) {
    let (kind, name) = (&op.kind, p.name);
    if given.len() != 1 && !p.variadic {
        let message = format!("`{name}` of {kind} has {} arguments, one is expected", given.len());
        exam.error("parameter", place, message);
    }
    for arg in given {
        let (ty, known) = match arg {
            Arg::Const(c) => (&c.ty, true),
            Arg::Value(id) => (exam.function.ty(*id), !matches!(exam.scope.known(*id), Known::No)),
        };
        if p.fixed && !known {
            exam.error("fixed", place, format!("`{name}` of {kind} is computed, a constant is expected"));
        }
        accepted(exam, op, p, ty, place);
    }
}

fn accepted(exam: &mut Exam<'_>, op: &Op, p: &Param, ty: &Type, place: &str) {
    if let Type::Tensor(t) = ty
        && !p.accepts.has(t.dtype)
    {
        let accepted: Vec<&str> = p.accepts.list().into_iter().map(DType::name).collect();
        let message = format!("`{}` of {} is {}, it takes {}", p.name, op.kind, t.dtype, accepted.join(", "));
        exam.error("dtype", place, message);
    }
}

/// Only constexpr ops have parameters among the attributes.
fn attributes(exam: &mut Exam<'_>, op: &Op, spec: &Spec, place: &str) {
    let constexpr = op.kind.starts_with("constexpr_");
    if constexpr {
        generation(exam, op, place);
    }
    for (name, c) in op.attrs.iter().filter(|(n, _)| *n != "name") {
        match spec.param(name) {
            _ if !constexpr => {
                exam.note("parameter", place, format!("{} has an attribute `{name}`", op.kind));
            }
            Some(p) => accepted(exam, op, p, &c.ty, place),
            None => exam.error("parameter", place, format!("{} has no parameter `{name}`", op.kind)),
        }
    }
}

/// Constexpr ops of before iOS 18 have parameters as attributes, and packed data beside a `shape`.
fn generation(exam: &mut Exam<'_>, op: &Op, place: &str) {
    let newer = exam.opset >= Opset::Ios18;
    // It has no newer form.
    let affine = op.kind == "constexpr_affine_dequantize";
    if affine && newer {
        let message = "a form of before iOS 18; `constexpr_blockwise_shift_scale` is its successor";
        exam.note("constexpr", place, message.into());
    }
    let as_attributes = affine || !newer;
    let (odd, seen, expected) = match as_attributes {
        true => (op.params.keys().next(), "an input", "an attribute"),
        false => (op.attrs.keys().find(|n| *n != "name"), "an attribute", "an input"),
    };
    if let Some(name) = odd {
        let message = format!("`{name}` is {seen}, with {} it is {expected}", exam.opset);
        exam.error("constexpr", place, message);
    }
    let shaped = matches!(op.kind.as_str(), "constexpr_lut_to_dense" | "constexpr_sparse_to_dense");
    if shaped && exam.scope.args(op).has("shape") == newer {
        let wants = if newer { "takes no" } else { "wants a" };
        exam.error("constexpr", place, format!("with {} {} {wants} `shape`", exam.opset, op.kind));
    }
}

fn before_ios17(exam: &mut Exam<'_>, op: &Op, place: &str) {
    let args = exam.scope.args(op);
    if let Ok(x) = args.dtype("x") {
        for name in listed(LIKE_X, &op.kind).iter().filter(|n| args.has(n)) {
            match args.dtype(name) {
                Ok(d) if d != x => {
                    let message =
                        format!("`{name}` of {} is {d}, `x` is {x}; before iOS 17 they are equal", op.kind);
                    exam.error("dtype", place, message);
                }
                _ => {}
            }
        }
    }
    if op.kind.starts_with("constexpr_") {
        return;
    }
    for id in &op.outputs {
        if let Type::Tensor(t) = exam.function.ty(*id)
            && matches!(t.dtype, DType::I8 | DType::U8 | DType::I16 | DType::U16)
        {
            exam.error("dtype", place, format!("the result is {}; before iOS 17 none is", t.dtype));
        }
    }
}

fn listed(table: &[(&str, &'static [&'static str])], kind: &str) -> &'static [&'static str] {
    table.iter().find(|(k, _)| *k == kind).map_or(&[], |(_, names)| names)
}
