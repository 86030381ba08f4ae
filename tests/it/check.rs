//! The checker: a program that keeps every rule, and one break of it for each rule.

use std::collections::BTreeMap;

use silane::mil::DType::{F16, F32, I32};
use silane::{
    error::Result,
    graph::{
        Builder, Severity,
        build::spell_constants,
        check::{check, problems},
    },
    mil::{
        Arg, Block, Bytes, Const, DType, Data, Dim, Function, Literal, Op, Program, TensorType, Type,
        ValueId, Weight,
    },
    ops::Opset,
};

#[test]
fn a_valid_program_has_no_problems() {
    for program in [valid(), old(), two_functions()] {
        assert_eq!(problems(&program), []);
    }
    let checked = check(valid()).unwrap();
    assert_eq!((checked.opset, checked.needs), (Opset::Ios26, Opset::Ios18));
    let checked = check(old()).unwrap();
    assert_eq!((checked.opset, checked.needs), (Opset::Ios16, Opset::Ios16));
}

#[test]
fn each_rule_finds_its_break() {
    use Severity::{Error, Note};
    type Case = (Severity, &'static str, fn(&mut Program));
    let cases: &[Case] = &[
        (Error, "structure", |p| op(p, "y").outputs.push(ValueId(9999))),
        (Error, "structure", |p| op(p, "y").outputs.push(ValueId(0))),
        (Error, "structure", |p| main(p).body.ops.reverse()),
        (Error, "structure", |p| main(p).body.ops.retain(|o| o.name() != "h")),
        (Error, "structure", |p| main(p).body.outputs.push(ValueId(9999))),
        (Error, "structure", |p| main(p).inputs.push(ValueId(9999))),
        (Error, "structure", use_of_an_inner_value),
        (Error, "function", |p| p.functions.clear()),
        (Error, "function", |p| p.default_function = "other".into()),
        (Error, "function", |p| rename_function(p, "decode")),
        (Error, "opset", |p| main(p).opset = "CoreML99".into()),
        (Error, "opset", |p| main(p).opset = "CoreML7".into()),
        (Error, "identifier", |p| rename(p, "h", "layers.0")),
        (Error, "identifier", |p| rename(p, "h", "0h")),
        (Error, "identifier", |p| rename(p, "h", "")),
        (Error, "identifier", |p| rename(p, "x", "fp16")),
        (Error, "identifier", |p| name_op(p, "h", "a b")),
        (Error, "unique name", |p| rename(p, "h", "y")),
        (Error, "unique name", |p| rename(p, "h", "cache")),
        (Error, "unique name", |p| name_op(p, "h", "y")),
        (Note, "op name", |p| drop(op(p, "h").attrs.remove("name"))),
        (Error, "input", |p| _ = add_input(p, "unused", Type::tensor(F16, [1usize]))),
        (Error, "input", |p| used_input(p, Type::scalar(F16))),
        (Error, "input", |p| used_input(p, Type::tensor(DType::Bool, [1usize]))),
        (Error, "input", |p| used_input(p, Type::tensor(DType::I64, [1usize]))),
        (Error, "input", |p| used_input(p, Type::Tuple(vec![]))),
        (Note, "input", |p| used_input(p, Type::tensor(F16, [1usize, 20000]))),
        (Error, "output", |p| main(p).body.outputs.clear()),
        (Error, "output", |p| push_output(p, "y")),
        (Error, "output", |p| push_output(p, "x")),
        (Error, "output", |p| push_output(p, "mask")),
        (Note, "output", |p| push_output(p, "total")),
        (Error, "output", |p| push_output(p, "cache")),
        (Error, "state", |p| retype_state(p, TensorType::new(F32, [1usize, 64]))),
        (Error, "state", |p| retype_state(p, TensorType::new(F16, [Dim::ANY, Dim::Fixed(64)]))),
        (Note, "state", |p| retype_state(p, TensorType::new(F16, [1usize, 270]))),
        (Note, "state", |p| retype_state(p, TensorType::new(DType::I8, [1usize, 64]))),
        (Note, "state", another_state),
        (Error, "required", |p| drop(op(p, "y").params.remove("x"))),
        (Error, "required", |p| drop(op(p, "h").params.remove("pad"))),
        (Error, "required", |p| drop(op(p, "g").params.remove("mode"))),
        (Note, "written", |p| drop(op(p, "scores").params.remove("transpose_x"))),
        (Error, "parameter", |p| bind(p, "y", "z", Const::int(1))),
        (Error, "parameter", |p| {
            let twice = op(p, "y").params["x"][0].clone();
            op(p, "y").params.get_mut("x").unwrap().push(twice);
        }),
        (Note, "parameter", |p| drop(op(p, "y").attrs.insert("hint".into(), Const::int(1)))),
        (Error, "fixed", |p| bind_value(p, "p", "axis", "number")),
        (Error, "dtype", |p| bind(p, "p", "axis", Const::string("1"))),
        (Error, "type", |p| value(p, "h").ty = Type::tensor(F16, [1usize, 32, 1, 9])),
        (Error, "type", |p| value(p, "h").ty = Type::tensor(F32, [1usize, 32, 1, 8])),
        (Error, "type", |p| bind(p, "p", "axis", Const::int(4))),
        (Error, "type", |p| bind(p, "write", "data", Const::float(F16, 0.0))),
        (Error, "type", |p| {
            let extra = main(p).add("extra", Type::scalar(F16));
            op(p, "write").outputs.push(extra);
        }),
        (Error, "rank", |p| {
            used_input(p, Type::tensor(F16, [1usize; 6]));
        }),
        (Error, "matmul", |p| {
            value(p, "number").ty = Type::tensor(I32, [1usize, 1]);
            value(p, "n").ty = Type::tensor(I32, [1usize, 1]);
            op(p, "n").kind = "matmul".into();
            bind(p, "n", "transpose_x", Const::bool(false));
            bind(p, "n", "transpose_y", Const::bool(false));
        }),
        (Error, "const", |p| drop(konst(p, "y_1").attrs.remove("val"))),
        (Error, "const", |p| value(p, "mode").ty = Type::tensor(DType::String, [1usize])),
        (Error, "literal", |p| literal(p, "groups", Literal::Longs(vec![1]))),
        (Error, "literal", |p| literal(p, "transpose_x", Literal::Ints(vec![0]))),
        (Error, "literal", |p| literal(p, "pad", Literal::Ints(vec![0, 0, 0]))),
        (Error, "literal", |p| literal(p, "pad", Literal::Missing)),
        (Error, "literal", |p| literal(p, "half", Literal::Floats(vec![0.5]))),
        (Error, "literal", |p| literal(p, "half", Literal::Bytes(vec![0; 3]))),
        (Error, "literal", |p| literal(p, "mode", Literal::List(vec![]))),
        (Error, "weight", |p| bind(p, "y", "x", Const::weight(weight("w", F16, &[1, 32, 1, 1])))),
        (Error, "weight", |p| const_weight(p, weight("w", DType::I64, &[32]), None)),
        (Error, "weight", |p| const_weight(p, weight("w", F16, &[0]), None)),
        (Error, "weight", |p| {
            const_weight(p, weight("w", F16, &[32]), Some(TensorType::new(F16, [31usize])));
        }),
        (Error, "weight", |p| {
            const_weight(p, weight("w", F16, &[32]), Some(TensorType::new(F32, [32usize])));
        }),
        (Note, "non-finite constant", |p| literal(p, "half", Literal::Bytes(vec![0, 0xfc]))),
        (Note, "non-finite constant", |p| const_floats(p, &[-1e5])),
        (Note, "size", |p| {
            let more = (0..8000).map(|i| identity(main(p), &format!("more_{i}"))).collect::<Vec<_>>();
            main(p).body.ops.extend(more);
        }),
        (Note, "unknown op", |p| op(p, "y").kind = "made_up".into()),
    ];
    let mut wrong = Vec::new();
    for (i, (severity, rule, damage)) in cases.iter().enumerate() {
        let mut program = valid();
        damage(&mut program);
        let found = problems(&program);
        let exact = found.iter().all(|f| f.rule == *rule && f.severity == *severity);
        if found.is_empty() || !exact {
            wrong.push(format!("case {i}, {rule}: {found:?}"));
        }
        assert_eq!(check(program).is_err(), found.iter().any(|f| f.severity == Error), "case {i}, {rule}");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn several_functions_agree() {
    let damages: &[Damage] = &[
        ("function", |p| p.default_function.clear()),
        ("function", |p| p.default_function = "main".into()),
        ("opset", |p| p.functions.get_mut("prefill").unwrap().opset = "CoreML9".into()),
        ("opset", |p| p.functions.values_mut().for_each(|f| f.opset = "CoreML7".into())),
        ("identifier", |p| {
            let f = p.functions.remove("prefill").unwrap();
            p.functions.insert("pre-fill".into(), f);
        }),
    ];
    for (rule, damage) in damages {
        let mut program = two_functions();
        damage(&mut program);
        let found = problems(&program);
        assert!(!found.is_empty() && found.iter().all(|f| f.rule == *rule), "{rule}: {found:?}");
    }
}

#[test]
fn older_opsets_are_stricter() {
    let damages: &[Damage] = &[
        ("opset", |p| main(p).opset = "CoreML5".into()),
        ("dtype", |p| bind(p, "r", "epsilon", Const::float(F32, 1e-3))),
        ("opset", |p| const_weight(p, weight("w", I32, &[32]), None)),
    ];
    for (rule, damage) in damages {
        let mut program = old();
        damage(&mut program);
        let found = problems(&program);
        assert!(!found.is_empty() && found.iter().all(|f| f.rule == *rule), "{rule}: {found:?}");
    }
}

#[test]
fn compressed_weights_have_their_form() {
    let all_good: &[Damage] = &[("", |_| {})];
    let newer: &[Damage] = &[
        ("constexpr", |p| move_to_attributes(p, "w")),
        ("constexpr", |p| bind(p, "lut", "shape", Const::ints(&[4, 8]))),
        ("dtype", |p| bind(p, "w", "data", Const::ints(&[0; 32]))),
        ("required", |p| drop(op(p, "w").params.remove("scale"))),
        ("parameter", |p| bind(p, "w", "axis", Const::int(0))),
        ("opset", |p| main(p).opset = "CoreML7".into()),
    ];
    let older: &[Damage] = &[
        ("constexpr", move_to_inputs),
        ("constexpr", |p| main(p).opset = "CoreML8".into()),
        ("dtype", |p| attribute(p, "quantized_data", Const::ints(&[0; 32]))),
        ("parameter", |p| attribute(p, "offset", Const::int(0))),
        ("required", |p| drop(op(p, "w").attrs.remove("scale"))),
        ("weight", |p| attribute(p, "scale", Const::weight(weight("s", DType::F64, &[4])))),
    ];
    type Make = fn() -> Program;
    for (make, damages) in
        [(compressed as Make, all_good), (affine as Make, all_good), (compressed, newer), (affine, older)]
    {
        for (i, (rule, damage)) in damages.iter().enumerate() {
            let mut program = make();
            damage(&mut program);
            let found = problems(&program);
            assert_eq!(found.is_empty(), rule.is_empty(), "{i}, {rule}: {found:?}");
            assert_eq!(found.first().map_or("", |f| f.rule), *rule, "{i}: {found:?}");
        }
    }
}

#[test]
fn narrow_indices_reach_every_row() {
    for (dtype, rows, reach) in [
        ("uint16", 65536, true),
        ("uint16", 65537, false),
        ("int16", 32768, true),
        ("int16", 70000, false),
        ("int32", 70000, true),
    ] {
        let mut b = Builder::new(Opset::Ios17);
        let ids = b.input("ids", Type::tensor(I32, [1usize, 3])).unwrap();
        let ids = b.op("cast", "narrow", [("x", ids.into()), ("dtype", dtype.into())]).unwrap();
        let table = weight("table", F16, &[rows, 4]).into();
        let row = b.op("gather", "row", [("x", table), ("indices", ids.into()), ("axis", 0.into())]).unwrap();
        let mut function = b.finish(vec![row]);
        spell_constants(&mut function);
        let rules: Vec<_> = problems(&program([("main", function)], "")).iter().map(|p| p.rule).collect();
        assert_eq!(rules, if reach { vec![] } else { vec!["16-bit index"] }, "{dtype}, {rows} rows");
    }
}

#[test]
fn an_error_says_where_and_how_many() {
    let mut program = valid();
    bind(&mut program, "y", "z", Const::int(1));
    let one = check(program.clone()).unwrap_err();
    assert_eq!(one.message(), "main: y: add has no parameter `z` [parameter]");
    bind(&mut program, "p", "z", Const::int(1));
    let two = check(program).unwrap_err();
    assert_eq!(two.message(), "main: p: softmax has no parameter `z` [parameter], and 1 problem more");
}

/// Branches may name their values alike; a value of one cannot be used after it.
#[test]
fn inner_blocks_have_names_of_their_own() {
    let mut program = valid();
    add_cond(&mut program);
    assert_eq!(problems(&program), []);
}

/// The rule, and how to break it.
type Damage = (&'static str, fn(&mut Program));

/// A convolution, a softmax, a product and a state, with every constant spelt.
fn valid() -> Program {
    let mut function = build(Opset::Ios26).unwrap();
    spell_constants(&mut function);
    program([("main", function)], "")
}

fn build(opset: Opset) -> Result<Function> {
    let mut b = Builder::new(opset);
    let x = b.input("x", Type::tensor(F16, [1usize, 32, 1, 8]))?;
    let number = b.input("number", Type::tensor(I32, [1usize]))?;
    let cache = b.input("cache", Type::state(TensorType::new(F16, [1usize, 64])))?;
    let w = weight("w", F16, &[32, 32, 1, 1]);
    let conv = [
        ("x", x.into()),
        ("weight", w.into()),
        ("bias", weight("b", F16, &[32]).into()),
        ("strides", [1, 1].into()),
        ("pad", [0, 0, 0, 0].into()),
        ("dilations", [1, 1].into()),
    ];
    let h = b.op("conv", "h", conv)?;
    let g = b.op("gelu", "g", [("x", h.into())])?;
    let p = b.op("softmax", "p", [("x", g.into()), ("axis", 1.into())])?;
    let half = Const::float(F16, 0.5);
    let scores =
        b.op("matmul", "scores", [("x", p.into()), ("y", p.into()), ("transpose_y", true.into())])?;
    let s = b.op("mul", "s", [("x", scores.into()), ("y", half.into())])?;
    let y = b.op("add", "y", [("x", s.into()), ("y", s.into())])?;
    b.op("greater", "mask", [("x", y.into()), ("y", s.into())])?;
    let axes = [0, 1, 2, 3].into();
    b.op("reduce_sum", "total", [("x", y.into()), ("axes", axes), ("keep_dims", false.into())])?;
    let n = b.op("add", "n", [("x", number.into()), ("y", number.into())])?;
    let read = b.op("read_state", "read", [("input", cache.into())])?;
    let same = b.op("transpose", "same", [("x", read.into()), ("perm", [0, 1].into())])?;
    b.ops("write_state", "write", [("input", cache.into()), ("data", same.into())])?;
    Ok(b.finish(vec![y, n]))
}

/// A program of iOS 16.
fn old() -> Program {
    let mut b = Builder::new(Opset::Ios16);
    let x = b.input("x", Type::tensor(F16, [1usize, 32])).unwrap();
    let w = weight("w", F16, &[32, 32]);
    let bias = weight("b", F16, &[32]);
    let h = b.op("linear", "h", [("x", x.into()), ("weight", w.into()), ("bias", bias.into())]).unwrap();
    let r = b.op("rsqrt", "r", [("x", h.into())]).unwrap();
    let mut function = b.finish(vec![r]);
    spell_constants(&mut function);
    program([("main", function)], "")
}

/// Two compressed weights of iOS 18.
fn compressed() -> Program {
    let mut b = Builder::new(Opset::Ios18);
    let x = b.input("x", Type::tensor(F16, [1usize, 8])).unwrap();
    let (data, scale) = (weight("d", DType::I8, &[4, 8]), weight("s", F16, &[4, 1]));
    let w = b.op("constexpr_blockwise_shift_scale", "w", [("data", data.into()), ("scale", scale.into())]);
    let (indices, lut) = (weight("i", DType::U4, &[4, 8]), weight("l", F16, &[1, 1, 16, 1]));
    let v = b.op("constexpr_lut_to_dense", "lut", [("indices", indices.into()), ("lut", lut.into())]);
    let bias = weight("b", F16, &[4]);
    let linear = |w: ValueId| [("x", x.into()), ("weight", w.into()), ("bias", bias.clone().into())];
    let y = b.op("linear", "y", linear(w.unwrap())).unwrap();
    let z = b.op("linear", "z", linear(v.unwrap())).unwrap();
    let mut function = b.finish(vec![y, z]);
    spell_constants(&mut function);
    program([("main", function)], "")
}

/// A compressed weight of iOS 16.
fn affine() -> Program {
    let mut b = Builder::new(Opset::Ios16);
    let x = b.input("x", Type::tensor(F16, [1usize, 8])).unwrap();
    let (data, scale) = (weight("d", DType::I8, &[4, 8]), weight("s", F16, &[4]));
    let zero = weight("z", DType::I8, &[4]);
    let params = [
        ("quantized_data", data.into()),
        ("zero_point", zero.into()),
        ("scale", scale.into()),
        ("axis", 0.into()),
    ];
    let w = b.op("constexpr_affine_dequantize", "w", params).unwrap();
    let bias = weight("b", F16, &[4]);
    let y = b.op("linear", "y", [("x", x.into()), ("weight", w.into()), ("bias", bias.into())]).unwrap();
    let mut function = b.finish(vec![y]);
    spell_constants(&mut function);
    let mut program = program([("main", function)], "");
    move_to_attributes(&mut program, "w");
    program
}

fn move_to_attributes(p: &mut Program, name: &str) {
    let op = op(p, name);
    for (param, args) in std::mem::take(&mut op.params) {
        let [Arg::Const(c)] = args.as_slice() else { panic!("`{param}` is no literal") };
        op.attrs.insert(param, c.clone());
    }
}

fn move_to_inputs(p: &mut Program) {
    let op = op(p, "w");
    let name = op.attrs.remove("name").unwrap();
    let attrs = std::mem::replace(&mut op.attrs, BTreeMap::from([("name".into(), name)]));
    op.params.extend(attrs.into_iter().map(|(param, c)| (param, vec![Arg::Const(c)])));
}

fn attribute(p: &mut Program, param: &str, c: Const) {
    op(p, "w").attrs.insert(param.into(), c);
}

fn two_functions() -> Program {
    let mut function = build(Opset::Ios18).unwrap();
    spell_constants(&mut function);
    program([("decode", function.clone()), ("prefill", function)], "decode")
}

fn program<const N: usize>(functions: [(&str, Function); N], default: &str) -> Program {
    let functions: BTreeMap<_, _> = functions.into_iter().map(|(n, f)| (n.to_string(), f)).collect();
    Program { functions, default_function: default.into(), ..Program::default() }
}

/// A promise that nobody may call: the checker reads no weight.
fn weight(key: &str, dtype: DType, shape: &[usize]) -> Weight {
    Weight::new(key, dtype, shape, || -> Result<Bytes> { panic!("the checker read a weight") })
}

fn main(p: &mut Program) -> &mut Function {
    p.functions.get_mut("main").unwrap()
}

fn id(p: &Program, name: &str) -> ValueId {
    let at = p.functions["main"].values.iter().position(|v| v.name == name);
    ValueId(u32::try_from(at.unwrap_or_else(|| panic!("no value `{name}`"))).unwrap())
}

fn value<'a>(p: &'a mut Program, name: &str) -> &'a mut silane::mil::Value {
    let id = id(p, name);
    main(p).value_mut(id)
}

fn op<'a>(p: &'a mut Program, name: &str) -> &'a mut Op {
    main(p).body.ops.iter_mut().find(|o| o.name() == name).unwrap_or_else(|| panic!("no op `{name}`"))
}

