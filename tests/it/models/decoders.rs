//! Language models: decode and prefill over the cache against what Transformers computed.

use std::collections::BTreeMap;

use serde_json::json;
use silane::{
    checkpoint::{Checkpoint, Task},
    graph,
    interp::{Machine, Precision, States, compare::compare},
    mil::{DType, Program, Type},
    models::{self, Chunks, Parts, Plan},
    nn::cache::Update,
    ops::Val,
    passes,
};

use super::{fixture, floats, open, plan, stored};

pub(super) const CONTEXT: usize = 64;

/// Every language model of the fixtures.
pub(super) const VARIANTS: [&str; 41] = [
    "bloom",
    "cohere",
    "cohere-qk-norm",
    "falcon",
    "falcon-alibi",
    "falcon-gqa",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma3_text-types",
    "gpt2",
    "gpt2-scaled",
    "gpt_neo",
    "gpt_neox",
    "gpt_neox-serial",
    "granite",
    "llama",
    "llama-bias",
    "llama-rope-dynamic",
    "llama-rope-linear",
    "llama-rope-llama3",
    "llama-rope-yarn",
    "llama-v5-config",
    "mistral",
    "mixtral",
    "olmo2",
    "opt",
    "opt-350m",
    "phi",
    "phi-qk-norm",
    "phi3",
    "phi3-longrope",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "qwen3-bias",
    "qwen3_moe",
    "smollm3",
    "stablelm",
    "stablelm-parallel",
    "starcoder2",
];

/// The parts of a model, and how far its cache is.
pub(crate) struct Text<'a> {
    pub(super) machines: Vec<(Machine<'a>, States)>,
}

impl<'a> Text<'a> {
    pub(crate) fn new(programs: &'a [Program], precision: Precision) -> Self {
        let open = |p: &'a Program| {
            let machine = Machine::new(p, precision);
            let states = machine.states("decode").unwrap();
            (machine, states)
        };
        Self { machines: programs.iter().map(open).collect() }
    }

    /// The logits after the last of `ids`, which begin at `position`; pieces are joined in order of their
    /// names.
    pub(crate) fn feed(&mut self, ids: &[i64], position: usize) -> Vec<f32> {
        self.call(ids, position).values().flat_map(floats).collect()
    }

    /// What the last part gives.
    pub(super) fn call(&mut self, ids: &[i64], position: usize) -> BTreeMap<String, Val> {
        self.by(if ids.len() == 1 { "decode" } else { "prefill" }, ids, position)
    }

    /// The same by the function named.
    pub(super) fn by(&mut self, function: &str, ids: &[i64], position: usize) -> BTreeMap<String, Val> {
        let n = ids.len();
        let positions = (0..n).map(|i| i64::try_from(position + i).unwrap()).collect();
        let given = BTreeMap::from([
            ("input_ids", Val::ints(ids.to_vec(), &[1, n]).unwrap()),
            ("position_ids", Val::ints(positions, &[1, n]).unwrap()),
        ]);
        let (mut carried, mut outputs): (Option<Val>, _) = (None, BTreeMap::new());
        for (machine, states) in &mut self.machines {
            let value = |name: &String| match name.as_str() {
                "hidden_states" => carried.clone().unwrap(),
                other => given[other].clone(),
            };
            let inputs = machine
                .inputs(function)
                .unwrap()
                .into_iter()
                .map(|name| (name.clone(), value(&name)))
                .collect();
            outputs = machine.run(function, &inputs, states, None).unwrap();
            carried = outputs.get("output_hidden_states").cloned();
        }
        outputs
    }
}

pub(crate) fn chunks(chunk: usize, parts: usize, update: Update) -> Chunks {
    let (contexts, chunk, parts) = (vec![CONTEXT], Some(chunk), Parts::Count(parts));
    Chunks { contexts, chunk, update, parts, ..Chunks::default() }
}

pub(crate) fn programs(checkpoint: &Checkpoint, float: DType, chunks: Chunks) -> Vec<Program> {
    try_programs(checkpoint, float, chunks).unwrap_or_else(|e| panic!("{e}"))
}

pub(super) fn try_programs(
    checkpoint: &Checkpoint,
    float: DType,
    chunks: Chunks,
) -> silane::Result<Vec<Program>> {
    let plan = Plan { task: Task::CausalLm, float, chunks, ..plan(checkpoint, 1, 1) };
    let parts = models::build(checkpoint, &plan, checkpoint.config.model_type()?)?;
    let tidy = |mut part: models::Part| {
        passes::tidy(&mut part.program)?;
        graph::check(part.program).map(graph::Checked::into_program)
    };
    parts.into_iter().map(tidy).collect()
}

/// The first stored row without padding: its ids, and the logits after each.
pub(super) fn row(name: &str) -> (Vec<i64>, Vec<Vec<f32>>) {
    let stored = stored(&format!("tiny/{name}"));
    let shape = stored["logits"].tensor().unwrap().dims().to_vec();
    let ids = stored["input_ids"].to_ints().unwrap()[..shape[1]].to_vec();
    let logits = floats(&stored["logits"]).chunks(shape[2]).take(shape[1]).map(<[f32]>::to_vec).collect();
    (ids, logits)
}

