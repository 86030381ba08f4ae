//! Running programs: flow, states, lists, rounding, refusals, and what packages compute.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
};

use candle_core::Tensor as Array;
use serde::Deserialize;
use silane::{
    Result,
    graph::{Builder, In},
    interp::{Machine, Precision, States, compare},
    mil::{Arg, Block, Const, DType, Dim, Function, Literal, Op, Program, TensorType, Type, ValueId, Weight},
    ops::{Opset, Val},
    package,
};

#[derive(Deserialize)]
struct Numbers {
    s: Vec<usize>,
    d: Vec<f64>,
}

#[derive(Deserialize)]
struct Run {
    package: String,
    calls: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    function: String,
    inputs: BTreeMap<String, Numbers>,
    outputs: BTreeMap<String, Numbers>,
}

#[test]
fn packages_compute_what_another_program_computes() {
    let runs: Vec<Run> = serde_json::from_str(&fixture("interp/runs.json")).unwrap();
    for run in runs {
        let package = package::open_program(&path(&format!("packages/{}.mlpackage", run.package))).unwrap();
        let mut machine = Machine::new(&package.program, Precision::Fp16);
        let mut states = machine.states(&run.calls[0].function).unwrap();
        for (i, call) in run.calls.iter().enumerate() {
            let place = format!("{} call {i}", run.package);
            let inputs = call.inputs.iter().map(|(n, v)| (n.clone(), floats(&v.d, &v.s))).collect();
            let seen = machine
                .run(&call.function, &inputs, &mut states, None)
                .unwrap_or_else(|e| panic!("{place}: {e}"));
            assert_eq!(seen.keys().collect::<Vec<_>>(), call.outputs.keys().collect::<Vec<_>>(), "{place}");
            for (name, want) in &call.outputs {
                let expected: Vec<f32> = want.d.iter().map(|v| *v as f32).collect();
                let seen = seen[name].to_floats().unwrap();
                let report = compare::compare(&seen, &expected, 1e-3).unwrap();
                assert_eq!(report.first_bad, None, "{place} {name}: {report:?}");
            }
        }
    }
}

#[test]
fn compressed_weights_match_bit_for_bit() {
    let all: BTreeMap<String, BTreeMap<String, Numbers>> =
        serde_json::from_str(&fixture("interp/dense_weights.json")).unwrap();
    for (name, weights) in all {
        let package = package::open_program(&path(&format!("packages/{name}.mlpackage"))).unwrap();
        let function = &package.program.functions["main"];
        let inputs = function.inputs.iter().map(|id| {
            let t = function.ty(*id).as_tensor().unwrap();
            (function.name(*id).to_string(), zeros(&t.shape().unwrap()))
        });
        let mut seen = BTreeMap::new();
        let mut tap = |_: &Op, name: &str, value: &Val| {
            if weights.contains_key(name) {
                seen.insert(name.to_string(), value.clone());
            }
        };
        let mut machine = Machine::new(&package.program, Precision::Fp16);
        machine.run("main", &inputs.collect(), &mut States::default(), Some(&mut tap)).unwrap();
        for (weight, want) in &weights {
            let value = &seen[weight];
            assert_eq!(value.tensor().unwrap().dims(), want.s, "{name} {weight}");
            let expected: Vec<f32> = want.d.iter().map(|v| *v as f32).collect();
            assert_eq!(value.to_floats().unwrap(), expected, "{name} {weight}");
        }
    }
}

#[test]
fn a_state_is_seen_by_the_next_call() {
    let mut b = Builder::new(Opset::Ios18);
    let state = b.input("total", Type::state(TensorType::new(DType::F16, [2usize]))).unwrap();
    let x = b.input("x", Type::tensor(DType::F16, [2usize])).unwrap();
    let old = b.op("read_state", "old", [("input", state.into())]).unwrap();
    let new = b.op("add", "new", [("x", old.into()), ("y", x.into())]).unwrap();
    b.ops("write_state", "write", [("input", state.into()), ("data", new.into())]).unwrap();
    let again = b.op("read_state", "again", [("input", state.into())]).unwrap();
    let program = program(b.finish(vec![again, old]));
    let mut machine = Machine::new(&program, Precision::Fp16);
    let mut states = machine.states("main").unwrap();
    let inputs = BTreeMap::from([("x".to_string(), floats(&[1.0, 2.5], &[2]))]);
    for (again, old) in [([1.0, 2.5], [0.0, 0.0]), ([2.0, 5.0], [1.0, 2.5])] {
        let out = machine.run("main", &inputs, &mut states, None).unwrap();
        assert_eq!(out["again"].to_floats().unwrap(), again);
        assert_eq!(out["old"].to_floats().unwrap(), old);
    }
    assert_eq!(states.get("total").unwrap().to_vec1::<f32>().unwrap(), [2.0, 5.0]);
    let e = machine.run("main", &inputs, &mut States::default(), None).unwrap_err();
    assert!(e.message().contains("state `total` is missing"), "{e}");
}

