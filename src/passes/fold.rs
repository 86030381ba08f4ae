//! Computes ops whose arguments are all small literals.

use std::collections::BTreeMap;

use candle_core::DType as CandleType;

use super::{is_output, replace};
use crate::{
    error::Result,
    mil::{
        Arg, Const, DType, Data, Function, Literal, Op, Type,
        constant::{encode_floats, encode_ints},
    },
    ops::{self, Call, Eval, Val},
};

/// Larger results are cheaper to compute than to store.
const LARGEST: usize = 4096;

pub(super) fn fold(function: &mut Function) -> Result<bool> {
    let mut folded = Vec::new();
    for op in &function.body.ops {
        let [out] = op.outputs[..] else { continue };
        if is_output(&function.body, out) || !foldable(op) {
            continue;
        }
        if let Some(value) = compute(op, function.ty(out))? {
            folded.push((out, value));
        }
    }
    for (out, value) in &folded {
        replace(function, *out, &Arg::Const(value.clone()));
    }
    Ok(!folded.is_empty() && super::dead::remove_dead(function)?)
}

fn foldable(op: &Op) -> bool {
    let literal = |a: &Arg| matches!(a, Arg::Const(c) if matches!(c.data, Data::Literal(_)));
    op.blocks.is_empty()
        && op.args().count() > 0
        && op.args().all(literal)
        && !op.kind.starts_with("constexpr_")
}

fn compute(op: &Op, ty: &Type) -> Result<Option<Const>> {
    let Some(spec) = ops::find(&op.kind) else { return Ok(None) };
    let Type::Tensor(tensor) = ty else { return Ok(None) };
    if tensor.count().is_none_or(|n| n > LARGEST) {
        return Ok(None);
    }
    let mut args: BTreeMap<&str, Vec<Val>> = BTreeMap::new();
    for (name, given) in &op.params {
        let constant = |a: &Arg| match a {
            Arg::Const(c) => Val::constant(c),
            Arg::Value(_) => Err(crate::Error::new("not a constant")),
        };
        args.insert(name, given.iter().map(constant).collect::<Result<_>>()?);
    }
    let call = Call { op, args, outputs: vec![ty] };
    let result = match spec.eval {
        Eval::Unary(f) => Val::Tensor(f(call.tensor("x")?)?),
        Eval::Binary(f) => Val::Tensor(f(call.tensor("x")?, call.tensor("y")?)?),
        Eval::Call(f) => match f(&call)?.into_iter().next() {
            Some(v) => v,
            None => return Ok(None),
        },
        Eval::Flow | Eval::Unknown => return Ok(None),
    };
    let Val::Tensor(t) = &result else { return Ok(None) };
    let literal = match tensor.dtype {
        DType::F16 => Literal::Bytes(encode_floats(DType::F16, &result.to_floats()?)?),
        DType::F32 => Literal::Floats(result.to_floats()?),
        DType::Bool if t.dtype() == CandleType::U8 => {
            Literal::Bools(result.to_ints()?.into_iter().map(|i| i != 0).collect())
        }
        DType::I32 | DType::I16 | DType::U16 => {
            let narrow = |i: i64| i32::try_from(i).ok();
            match result.to_ints()?.into_iter().map(narrow).collect::<Option<Vec<i32>>>() {
                Some(ints) => Literal::Ints(ints),
                None => return Ok(None),
            }
        }
        DType::I8 | DType::U8 => Literal::Bytes(encode_ints(tensor.dtype, &result.to_ints()?)?),
        _ => return Ok(None),
    };
    Ok(Some(Const::literal(tensor.clone(), literal)))
}