/// The const op of the parameter that it was spelt for.
fn konst<'a>(p: &'a mut Program, name: &str) -> &'a mut Op {
    let op = op(p, name);
    assert_eq!(op.kind, "const");
    op
}

fn rename(p: &mut Program, from: &str, to: &str) {
    value(p, from).name = to.into();
}

fn rename_function(p: &mut Program, to: &str) {
    let function = p.functions.remove("main").unwrap();
    p.functions.insert(to.into(), function);
}

fn name_op(p: &mut Program, from: &str, to: &str) {
    op(p, from).attrs.insert("name".into(), Const::string(to));
}

fn bind(p: &mut Program, name: &str, param: &str, c: Const) {
    op(p, name).params.insert(param.into(), vec![Arg::Const(c)]);
}

fn bind_value(p: &mut Program, name: &str, param: &str, value: &str) {
    let id = id(p, value);
    op(p, name).params.insert(param.into(), vec![Arg::Value(id)]);
}

fn literal(p: &mut Program, name: &str, literal: Literal) {
    // `half` is the operand `y` of the one multiplication.
    let name = if name == "half" { "y_1" } else { name };
    konst(p, name).attrs.get_mut("val").unwrap().data = Data::Literal(literal);
}

fn add_const(p: &mut Program, name: &str, val: Const) {
    let id = main(p).add(name, val.ty.clone());
    let attrs = BTreeMap::from([("name".into(), Const::string(name)), ("val".into(), val)]);
    main(p).body.ops.insert(0, Op { kind: "const".into(), outputs: vec![id], attrs, ..Op::default() });
}

