//! What every emitted program looks like, whatever it computes.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use silane::{
    graph::{self, build::is_identifier},
    mil::{Arg, Const, DType, Data, Function, Literal, Op, Type},
    ops::{self, Need, Opset},
    package::{self, Interface, Save},
};

use super::{Model, Plan, STORED, build, fixture, open, plan};

/// The least value of fp16.
const LEAST: f32 = -65504.0;

#[test]
fn every_program_keeps_to_the_layout() {
    for (name, tokens, segments) in STORED {
        let checkpoint = open(&fixture(name));
        for float in [DType::F16, DType::F32] {
            for opset in [Opset::Ios16, Opset::Ios18] {
                let plan = Plan { token_type_ids: segments, float, opset, ..plan(&checkpoint, 2, tokens) };
                let program = build(&checkpoint, &plan);
                assert_eq!(graph::problems(&program), [], "{name}");
                let main = &program.functions["main"];
                projections_are_convolutions(name, main);
                nothing_has_more_than_four_axes(name, main);
                only_keys_are_transposed(name, main, layers(&checkpoint));
                softmax_is_over_the_keys(name, main);
                constants_are_finite_in_fp16(name, main);
                names_are_unique_identifiers(name, main);
                parameters_are_written_out(name, main, opset);
                inputs_are_used(name, main);
            }
        }
    }
}

fn projections_are_convolutions(name: &str, main: &Function) {
    let kinds: BTreeSet<&str> = ops(main).map(|op| op.kind.as_str()).collect();
    assert!(kinds.contains("conv"), "{name}: {kinds:?}");
    assert!(kinds.is_disjoint(&BTreeSet::from(["linear", "matmul", "reshape"])), "{name}: {kinds:?}");
}

fn nothing_has_more_than_four_axes(name: &str, main: &Function) {
    for value in &main.values {
        let rank = value.ty.as_tensor().unwrap().rank();
        assert!(rank <= 4, "{name}: `{}` has rank {rank}", value.name);
    }
}

fn only_keys_are_transposed(name: &str, main: &Function, layers: usize) {
    let perms: Vec<Vec<i64>> =
        ops(main).filter(|op| op.kind == "transpose").map(|op| ints(main, op, "perm")).collect();
    let (keys, others): (Vec<_>, Vec<_>) = perms.into_iter().partition(|p| p.len() == 4);
    assert_eq!(keys, vec![vec![0, 3, 2, 1]; layers], "{name}: transposes inside");
    // One on the way in, and one on the way out where there is an output per token.
    assert!((1..=2).contains(&others.len()) && others.iter().all(|p| *p == [0, 2, 1]), "{name}: {others:?}");
}

fn softmax_is_over_the_keys(name: &str, main: &Function) {
    let axes: BTreeSet<_> =
        ops(main).filter(|op| op.kind == "softmax").map(|op| ints(main, op, "axis")).collect();
    assert_eq!(axes, BTreeSet::from([vec![1]]), "{name}");
}

/// A mask that is -inf in fp16 makes NaN of a row of nothing but padding.
fn constants_are_finite_in_fp16(name: &str, main: &Function) {
    for (value, constant) in constants(main) {
        if matches!(&constant.data, Data::Literal(Literal::Strings(_))) {
            continue;
        }
        let values = constant.numbers().unwrap().into_floats();
        assert!(values.iter().all(|v| v.is_finite() && *v >= LEAST), "{name}: `{value}`");
    }
}

fn names_are_unique_identifiers(name: &str, main: &Function) {
    let mut seen = HashSet::new();
    for value in &main.values {
        assert!(is_identifier(&value.name), "{name}: `{}`", value.name);
        assert!(seen.insert(&value.name), "{name}: `{}` is there twice", value.name);
    }
}

