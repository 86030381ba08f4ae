//! Activations in 8 bits: where pairs go, their scales, what is left and why, and how near outputs stay.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use silane::{
    checkpoint::Checkpoint,
    graph::{Builder, In, check},
    interp::{Machine, Precision},
    mil::{Arg, Const, DType, Op, Program, Type, ValueId, Weight},
    models::{self, Chunks, Plan},
    ops::{Opset, Val},
    package::{Interface, Save, open_program, save},
    passes,
    quant::{
        Activations, Calibration, Entry, Inputs, Method, Options, Policy, Report, Rule, apply_calibrated,
    },
    reference::{Divisors, Wanted, observe},
};

const OPTIONS: Options =
    Options { target: silane::quant::Target::Ane, allow_slow: false, recompress: false, trusted: true };

fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let number = |i: u32| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1u32 << 24) as f32 - 0.5;
    (0..count as u32).map(|i| number(i * 31 + seed * 1009 + 7)).collect()
}

fn weight(key: &str, dtype: DType, shape: &[usize]) -> In {
    let values = numbers(shape.iter().product(), key.len() as u32);
    Weight::new(key, dtype, shape, move || Ok(silane::mil::constant::encode_floats(dtype, &values)?.into()))
        .into()
}

fn conv(b: &mut Builder, name: &str, x: ValueId, dtype: DType, key: &str) -> ValueId {
    let params = [
        ("x", x.into()),
        ("weight", weight(key, dtype, &[16, 16, 1, 1])),
        ("strides", [1, 1].into()),
        ("pad_type", "valid".into()),
        ("pad", [0, 0, 0, 0].into()),
        ("dilations", [1, 1].into()),
        ("groups", 1.into()),
    ];
    b.op("conv", name, params).unwrap()
}

/// Three layers that are given the same, one that is given their sum, and some that cannot have what is asked.
fn program(opset: Opset, dtype: DType) -> Program {
    let mut b = Builder::new(opset);
    let x = b.input("x", Type::tensor(dtype, [1, 16, 1, 4])).unwrap();
    let q = conv(&mut b, "q", x, dtype, "ckpt:q | fp16");
    let k = conv(&mut b, "k", x, dtype, "ckpt:k | fp16");
    let v = conv(&mut b, "v", x, dtype, "ckpt:v | fp16");
    let mut sum = b.op("add", "qk", [("x", q.into()), ("y", k.into())]).unwrap();
    sum = b.op("add", "qkv", [("x", sum.into()), ("y", v.into())]).unwrap();
    let o = conv(&mut b, "o", sum, dtype, "ckpt:o | fp16");
    let odd = conv(&mut b, "odd", o, dtype, "ckpt:odd | fp16");
    let dead = conv(&mut b, "dead", odd, dtype, "ckpt:dead | fp16");
    let flat = b.op("reshape", "flat", [("x", dead.into()), ("shape", [4, 16].into())]).unwrap();
    let y = b.op("matmul", "mat", [("x", flat.into()), ("y", weight("ckpt:mat | fp16", dtype, &[16, 16]))]);
    let bias = Const::floats(dtype, &[12], &[0.5; 12]);
    let linear = [
        ("x", y.unwrap().into()),
        ("weight", weight("ckpt:lin | fp16", dtype, &[12, 16])),
        ("bias", bias.into()),
    ];
    let y = b.op("linear", "lin", linear).unwrap();
    let main = b.finish(vec![y]);
    let mut program = Program { functions: [("main".to_string(), main)].into(), ..Program::default() };
    passes::tidy(&mut program).unwrap();
    program
}

/// What a text is said to have given the layers: many small numbers and few large ones.
fn taught() -> Arc<Calibration> {
    let given = |largest: f32| {
        let magnitudes = (0..200u16).map(|i| (f32::from(i) / 256.0, 1000)).chain([(largest, 1)]).collect();
        Arc::new(Inputs { moments: vec![1.0; 16], hessian: None, magnitudes })
    };
    let shared = given(2.0);
    let zeros = Arc::new(Inputs { moments: vec![0.0; 16], hessian: None, magnitudes: vec![(0.0, 64)] });
    let inputs = [
        ("q", shared.clone()),
        ("k", shared.clone()),
        ("v", shared),
        ("o", given(3.0)),
        ("dead", zeros),
        ("mat", given(1.0)),
        ("lin", given(1.0)),
    ];
    Arc::new(Calibration {
        method: Method::Importance,
        inputs: inputs.map(|(n, i)| (n.to_string(), i)).into(),
        costs: BTreeMap::new(),
    })
}

