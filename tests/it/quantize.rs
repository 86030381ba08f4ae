//! Quantizing programs: which constants are taken, what they become, and what is left.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use half::f16;
use silane::{
    graph::{Builder, In, check},
    interp::{Machine, Precision, States},
    mil::{Arg, Const, DType, Data, Program, Type, Weight},
    ops::{Opset, Val},
    package::{Interface, Save, open_program, save},
    quant::{self, Layout, Options, Policy, Report, Rule, Scheme, Target, encode},
};

/// Schemes that the opset can hold, in all their forms.
const OLD: &[&str] = &["int8", "uint8", "int8:t", "lut1", "lut2", "lut4", "lut6", "lut8", "sparse50", "2:4"];
const NEW: &[&str] = &[
    "int8:b8",
    "int4",
    "uint4",
    "int4:b16",
    "uint4:b8",
    "lut3",
    "lut4:g8",
    "lut6:g4i",
    "lut2:v2",
    "lut4:g8:v2",
    "lut4:i8",
    "lut4:g8:i8",
    "lut2:v4:i8",
    "sparse50+int8",
    "sparse50+lut4",
    "sparse75+lut4:g8",
    "2:4+int4:b8",
    "2:4+lut4:i8",
];

fn values(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        f64::from(state) / f64::from(u32::MAX) - 0.5
    };
    let sum = |n: &mut dyn FnMut() -> f64| (0..4).map(|_| n()).sum::<f64>();
    (0..count).map(|_| f16::from_f64(sum(&mut next) * 0.2).to_f32()).collect()
}

fn weight(key: &str, dtype: DType, shape: &[usize], values: Vec<f32>) -> Weight {
    let key = key.to_string();
    Weight::new(key, dtype, shape, move || Ok(silane::mil::constant::encode_floats(dtype, &values)?.into()))
}

/// One function with a weight of each kind, beside constants that are none.
fn program(opset: Opset, dtype: DType) -> Program {
    let mut b = Builder::new(opset);
    let w = |key: &str, shape: &[usize], seed: u32| -> In {
        weight(key, dtype, shape, values(shape.iter().product(), seed)).into()
    };
    let x = b.input("x", Type::tensor(dtype, [1, 24, 1, 4])).unwrap();
    let ids = b.input("ids", Type::tensor(DType::I32, [1, 4])).unwrap();
    let conv = b
        .op(
            "conv",
            "conv",
            [
                ("x", x.into()),
                ("weight", w("ckpt:layers.0.up.weight | fp16", &[32, 24, 1, 1], 1)),
                ("bias", w("bias", &[32], 2)),
                ("strides", [1, 1].into()),
                ("pad_type", "valid".into()),
                ("pad", [0, 0, 0, 0].into()),
                ("dilations", [1, 1].into()),
                ("groups", 1.into()),
            ],
        )
        .unwrap();
    let flat = b.op("reshape", "flat", [("x", conv.into()), ("shape", [1, 32, 4].into())]).unwrap();
    let turned = b.op("transpose", "turned", [("x", flat.into()), ("perm", [0, 2, 1].into())]).unwrap();
    let bias = Const::floats(dtype, &[40], &[0.0; 40]);
    let linear = b
        .op(
            "linear",
            "linear",
            [("x", turned.into()), ("weight", w("lin", &[40, 32], 3)), ("bias", bias.into())],
        )
        .unwrap();
    let matmul = b.op("matmul", "matmul", [("x", linear.into()), ("y", w("mat", &[40, 24], 4))]).unwrap();
    let rows = b
        .op("gather", "rows", [("x", w("table", &[64, 24], 5)), ("indices", ids.into()), ("axis", 0.into())])
        .unwrap();
    let sum = b.op("add", "sum", [("x", matmul.into()), ("y", rows.into())]).unwrap();
    let out = b.op("mul", "scaled", [("x", sum.into()), ("y", w("gain", &[1, 4, 24], 6))]).unwrap();
    let main = b.finish(vec![out]);
    let mut program =
        Program { functions: BTreeMap::from([("main".to_string(), main)]), ..Program::default() };
    silane::passes::tidy(&mut program).unwrap();
    program
}