/// Row 1 of state `a` is replaced by `x`: 1 in the first call, 2 in the second.
fn updating(outputs: impl Fn(&mut Builder, [ValueId; 2], ValueId) -> Vec<ValueId>) -> Program {
    let mut b = Builder::new(Opset::Ios18);
    let ty = || Type::state(TensorType::new(DType::F16, [2usize, 2]));
    let states = [b.input("a", ty()).unwrap(), b.input("b", ty()).unwrap()];
    let x = b.input("x", Type::tensor(DType::F16, [1usize, 2])).unwrap();
    let outputs = outputs(&mut b, states, x);
    program(b.finish(outputs))
}

fn read_state(b: &mut Builder, state: ValueId) -> ValueId {
    b.op("read_state", "read", [("input", state.into())]).unwrap()
}

fn write_state(b: &mut Builder, state: ValueId, data: ValueId) {
    b.ops("write_state", "write", [("input", state.into()), ("data", data.into())]).unwrap();
}

fn update(b: &mut Builder, state: ValueId, old: ValueId, x: ValueId) {
    let params = [("x", old.into()), ("update", x.into()), ("begin", [1, 0].into()), ("end", [2, 2].into())];
    let new = b.op("slice_update", "update", params).unwrap();
    write_state(b, state, new);
}

#[test]
fn values_read_from_a_state_stay_as_they_were() {
    let rows = |b: &mut Builder, x: ValueId| {
        let (begin, size) = ([1, 0], [1, 2]);
        b.op("slice_by_size", "row", [("x", x.into()), ("begin", begin.into()), ("size", size.into())])
            .unwrap()
    };
    for (what, program, expected) in [
        (
            "a result",
            updating(|b, [a, _], x| {
                let old = read_state(b, a);
                update(b, a, old, x);
                vec![read_state(b, a)]
            }),
            [[0.0, 0.0, 1.0, 1.0].as_slice(), &[0.0, 0.0, 2.0, 2.0]],
        ),
        (
            "an older read",
            updating(|b, [a, _], x| {
                let old = read_state(b, a);
                update(b, a, old, x);
                vec![old]
            }),
            [&[0.0; 4], &[0.0, 0.0, 1.0, 1.0]],
        ),
        (
            "a row of an older read",
            updating(|b, [a, _], x| {
                let old = read_state(b, a);
                let row = rows(b, old);
                update(b, a, old, x);
                vec![b.op("add", "sum", [("x", row.into()), ("y", x.into())]).unwrap()]
            }),
            [&[1.0, 1.0], &[3.0, 3.0]],
        ),
        (
            "the other state, which was given the value",
            updating(|b, [a, other], x| {
                let old = read_state(b, a);
                write_state(b, other, old);
                update(b, a, old, x);
                vec![read_state(b, other)]
            }),
            [&[0.0; 4], &[0.0, 0.0, 1.0, 1.0]],
        ),
        (
            "an input that was written",
            updating(|b, [a, _], x| {
                let both = [x, x];
                let whole =
                    b.op("concat", "whole", [("values", In::from(&both[..])), ("axis", 0.into())]).unwrap();
                write_state(b, a, whole);
                let read = read_state(b, a);
                let zero = b.op("sub", "zero", [("x", x.into()), ("y", x.into())]).unwrap();
                update(b, a, read, zero);
                vec![whole]
            }),
            [&[1.0; 4], &[2.0; 4]],
        ),
    ] {
        let mut machine = Machine::new(&program, Precision::Fp16);
        let mut states = machine.states("main").unwrap();
        let start = states.clone();
        let mut results = Vec::new();
        for v in [1.0, 2.0] {
            let inputs = inputs(&[("x", floats(&[v, v], &[1, 2]))]);
            results.push(machine.run("main", &inputs, &mut states, None).unwrap());
        }
        for (out, want) in results.iter().zip(expected) {
            assert_eq!(out.values().next().unwrap().to_floats().unwrap(), want, "{what}");
        }
        assert_eq!(start.get("a").unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap(), [0.0; 4]);
    }
}