fn policy(scheme: &str) -> Policy {
    Policy { smallest: 1, ..Policy::uniform(scheme.parse().unwrap()) }
}

fn entry<'a>(report: &'a Report, name: &str) -> &'a Entry {
    report.tensors.iter().find(|e| e.name == name).unwrap()
}

fn ops<'a>(program: &'a Program, kind: &str) -> Vec<&'a Op> {
    let mut found = Vec::new();
    for function in program.functions.values() {
        function.body.walk(&mut |op| {
            if op.kind == kind {
                found.push(op);
            }
        });
    }
    found
}

#[test]
fn one_pair_serves_all_that_are_given_the_same() {
    for (opset, dtype) in [(Opset::Ios17, DType::F16), (Opset::Ios18, DType::F16), (Opset::Ios26, DType::F32)]
    {
        let mut p = program(opset, dtype);
        let report = apply_calibrated(&mut p, &policy("w8a8"), OPTIONS, Some(&taught())).unwrap();
        let (quantize, dequantize) = (ops(&p, "quantize"), ops(&p, "dequantize"));
        assert_eq!((quantize.len(), dequantize.len()), (3, 3), "{opset}");
        let given = |name: &str| {
            let op = ops(&p, if name == "lin" { "linear" } else { "conv" });
            let op = op.into_iter().find(|op| op.name() == name).unwrap();
            let [Arg::Value(x)] = op.params["x"][..] else { panic!("{name} is given a constant") };
            p.functions["main"].name(x).to_string()
        };
        assert_eq!(
            ["q", "k", "v", "o"].map(given),
            ["x_dequantized", "x_dequantized", "x_dequantized", "qkv_dequantized"]
        );
        for (name, asked) in [
            ("q", Ok(())),
            ("k", Ok(())),
            ("v", Ok(())),
            ("o", Ok(())),
            ("lin", Ok(())),
            ("odd", Err("the text taught nothing about the inputs of `odd`")),
            ("dead", Err("the text gave the layer nothing but zeros")),
        ] {
            let e = entry(&report, &format!("{name}_weight"));
            assert_eq!(e.activations.as_ref().unwrap().as_ref().map(|_| ()).map_err(String::as_str), asked);
            assert_eq!(e.scheme.to_string(), if asked.is_ok() { "w8a8" } else { "int8" }, "{name}");
            assert_eq!(given(name).ends_with("_dequantized"), asked.is_ok(), "{name}");
        }
        let matmul = entry(&report, "mat_y");
        let why = "`matmul` is no layer that takes them".to_string();
        assert_eq!((matmul.scheme.to_string().as_str(), &matmul.activations), ("int8", &Some(Err(why))));
        let scale = |name: &str| entry(&report, name).activations().unwrap().scale;
        assert_eq!(scale("q_weight"), scale("v_weight"));
        assert!(report.notes.iter().any(|n| n.starts_with("`w8a8`: ")), "{:?}", report.notes);
        check(p.clone()).unwrap();
        // What is quantized already is left so.
        let again = apply_calibrated(
            &mut p,
            &policy("w8a8"),
            Options { recompress: true, ..OPTIONS },
            Some(&taught()),
        )
        .unwrap();
        assert_eq!(ops(&p, "quantize").len(), 3);
        let known = entry(&again, "o_weight").activations.clone();
        assert_eq!(known, Some(Err("they are quantized already".into())));
    }
}

