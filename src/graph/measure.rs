//! What running a function takes, from its types alone: operations and the memory of results.

use std::collections::BTreeMap;

use crate::mil::{Arg, Block, Function, Op, Type, ValueId};

/// What one call of a function takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Measure {
    /// Ops, constants left out.
    pub ops: usize,
    /// Floating-point operations: two for each product of convolutions, linear layers and matrix products,
    /// one for each element of any other op that computes.
    pub flops: u64,
    /// Of those, the ones of products of two activations, as attention's are.
    pub attention_flops: u64,
    /// The most that results take at a time, in bytes, each from the op that makes it to the last that
    /// reads it. States, constants, and results that only look at another one differently are left out.
    pub peak_bytes: u64,
    /// The largest result of an op, looked at as above.
    pub largest_bytes: u64,
    /// Bytes that are written and read again because a result is over [`ON_CHIP`].
    pub spilled_bytes: u64,
}

/// What one operand may take to stay on chip, 2 MiB on all generations of Neural Engines.
pub const ON_CHIP: u64 = 2 << 20;

impl Measure {
    pub fn of(function: &Function) -> Measure {
        let mut measure = Measure::default();
        count(function, &function.body, &mut measure);
        memory(function, &mut measure);
        measure
    }
}

/// Ops that leave every element where it is.
const VIEWS: &[&str] = &["reshape", "squeeze", "expand_dims", "identity", "read_state"];

/// Ops that only move elements.
const MOVES: &[&str] = &[
    "transpose",
    "concat",
    "split",
    "slice_by_size",
    "slice_by_index",
    "slice_update",
    "gather",
    "stack",
    "write_state",
    "cast",
    "tile",
    "pad",
];

fn count(function: &Function, block: &Block, measure: &mut Measure) {
    for op in &block.ops {
        if op.kind == "const" {
            continue;
        }
        measure.ops += 1;
        measure.flops += flops(function, op);
        if op.kind == "matmul" || op.kind == "einsum" {
            measure.attention_flops += if constant(function, op, "y") || constant(function, op, "x") {
                0
            } else {
                flops(function, op)
            };
        }
        op.blocks.iter().for_each(|inner| count(function, inner, measure));
    }
}

fn elements(ty: &Type) -> u64 {
    ty.as_tensor().and_then(crate::mil::TensorType::count).map_or(0, |n| n as u64)
}

fn bytes(ty: &Type) -> u64 {
    let width = ty.as_tensor().and_then(|t| t.dtype.bits()).unwrap_or(0) as u64;
    (elements(ty) * width).div_ceil(8)
}

fn shape(function: &Function, op: &Op, param: &str) -> Vec<usize> {
    match op.params.get(param).and_then(|args| args.first()) {
        Some(Arg::Value(id)) => function.ty(*id).as_tensor().and_then(crate::mil::TensorType::shape),
        Some(Arg::Const(c)) => c.ty.as_tensor().and_then(crate::mil::TensorType::shape),
        None => None,
    }
    .unwrap_or_default()
}

fn constant(function: &Function, op: &Op, param: &str) -> bool {
    match op.params.get(param).and_then(|args| args.first()) {
        Some(Arg::Const(_)) => true,
        Some(Arg::Value(id)) => function
            .body
            .ops
            .iter()
            .any(|o| o.outputs.contains(id) && (o.kind == "const" || o.kind.starts_with("constexpr_"))),
        None => false,
    }
}

fn flops(function: &Function, op: &Op) -> u64 {
    let out: u64 = op.outputs.iter().map(|id| elements(function.ty(*id))).sum();
    let product = |dims: &[usize]| dims.iter().map(|d| *d as u64).product::<u64>();
    match op.kind.as_str() {
        "conv" | "conv_transpose" => {
            let weight = shape(function, op, "weight");
            2 * out * weight.get(1..).map_or(1, product)
        }
        "linear" => 2 * out * shape(function, op, "weight").last().map_or(1, |n| *n as u64),
        "matmul" => {
            let x = shape(function, op, "x");
            let turned = op
                .params
                .get("transpose_x")
                .and_then(|a| a.first())
                .is_some_and(|a| matches!(a, Arg::Const(c) if c.numbers().is_ok_and(|n| n.into_ints().first() == Some(&1))));
            let inner = x.len().checked_sub(if turned { 2 } else { 1 }).and_then(|i| x.get(i)).copied();
            2 * out * inner.unwrap_or(1) as u64
        }
        // nchw,nwhu->nchu and chw,whr->chr: the inner axis is the first one's last.
        "einsum" => {
            let first = match op.params.get("values").and_then(|args| args.first()) {
                Some(Arg::Value(id)) => function.ty(*id).as_tensor().and_then(crate::mil::TensorType::shape),
                _ => None,
            };
            2 * out * first.and_then(|s| s.last().copied()).unwrap_or(1) as u64
        }
        kind if VIEWS.contains(&kind) || MOVES.contains(&kind) || kind.starts_with("constexpr_") => 0,
        kind if kind.starts_with("reduce_") || kind == "softmax" || kind == "layer_norm" => {
            product(&shape(function, op, "x"))
        }
        _ => out,
    }
}