/// A chain of updates in place, of two states in turn, is what copies would be; a clone stays behind.
#[test]
fn updates_of_two_states_do_not_meet() {
    let program = updating(|b, [first, second], x| {
        let (old, other) = (read_state(b, first), read_state(b, second));
        update(b, first, old, x);
        let twice = b.op("add", "twice", [("x", x.into()), ("y", x.into())]).unwrap();
        update(b, second, other, twice);
        let (now, then) = (read_state(b, first), read_state(b, second));
        vec![b.op("add", "sum", [("x", now.into()), ("y", then.into())]).unwrap()]
    });
    let mut machine = Machine::new(&program, Precision::Fp16);
    let mut states = machine.states("main").unwrap();
    let clone = states.clone();
    let mut call = |v: f64, states: &mut States| {
        let inputs = inputs(&[("x", floats(&[v, v], &[1, 2]))]);
        machine.run("main", &inputs, states, None).unwrap()["sum"].to_floats().unwrap()
    };
    assert_eq!(call(1.0, &mut states), [0.0, 0.0, 3.0, 3.0]);
    assert_eq!(call(2.0, &mut states), [0.0, 0.0, 6.0, 6.0]);
    assert_eq!(clone.get("b").unwrap().to_vec2::<f32>().unwrap(), [[0.0, 0.0], [0.0, 0.0]]);
    let fork = states.clone();
    call(5.0, &mut states);
    assert_eq!(fork.get("b").unwrap().to_vec2::<f32>().unwrap(), [[0.0, 0.0], [4.0, 4.0]]);
    assert_eq!(states.get("b").unwrap().to_vec2::<f32>().unwrap(), [[0.0, 0.0], [10.0, 10.0]]);
}

/// One block reads the state, the other replaces it; what comes out stays as it was after a later update.
#[test]
fn states_in_blocks_of_a_cond() {
    let mut f = Function { opset: "CoreML8".into(), ..Function::default() };
    let whole = || Type::tensor(DType::F16, [2usize, 2]);
    let pred = f.add("pred", Type::scalar(DType::Bool));
    let state = f.add("a", Type::state(TensorType::new(DType::F16, [2usize, 2])));
    let x = f.add("x", Type::tensor(DType::F16, [1usize, 2]));
    f.inputs = vec![pred, state, x];
    let [early, yes, no, changed, out, before, new] =
        ["early", "yes", "no", "changed", "out", "before", "new"].map(|name| f.add(name, whole()));
    let read = |to| op("read_state", &[("input", state.into())], &[to]);
    let write = |data: ValueId| op("write_state", &[("input", state.into()), ("data", data.into())], &[]);
    let update = |from: ValueId, x: Given, to| {
        let (begin, end) = (Const::ints(&[1, 0]), Const::ints(&[2, 2]));
        op(
            "slice_update",
            &[("x", from.into()), ("update", x), ("begin", begin.into()), ("end", end.into())],
            &[to],
        )
    };
    let nines = Const::floats(DType::F16, &[1, 2], &[9.0; 2]);
    let mut cond = op("cond", &[("pred", pred.into())], &[out]);
    cond.blocks = vec![
        Block { ops: vec![read(yes)], outputs: vec![yes], ..Block::default() },
        Block {
            ops: vec![read(no), update(no, nines.into(), changed), write(changed)],
            outputs: vec![changed],
            ..Block::default()
        },
    ];
    f.body = Block {
        ops: vec![read(early), cond, read(before), update(before, x.into(), new), write(new)],
        outputs: vec![early, out],
        ..Block::default()
    };
    let program = program(f);
    let mut machine = Machine::new(&program, Precision::Fp16);
    let mut states = machine.states("main").unwrap();
    let mut seen = Vec::new();
    for (pred, v) in [(true, 1.0), (false, 2.0), (true, 3.0)] {
        let inputs =
            inputs(&[("pred", Val::bools(vec![pred], &[]).unwrap()), ("x", floats(&[v, v], &[1, 2]))]);
        seen.push(machine.run("main", &inputs, &mut states, None).unwrap());
    }
    let lasts =
        |name: &str| -> Vec<f32> { seen.iter().map(|out| out[name].to_floats().unwrap()[3]).collect() };
    assert_eq!(lasts("early"), [0.0, 1.0, 2.0]);
    assert_eq!(lasts("out"), [0.0, 9.0, 2.0]);
    assert_eq!(states.get("a").unwrap().to_vec2::<f32>().unwrap(), [[0.0, 0.0], [3.0, 3.0]]);
}