const WEIGHTS: [(&str, usize, usize); 4] =
    [("conv_weight", 0, 1), ("linear_weight", 0, 1), ("matmul_y", 1, 0), ("rows_x", 0, 1)];

fn policy(scheme: &str, smallest: usize) -> Policy {
    Policy { smallest, ..Policy::uniform(scheme.parse().unwrap()) }
}

/// All schemes, whatever the target thinks of them.
fn any() -> Options {
    Options { allow_slow: true, ..Options::default() }
}

fn apply(program: &mut Program, scheme: &str) -> Report {
    quant::apply(program, &policy(scheme, 100), any()).unwrap()
}

/// The dense values of every weight of `main`, by name, from the op table.
fn dense(program: &Program) -> BTreeMap<String, Vec<f32>> {
    let mut program = program.clone();
    quant::decompress(&mut program).unwrap();
    let function = &program.functions["main"];
    let mut found = BTreeMap::new();
    function.body.walk(&mut |op| {
        if let Some(Const { data: Data::Weight(w), .. }) = op.constant() {
            found.insert(function.name(op.outputs[0]).to_string(), w.floats().unwrap());
        }
    });
    found
}

fn run(program: &Program, dtype: DType) -> Vec<f32> {
    let mut machine = Machine::new(program, Precision::Fp16);
    let inputs = BTreeMap::from([
        ("x".to_string(), Val::floats(values(96, 9), &[1, 24, 1, 4]).unwrap()),
        ("ids".to_string(), Val::ints(vec![3, 0, 63, 17], &[1, 4]).unwrap()),
    ]);
    assert!(matches!(dtype, DType::F16 | DType::F32));
    let mut out = machine.run("main", &inputs, &mut States::default(), None).unwrap();
    out.pop_first().unwrap().1.to_floats().unwrap()
}

fn saved(dir: &Path, program: Program, report: &Report) -> PathBuf {
    let path = dir.join("out.mlpackage");
    let checked = check(program).unwrap();
    let interface = Interface::of(checked.program()).unwrap();
    let late = || report.metadata().into_iter().map(|m| ("silane.quantization".to_string(), m)).collect();
    let options = Save { force: true, from: None, late: Some(&late) };
    save(&path, &checked, &interface, options).unwrap();
    path
}

