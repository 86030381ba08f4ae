//! Emitted programs against what Transformers computed, and against our reference where nothing is stored.

pub(crate) mod decoders;
mod heads;
mod prefill;
mod rotate;
mod structure;
mod traps;
mod vocabulary;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use candle_core::Tensor;
use serde_json::{Map, Value, json};
use silane::{
    checkpoint::{Checkpoint, Task},
    graph,
    interp::{
        Machine, Precision, States,
        compare::{Comparison, compare, kept_rows},
    },
    mil::{DType, Numbers, Program},
    models::{self, Chunks, Plan},
    ops::{Opset, Val},
    passes,
    reference::{self, Inputs},
};
use tempfile::TempDir;

use super::checkpoint::{Raw, folder, pack, raw_f32};

/// Checkpoint, tokens per row, whether the stored inputs have segments.
const STORED: [(&str, usize, bool); 17] = [
    ("tiny/albert", 9, true),
    ("tiny/albert-groups", 9, true),
    ("tiny/bert", 9, true),
    ("tiny/bert-cls", 9, true),
    ("tiny/bert-mlm", 9, true),
    ("tiny/distilbert", 9, false),
    ("tiny/distilbert-cls", 9, false),
    ("tiny/distilbert-tokens", 9, false),
    ("tiny/electra", 9, true),
    ("tiny/electra-discriminator", 9, true),
    ("tiny/modernbert", 9, false),
    ("tiny/modernbert-mlm", 9, false),
    ("tiny/mpnet", 9, false),
    ("tiny/roberta", 9, false),
    ("tiny/roberta-mlm", 9, false),
    ("tiny/xlm-roberta", 9, false),
    ("rxn-albert-mlm", 23, false),
];

#[test]
fn programs_compute_what_transformers_does() {
    for (name, tokens, segments) in STORED {
        let checkpoint = open(&fixture(name));
        let stored = stored(name);
        let rows = stored["attention_mask"].tensor().unwrap().dims()[0];
        // A row at a time, as most hosts do, and the whole batch at once.
        for batch in [1, rows] {
            let plan = Plan { token_type_ids: segments, ..plan(&checkpoint, batch, tokens) };
            for (float, limit) in [(DType::F32, Limit::Relative(1e-4)), (DType::F16, Limit::Psnr(50.0))] {
                let program = build(&checkpoint, &Plan { float, ..plan.clone() });
                for (output, seen) in run_in_turn(&program, &stored, batch) {
                    let c = compared(&seen, &stored[&output], &stored["attention_mask"]);
                    let (off, psnr) = (c.relative(), c.psnr);
                    let what = format!("{name}, {float}, {batch} rows at a time: {output}");
                    assert!(limit.holds(&c), "{what} is off by {off:.1e} of the spread, {psnr:.1} dB");
                }
            }
        }
    }
}

/// Without the input, every token is of segment 0.
#[test]
fn without_segments_all_tokens_are_of_the_first() {
    for name in ["tiny/bert", "tiny/albert", "tiny/electra"] {
        let checkpoint = open(&fixture(name));
        let zeros = inputs(&[&[5, 9, 7, 3]], None);
        let ones = Inputs { token_type_ids: Some(vec![vec![0, 0, 1, 1]]), ..zeros.clone() };
        assert_agrees(name, &checkpoint, Task::FeatureExtraction, &zeros);
        assert_agrees(name, &checkpoint, Task::FeatureExtraction, &ones);
        let run = |i: &Inputs| reference::encoder(&checkpoint, Task::FeatureExtraction, i).unwrap();
        let [a, b] = [&zeros, &ones].map(|i| floats(&run(i)["last_hidden_state"].clone().into()));
        assert!(compare(&a, &b, 0.0).unwrap().relative() > 1e-2, "{name}: segments make no difference");
    }
}

enum Limit {
    /// The largest difference, as a share of the spread.
    Relative(f64),
    /// Decibels.
    Psnr(f64),
}

impl Limit {
    fn holds(&self, c: &Comparison) -> bool {
        let near = match self {
            Limit::Relative(most) => c.relative() <= *most,
            Limit::Psnr(least) => c.psnr >= *least,
        };
        near && c.count > 0 && c.seen_non_finite == 0
    }
}

/// The program in fp32 and fp16 against our reference, on inputs that need not be stored.
fn assert_agrees(what: &str, checkpoint: &Checkpoint, task: Task, inputs: &Inputs) {
    let (batch, tokens) = (inputs.input_ids.len(), inputs.input_ids[0].len());
    let expected = reference::encoder(checkpoint, task, inputs).unwrap();
    let given = values(inputs);
    for (float, limit) in [(DType::F32, Limit::Relative(1e-4)), (DType::F16, Limit::Psnr(50.0))] {
        let plan = Plan {
            task,
            float,
            token_type_ids: inputs.token_type_ids.is_some(),
            ..plan(checkpoint, batch, tokens)
        };
        for (name, seen) in run(&build(checkpoint, &plan), &given) {
            let expected = Val::Tensor(expected[&name].clone());
            let c = compared(&seen, &expected, &given["attention_mask"]);
            assert!(
                limit.holds(&c),
                "{what}, {task}, {float}: {name} is off by {:.1e} of the spread, {:.1} dB; first {:?}",
                c.relative(),
                c.psnr,
                c.first_bad
            );
        }
    }
}