/// 1 + 2^-12 is 1 in fp16; integers wrap at their width.
#[test]
fn results_are_rounded_to_their_declared_type() {
    let sum = |dtype: DType, a: f32, b: f32, precision| {
        let mut builder = Builder::new(Opset::Ios18);
        let x = builder.input("x", Type::tensor(dtype, [1usize])).unwrap();
        let y = builder.op("add", "y", [("x", x.into()), ("y", In::float(dtype, b))]).unwrap();
        one(&program(builder.finish(vec![y])), precision, &[("x", floats(&[f64::from(a)], &[1]))]).unwrap()
    };
    let tiny = (-12f32).exp2();
    assert_eq!(sum(DType::F16, 1.0, tiny, Precision::Fp16), [1.0]);
    assert_eq!(sum(DType::F16, 1.0, tiny, Precision::Fp32), [1.0 + tiny]);
    assert_eq!(sum(DType::F32, 1.0, tiny, Precision::Fp16), [1.0 + tiny]);
    assert_eq!(sum(DType::F16, 60000.0, 60000.0, Precision::Fp16), [f32::INFINITY]);
    let mut b = Builder::new(Opset::Ios18);
    let x = b.input("x", Type::tensor(DType::I32, [1usize])).unwrap();
    let y = b.op("add", "y", [("x", x.into()), ("y", i32::MAX.into())]).unwrap();
    let wrapped = one(&program(b.finish(vec![y])), Precision::Fp16, &[("x", floats(&[1.0], &[1]))]).unwrap();
    assert_eq!(wrapped, [i32::MIN as f32]);
}

#[test]
fn cond_runs_one_of_its_blocks() {
    let mut f = Function { opset: "CoreML7".into(), ..Function::default() };
    let scalar = || Type::scalar(DType::F32);
    let (pred, x) = (f.add("pred", Type::scalar(DType::Bool)), f.add("x", scalar()));
    f.inputs = vec![pred, x];
    let (yes, no, out) = (f.add("yes", scalar()), f.add("no", scalar()), f.add("out", scalar()));
    let block = |kind: &str, id| Block {
        ops: vec![op(kind, &[("x", x.into()), ("y", Const::float(DType::F32, 3.0).into())], &[id])],
        outputs: vec![id],
        ..Block::default()
    };
    let mut cond = op("cond", &[("pred", pred.into())], &[out]);
    cond.blocks = vec![block("mul", yes), block("sub", no)];
    f.body = Block { ops: vec![cond], outputs: vec![out, x], ..Block::default() };
    let program = program(f);
    for (pred, want) in [(true, 12.0), (false, 1.0)] {
        let pred = Val::bools(vec![pred], &[]).unwrap();
        let seen = one(&program, Precision::Fp32, &[("pred", pred), ("x", floats(&[4.0], &[]))]).unwrap();
        assert_eq!(seen, [want]);
    }
}