/// Every form of every scheme, for every kind of weight: what is written is what the encoding decodes to,
/// bit for bit, and the program computes with it.
#[test]
fn what_is_written_is_what_was_encoded() {
    let dir = tempfile::tempdir().unwrap();
    let new: Vec<&str> = OLD.iter().chain(NEW).copied().collect();
    for (opset, dtype, schemes) in [
        (Opset::Ios16, DType::F16, OLD.to_vec()),
        (Opset::Ios17, DType::F32, OLD.to_vec()),
        (Opset::Ios18, DType::F16, new.clone()),
        (Opset::Ios18, DType::F32, new.clone()),
        (Opset::Ios26, DType::F16, new),
    ] {
        let original = program(opset, dtype);
        let plain = dense(&original);
        for scheme in schemes {
            let place = format!("{opset} {dtype} {scheme}");
            let mut program = original.clone();
            let report = apply(&mut program, scheme);
            assert_eq!(report.tensors.len(), WEIGHTS.len(), "{place}");
            let read = open_program(&saved(dir.path(), program, &report)).unwrap().program;
            let seen = dense(&read);
            for entry in &report.tensors {
                let (_, output, input) = WEIGHTS.iter().find(|w| w.0 == entry.name).copied().unwrap();
                let shape = entry.ty.shape().unwrap();
                let layout = Layout { shape: &shape, output, input };
                let encoded = encode(&plain[&entry.name], layout, &entry.scheme, None).unwrap();
                let mut expected = encoded.decode(layout).unwrap();
                let mut seen = seen[&entry.name].clone();
                if dtype == DType::F32 {
                    // A product of an fp32 program is not rounded to fp16.
                    for v in expected.iter_mut().chain(&mut seen) {
                        *v = f16::from_f32(*v).to_f32();
                    }
                }
                assert_eq!(seen, expected, "{place}: {}", entry.name);
                let quality = entry.quality().unwrap();
                assert!(quality.sqnr_db > 2.0 && quality.max_error.is_finite(), "{place}: {quality:?}");
            }
            let mut by_hand = original.clone();
            let values = dense(&read);
            for f in by_hand.functions.values_mut() {
                let names = f.values.clone();
                f.body.walk_mut(&mut |op| {
                    let Some(id) = op.outputs.first() else { return };
                    let name = names[id.0 as usize].name.as_str();
                    if let (Some(v), true) = (values.get(name), op.kind == "const") {
                        let Type::Tensor(t) = &names[id.0 as usize].ty else { return };
                        let w = weight(&format!("{name} by hand"), dtype, &t.shape().unwrap(), v.clone());
                        op.attrs.insert("val".into(), Const::weight(w));
                    }
                });
            }
            assert_eq!(run(&read, dtype), run(&by_hand, dtype), "{place}");
        }
    }
}

/// Each constant that stays has a reason.
#[test]
fn what_is_no_weight_is_left_and_named() {
    let mut p = program(Opset::Ios18, DType::F16);
    let report = apply(&mut p, "int8");
    let left: Vec<(&str, &str)> = report.skipped.iter().map(|s| (s.name.as_str(), s.why.as_str())).collect();
    assert_eq!(
        left,
        [
            ("conv_bias", "`bias` of conv, which is no weight"),
            ("bias", "`bias` of linear, which is no weight"),
            ("scaled_y", "`y` of mul, which is no weight"),
        ]
    );
    let mut p = program(Opset::Ios18, DType::F16);
    let report = quant::apply(&mut p, &policy("int8", 1000), any()).unwrap();
    let small: Vec<&str> = report
        .skipped
        .iter()
        .filter(|s| s.why == "fewer than 1000 elements")
        .map(|s| s.name.as_str())
        .collect();
    assert_eq!(small, ["conv_weight", "matmul_y"]);
    // What is compressed already stays, unless it is to be compressed anew.
    let mut twice = program(Opset::Ios18, DType::F16);
    apply(&mut twice, "lut4");
    let once = twice.clone();
    let report = apply(&mut twice, "int8");
    assert!(report.tensors.is_empty() && twice == once);
    let why = "compressed already, by constexpr_lut_to_dense";
    assert_eq!(report.skipped.iter().filter(|s| s.why == why).count(), 4);
    let again = Options { recompress: true, ..any() };
    let report = quant::apply(&mut twice, &policy("int8", 100), again).unwrap();
    assert_eq!(report.tensors.len(), 4);
    assert!(check(twice).is_ok());
}

#[test]
fn rules_see_names_tensors_and_ops() {
    let rule = |weight: Option<&str>, op: Option<&str>, scheme: &str| {
        Rule::new(weight, op, scheme.parse().unwrap()).unwrap()
    };
    let mut p = program(Opset::Ios18, DType::F16);
    let rules = vec![
        rule(None, Some("gather"), "int8"),
        rule(Some("layers.*.up.weight"), None, "lut6"),
        rule(Some("matmul_?"), Some("matmul"), "fp16"),
    ];
    let recipe = Policy { rules, ..policy("lut4", 100) };
    let report = quant::apply(&mut p, &recipe, any()).unwrap();
    let found: Vec<(&str, String)> =
        report.tensors.iter().map(|e| (e.name.as_str(), e.scheme.to_string())).collect();
    let expected = [("conv_weight", "lut6"), ("linear_weight", "lut4"), ("rows_x", "int8")];
    assert_eq!(found, expected.map(|(n, s)| (n, s.to_string())));
    assert!(report.skipped.iter().any(|s| s.name == "matmul_y" && s.why == "left as it is, by rule 3"));
    assert_eq!(report.used, [true, true, true]);
    assert!(recipe.refuse_unused([report.used.as_slice()]).is_ok());
}

