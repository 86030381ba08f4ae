//! What reads a constant: the ops that take it as a weight, with the axes that its channels lie on, and
//! those that do not.

use std::collections::HashMap;

use crate::{
    mil::{Arg, Block, Function, Op, ValueId},
    ops::Scope,
};

/// One place where a constant is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Use {
    /// As the weight of an op.
    Weight(Role),
    /// As another parameter, of this op.
    Other { op: String, param: String },
    /// It leaves its block.
    Output,
}

/// How an op takes a weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Role {
    pub(super) op: String,
    /// The axis of output channels.
    pub(super) output: usize,
    /// The axis that is summed over; of a table that is looked up, the axis of its columns.
    pub(super) input: usize,
    /// The largest stride of a convolution, 1 elsewhere.
    pub(super) stride: i64,
}

/// Everything that reads each value of a function.
pub(super) fn of(function: &Function) -> HashMap<ValueId, Vec<Use>> {
    let scope = Scope::new(function);
    let mut uses = HashMap::new();
    collect(&scope, &function.body, &mut uses);
    uses
}

fn collect(scope: &Scope<'_>, block: &Block, uses: &mut HashMap<ValueId, Vec<Use>>) {
    for op in &block.ops {
        for (param, args) in &op.params {
            for (position, arg) in args.iter().enumerate() {
                let Arg::Value(id) = arg else { continue };
                let rank = scope.function.ty(*id).as_tensor().map_or(0, |t| t.rank());
                let read = match role(scope, op, param, position, rank) {
                    Some(role) => Use::Weight(role),
                    None => Use::Other { op: op.kind.clone(), param: param.clone() },
                };
                uses.entry(*id).or_default().push(read);
            }
        }
        op.blocks.iter().for_each(|inner| collect(scope, inner, uses));
    }
    for id in &block.outputs {
        uses.entry(*id).or_default().push(Use::Output);
    }
}

/// The role of an argument, where it is that of a weight.
fn role(scope: &Scope<'_>, op: &Op, param: &str, position: usize, rank: usize) -> Option<Role> {
    let args = scope.args(op);
    let flag = |name: &str| args.bool_or(name, false).unwrap_or(false);
    let (output, input) = match (op.kind.as_str(), param) {
        ("conv", "weight") | ("linear", "weight") => (0, 1),
        ("conv_transpose", "weight") => (1, 0),
        ("lstm", "weight_ih" | "weight_hh" | "weight_ih_back" | "weight_hh_back")
        | ("gru" | "rnn", "weight_ih" | "weight_hh") => (0, 1),
        ("matmul", "y") if rank >= 2 && !flag("transpose_y") => (rank - 1, rank - 2),
        ("matmul", "y") if rank >= 2 => (rank - 2, rank - 1),
        ("matmul", "x") if rank >= 2 && !flag("transpose_x") => (rank - 2, rank - 1),
        ("matmul", "x") if rank >= 2 => (rank - 1, rank - 2),
        // `nchw,nwhu->nchu`, the one equation there is: w is summed over.
        ("einsum", "values") if rank >= 3 && position == 0 => (rank - 3, rank - 1),
        ("einsum", "values") if rank >= 3 => (rank - 1, rank - 3),
        ("gather", "x") if rank >= 2 => {
            let axis = args.axis("axis", "x", 0).ok()?;
            (axis, if axis + 1 == rank { rank - 2 } else { rank - 1 })
        }
        _ => return None,
    };
    if rank < 2 {
        return None;
    }
    let strides = if op.kind == "conv" { args.ints("strides").ok().flatten() } else { None };
    let stride = strides.and_then(|s| s.into_iter().max()).unwrap_or(1);
    Some(Role { op: op.kind.clone(), output, input, stride })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        graph::{Builder, In},
        mil::{DType, Type, Weight},
        ops::Opset,
    };

    fn weight(shape: &[usize]) -> In {
        let bytes = 2 * shape.iter().product::<usize>();
        Weight::new(format!("{shape:?}"), DType::F16, shape, move || Ok(vec![0; bytes].into())).into()
    }

    #[test]
    fn axes_follow_the_op_that_reads() {
        let mut b = Builder::new(Opset::Ios18);
        let x = b.input("x", Type::tensor(DType::F16, [1, 2, 5, 4])).unwrap();
        let ids = b.input("ids", Type::tensor(DType::I32, [1, 3])).unwrap();
        let turned: In = true.into();
        b.op("matmul", "plain", [("x", x.into()), ("y", weight(&[4, 6]))]).unwrap();
        b.op("matmul", "turned", [("x", x.into()), ("y", weight(&[6, 4])), ("transpose_y", turned)]).unwrap();
        b.op("matmul", "left", [("x", weight(&[7, 5])), ("y", x.into())]).unwrap();
        b.op("linear", "linear", [("x", x.into()), ("weight", weight(&[8, 4])), ("bias", In::floats_of(8))])
            .unwrap();
        b.op("gather", "rows", [("x", weight(&[9, 4])), ("indices", ids.into()), ("axis", 0.into())])
            .unwrap();
        let equation: In = "nchw,nwhu->nchu".into();
        let values =
            [x.into(), weight(&[1, 4, 5, 3])].into_iter().flat_map(In::into_args).collect::<Vec<_>>();
        b.op("einsum", "einsum", [("values", values.into()), ("equation", equation)]).unwrap();
        b.op("add", "sum", [("x", x.into()), ("y", weight(&[1, 2, 5, 4]))]).unwrap();
        let mut function = b.finish(vec![]);
        crate::graph::build::spell_constants(&mut function);
        let uses = of(&function);
        let found = |name: &str| {
            let id = (0..).map(ValueId).find(|id| function.name(*id) == name).unwrap();
            uses[&id].clone()
        };
        for (name, op, output, input) in [
            ("plain_y", "matmul", 1, 0),
            ("turned_y", "matmul", 0, 1),
            ("left_x", "matmul", 0, 1),
            ("linear_weight", "linear", 0, 1),
            ("rows_x", "gather", 0, 1),
            ("einsum_values", "einsum", 3, 1),
        ] {
            assert_eq!(
                found(name),
                [Use::Weight(Role { op: op.into(), output, input, stride: 1 })],
                "{name}"
            );
        }
        assert_eq!(found("sum_y"), [Use::Other { op: "add".into(), param: "y".into() }]);
    }

    impl In {
        fn floats_of(n: usize) -> In {
            crate::mil::Const::floats(DType::F16, &[n], &vec![0.0; n]).into()
        }
    }
}