/// Doubles until the limit, counting the rounds and listing what it went through.
#[test]
fn while_loop_runs_until_its_test_fails() {
    let mut f = Function { opset: "CoreML7".into(), ..Function::default() };
    let (int, number) = (Type::scalar(DType::I32), Type::scalar(DType::F32));
    let list = Type::List { element: Box::new(number.clone()), length: None };
    let (x, limit) = (f.add("x", number.clone()), f.add("limit", number.clone()));
    f.inputs = vec![x, limit];
    let made = f.add("made", list.clone());
    let types = [int.clone(), number.clone(), list.clone()];
    let vars = |f: &mut Function, suffix: &str| -> Vec<ValueId> {
        types.iter().enumerate().map(|(i, t)| f.add(format!("v{i}{suffix}"), t.clone())).collect()
    };
    let (t, b, next, out) = (vars(&mut f, "t"), vars(&mut f, "b"), vars(&mut f, "n"), vars(&mut f, "o"));
    let go = f.add("go", Type::scalar(DType::Bool));
    let test = Block {
        inputs: t.clone(),
        ops: vec![op("less", &[("x", t[1].into()), ("y", limit.into())], &[go])],
        outputs: vec![go],
        ..Block::default()
    };
    let body = Block {
        inputs: b.clone(),
        ops: vec![
            op(
                "list_write",
                &[("ls", b[2].into()), ("index", b[0].into()), ("value", b[1].into())],
                &[next[2]],
            ),
            op("add", &[("x", b[0].into()), ("y", Const::int(1).into())], &[next[0]]),
            op("add", &[("x", b[1].into()), ("y", b[1].into())], &[next[1]]),
        ],
        outputs: next,
        ..Block::default()
    };
    let make = op(
        "make_list",
        &[("init_length", Const::int(1).into()), ("dtype", Const::string("fp32").into())],
        &[made],
    );
    let mut run = op("while_loop", &[], &out);
    run.params.insert("loop_vars".into(), vec![Const::int(0).into_arg(), x.into_arg(), made.into_arg()]);
    run.blocks = vec![test, body];
    let gathered = f.add("gathered", Type::tensor(DType::F32, [2usize]));
    let length = f.add("length", int);
    let ids = Const::ints(&[2, 0]);
    let tail = [
        op("list_gather", &[("ls", out[2].into()), ("indices", ids.into())], &[gathered]),
        op("list_length", &[("ls", out[2].into())], &[length]),
    ];
    f.body = Block {
        ops: [vec![make, run], tail.to_vec()].concat(),
        outputs: vec![out[0], out[1], gathered, length],
        ..Block::default()
    };
    let program = program(f);
    let inputs = inputs(&[("x", floats(&[3.0], &[])), ("limit", floats(&[20.0], &[]))]);
    let seen =
        Machine::new(&program, Precision::Fp32).run("main", &inputs, &mut States::default(), None).unwrap();
    for (name, want) in
        [("v0o", vec![3.0]), ("v1o", vec![24.0]), ("gathered", vec![12.0, 3.0]), ("length", vec![3.0])]
    {
        assert_eq!(seen[name].to_floats().unwrap(), want, "{name}");
    }
}

#[test]
fn lists_hold_zeros_until_they_are_written() {
    let mut b = Builder::new(Opset::Ios18);
    let x = b.input("x", Type::tensor(DType::F16, [2usize, 3])).unwrap();
    let shape = In::from([3]);
    let list = b
        .op(
            "make_list",
            "list",
            [
                ("init_length", 3.into()),
                ("dynamic_length", false.into()),
                ("elem_shape", shape),
                ("dtype", "fp16".into()),
            ],
        )
        .unwrap();
    assert_eq!(b.ty(list).to_string(), "list<fp16 [3], 3>");
    let list = b
        .op("list_scatter", "filled", [("ls", list.into()), ("indices", [2, 0].into()), ("value", x.into())])
        .unwrap();
    let all = b.op("list_gather", "all", [("ls", list.into()), ("indices", [0, 1, 2].into())]).unwrap();
    let last = b.op("list_read", "last", [("ls", list.into()), ("index", (-1).into())]).unwrap();
    assert_eq!(b.ty(last).to_string(), "fp16 [3]");
    let bad = b
        .op("list_write", "bad", [("ls", list.into()), ("index", 3.into()), ("value", last.into())])
        .unwrap();
    let function = b.finish(vec![all, last]);
    let x = || floats(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3]);
    let mut good = function.clone();
    good.body.ops.retain(|op| !op.outputs.contains(&bad));
    let out = run(&program(good), &[("x", x())]).unwrap();
    assert_eq!(out["all"].to_floats().unwrap(), [4.0, 5.0, 6.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0]);
    assert_eq!(out["last"].to_floats().unwrap(), [1.0, 2.0, 3.0]);
    let e = run(&program(function), &[("x", x())]).unwrap_err();
    assert_eq!(e.message(), "main: list_write → bad: index: index 3 is outside a size of 3");
}

