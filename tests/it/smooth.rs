//! Smoothing: the same numbers come out, by folding alone, and what a text taught follows.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use silane::{
    checkpoint::Checkpoint,
    interp::{Machine, Precision},
    mil::{Arg, Data, Program},
    models::{self, Chunks, Parts, Plan},
    ops::Val,
    passes,
    quant::{Smoothing, smooth},
    reference::{Divisors, Wanted, observe},
};

struct Model {
    programs: Vec<Program>,
    checkpoint: Checkpoint,
    rows: Vec<Vec<u32>>,
}

impl Model {
    fn new(name: &str, parts: usize) -> Model {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/tiny").join(name);
        let checkpoint = Checkpoint::open_dir(&dir).unwrap();
        let chunks =
            Chunks { contexts: vec![32], chunk: Some(16), parts: Parts::Count(parts), ..Chunks::default() };
        let kind = checkpoint.config.model_type().unwrap();
        let built = models::build(&checkpoint, &Plan::language(chunks), kind).unwrap();
        let mut programs: Vec<Program> = built.into_iter().map(|p| p.program).collect();
        programs.iter_mut().for_each(|p| passes::tidy(p).unwrap());
        let rows = (0..8u32).map(|r| (0..40).map(|i| (r * 37 + i * i * 11 + i * 5) % 250 + 5).collect());
        Model { programs, checkpoint, rows: rows.collect() }
    }

    fn largest(&mut self) -> Divisors {
        let given = observe(&self.checkpoint, &self.rows, Wanted::Moments, &Divisors::new()).unwrap().given;
        given.into_iter().map(|(name, g)| (name, Arc::new(g.largest.clone()))).collect()
    }

    fn smooth(&mut self, alpha: f32) -> Smoothing {
        let largest = self.largest();
        let mut programs: Vec<&mut Program> = self.programs.iter_mut().collect();
        smooth(&mut programs, &largest, alpha).unwrap()
    }
}

fn logits(program: &Program, function: &str, width: i64) -> Vec<f32> {
    let mut machine = Machine::new(program, Precision::Fp16);
    let mut states = machine.states(function).unwrap();
    let mut all = Vec::new();
    for start in [0, width] {
        let n = usize::try_from(width).unwrap();
        let ids = (start..start + width).map(|i| (i * 29 + 11) % 250 + 5).collect();
        let inputs = BTreeMap::from([
            ("input_ids".to_string(), Val::ints(ids, &[1, n]).unwrap()),
            ("position_ids".to_string(), Val::ints((start..start + width).collect(), &[1, n]).unwrap()),
        ]);
        let mut out = machine.run(function, &inputs, &mut states, None).unwrap();
        all.extend(out.pop_first().unwrap().1.to_floats().unwrap());
    }
    all
}

/// Keys of all weights, and how many consts have each.
fn keys(programs: &[Program]) -> BTreeMap<String, usize> {
    let mut keys = BTreeMap::new();
    for function in programs.iter().flat_map(|p| p.functions.values()) {
        function.body.walk(&mut |op| {
            if let Some(Data::Weight(w)) = op.constant().map(|c| &c.data) {
                *keys.entry(w.key.clone()).or_default() += 1;
            }
        });
    }
    keys
}