/// No scale of a fine search has a smaller error, and neither has that of the largest magnitude.
#[test]
fn scales_have_the_least_squared_error() {
    for (largest, rare) in [(0.8f32, 1u64), (2.0, 1), (2.0, 100_000), (60.0, 1), (60000.0, 3)] {
        let mut all: Vec<(f32, u64)> = (1..200u16).map(|i| (f32::from(i) / 256.0, 1000)).collect();
        all.push((largest, rare));
        let mut how = (*taught()).clone();
        let inputs = Inputs { moments: vec![1.0; 16], hessian: None, magnitudes: all.clone() };
        how.inputs.insert("o".into(), Arc::new(inputs));
        let mut p = program(Opset::Ios18, DType::F16);
        let report = apply_calibrated(&mut p, &policy("w8a8"), OPTIONS, Some(&Arc::new(how))).unwrap();
        let Activations { bits, scale, sqnr_db } = entry(&report, "o_weight").activations().unwrap();
        let error = |scale: f32| -> f64 {
            let off = |(v, n): &(f32, u64)| {
                *n as f64 * f64::from(v - (v / scale).round_ties_even().min(127.0) * scale).powi(2)
            };
            all.iter().map(off).sum()
        };
        let power: f64 = all.iter().map(|(v, n)| *n as f64 * f64::from(*v).powi(2)).sum();
        assert_eq!(bits, 8);
        assert!((sqnr_db - 10.0 * (power / error(scale)).log10()).abs() < 1e-6);
        let top = half::f16::from_f32(largest / 127.0).to_f32();
        assert!(error(scale) <= error(top), "{largest}: {scale} {}", error(scale));
        let best = (1..400).map(|i| error(top * 0.985f32.powi(i))).fold(error(top), f64::min);
        assert!(error(scale) < 1.03 * best, "{largest} {rare}: {:e} for {best:e}", error(scale));
    }
}

#[test]
fn what_cannot_be_is_refused_with_the_way_out() {
    let named = Policy {
        rules: vec![Rule::new(Some("o_*"), None, "w8a8".parse().unwrap()).unwrap()],
        ..policy("int8")
    };
    for (opset, policy, taught, says, way) in [
        (Opset::Ios18, policy("w8a8"), None, "nothing is known of their ranges", "--calibrate TEXT"),
        (Opset::Ios18, named, None, "nothing is known of their ranges", "--calibrate TEXT"),
        (Opset::Ios16, policy("w8a8"), Some(taught()), "`w8a8` needs CoreML7", "--minimum-os ios17"),
    ] {
        let mut p = program(opset, DType::F16);
        let error = apply_calibrated(&mut p, &policy, OPTIONS, taught.as_ref()).unwrap_err();
        assert!(error.message().contains(says), "{error}");
        assert!(error.way_out().unwrap().contains(way), "{error:?}");
    }
    let mut how = (*taught()).clone();
    Arc::make_mut(how.inputs.get_mut("o").unwrap()).magnitudes[0].0 = f32::NAN;
    let mut p = program(Opset::Ios18, DType::F16);
    let error = apply_calibrated(&mut p, &policy("w8a8"), OPTIONS, Some(&Arc::new(how))).unwrap_err();
    assert!(error.message().contains("`o`: a magnitude of inputs is NaN"), "{error}");
}

/// A model, and what a text gave its layers.
fn model(name: &str) -> (Program, Arc<Calibration>) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/tiny").join(name);
    let checkpoint = Checkpoint::open_dir(&dir).unwrap();
    let plan = Plan::language(Chunks { contexts: vec![32], chunk: Some(16), ..Chunks::default() });
    let kind = checkpoint.config.model_type().unwrap();
    let mut program = models::build(&checkpoint, &plan, kind).unwrap().remove(0).program;
    passes::tidy(&mut program).unwrap();
    let rows: Vec<Vec<u32>> =
        (0..8u32).map(|r| (0..40).map(|i| (r * 37 + i * i * 11 + i * 5) % 250 + 5).collect()).collect();
    let observed = observe(&checkpoint, &rows, Wanted::Hessians, &Divisors::new()).unwrap();
    let inputs = observed.given.iter().map(|(name, given)| {
        let (moments, magnitudes) = (given.moments.clone(), given.magnitudes.clone());
        (name.clone(), Arc::new(Inputs::new(moments, given.hessian.clone(), magnitudes).unwrap()))
    });
    let calibration =
        Calibration { method: Method::Feedback, inputs: inputs.collect(), costs: BTreeMap::new() };
    (program, Arc::new(calibration))
}