#[test]
fn classify_names_the_most_probable() {
    let mut f = Function { opset: "CoreML5".into(), ..Function::default() };
    let p = f.add("p", Type::tensor(DType::F32, [3usize]));
    f.inputs = vec![p];
    let string = Type::scalar(DType::String);
    let list = Type::List { element: Box::new(string.clone()), length: Some(Dim::Fixed(3)) };
    let classes = ["cat", "dog", "owl"].map(Const::string).to_vec();
    let classes =
        Const { ty: list, ..Const::literal(TensorType::scalar(DType::String), Literal::List(classes)) };
    let table = Type::Dict(Box::new(string.clone()), Box::new(Type::scalar(DType::F64)));
    let (label, table) = (f.add("label", string), f.add("table", table));
    let classify =
        op("classify", &[("probabilities", p.into()), ("classes", classes.into())], &[label, table]);
    f.body = Block { ops: vec![classify], outputs: vec![label, table], ..Block::default() };
    let out = run(&program(f), &[("p", floats(&[0.2, 0.7, 0.1], &[3]))]).unwrap();
    assert!(matches!(&out["label"], Val::Str(s) if s == "dog"), "{:?}", out["label"]);
    assert!(matches!(&out["table"], Val::List(rows) if rows.len() == 3));
}

#[test]
fn non_zero_lists_indices() {
    let mut b = Builder::new(Opset::Ios18);
    let x = b.input("x", Type::tensor(DType::F16, [2usize, 3])).unwrap();
    let y = b.op("non_zero", "y", [("x", x.into())]).unwrap();
    let out = run(&program(b.finish(vec![y])), &[("x", floats(&[0.0, 1.0, 0.0, 2.0, 0.0, -1.0], &[2, 3]))])
        .unwrap();
    assert_eq!(out["y"].tensor().unwrap().to_vec2::<i64>().unwrap(), [[0, 1], [1, 0], [1, 2]]);
}

#[test]
fn wrong_inputs_are_refused_with_what_is_wanted() {
    let mut b = Builder::new(Opset::Ios18);
    let x = b.input("x", Type::tensor(DType::F16, [Dim::Fixed(1), Dim::ANY, Dim::Fixed(4)])).unwrap();
    let y = b.op("relu", "y", [("x", x.into())]).unwrap();
    let program = program(b.finish(vec![y]));
    let good = ("x", zeros(&[1, 3, 4]));
    assert!(run(&program, std::slice::from_ref(&good)).is_ok());
    let takes = "it takes `x` fp16 [1, ?, 4]";
    for (given, message, hint) in [
        (vec![], "main: input `x` is missing", Some(takes)),
        (vec![good.clone(), ("z", zeros(&[1]))], "main: there is no input `z`", Some(takes)),
        (
            vec![("x", zeros(&[1, 3, 5]))],
            "main: input `x`: the value is [1, 3, 5], fp16 [1, ?, 4] is declared",
            None,
        ),
        (
            vec![("x", zeros(&[3, 4]))],
            "main: input `x`: the value is [3, 4], fp16 [1, ?, 4] is declared",
            None,
        ),
        (vec![("x", Val::Str("a".into()))], "main: input `x` is fp16 [1, ?, 4], a tensor is expected", None),
    ] {
        let e = run(&program, &given).unwrap_err();
        assert_eq!((e.message(), e.way_out()), (message, hint));
    }
    let mut machine = Machine::new(&program, Precision::Fp16);
    let e = machine.run("decode", &BTreeMap::new(), &mut States::default(), None).unwrap_err();
    assert_eq!((e.message(), e.way_out()), ("the program has no function `decode`", Some("it has main")));
}