/// Powers of two change exponents only: outputs are the same, as far as nothing leaves fp16's normal range.
#[test]
fn outputs_stay_what_they_were() {
    for (name, norms, products, left) in [
        ("llama", 7, 3, &[][..]),
        ("gpt2", 6, 0, &["`wte.weight` is read in another place too"]),
        ("falcon", 3, 0, &["`transformer.word_embeddings.weight` is read in another place too"]),
        ("phi", 4, 0, &[]),
        ("mixtral", 7, 12, &[]),
        (
            "gemma3_text",
            8,
            4,
            &[
                "`model.embed_tokens.weight` is read in another place too",
                "add reads it, which is no linear layer",
                "mul reads it, which is no linear layer",
            ],
        ),
        ("opt-350m", 1, 0, &["add reads it, which is no linear layer"]),
    ] {
        let mut model = Model::new(name, 1);
        let before = model.programs[0].clone();
        let done = model.smooth(0.5);
        let count = |product| done.smoothed.iter().filter(|s| s.product == product).count();
        assert_eq!((count(false), count(true)), (norms, products), "{name}: {done:?}");
        let mut reasons: Vec<&str> = done.left.values().map(String::as_str).collect();
        reasons.sort_unstable();
        reasons.dedup();
        assert_eq!(reasons, left, "{name}");
        assert!(done.smoothed.iter().any(|s| s.least < s.largest), "{name}: nothing is moved");
        assert!(!done.divisors.is_empty());
        for s in done.divisors.values().flat_map(|d| d.iter()) {
            assert!(*s > 0.0 && s.to_bits() & 0x7f_ffff == 0, "{name}: {s} is no power of two");
        }
        // Functions go on sharing their weights.
        let after = &model.programs[0];
        let counts = |p: &Program| keys(std::slice::from_ref(p)).into_values().collect::<Vec<_>>();
        let (mut a, mut b) = (counts(&before), counts(after));
        a.sort_unstable();
        b.sort_unstable();
        assert_eq!(a, b, "{name}");
        for (function, width) in [("decode", 1), ("prefill", 16)] {
            let (was, is) = (logits(&before, function, width), logits(after, function, width));
            let spread = was.iter().fold(0f32, |m, v| m.max(v.abs()));
            let off = was.iter().zip(&is).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
            println!("{name} {function}: off by {off:e} of {spread}");
            assert!(off <= 1e-3 * spread, "{name} {function}: {off} of {spread}");
        }
        silane::graph::check(after.clone()).unwrap();
    }
}

/// What a layer is given in the smoothed program is what is looked at when inputs are divided.
#[test]
fn what_was_taught_follows() {
    let mut model = Model::new("llama", 1);
    let done = model.smooth(0.5);
    let given = |by: &Divisors| observe(&model.checkpoint, &model.rows, Wanted::Hessians, by).unwrap().given;
    let (plain, divided) = (given(&Divisors::new()), given(&done.divisors));
    let mut seen = 0;
    for (name, was) in &plain {
        let (is, n) = (&divided[name], was.moments.len());
        let one = Arc::new(vec![1.0; n]);
        let s = done.divisors.get(name).unwrap_or(&one);
        seen += usize::from(!Arc::ptr_eq(s, &one));
        for i in 0..n {
            let near = |a: f32, b: f32| (a - b).abs() <= 1e-5 * a.abs().max(1e-20);
            assert!(near(is.moments[i], was.moments[i] / (s[i] * s[i])), "{name} {i}");
            assert_eq!(is.largest[i], was.largest[i] / s[i], "{name} {i}");
            let (h, g) = (was.hessian.as_ref().unwrap(), is.hessian.as_ref().unwrap());
            for j in 0..n {
                let scale = (is.moments[i] * is.moments[j]).sqrt();
                let want = h[i * n + j] / (s[i] * s[j]);
                assert!((g[i * n + j] - want).abs() <= 1e-4 * scale, "{name} {i} {j}");
            }
        }
        let top = is.largest.iter().copied().fold(0f32, f32::max);
        assert!((is.magnitudes.last().unwrap().0 / top - 1.0).abs() < 1e-3, "{name}");
    }
    // q, k, v, gate, up and down of three layers, and the head.
    assert_eq!(seen, 19);
}