/// No scale is 0, rows of nothing stay nothing, small rows keep their size.
#[test]
fn small_channels_survive() {
    let (rows, columns) = (8, 64);
    let mut numbers = values(rows * columns, 1);
    for (row, size) in [(0, 0.0), (1, 1e-6), (2, 1e-5), (5, 0.0)] {
        for v in &mut numbers[row * columns..(row + 1) * columns] {
            *v = f16::from_f32(if *v > 0.0 { size } else { -size }).to_f32();
        }
    }
    for scheme in ["int8", "int4:b32", "uint4", "uint8:o", "lut4", "lut4:g2", "lut8:g4:i8"] {
        let mut p = one_linear(Opset::Ios18, &[rows, columns], numbers.clone());
        let report = apply(&mut p, scheme);
        assert_eq!(report.tensors.len(), 1, "{scheme}");
        let mut scales = 0;
        p.functions["main"].body.walk(&mut |op| {
            for (name, args) in &op.params {
                if let ("scale", [Arg::Const(Const { data: Data::Weight(w), .. })]) =
                    (name.as_str(), args.as_slice())
                {
                    assert!(w.floats().unwrap().iter().all(|s| *s > 0.0 && s.is_finite()), "{scheme}");
                    scales += 1;
                }
            }
        });
        assert!(scales > 0 || scheme.starts_with("lut4"), "{scheme}");
        let dense = dense(&p).remove("linear_weight").unwrap();
        assert!(dense.iter().all(|v| v.is_finite()), "{scheme}");
        for row in [0, 5] {
            assert!(
                dense[row * columns..(row + 1) * columns].iter().all(|v| *v == 0.0),
                "{scheme}: row {row}"
            );
        }
        if !scheme.starts_with("lut") {
            let half_a_step = 1e-5 / 7.0;
            for i in 2 * columns..3 * columns {
                assert!(
                    (dense[i] - numbers[i]).abs() <= half_a_step,
                    "{scheme}: {} for {}",
                    dense[i],
                    numbers[i]
                );
            }
        }
    }
}

fn one_linear(opset: Opset, shape: &[usize], numbers: Vec<f32>) -> Program {
    let mut b = Builder::new(opset);
    let x = b.input("x", Type::tensor(DType::F16, [1, shape[1]])).unwrap();
    let bias = Const::floats(DType::F16, &[shape[0]], &vec![0.0; shape[0]]);
    let w = weight("w", DType::F16, shape, numbers);
    let y = b.op("linear", "linear", [("x", x.into()), ("weight", w.into()), ("bias", bias.into())]).unwrap();
    let main = b.finish(vec![y]);
    let mut p = Program { functions: BTreeMap::from([("main".to_string(), main)]), ..Program::default() };
    silane::passes::tidy(&mut p).unwrap();
    p
}

