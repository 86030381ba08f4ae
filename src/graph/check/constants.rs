//! Constants: literals as the wire wants them, and weights that the weight file can hold. Only literals
//! are looked into.

use half::f16;

use super::{Exam, types::constant_shape};
use crate::{
    mil::{Arg, Const, DType, Data, Literal, Op, TensorType, Type, Weight},
    ops::Opset,
};

pub(super) fn op(exam: &mut Exam<'_>, op: &Op) {
    let place = exam.label(op).to_string();
    let may_hold_weights = op.kind == "const" || op.kind.starts_with("constexpr_");
    if op.kind == "const" {
        const_op(exam, op, &place);
    }
    let given = op.params.iter().flat_map(|(name, args)| args.iter().map(move |a| (name, a)));
    let literals = given.filter_map(|(name, arg)| match arg {
        Arg::Const(c) => Some((name, c)),
        Arg::Value(_) => None,
    });
    for (name, c) in literals.chain(&op.attrs) {
        constant(exam, c, &place);
        if !may_hold_weights && matches!(c.data, Data::Weight(_)) {
            let message = format!("`{name}` of {} is a weight, a const op has to hold it", op.kind);
            exam.error("weight", &place, message);
        }
    }
}

fn const_op(exam: &mut Exam<'_>, op: &Op, place: &str) {
    let function = exam.function;
    let (Some(value), [id]) = (op.attrs.get("val"), op.outputs.as_slice()) else {
        let message = match op.attrs.contains_key("val") {
            true => format!("a const has {} results, one is expected", op.outputs.len()),
            false => "a const has no `val`".into(),
        };
        return exam.error("const", place, message);
    };
    if value.ty != *function.ty(*id) {
        let message =
            format!("`{}` is declared {}, its value is {}", function.name(*id), function.ty(*id), value.ty);
        exam.error("const", place, message);
    }
    if !op.params.is_empty() {
        exam.error("const", place, "a const has inputs, it takes none".into());
    }
}

fn constant(exam: &mut Exam<'_>, c: &Const, place: &str) {
    let count = match constant_shape(&c.ty) {
        Ok(count) => count,
        Err(message) => return exam.error("literal", place, message),
    };
    match (&c.data, &c.ty, count) {
        (Data::Weight(w), Type::Tensor(t), _) => weight(exam, w, t, place),
        (Data::Literal(literal), Type::Tensor(t), Some(count)) => tensor(exam, literal, t, count, place),
        (Data::Literal(literal), ty, _) if holds(literal, ty) => {
            if let Literal::List(items) | Literal::Tuple(items) = literal {
                items.iter().for_each(|item| constant(exam, item, place));
            }
        }
        (_, ty, _) => exam.error("literal", place, format!("a value of type {ty} has no such payload")),
    }
}

fn holds(literal: &Literal, ty: &Type) -> bool {
    match (literal, ty) {
        (Literal::List(_), Type::List { .. }) | (Literal::Dict(_), Type::Dict(..)) => true,
        (Literal::Tuple(items), Type::Tuple(types)) => items.len() == types.len(),
        _ => false,
    }
}

fn tensor(exam: &mut Exam<'_>, literal: &Literal, t: &TensorType, count: usize, place: &str) {
    let (len, field) = match literal {
        Literal::Bools(v) => (v.len(), "bools"),
        Literal::Ints(v) => (v.len(), "ints"),
        Literal::Longs(v) => (v.len(), "longInts"),
        Literal::Floats(v) => (v.len(), "floats"),
        Literal::Doubles(v) => (v.len(), "doubles"),
        Literal::Strings(v) => (v.len(), "strings"),
        Literal::Bytes(v) => (v.len(), "bytes"),
        Literal::Empty if count == 0 => return,
        _ => return exam.error("literal", place, format!("{t} has no elements")),
    };
    let wanted = field_of(t.dtype);
    if field != wanted {
        let message = format!("{t} is in the field `{field}`, `{wanted}` is expected");
        return exam.error("literal", place, message);
    }
    if t.dtype == DType::String && t.rank() > 0 {
        exam.error("literal", place, format!("{t}: strings have rank 0"));
    }
    let (want, one) = match field {
        "bytes" => (t.dtype.packed_len(count), t.dtype.packed_len(1)),
        _ => (Some(count), Some(1)),
    };
    // One element stands for all.
    if Some(len) != want && Some(len) != one {
        let want = want.map_or_else(|| "more than can be counted".into(), |n| n.to_string());
        let noun = if field == "bytes" { "bytes" } else { "elements" };
        exam.error("literal", place, format!("{t} takes {want} {noun}, there are {len}"));
    }
    if let Some(bad) = not_finite(literal, t.dtype) {
        let rounded = if bad.is_finite() { ", infinite in fp16" } else { "" };
        exam.note("non-finite constant", place, format!("{t} holds {bad:e}{rounded}"));
    }
}

/// The field of the wire format that holds a literal of this element type.
fn field_of(dtype: DType) -> &'static str {
    match dtype {
        DType::Bool => "bools",
        DType::String => "strings",
        DType::F32 => "floats",
        DType::F64 => "doubles",
        DType::I32 | DType::I16 | DType::U16 => "ints",
        DType::I64 | DType::U64 => "longInts",
        _ => "bytes",
    }
}

/// The first element that is infinite or no number once rounded to fp16.
fn not_finite(literal: &Literal, dtype: DType) -> Option<f32> {
    match (literal, dtype) {
        (Literal::Floats(v), DType::F32) => v.iter().copied().find(|v| !f16::from_f32(*v).is_finite()),
        (Literal::Bytes(v), DType::F16) => {
            let (elements, _) = v.as_chunks::<2>();
            elements.iter().map(|b| f16::from_le_bytes(*b)).find(|v| !v.is_finite()).map(f32::from)
        }
        _ => None,
    }
}

fn weight(exam: &mut Exam<'_>, w: &Weight, t: &TensorType, place: &str) {
    if w.dtype != t.dtype || t.shape().as_ref() != Some(&w.shape) {
        exam.error("weight", place, format!("the type is {t}, the weight `{}` is {}", w.key, w.ty()));
    }
    match w.dtype {
        DType::Bool | DType::String | DType::I64 | DType::U64 | DType::F64 => {
            exam.error("weight", place, format!("a weight file has no {}", w.dtype));
        }
        DType::F16 | DType::F32 | DType::I8 | DType::U8 | DType::BF16 | DType::I16 | DType::U16 => {}
        narrow => exam.needs(Opset::Ios18, place, &format!("a weight of {narrow}")),
    }
    if w.count() == 0 {
        exam.error("weight", place, format!("{t} is empty, which a weight file cannot hold"));
    }
}