#[test]
fn a_result_of_another_type_is_an_error() {
    for (kind, ty, message) in [
        (
            "relu",
            Type::tensor(DType::F16, [3usize]),
            "main: relu → y: the value is [2], fp16 [3] is declared",
        ),
        (
            "relu",
            Type::tensor(DType::F16, [2usize, 1]),
            "main: relu → y: the value is [2], fp16 [2, 1] is declared",
        ),
        (
            "relu",
            Type::tensor(DType::I32, [2usize]),
            "main: relu → y: the value holds floats, int32 [2] is declared",
        ),
        ("relu", Type::scalar(DType::String), "main: relu → y: the value is [2], string [] is declared"),
        (
            "frobnicate",
            Type::tensor(DType::F16, [2usize]),
            "main: frobnicate → y: silane does not know this op",
        ),
    ] {
        let mut f = Function { opset: "CoreML5".into(), ..Function::default() };
        let x = f.add("x", Type::tensor(DType::F16, [2usize]));
        f.inputs = vec![x];
        let y = f.add("y", ty);
        f.body =
            Block { ops: vec![op(kind, &[("x", x.into())], &[y])], outputs: vec![y], ..Block::default() };
        let e = run(&program(f), &[("x", zeros(&[2]))]).unwrap_err();
        assert_eq!(e.message(), message);
    }
}

#[test]
fn values_that_no_op_needs_again_can_still_be_outputs() {
    let mut b = Builder::new(Opset::Ios18);
    let x = b.input("x", Type::tensor(DType::F16, [2usize])).unwrap();
    let a = b.op("relu", "a", [("x", x.into())]).unwrap();
    let c = b.op("add", "c", [("x", a.into()), ("y", x.into())]).unwrap();
    b.op("relu", "unused", [("x", c.into())]).unwrap();
    let out = run(&program(b.finish(vec![a, x])), &[("x", floats(&[-1.0, 2.0], &[2]))]).unwrap();
    assert_eq!(out["a"].to_floats().unwrap(), [0.0, 2.0]);
    assert_eq!(out["x"].to_floats().unwrap(), [-1.0, 2.0]);
}

#[test]
fn the_tap_sees_every_result_in_order_and_weights_are_read_once() {
    let reads = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counter = reads.clone();
    let weight = Weight::new("w", DType::F16, [2usize], move || {
        counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Ok(vec![0, 0x3c, 0, 0x40].into())
    });
    let mut b = Builder::new(Opset::Ios18);
    let x = b.input("x", Type::tensor(DType::F16, [2usize])).unwrap();
    let y = b.op("mul", "y", [("x", x.into()), ("y", weight.clone().into())]).unwrap();
    let z = b.op("add", "z", [("x", y.into()), ("y", weight.into())]).unwrap();
    let program = program(b.finish(vec![z]));
    let mut machine = Machine::new(&program, Precision::Fp16);
    let mut seen = Vec::new();
    for _ in 0..2 {
        let mut tap = |op: &Op, name: &str, value: &Val| {
            seen.push((op.kind.clone(), name.to_string(), value.to_floats().unwrap()));
        };
        let inputs = inputs(&[("x", floats(&[3.0, 4.0], &[2]))]);
        machine.run("main", &inputs, &mut States::default(), Some(&mut tap)).unwrap();
    }
    let row = |kind: &str, name: &str, v: [f32; 2]| (kind.to_string(), name.to_string(), v.to_vec());
    assert_eq!(seen[..2], [row("mul", "y", [3.0, 8.0]), row("add", "z", [4.0, 10.0])]);
    assert_eq!(seen[2..], seen[..2]);
    assert_eq!(reads.load(std::sync::atomic::Ordering::Relaxed), 1);
}