fn parameters_are_written_out(name: &str, main: &Function, opset: Opset) {
    for op in ops(main) {
        let spec = ops::find(&op.kind).unwrap();
        for p in spec.params.iter().filter(|p| p.since <= opset && p.need != Need::Optional) {
            assert!(op.params.contains_key(p.name), "{name}: {} has no `{}`", op.kind, p.name);
        }
    }
}

fn inputs_are_used(name: &str, main: &Function) {
    let used: HashSet<_> = ops(main).flat_map(Op::args).filter_map(value_of).collect();
    for id in &main.inputs {
        assert!(used.contains(id), "{name}: input `{}` is not used", main.name(*id));
    }
}

/// Layers of one group hold the same bytes, however often they are run.
#[test]
fn shared_layers_are_stored_once() {
    let dir = fixture("rxn-albert-mlm");
    let checkpoint = open(&dir);
    let halved = std::fs::metadata(dir.join("model.safetensors")).unwrap().len() / 2;
    let saved = save(&checkpoint, &plan(&checkpoint, 1, 16)).weight_bytes;
    assert!(saved < halved, "{saved} bytes of weights from {halved} in fp16");
}

/// The table of words serves the embedding and the head.
#[test]
fn a_tied_head_is_stored_once() {
    for (name, table) in [("bert-mlm", 131), ("roberta-mlm", 307), ("modernbert-mlm", 307)] {
        let mut model = Model::load(&format!("tiny/{name}"));
        let (_dir, checkpoint) = model.open();
        let tied = save(&checkpoint, &plan(&checkpoint, 1, 8)).weight_bytes;
        let decoder = match name {
            "bert-mlm" => "cls.predictions.decoder.weight",
            "roberta-mlm" => "lm_head.decoder.weight",
            _ => "decoder.weight",
        };
        model.random(decoder, &[table, 36]);
        let (_dir, checkpoint) = model.open();
        let untied = save(&checkpoint, &plan(&checkpoint, 1, 8)).weight_bytes;
        let more = u64::try_from(table * 36 * 2).unwrap();
        assert!((more..more + 256).contains(&(untied - tied)), "{name}: {tied} tied, {untied} untied");
    }
}

fn save(checkpoint: &silane::checkpoint::Checkpoint, plan: &Plan) -> package::Saved {
    let checked = graph::check(build(checkpoint, plan)).unwrap();
    let interface = Interface::of(checked.program()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    package::save(&dir.path().join("a.mlpackage"), &checked, &interface, Save::default()).unwrap()
}

/// Attention layers that are run, shared ones as often as they are.
fn layers(checkpoint: &silane::checkpoint::Checkpoint) -> usize {
    let config = &checkpoint.config;
    let layers = config.usize(&["num_hidden_layers", "n_layers"]).unwrap();
    layers * config.usize_or(&["inner_group_num"], 1).unwrap()
}

/// Ops that compute.
fn ops(main: &Function) -> impl Iterator<Item = &Op> {
    main.body.ops.iter().filter(|op| op.kind != "const")
}

fn constants(main: &Function) -> BTreeMap<&str, &Const> {
    let spelt = main.body.ops.iter().filter_map(|op| Some((main.name(op.outputs[0]), op.constant()?)));
    let spelt: BTreeMap<_, _> = spelt.collect();
    let direct = ops(main).flat_map(Op::args).any(|a| matches!(a, Arg::Const(_)));
    assert!(!direct && spelt.values().any(|c| matches!(c.ty, Type::Tensor(_))), "constants are ops");
    spelt
}

fn ints(main: &Function, op: &Op, param: &str) -> Vec<i64> {
    let id = value_of(&op.params[param][0]).unwrap();
    let made = main.body.ops.iter().find(|op| op.outputs.contains(&id)).unwrap();
    made.constant().unwrap().numbers().unwrap().into_ints()
}

fn value_of(arg: &Arg) -> Option<silane::mil::ValueId> {
    match arg {
        Arg::Value(id) => Some(*id),
        Arg::Const(_) => None,
    }
}