fn const_weight(p: &mut Program, w: Weight, declared: Option<TensorType>) {
    let mut c = Const::weight(w);
    if let Some(ty) = declared {
        c.ty = ty.into();
    }
    add_const(p, "extra", c);
}

fn const_floats(p: &mut Program, v: &[f32]) {
    add_const(p, "extra", Const::floats(F32, &[v.len()], v));
}

fn add_input(p: &mut Program, name: &str, ty: Type) -> ValueId {
    let f = main(p);
    let id = f.add(name, ty);
    f.inputs.push(id);
    id
}

/// An input that an op outside the table uses.
fn used_input(p: &mut Program, ty: Type) {
    let id = add_input(p, "extra", ty.clone());
    let mut user = identity(main(p), "user");
    user.params.insert("x".into(), vec![Arg::Value(id)]);
    main(p).value_mut(user.outputs[0]).ty = ty;
    main(p).body.ops.push(user);
}

fn identity(f: &mut Function, name: &str) -> Op {
    let out = f.add(name, f.ty(f.inputs[0]).clone());
    Op {
        kind: "identity".into(),
        params: BTreeMap::from([("x".into(), vec![Arg::Value(f.inputs[0])])]),
        outputs: vec![out],
        attrs: BTreeMap::from([("name".into(), Const::string(name))]),
        ..Op::default()
    }
}