#[test]
fn comparison_measures_what_it_says() {
    let same = compare::compare(&[1.0, 2.0], &[1.0, 2.0], 0.0).unwrap();
    assert_eq!((same.max, same.psnr, same.first_bad), (0.0, f64::INFINITY, None));
    assert!((same.cosine - 1.0).abs() < 1e-12);
    let off = compare::compare(&[0.0, 1.0, 4.5], &[0.0, 1.0, 4.0], 0.1).unwrap();
    assert_eq!((off.max, off.spread, off.relative()), (0.5, 4.0, 0.125));
    assert_eq!(off.first_bad, Some(compare::Bad { index: 2, seen: 4.5, expected: 4.0 }));
    // The root of a mean square of 0.25 / 3, against a spread of 4.
    assert!((off.psnr - 20.0 * (4.0 / (0.25f64 / 3.0).sqrt()).log10()).abs() < 1e-9);
    assert!(compare::compare(&[0.0, 1.0, 4.3], &[0.0, 1.0, 4.0], 0.1).unwrap().first_bad.is_none());
    let nan = compare::compare(&[f32::NAN, f32::INFINITY], &[1.0, f32::INFINITY], 0.1).unwrap();
    assert_eq!((nan.seen_non_finite, nan.expected_non_finite), (2, 1));
    assert_eq!(nan.first_bad.map(|b| b.index), Some(0));
    assert!(compare::compare(&[1.0], &[1.0, 2.0], 0.0).is_err());
    assert_eq!(compare::compare(&[0.0; 2], &[3.0; 2], 0.0).unwrap().spread, 3.0);

    let ln2 = std::f32::consts::LN_2;
    assert_eq!(compare::divergence(&[0.5, 1.5], &[10.0, 11.0], 2).unwrap(), 0.0);
    // From (1/2, 1/2) to (2/3, 1/3): ln(3/4) / 2 + ln(3/2) / 2.
    let kl = compare::divergence(&[ln2, 0.0], &[0.0, 0.0], 2).unwrap();
    assert!((kl - ((0.75f64).ln() + (1.5f64).ln()) / 2.0).abs() < 1e-7, "{kl}");
    assert_eq!(compare::top_k(&[3.0, 1.0, 2.0, 0.0], &[3.0, 2.0, 1.0, 0.0], 4, 2).unwrap(), 0.5);
    assert_eq!(compare::top_k(&[1.0, 0.0, 0.0, 1.0], &[1.0, 0.0, 1.0, 0.0], 2, 1).unwrap(), 0.5);
    assert!(compare::top_k(&[1.0], &[1.0], 1, 2).is_err());
    assert_eq!(compare::kept_rows(&[1.0, 2.0, 3.0, 4.0], &[0, 1], 2).unwrap(), [3.0, 4.0]);
    assert!(compare::kept_rows(&[1.0], &[0, 1], 2).is_err());
}

/// What an argument of an op is made from.
trait IntoArg {
    fn into_arg(self) -> Arg;
}

impl IntoArg for Const {
    fn into_arg(self) -> Arg {
        Arg::Const(self)
    }
}

impl IntoArg for ValueId {
    fn into_arg(self) -> Arg {
        Arg::Value(self)
    }
}

struct Given(Arg);

impl<T: IntoArg> From<T> for Given {
    fn from(t: T) -> Given {
        Given(t.into_arg())
    }
}

fn op(kind: &str, params: &[(&str, Given)], outputs: &[ValueId]) -> Op {
    let params = params.iter().map(|(name, g)| ((*name).to_string(), vec![g.0.clone()])).collect();
    Op { kind: kind.into(), params, outputs: outputs.to_vec(), ..Op::default() }
}

fn program(function: Function) -> Program {
    let names: BTreeSet<&str> = function.values.iter().map(|v| v.name.as_str()).collect();
    assert_eq!(names.len(), function.values.len(), "names are unique");
    Program { functions: BTreeMap::from([("main".to_string(), function)]), ..Program::default() }
}

fn inputs(given: &[(&str, Val)]) -> BTreeMap<String, Val> {
    given.iter().map(|(name, v)| ((*name).to_string(), v.clone())).collect()
}

fn run(program: &Program, given: &[(&str, Val)]) -> Result<BTreeMap<String, Val>> {
    Machine::new(program, Precision::Fp16).run("main", &inputs(given), &mut States::default(), None)
}

/// The first output.
fn one(program: &Program, precision: Precision, given: &[(&str, Val)]) -> Result<Vec<f32>> {
    let out = Machine::new(program, precision).run("main", &inputs(given), &mut States::default(), None)?;
    let function = &program.functions["main"];
    out[function.name(function.body.outputs[0])].to_floats()
}

fn floats(values: &[f64], shape: &[usize]) -> Val {
    Val::Tensor(Array::new(values, &candle_core::Device::Cpu).unwrap().reshape(shape).unwrap())
}

fn zeros(shape: &[usize]) -> Val {
    floats(&vec![0.0; shape.iter().product()], shape)
}

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

fn fixture(name: &str) -> String {
    fs::read_to_string(path(name)).unwrap()
}