fn plan(checkpoint: &Checkpoint, batch: usize, tokens: usize) -> Plan {
    Plan {
        task: checkpoint.task().unwrap(),
        batch,
        tokens: Some(tokens),
        token_type_ids: false,
        float: DType::F16,
        opset: Opset::Ios18,
        chunks: Chunks { contexts: vec![32], chunk: None, ..Chunks::default() },
    }
}

fn build(checkpoint: &Checkpoint, plan: &Plan) -> Program {
    try_build(checkpoint, plan).unwrap()
}

fn try_build(checkpoint: &Checkpoint, plan: &Plan) -> silane::Result<Program> {
    let parts = models::build(checkpoint, plan, checkpoint.config.model_type()?)?;
    assert_eq!(parts.len(), 1);
    let mut program = parts.into_iter().next().unwrap().program;
    passes::tidy(&mut program)?;
    Ok(graph::check(program)?.into_program())
}

/// Runs `main` on those of the given values that it takes, each result rounded to its declared type.
fn run(program: &Program, given: &BTreeMap<String, Val>) -> BTreeMap<String, Val> {
    let main = &program.functions["main"];
    let taken = main.inputs.iter().map(|id| main.name(*id).to_string());
    let inputs = taken.map(|name| (name.clone(), given[&name].clone())).collect();
    // An op that is not finite anywhere, at padding too, would be one op away from a NaN at real tokens.
    let mut tap = |_: &silane::mil::Op, name: &str, value: &Val| {
        if let Val::Tensor(t) = value
            && t.dtype().is_float()
        {
            assert!(floats(value).iter().all(|v| v.is_finite()), "`{name}` is not finite");
        }
    };
    Machine::new(program, Precision::Fp16)
        .run("main", &inputs, &mut States::default(), Some(&mut tap))
        .unwrap()
}

/// Runs `batch` rows after the other and joins the outputs.
fn run_in_turn(program: &Program, given: &BTreeMap<String, Val>, batch: usize) -> BTreeMap<String, Val> {
    let mut joined: BTreeMap<String, Vec<Tensor>> = BTreeMap::new();
    for first in (0..given["input_ids"].tensor().unwrap().dims()[0]).step_by(batch) {
        let part = given.iter().map(|(n, v)| (n.clone(), slice(v, first, batch))).collect();
        for (name, value) in run(program, &part) {
            joined.entry(name).or_default().push(value.tensor().unwrap().clone());
        }
    }
    assert!(!joined.is_empty());
    joined.into_iter().map(|(name, parts)| (name, Val::Tensor(Tensor::cat(&parts, 0).unwrap()))).collect()
}

/// Seen against expected, without what is at padding.
fn compared(seen: &Val, expected: &Val, mask: &Val) -> Comparison {
    let (dims, mask_dims) = (seen.tensor().unwrap().dims(), mask.tensor().unwrap().dims());
    assert_eq!(dims, expected.tensor().unwrap().dims());
    let mask = mask.to_ints().unwrap();
    let (seen, expected) = (floats(seen), floats(expected));
    if dims.len() < 2 || dims[..2] != *mask_dims {
        return compare(&seen, &expected, 1e-3).unwrap();
    }
    let width = dims[2..].iter().product();
    let kept = |v: &[f32]| kept_rows(v, &mask, width).unwrap();
    compare(&kept(&seen), &kept(&expected), 1e-3).unwrap()
}

fn floats(value: &Val) -> Vec<f32> {
    value.to_floats().unwrap()
}

fn slice(value: &Val, first: usize, rows: usize) -> Val {
    Val::Tensor(value.tensor().unwrap().narrow(0, first, rows).unwrap())
}

fn inputs(ids: &[&[u32]], mask: Option<&[&[u32]]>) -> Inputs {
    let rows = |rows: &[&[u32]]| rows.iter().map(|row| row.to_vec()).collect::<Vec<_>>();
    let ones = ids.iter().map(|row| vec![1; row.len()]).collect();
    Inputs { input_ids: rows(ids), attention_mask: mask.map_or(ones, rows), token_type_ids: None }
}

fn values(inputs: &Inputs) -> BTreeMap<String, Val> {
    let val = |rows: &[Vec<u32>]| {
        Val::ints(rows.iter().flatten().map(|i| i64::from(*i)).collect(), &[rows.len(), rows[0].len()])
            .unwrap()
    };
    let named = [("input_ids", Some(&inputs.input_ids)), ("attention_mask", Some(&inputs.attention_mask))];
    let all = named.into_iter().chain([("token_type_ids", inputs.token_type_ids.as_ref())]);
    all.filter_map(|(name, rows)| Some((name.to_string(), val(rows?)))).collect()
}