fn push_output(p: &mut Program, name: &str) {
    let id = id(p, name);
    main(p).body.outputs.push(id);
}

/// Changes the state and everything that is made of it.
fn retype_state(p: &mut Program, ty: TensorType) {
    value(p, "cache").ty = Type::state(ty.clone());
    for name in ["read", "same"] {
        value(p, name).ty = ty.clone().into();
    }
}

fn another_state(p: &mut Program) {
    let state = add_input(p, "second", Type::state(TensorType::new(F16, [1usize, 64])));
    let out = main(p).add("read_second", Type::tensor(F16, [1usize, 64]));
    main(p).body.ops.push(Op {
        kind: "read_state".into(),
        params: BTreeMap::from([("input".into(), vec![Arg::Value(state)])]),
        outputs: vec![out],
        attrs: BTreeMap::from([("name".into(), Const::string("read_second"))]),
        ..Op::default()
    });
}

/// Two branches, each with a value called `inner`; gives the two values.
fn add_cond(p: &mut Program) -> [ValueId; 2] {
    let f = main(p);
    let flag = f.add("flag", Type::scalar(DType::Bool));
    let attrs = BTreeMap::from([("name".into(), Const::string("flag")), ("val".into(), Const::bool(true))]);
    f.body.ops.push(Op { kind: "const".into(), outputs: vec![flag], attrs, ..Op::default() });
    let branch = |f: &mut Function, name: &str| {
        let mut op = identity(f, "inner");
        op.attrs.insert("name".into(), Const::string(name));
        let out = op.outputs[0];
        (Block { ops: vec![op], outputs: vec![out], ..Block::default() }, out)
    };
    let (yes, a) = branch(f, "yes");
    let (no, b) = branch(f, "no");
    let out = f.add("chosen", f.ty(a).clone());
    f.body.ops.push(Op {
        kind: "cond".into(),
        params: BTreeMap::from([("pred".into(), vec![Arg::Value(flag)])]),
        outputs: vec![out],
        blocks: vec![yes, no],
        attrs: BTreeMap::from([("name".into(), Const::string("chosen"))]),
    });
    [a, b]
}

fn use_of_an_inner_value(p: &mut Program) {
    let [inner, _] = add_cond(p);
    main(p).body.outputs.push(inner);
}