fn logits(program: &Program) -> Vec<f32> {
    let mut machine = Machine::new(program, Precision::Fp16);
    let mut states = machine.states("prefill").unwrap();
    let mut all = Vec::new();
    for start in [0i64, 16] {
        // Other tokens than those of the text.
        let ids = (start..start + 16).map(|i| (i * 29 + 11) % 250 + 5).collect();
        let inputs = BTreeMap::from([
            ("input_ids".to_string(), Val::ints(ids, &[1, 16]).unwrap()),
            ("position_ids".to_string(), Val::ints((start..start + 16).collect(), &[1, 16]).unwrap()),
        ]);
        let mut out = machine.run("prefill", &inputs, &mut states, None).unwrap();
        all.extend(out.pop_first().unwrap().1.to_floats().unwrap());
    }
    all
}

fn psnr(seen: &[f32], expected: &[f32]) -> f64 {
    let (low, high) = expected.iter().fold((f32::MAX, f32::MIN), |(a, b), v| (a.min(*v), b.max(*v)));
    let squares: f64 = seen.iter().zip(expected).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    10.0 * (f64::from(high - low).powi(2) * expected.len() as f64 / squares).log10()
}

/// Every layer of models of several families is given integers, and outputs stay near.
#[test]
fn models_stay_near_what_they_were() {
    for name in ["llama", "gemma3_text", "gpt2", "falcon"] {
        let (program, calibration) = model(name);
        let mut small = program.clone();
        let report = apply_calibrated(
            &mut small,
            &Policy::uniform("w8a8".parse().unwrap()),
            OPTIONS,
            Some(&calibration),
        )
        .unwrap();
        for e in report.tensors.iter().filter(|e| e.op == "conv") {
            assert!(
                e.activations().is_some_and(|a| a.sqnr_db > 25.0),
                "{name}: {}: {:?}",
                e.name,
                e.activations
            );
        }
        let (convs, pairs) = (ops(&small, "conv").len(), ops(&small, "quantize").len());
        assert!(pairs <= convs && ops(&small, "dequantize").len() == pairs, "{name}: {pairs} {convs}");
        let checked = check(small).unwrap();
        let near = psnr(&logits(checked.program()), &logits(&program));
        let mut weights = program.clone();
        let int8 = Policy::uniform("int8".parse().unwrap());
        apply_calibrated(&mut weights, &int8, OPTIONS, Some(&calibration)).unwrap();
        let alone = psnr(&logits(&weights), &logits(&program));
        println!("{name}: {near:.1} dB, weights alone {alone:.1} dB, activations {:?}", report.activations());
        assert!(near > 38.0, "{name}: {near:.1} dB");
    }
}

/// Written packages are the same each time, on any number of threads, and say what was done.
#[test]
fn the_same_bytes_come_out() {
    let (program, calibration) = model("llama");
    let dir = tempfile::tempdir().unwrap();
    let write = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let mut p = program.clone();
            let w8a8 = Policy::uniform("w8a8".parse().unwrap());
            let report = apply_calibrated(&mut p, &w8a8, OPTIONS, Some(&calibration)).unwrap();
            let checked = check(p).unwrap();
            let interface = Interface::of(checked.program()).unwrap();
            let late = || report.metadata().into_iter().map(|m| ("said".to_string(), m)).collect();
            let path = dir.path().join(format!("{threads}.mlpackage"));
            save(&path, &checked, &interface, Save { force: true, from: None, late: Some(&late) }).unwrap();
            let weights = std::fs::read(path.join("Data/com.apple.CoreML/weights/weight.bin")).unwrap();
            let model = std::fs::read(path.join("Data/com.apple.CoreML/model.mlmodel")).unwrap();
            let said = open_program(&path).unwrap().interface.metadata.user_defined["said"].clone();
            assert!(said.contains("\"activations\":{\"bits\":8,\"sqnr_db\":"), "{said}");
            (weights, model, report.json())
        })
    };
    assert!(write(1) == write(2));
}