/// The stored inputs and outputs of a checkpoint.
fn stored(name: &str) -> BTreeMap<String, Val> {
    let bytes = std::fs::read(fixture(name).join("reference.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let value = |t: &safetensors::tensor::TensorView<'_>| {
        let dtype = if t.dtype() == safetensors::Dtype::I64 { DType::I64 } else { DType::F32 };
        let count = t.shape().iter().product();
        Val::numbers(Numbers::decode(dtype, t.data(), count).unwrap(), t.shape()).unwrap()
    };
    file.tensors().iter().map(|(name, t)| (name.clone(), value(t))).collect()
}

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models").join(name)
}

fn open(dir: &Path) -> Checkpoint {
    Checkpoint::open_dir(dir).unwrap()
}

/// A checkpoint in memory, to be changed and written again.
pub(crate) struct Model {
    pub(crate) config: Map<String, Value>,
    pub(crate) tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    files: Vec<(String, Vec<u8>)>,
}

impl Model {
    /// A stored checkpoint with its tokenizer.
    pub(crate) fn load(name: &str) -> Model {
        let dir = fixture(name);
        let checkpoint = open(&dir);
        let tensor = |n: &str| {
            let values = checkpoint.tensors.floats(n).ok()?;
            Some((n.to_string(), (checkpoint.tensors.shape(n).unwrap().to_vec(), values)))
        };
        let files = ["tokenizer.json", "tokenizer_config.json"];
        let read = |f: &str| (f.to_string(), std::fs::read(dir.join(f)).unwrap());
        Model {
            config: serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap(),
            tensors: checkpoint.tensors.names().filter_map(tensor).collect(),
            files: files.map(read).to_vec(),
        }
    }

    /// BERT of one layer and 8 channels.
    pub(crate) fn small_bert(vocabulary: usize) -> Model {
        let config = json!({
            "model_type": "bert", "architectures": ["BertModel"], "vocab_size": vocabulary,
            "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12,
            "max_position_embeddings": 16, "type_vocab_size": 2, "pad_token_id": 0,
        });
        let Value::Object(config) = config else { unreachable!() };
        let mut model = Model { config, tensors: BTreeMap::new(), files: Vec::new() };
        for (table, rows) in
            [("word_embeddings", vocabulary), ("position_embeddings", 16), ("token_type_embeddings", 2)]
        {
            model.random(&format!("embeddings.{table}.weight"), &[rows, 8]);
        }
        model.norm("embeddings.LayerNorm", 8);
        let layer = "encoder.layer.0";
        for name in ["attention.self.query", "attention.self.key", "attention.self.value"] {
            model.linear(&format!("{layer}.{name}"), 8, 8);
        }
        for (name, outputs, width) in
            [("attention.output.dense", 8, 8), ("intermediate.dense", 12, 8), ("output.dense", 8, 12)]
        {
            model.linear(&format!("{layer}.{name}"), outputs, width);
        }
        model.norm(&format!("{layer}.attention.output.LayerNorm"), 8);
        model.norm(&format!("{layer}.output.LayerNorm"), 8);
        model
    }

    pub(crate) fn set(&mut self, key: &str, value: Value) -> &mut Model {
        self.config.insert(key.into(), value);
        self
    }

    pub(crate) fn file(&mut self, name: &str, content: &Value) -> &mut Model {
        self.files.push((name.into(), content.to_string().into_bytes()));
        self
    }

    pub(crate) fn values(&mut self, name: &str) -> &mut Vec<f32> {
        &mut self.tensors.get_mut(name).unwrap().1
    }

    /// A tensor of numbers from −1 to 1 that depend on its name only.
    pub(crate) fn random(&mut self, name: &str, shape: &[usize]) -> &mut Model {
        let mut state = name.bytes().fold(0x9e37_79b9u32, |h, b| (h ^ u32::from(b)).wrapping_mul(16_777_619));
        let mut draw = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from(u16::try_from(state >> 16).unwrap()) / 32768.0 - 1.0
        };
        let values = (0..shape.iter().product()).map(|_| draw()).collect();
        self.tensors.insert(name.into(), (shape.to_vec(), values));
        self
    }

    pub(crate) fn linear(&mut self, name: &str, outputs: usize, width: usize) -> &mut Model {
        self.random(&format!("{name}.weight"), &[outputs, width]).random(&format!("{name}.bias"), &[outputs])
    }

    pub(crate) fn norm(&mut self, name: &str, channels: usize) -> &mut Model {
        self.random(&format!("{name}.weight"), &[channels]).random(&format!("{name}.bias"), &[channels])
    }

    pub(crate) fn write(&self) -> TempDir {
        let tensors: Vec<Raw> =
            self.tensors.iter().map(|(name, (shape, values))| raw_f32(name, shape, values)).collect();
        let mut files = vec![
            ("config.json", Value::Object(self.config.clone()).to_string().into_bytes()),
            ("model.safetensors", pack(&tensors)),
        ];
        files.extend(self.files.iter().map(|(name, bytes)| (name.as_str(), bytes.clone())));
        folder(&files)
    }

    pub(crate) fn open(&self) -> (TempDir, Checkpoint) {
        let dir = self.write();
        let checkpoint = open(dir.path());
        (dir, checkpoint)
    }
}