pub(super) fn assert_near(what: &str, seen: &[f32], expected: &[f32], float: DType) {
    let c = compare(seen, expected, 0.0).unwrap();
    let near = if float == DType::F32 { c.relative() <= 1e-4 } else { c.psnr >= 50.0 };
    let finite = c.seen_non_finite == 0;
    assert!(near && finite, "{what}: off by {:.1e} of the spread, {:.1} dB", c.relative(), c.psnr);
}

#[test]
fn decode_and_prefill_compute_what_transformers_does() {
    for (i, name) in VARIANTS.iter().enumerate() {
        let checkpoint = open(&fixture(&format!("tiny/{name}")));
        let (ids, expected) = row(name);
        // Parts and ways to update take turns; the whole table is printed by a script.
        let (chunk, parts) = ([4, 3, 7][i % 3], 1 + i % 3);
        let update = if i % 2 == 0 { Update::Slice } else { Update::Blend };
        for (float, precision) in [(DType::F32, Precision::Fp32), (DType::F16, Precision::Fp16)] {
            let programs = programs(&checkpoint, float, chunks(chunk, parts, update));
            let what = |how: &str| format!("{name}, {float}, {parts} parts, {update:?}, {how}");
            let mut all = (Vec::new(), Vec::new());
            let mut text = Text::new(&programs, precision);
            for (t, id) in ids.iter().enumerate() {
                all.0.extend(text.feed(&[*id], t));
                all.1.extend(&expected[t]);
            }
            assert_near(&what("decode"), &all.0, &all.1, float);

            // Full chunks, then one that ends at the last token and repeats some, then a token more.
            let mut text = Text::new(&programs, precision);
            let end = ids.len() - 1;
            let mut starts: Vec<usize> = (0..end / chunk).map(|c| c * chunk).collect();
            starts.push(end - chunk);
            for start in starts {
                let seen = text.feed(&ids[start..start + chunk], start);
                assert_near(&what("prefill"), &seen, &expected[start + chunk - 1], float);
            }
            assert_near(&what("after prefill"), &text.feed(&ids[end..], end), &expected[end], float);
        }
    }
}

#[test]
fn greedy_text_is_that_of_transformers() {
    for name in VARIANTS {
        let checkpoint = open(&fixture(&format!("tiny/{name}")));
        let stored = stored(&format!("tiny/{name}"));
        let programs = programs(&checkpoint, DType::F16, chunks(4, 1, Update::Slice));
        let mut text = Text::new(&programs, Precision::Fp16);
        let mut ids = stored["greedy.prompt_ids"].to_ints().unwrap();
        let prompt = ids.len();
        let mut logits = Vec::new();
        for (t, id) in ids.clone().iter().enumerate() {
            logits = text.feed(&[*id], t);
        }
        for expected in stored["greedy.token_ids"].to_ints().unwrap() {
            let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
            assert_eq!(i64::try_from(best).unwrap(), expected, "{name}, token {}", ids.len() - prompt);
            ids.push(expected);
            logits = text.feed(&[expected], ids.len() - 1);
        }
    }
}

/// Padding behind a short prompt may hold anything: later tokens overwrite it before they look.
#[test]
fn padding_behind_a_prompt_leaves_no_trace() {
    for update in [Update::Slice, Update::Blend] {
        let checkpoint = open(&fixture("tiny/gemma3_text"));
        let (ids, _) = row("gemma3_text");
        let programs = programs(&checkpoint, DType::F16, chunks(7, 1, update));
        let continued = |garbage: i64| {
            let mut text = Text::new(&programs, Precision::Fp16);
            let mut padded = ids[..3].to_vec();
            padded.resize(7, garbage);
            text.feed(&padded, 0);
            (2..ids.len()).flat_map(|t| text.feed(&ids[t..=t], t)).collect::<Vec<f32>>()
        };
        let plain = {
            let mut text = Text::new(&programs, Precision::Fp16);
            let logits: Vec<Vec<f32>> = (0..ids.len()).map(|t| text.feed(&ids[t..=t], t)).collect();
            logits[2..].concat()
        };
        assert_eq!(continued(5), continued(200), "{update:?}");
        assert_near("after padding", &continued(5), &plain, DType::F16);
    }
}

/// Parts change nothing, whatever the cut.
#[test]
fn parts_give_exactly_what_the_whole_gives() {
    let checkpoint = open(&fixture("tiny/qwen2"));
    let (ids, _) = row("qwen2");
    let run = |parts: usize| {
        let programs = programs(&checkpoint, DType::F16, chunks(4, parts, Update::Slice));
        let mut text = Text::new(&programs, Precision::Fp16);
        let first = text.feed(&ids[..4], 0);
        (4..ids.len()).map(|t| text.feed(&ids[t..=t], t)).fold(first, |all, next| [all, next].concat())
    };
    let whole = run(1);
    for parts in 2..=5 {
        assert_eq!(run(parts), whole, "{parts} parts");
    }
}