/// Sizes that groups and blocks do not divide get near ones that do, and the report says so.
#[test]
fn ragged_sizes_are_told() {
    for (shape, scheme, becomes) in [
        ([120, 64], "lut4:g16", "lut4:g15"),
        ([64, 100], "int4:b32", "int4:b25"),
        ([1, 300], "lut4:g16", "lut4"),
        ([64, 64], "lut4:g16", "lut4:g16"),
        ([7, 31], "int8", "int8"),
        ([31, 60], "2:4+int4:b16", "2:4+int4:b15"),
    ] {
        let numbers = values(shape[0] * shape[1], 3);
        let mut p = one_linear(Opset::Ios18, &shape, numbers.clone());
        let report = apply(&mut p, scheme);
        let [entry] = report.tensors.as_slice() else { panic!("{scheme}: {report:?}") };
        assert_eq!(entry.scheme.to_string(), becomes);
        assert_eq!(entry.note.is_some(), becomes != scheme, "{scheme}: {:?}", entry.note);
        let worst =
            dense(&p)["linear_weight"].iter().zip(&numbers).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < if scheme.contains("2:4") { 0.3 } else { 0.1 }, "{scheme}: {worst}");
    }
}

/// Every pair of target and scheme is allowed, or refused with what would work; what is written agrees
/// with itself.
#[test]
fn old_systems_are_not_given_new_forms() {
    let dir = tempfile::tempdir().unwrap();
    for opset in Opset::ALL {
        for scheme in OLD.iter().chain(NEW) {
            let mut p = one_linear(opset, &[32, 64], values(2048, 4));
            let needs = if OLD.contains(scheme) { Opset::Ios16 } else { Opset::Ios18 };
            let applied = quant::apply(&mut p, &policy(scheme, 1), any());
            match applied {
                Ok(report) => {
                    assert!(opset >= needs, "{opset} {scheme}");
                    let package = open_program(&saved(dir.path(), p, &report)).unwrap();
                    assert_eq!(package.spec_version, opset.spec_version());
                    assert_eq!(package.program.functions["main"].opset, opset.wire());
                }
                Err(e) => {
                    assert!(opset < needs, "{opset} {scheme}: {e}");
                    assert!(e.message().contains(&needs.to_string()), "{e}");
                    assert!(e.way_out().unwrap().contains("--minimum-os"), "{e}");
                    // A raised program takes it, and computes the same until then.
                    quant::raise(&mut p, needs).unwrap();
                    let report = quant::apply(&mut p, &policy(scheme, 1), any()).unwrap();
                    let package = open_program(&saved(dir.path(), p, &report)).unwrap();
                    assert_eq!(package.spec_version, needs.spec_version());
                }
            }
        }
    }
}

/// Compressed weights of older programs keep their bytes when the program is raised.
#[test]
fn raised_programs_compute_the_same() {
    for scheme in OLD {
        let mut p = program(Opset::Ios16, DType::F16);
        apply(&mut p, scheme);
        let (before, values) = (run(&p, DType::F16), dense(&p));
        quant::raise(&mut p, Opset::Ios18).unwrap();
        let raised = check(p).unwrap();
        assert_eq!(dense(raised.program()), values, "{scheme}");
        assert_eq!(run(raised.program(), DType::F16), before, "{scheme}");
    }
}

/// Schemes that are known to be slow or wrong on the target are refused with the reason.
#[test]
fn targets_refuse_what_runs_badly() {
    let p = one_linear(Opset::Ios18, &[32, 64], values(2048, 4));
    for (scheme, ane, why) in [
        ("int8", true, ""),
        ("int4", true, ""),
        ("lut4:g16", true, ""),
        ("lut4:g16i", true, ""),
        ("sparse50", true, ""),
        ("int4:b32", false, "with blocks"),
        ("int8:b32", false, "with blocks"),
        ("2:4+int8:b32", false, "with blocks"),
        ("lut4:g1", false, "59 ms"),
        ("lut4:g2", false, "31 ms"),
        ("lut4:v2", false, "vectors"),
        ("lut4:i8", false, "leave such weights"),
        ("sparse50+lut4", false, "leave such weights"),
    ] {
        for (target, allow_slow) in Target::ALL.into_iter().flat_map(|t| [(t, false), (t, true)]) {
            let options = Options { target, allow_slow, ..Options::default() };
            match quant::apply(&mut p.clone(), &policy(scheme, 1), options) {
                Ok(_) => assert!(ane || allow_slow || target == Target::Gpu, "{scheme} {target}"),
                Err(e) => {
                    assert!(!ane && !allow_slow && target != Target::Gpu, "{scheme} {target}: {e}");
                    assert!(e.message().contains(why), "{e}");
                    assert!(e.way_out().unwrap().contains("--allow-slow"), "{e}");
                }
            }
        }
    }
    for target in Target::ALL {
        for opset in [Opset::Ios16, Opset::Ios17, Opset::Ios18, Opset::Ios26] {
            let default: Scheme = target.default_scheme(opset).unwrap();
            let mut p = one_linear(opset, &[32, 64], values(2048, 4));
            let options = Options { target, ..Options::default() };
            assert!(quant::apply(&mut p, &Policy::uniform(default), options).is_ok(), "{target} {opset}");
        }
    }
}