/// What results take.
fn memory(function: &Function, measure: &mut Measure) {
    // The value whose memory each value is in.
    let mut home: BTreeMap<ValueId, Option<ValueId>> =
        function.inputs.iter().map(|id| (*id, Some(*id))).collect();
    let mut last: BTreeMap<ValueId, usize> = BTreeMap::new();
    let mut made: Vec<Vec<ValueId>> = Vec::new();
    for (i, op) in function.body.ops.iter().enumerate() {
        let mut read = Vec::new();
        reads(op, &mut read);
        for id in &read {
            if let Some(Some(home)) = home.get(id) {
                last.insert(*home, i);
                measure.spilled_bytes += spilled(function, *home);
            }
        }
        let stateful = op.kind == "slice_update"
            && op
                .params
                .get("x")
                .is_some_and(|a| matches!(a.first(), Some(Arg::Value(id)) if home.get(id) == Some(&None)));
        let mut new = Vec::new();
        for id in &op.outputs {
            let at = match op.kind.as_str() {
                "const" | "read_state" => None,
                kind if kind.starts_with("constexpr_") || stateful => None,
                kind if VIEWS.contains(&kind) => read.first().and_then(|x| home.get(x).copied().flatten()),
                _ => {
                    new.push(*id);
                    last.insert(*id, i);
                    Some(*id)
                }
            };
            home.insert(*id, at);
        }
        made.push(new);
    }
    for id in &function.body.outputs {
        if let Some(Some(home)) = home.get(id) {
            last.insert(*home, usize::MAX);
        }
    }
    let mut frees: BTreeMap<usize, u64> = BTreeMap::new();
    for (id, i) in &last {
        *frees.entry(*i).or_default() += bytes(function.ty(*id));
    }
    let mut held: u64 = function.inputs.iter().map(|id| bytes(function.ty(*id))).sum();
    let (mut peak, mut largest) = (held, 0);
    for (i, new) in made.iter().enumerate() {
        for id in new {
            held += bytes(function.ty(*id));
            largest = largest.max(bytes(function.ty(*id)));
        }
        peak = peak.max(held);
        held = held.saturating_sub(frees.get(&i).copied().unwrap_or(0));
    }
    let written = made.iter().flatten().map(|id| spilled(function, *id)).sum::<u64>();
    measure.spilled_bytes += written;
    (measure.peak_bytes, measure.largest_bytes) = (peak, largest);
}

fn spilled(function: &Function, id: ValueId) -> u64 {
    Some(bytes(function.ty(id))).filter(|b| *b > ON_CHIP).unwrap_or(0)
}

fn reads(op: &Op, into: &mut Vec<ValueId>) {
    into.extend(op.args().filter_map(|arg| match arg {
        Arg::Value(id) => Some(*id),
        Arg::Const(_) => None,
    }));
    for block in &op.blocks {
        block.ops.iter().for_each(|inner| reads(inner, into));
        into.extend(&block.outputs);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        graph::Builder,
        mil::{DType, Type},
        ops::Opset,
    };

    /// y = softmax(a b) c, by hand: products of [2, 8] and [8, 16], then [16, 4].
    #[test]
    fn a_small_function_is_counted_by_hand() {
        let mut b = Builder::new(Opset::Ios18);
        let input = |b: &mut Builder, name: &str, shape: [usize; 2]| {
            b.input(name, Type::tensor(DType::F16, shape)).unwrap()
        };
        let (x, y, z) =
            (input(&mut b, "x", [2, 8]), input(&mut b, "y", [8, 16]), input(&mut b, "z", [16, 4]));
        let s = b.op("matmul", "s", [("x", x.into()), ("y", y.into())]).unwrap();
        let p = b.op("softmax", "p", [("x", s.into()), ("axis", (-1).into())]).unwrap();
        let o = b.op("matmul", "o", [("x", p.into()), ("y", z.into())]).unwrap();
        let f = b.finish(vec![o]);
        let m = Measure::of(&f);
        let (first, second) = (2 * 2 * 8 * 16, 2 * 2 * 16 * 4);
        assert_eq!((m.ops, m.flops, m.attention_flops), (3, first + 32 + second, first + second));
        // x and y are still there when s is made, z all along.
        assert_eq!((m.peak_bytes, m.largest_bytes), (2 * (16 + 128 + 64 + 32), 64));
    }
}