/// What the Neural Engine and Core ML want of a stateful program.
#[test]
fn functions_keep_the_layout() {
    for name in VARIANTS {
        let checkpoint = open(&fixture(&format!("tiny/{name}")));
        for program in programs(&checkpoint, DType::F16, chunks(4, 1, Update::Slice)) {
            for (function, f) in &program.functions {
                let states: Vec<_> = f.inputs.iter().filter_map(|id| f.ty(*id).as_state()).collect();
                let [state] = states[..] else { panic!("{name}: {} states", states.len()) };
                let shape = state.shape().unwrap();
                assert!(shape[2] % 32 == 0 && shape[3] % 32 == 0, "{name}: state {state}");
                let mut computing = false;
                for op in f.body.ops.iter().filter(|op| op.kind != "const") {
                    assert!(!matches!(op.kind.as_str(), "tile" | "linear"), "{name}: {}", op.kind);
                    computing |= op.kind == "conv";
                    for id in &op.outputs {
                        let Type::Tensor(t) = f.ty(*id) else { continue };
                        assert!(t.rank() <= 4, "{name}, {function}: {} is {t}", f.name(*id));
                        // Integers are done with before the first projection.
                        let indices = op.kind == "topk";
                        assert!(
                            !computing || t.dtype != DType::I32 || indices,
                            "{name}: {} is {t}",
                            f.name(*id)
                        );
                        if op.kind == "transpose" && function == "prefill" {
                            assert!(
                                t.count() <= Some(4 * 307),
                                "{name}: {} is {t}, not of a chunk",
                                f.name(*id)
                            );
                        }
                    }
                }
            }
        }
    }
}

/// Large and tiny embedding rows, which RMSNorm must neither overflow nor round away.
#[test]
fn rms_norm_survives_what_fp16_holds() {
    for scale in [300.0, 1000.0, 20000.0] {
        let mut model = super::Model::load("tiny/llama");
        let rows = model.values("model.embed_tokens.weight");
        let largest = rows.iter().fold(0f32, |a, v| a.max(v.abs()));
        rows.iter_mut().for_each(|v| *v *= scale / largest);
        assert_fp16_follows(&model, &format!("rows up to {scale}"));
    }
    for scale in [0.0, 1e-4, 1e-3] {
        let mut model = super::Model::load("tiny/llama");
        model.values("model.embed_tokens.weight").iter_mut().for_each(|v| *v *= scale);
        assert_fp16_follows(&model, &format!("rows times {scale}"));
    }
}

fn assert_fp16_follows(model: &super::Model, what: &str) {
    let (_dir, checkpoint) = model.open();
    let run = |float, precision| {
        let programs = programs(&checkpoint, float, chunks(4, 1, Update::Slice));
        let mut text = Text::new(&programs, precision);
        [text.feed(&[7, 21, 5, 99], 0), text.feed(&[11], 4)].concat()
    };
    let (half, full) = (run(DType::F16, Precision::Fp16), run(DType::F32, Precision::Fp32));
    let c = compare(&half, &full, 0.0).unwrap();
    assert!(
        c.seen_non_finite == 0 && c.relative() < 5e-3,
        "{what}: off by {:.1e} of the spread",
        c.relative()
    );
}

#[test]
fn contexts_are_rounded_up_and_bounded() {
    let checkpoint = open(&fixture("tiny/llama"));
    let with = |context: usize| {
        let chunks = Chunks { contexts: vec![context], ..chunks(4, 1, Update::Slice) };
        let plan = Plan { task: Task::CausalLm, chunks, ..plan(&checkpoint, 1, 1) };
        models::build(&checkpoint, &plan, "llama")
    };
    let part = with(40).unwrap().remove(0);
    assert_eq!(part.contract["context_length"], json!([64]));
    assert!(part.notes[0].contains("rounded up from 40 to 64"), "{:?}", part.notes);
    let error = with(200).unwrap_err().to_string();
    assert!(error.contains("224 tokens is asked for, the checkpoint was made for 64"), "{error}");
    assert!(with(0).is_err());
}

/// A head that is neither there nor tied is an error that names it.
#[test]
fn a_head_that_is_missing_is_named() {
    let inner = json!({"tie_word_embeddings": true});
    for (key, value, works) in [
        ("tie_word_embeddings", json!(true), true),
        ("text_config", inner, true),
        ("tie_word_embeddings", json!(false), false),
    ] {
        let mut model = super::Model::load("tiny/llama");
        model.tensors.remove("lm_head.weight");
        model.config.remove("tie_word_embeddings");
        if key == "text_config" {
            let mut text = model.config.clone();
            text.insert("tie_word_embeddings".into(), value["tie_word_embeddings"].clone());
            model.set(key, text.into());
        } else {
            model.set(key, value);
        }
        let (_dir, checkpoint) = model.open();
        let built = try_programs(&checkpoint, DType::F16, chunks(4, 1, Update::Slice));
        match works {
            true => assert!(built.is_ok()),
            false => assert!(built.unwrap_err().to_string().contains("`lm_head.weight`")),
        }
    }
}