/// A mask is no weight, whatever is in it; a weight that is no number is named.
#[test]
fn infinite_masks_stay_and_broken_weights_are_refused() {
    let build = |numbers: Vec<f32>, raw: Option<(usize, f16)>| {
        let mut p = one_linear(Opset::Ios18, &[32, 64], numbers.clone());
        let f = p.functions.get_mut("main").unwrap();
        f.body.walk_mut(&mut |op| {
            if let Some(Const { data: Data::Weight(_), .. }) = op.attrs.get("val") {
                let halves: Vec<f16> = numbers.iter().map(|v| f16::from_f32(*v)).collect();
                let w = Weight::new("broken", DType::F16, [32, 64], move || {
                    let at = |i: usize| raw.filter(|r| r.0 == i).map_or(halves[i], |r| r.1);
                    Ok((0..2048).flat_map(|i| at(i).to_le_bytes()).collect::<Vec<u8>>().into())
                });
                op.attrs.insert("val".into(), Const::weight(w));
            }
        });
        p
    };
    let numbers = values(2048, 8);
    let mut broken = build(numbers.clone(), Some((700, f16::NAN)));
    let e = quant::apply(&mut broken, &policy("lut4", 1), any()).unwrap_err();
    assert_eq!(e.message(), "main: weight `linear_weight`: element 700 of fp16 [32, 64] is no number");
    let mut infinite = build(numbers.clone(), Some((5, f16::NEG_INFINITY)));
    let report = quant::apply(&mut infinite, &policy("lut4", 1), any()).unwrap();
    assert!(report.skipped.iter().any(|s| s.name == "linear_weight" && s.why == "element 5 is -inf"));
    assert!(report.tensors.is_empty());
    // A rule leaves a broken one alone.
    let leave = Rule::new(Some("linear*"), None, Scheme::Dense).unwrap();
    let recipe = Policy { rules: vec![leave], ..policy("lut4", 1) };
    assert!(quant::apply(&mut broken, &recipe, any()).is_ok());
    // A mask of -inf is added to scores, and is none of this.
    let mut b = Builder::new(Opset::Ios18);
    let x = b.input("x", Type::tensor(DType::F16, [1, 64, 64])).unwrap();
    let mask = Weight::new("mask", DType::F16, [1, 64, 64], || {
        let at = |i: usize| if i % 64 > i / 64 { f16::NEG_INFINITY } else { f16::ZERO };
        Ok((0..4096).flat_map(|i| at(i).to_le_bytes()).collect::<Vec<u8>>().into())
    });
    let y = b.op("add", "masked", [("x", x.into()), ("y", mask.into())]).unwrap();
    let main = b.finish(vec![y]);
    let mut p = Program { functions: BTreeMap::from([("main".to_string(), main)]), ..Program::default() };
    let report = quant::apply(&mut p, &policy("lut4", 1), any()).unwrap();
    assert_eq!(report.skipped[0].why, "`y` of add, which is no weight");
}