/// Activations become as even as the share says: with all of it moved, the largest of each channel is near 1.
#[test]
fn a_share_is_moved() {
    let spread = |values: &[f32]| {
        let logs: Vec<f32> = values.iter().filter(|v| **v > 0.0).map(|v| v.log2()).collect();
        logs.iter().copied().fold(f32::MIN, f32::max) - logs.iter().copied().fold(f32::MAX, f32::min)
    };
    for name in ["model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"] {
        let mut spreads = Vec::new();
        for alpha in [0.5, 1.0] {
            let mut model = Model::new("llama", 1);
            let was = model.largest()[name].clone();
            let done = model.smooth(alpha);
            let s = &done.divisors[name];
            let is: Vec<f32> = was.iter().zip(s.iter()).map(|(v, s)| v / s).collect();
            if spreads.is_empty() {
                spreads.push(spread(&was));
            }
            spreads.push(spread(&is));
            // Of a product, only ratios matter.
            let one =
                if name.contains("down_proj") { is.iter().copied().fold(0f32, f32::max) / 1.41 } else { 1.0 };
            let near = |v: &f32| *v == 0.0 || (0.7 * one..1.42 * one).contains(v);
            assert!(alpha != 1.0 || is.iter().all(near), "{name}: {is:?}");
        }
        assert!(spreads.is_sorted_by(|a, b| a > b), "{name}: {spreads:?}");
    }
}

#[test]
fn parts_are_smoothed_as_one_and_what_cannot_be_is_left() {
    let (mut one, mut two) = (Model::new("llama", 1), Model::new("llama", 2));
    let (whole, parts) = (one.smooth(0.5), two.smooth(0.5));
    assert_eq!(whole.divisors, parts.divisors);
    assert_eq!(whole.smoothed.len(), parts.smoothed.len());
    let mut model = Model::new("llama", 1);
    let before = keys(&model.programs);
    let mut programs: Vec<&mut Program> = model.programs.iter_mut().collect();
    let none = smooth(&mut programs, &BTreeMap::new(), 0.5).unwrap();
    let why = "the text taught nothing about the inputs of its layers";
    assert!(none.smoothed.is_empty() && none.left.values().all(|w| w == why), "{none:?}");
    assert_eq!(keys(&model.programs), before);
    let narrow: Divisors = before
        .keys()
        .filter_map(|k| Some((k.strip_prefix("ckpt:")?.split(' ').next()?.to_string(), Arc::new(vec![1.0]))))
        .collect();
    let mut programs: Vec<&mut Program> = model.programs.iter_mut().collect();
    let none = smooth(&mut programs, &narrow, 0.5).unwrap();
    assert!(none.smoothed.is_empty() && none.left.values().all(|w| w.contains("has 1 inputs")), "{none:?}");
    for alpha in [-0.1, 1.5, f32::NAN] {
        let mut programs: Vec<&mut Program> = model.programs.iter_mut().collect();
        let error = smooth(&mut programs, &narrow, alpha).unwrap_err();
        assert!(error.message().contains("is to be moved") && error.way_out().is_some(), "{error}");
    }
    // A layer that computes its weight, or a norm that another op reads too, keeps what it has.
    let largest = model.largest();
    let program = &mut model.programs[0];
    for function in program.functions.values_mut() {
        let norm = function.body.ops.iter().find(|op| op.name() == "model_layers_0_input_layernorm").unwrap();
        let at = norm.outputs[0];
        let mut add = function.body.ops.iter().find(|op| op.name() == "model_layers_0_add").unwrap().clone();
        add.params.insert("x".into(), vec![Arg::Value(at)]);
        let position = function.body.ops.iter().position(|op| op.name() == "model_layers_0_add").unwrap();
        function.body.ops[position] = add;
        // Of shares that are not all equal, where one begins is not known.
        let halves = "model_layers_1_mlp_gate_proj_halves";
        let split = function.body.ops.iter_mut().find(|op| op.name() == halves).unwrap();
        let count = split.params.remove("num_splits").unwrap();
        split.params.insert("split_sizes".into(), count);
    }
    let done = smooth(&mut [program], &largest, 0.5).unwrap();
    assert_eq!(done.smoothed.len(), 8);
    assert!(!done.smoothed.iter().any(|s| s.name == "model_layers_1_mlp_gate_proj_gated"), "{done:?}");
    let why = &done.left["model_layers_0_input_layernorm_norm"];
    assert_eq!(why, "add reads it, which is no linear layer");
}
