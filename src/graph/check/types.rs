//! Types: results follow from arguments, and Core ML can hold them.

use super::Exam;
use crate::{
    mil::{Arg, DType, Op, TensorType, Type},
    ops::{Args, Known, Spec},
};

/// `sound`: the parameters are there and of the right types, so that results follow from them.
pub(super) fn op(exam: &mut Exam<'_>, op: &Op, spec: &Spec, sound: bool) {
    let place = exam.label(op).to_string();
    let args = exam.scope.args(op);
    if sound {
        results(exam, op, spec, &args, &place);
    }
    match op.kind.as_str() {
        "matmul" => matmul(exam, &args, &place),
        "gather" | "gather_along_axis" => narrow_index(exam, &args, &place),
        _ => {}
    }
}

/// Rank 5 is the most; checked where a value is made, and for constants where one is used.
pub(super) fn ranks(exam: &mut Exam<'_>, op: &Op) {
    if op.kind.starts_with("constexpr_") {
        return;
    }
    let function = exam.function;
    let constant = |arg: &'_ Arg| match arg {
        Arg::Const(c) => c.ty.as_tensor().cloned(),
        Arg::Value(id) if matches!(exam.scope.known(*id), Known::No) => None,
        Arg::Value(id) => function.ty(*id).as_tensor().cloned(),
    };
    let results = op.outputs.iter().filter_map(|id| function.ty(*id).as_tensor().cloned());
    let high: Vec<TensorType> =
        op.args().filter_map(constant).chain(results).filter(|t| t.rank() > 5).collect();
    let place = exam.label(op).to_string();
    for t in high {
        exam.error("rank", &place, format!("{t} has rank {}, 5 is the most", t.rank()));
    }
}

fn results(exam: &mut Exam<'_>, op: &Op, spec: &Spec, args: &Args<'_>, place: &str) {
    let inferred = match (spec.infer)(args) {
        Ok(types) => types,
        Err(e) => return exam.error("type", place, format!("{}: {}", op.kind, e.message())),
    };
    if inferred.len() != op.outputs.len() {
        let message = format!("{} has {} results, it gives {}", op.kind, op.outputs.len(), inferred.len());
        return exam.error("type", place, message);
    }
    for (id, ty) in op.outputs.iter().zip(&inferred) {
        let value = exam.function.value(*id);
        if !value.ty.agrees(ty) {
            let message = format!("`{}` is declared {}, {} gives {ty}", value.name, value.ty, op.kind);
            exam.error("type", place, message);
        }
    }
}

fn matmul(exam: &mut Exam<'_>, args: &Args<'_>, place: &str) {
    for name in ["x", "y"] {
        let Ok(t) = args.tensor(name) else { continue };
        if t.rank() == 1 {
            exam.error("matmul", place, format!("`{name}` {t} has rank 1, which Core ML computes wrongly"));
        }
        if t.dtype.is_int() {
            exam.error("matmul", place, format!("`{name}` is {}, which fails at run time", t.dtype));
        }
    }
}

/// Indices computed in 8 or 16 bits cannot reach every row of a large table.
fn narrow_index(exam: &mut Exam<'_>, args: &Args<'_>, place: &str) {
    let (Ok(indices), Ok(x)) = (args.dtype("indices"), args.dims("x")) else { return };
    let narrow = matches!(indices, DType::I8 | DType::U8 | DType::I16 | DType::U16);
    let (Known::No, true, Ok(axis)) = (args.known("indices"), narrow, args.axis("axis", "x", 0)) else {
        return;
    };
    let (Some(rows), Some((_, last))) = (x[axis].fixed(), indices.int_range()) else { return };
    if i64::try_from(rows).is_ok_and(|rows| rows > last + 1) {
        let message = format!("{indices} indices reach {last}, the table has {rows} rows");
        exam.error("16-bit index", place, message);
    }
}

/// What is the matter with a type that a constant has, if anything.
pub(super) fn constant_shape(ty: &Type) -> Result<Option<usize>, String> {
    match ty {
        Type::Tensor(t) if t.shape().is_none() => Err(format!("{t} has a size that is not fixed")),
        Type::Tensor(t) => match t.count() {
            Some(n) => Ok(Some(n)),
            None => Err(format!("{t} is too large")),
        },
        _ => Ok(None),
    }
}