/// Weights that functions share, and tables that heads share, are compressed and stored once.
#[test]
fn shared_weights_are_shared_afterwards() {
    let dir = tempfile::tempdir().unwrap();
    let shared = values(64 * 64, 5);
    let function = |tokens: usize, key: &str| {
        let mut b = Builder::new(Opset::Ios18);
        let ids = b.input("ids", Type::tensor(DType::I32, [1, tokens])).unwrap();
        let table = weight(key, DType::F16, &[64, 64], shared.clone());
        let rows = b
            .op("gather", "rows", [("x", table.into()), ("indices", ids.into()), ("axis", 0.into())])
            .unwrap();
        let turned = b.op("transpose", "turned", [("x", rows.into()), ("perm", [0, 2, 1].into())]).unwrap();
        let wide = b.op("expand_dims", "wide", [("x", turned.into()), ("axes", [2].into())]).unwrap();
        let head = weight(key, DType::F16, &[64, 64, 1, 1], shared.clone());
        let y = b
            .op(
                "conv",
                "head",
                [
                    ("x", wide.into()),
                    ("weight", head.into()),
                    ("strides", [1, 1].into()),
                    ("pad_type", "valid".into()),
                    ("pad", [0, 0, 0, 0].into()),
                    ("dilations", [1, 1].into()),
                    ("groups", 1.into()),
                ],
            )
            .unwrap();
        b.finish(vec![y])
    };
    for (scheme, most) in [("int8", 4096 + 128), ("lut4:g8", 2048 + 8 * 32), ("sparse50", 4096 + 512)] {
        // The same weight by key, and by content alone.
        for keys in [["same", "same"], ["one", "other"]] {
            let functions = BTreeMap::from([
                ("decode".to_string(), function(1, keys[0])),
                ("prefill".to_string(), function(8, keys[1])),
            ]);
            let mut p = Program { functions, default_function: "decode".into(), ..Program::default() };
            let report = apply(&mut p, scheme);
            let path = saved(dir.path(), p, &report);
            let bytes = fs::metadata(path.join("Data/com.apple.CoreML/weights/weight.bin")).unwrap().len();
            assert!(bytes <= most + 64 * 8, "{scheme} {keys:?}: {bytes} bytes");
            let read = open_program(&path).unwrap();
            let said = &read.interface.metadata.user_defined["silane.quantization"];
            assert!(said.contains(scheme) && said.contains("worst_sqnr_db"), "{said}");
        }
    }
}

/// Dense weights come back as what the compressed ones stood for.
#[test]
fn compressed_packages_are_made_dense() {
    for name in [
        "int4_per_block_ios18",
        "int8_affine_ios16",
        "joint_sparse_ios18",
        "lut4_grouped_ios18",
        "lut6_ios18",
        "silero_vad_palette4",
    ] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("fixtures/packages/{name}.mlpackage"));
        let mut program = open_program(&path).unwrap().program;
        let made = quant::decompress(&mut program).unwrap();
        assert!(made > 0, "{name}");
        program.functions["main"].body.walk(&mut |op| assert!(!op.kind.starts_with("constexpr_"), "{name}"));
        assert!(check(program).is_ok(), "{name}");
    }
}

/// Elements are those of weights, whether they are bound to ops or spelt as constants.
#[test]
fn bits_are_those_of_an_element() {
    for scheme in ["int8", "lut4"] {
        let mut p = program(Opset::Ios18, DType::F16);
        let report = apply(&mut p, scheme);
        let weights: u64 = report.tensors.iter().map(|e| e.elements()).sum();
        assert!(report.elements >= weights, "{scheme}: {} of {weights}", report.elements);
        let mut again = program(Opset::Ios18, DType::F16);
        for function in again.functions.values_mut() {
            silane::graph::build::spell_constants(function);
        }
        assert_eq!(apply(&mut again, scheme).bits_per_weight(), report.bits_per_weight(), "{scheme}");
    }
}
