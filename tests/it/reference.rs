//! Our reference against what Transformers computed.

mod calibrate;
mod decoder;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use safetensors::SafeTensors;
use serde_json::{Value, json};
use silane::{
    checkpoint::{Checkpoint, Task},
    reference::{Inputs, encoder},
};
use tempfile::TempDir;

use super::checkpoint::{Raw, folder, pack, raw_f32};

#[test]
fn agrees_with_transformers() {
    let names = [
        "tiny/bert",
        "tiny/bert-cls",
        "tiny/bert-mlm",
        "tiny/distilbert",
        "tiny/distilbert-cls",
        "tiny/distilbert-tokens",
        "tiny/roberta",
        "tiny/roberta-mlm",
        "tiny/xlm-roberta",
        "tiny/mpnet",
        "tiny/electra",
        "tiny/electra-discriminator",
        "tiny/albert",
        "tiny/albert-groups",
        "tiny/modernbert",
        "tiny/modernbert-mlm",
        "rxn-albert-mlm",
    ];
    for name in names {
        let dir = models().join(name);
        let worst = worst(&dir, &dir.join("reference.safetensors"));
        println!("{name}: {worst:.1e}");
        assert!(worst < 1e-5, "{name}: {worst:e} of the spread");
    }
}

/// Heads that no stored output covers, on top of a stored checkpoint: with weights that pick channels, the
/// logits are known from the last hidden states.
#[test]
fn heads_pick_what_they_should() {
    let gelu = |x: f32| x * 0.5 * (1.0 + erf(x / 2f32.sqrt()));
    let pick =
        |name: &str| vec![raw_f32(&format!("{name}.weight"), &[2, 36], &picking([5, 9])), bias(name, 2)];
    let same = |name: &str| {
        let identity: Vec<f32> = (0..36 * 36).map(|i| if i % 37 == 0 { 1.0 } else { 0.0 }).collect();
        vec![raw_f32(&format!("{name}.weight"), &[36, 36], &identity), bias(name, 36)]
    };
    let classify = [same("classifier.dense"), pick("classifier.out_proj")].concat();
    let distil = [same("pre_classifier"), pick("classifier")].concat();
    let normed = |name: &str| vec![raw_f32(&format!("{name}.weight"), &[36], &[1.0; 36]), bias(name, 36)];
    let modern = [same("head.dense"), normed("head.norm"), pick("classifier")].concat();
    let distil_lm = [same("vocab_transform"), normed("vocab_layer_norm"), pick("vocab_projector")].concat();
    let electra_lm = [
        same("generator_predictions.dense"),
        normed("generator_predictions.LayerNorm"),
        pick("generator_lm_head"),
    ]
    .concat();
    let gelu_norm = |epsilon: f32| move |x: Vec<f32>| layer_norm(x.into_iter().map(gelu).collect(), epsilon);
    let each = |f: fn(f32) -> f32| move |x: Vec<f32>| x.into_iter().map(f).collect::<Vec<_>>();
    let (tanh, relu, plain) = (each(f32::tanh), each(|x| x.max(0.0)), each(|x| x));
    let (bert_lm, modern_head) = (gelu_norm(1e-12), gelu_norm(1e-5));
    let gelu = |x: Vec<f32>| x.into_iter().map(gelu).collect::<Vec<_>>();
    type Expect<'a> = &'a dyn Fn(Vec<f32>) -> Vec<f32>;
    let rows: [(&str, Task, Vec<Raw>, Expect<'_>); 14] = [
        ("roberta", Task::SequenceClassification, classify.clone(), &tanh),
        ("xlm-roberta", Task::SequenceClassification, classify.clone(), &tanh),
        ("mpnet", Task::SequenceClassification, classify.clone(), &tanh),
        ("electra", Task::SequenceClassification, classify, &gelu),
        ("distilbert", Task::SequenceClassification, distil, &relu),
        ("roberta", Task::TokenClassification, pick("classifier"), &plain),
        ("albert", Task::TokenClassification, pick("classifier"), &plain),
        ("bert", Task::QuestionAnswering, pick("qa_outputs"), &plain),
        ("distilbert", Task::QuestionAnswering, pick("qa_outputs"), &plain),
        ("distilbert", Task::MaskedLm, distil_lm, &bert_lm),
        ("electra", Task::MaskedLm, electra_lm, &bert_lm),
        ("modernbert", Task::SequenceClassification, modern.clone(), &modern_head),
        ("modernbert", Task::TokenClassification, modern.clone(), &modern_head),
        ("modernbert", Task::QuestionAnswering, modern, &modern_head),
    ];
    for (name, task, head, expect) in rows {
        let dir = grafted(name, json!({"classifier_pooling": "cls"}), head, &[]);
        let inputs = inputs(&[&[5, 6, 7, 8]], None);
        let outputs = encoder(&open(&dir), task, &inputs).unwrap();
        let hidden = values(&outputs["last_hidden_state"]);
        let tokens = if task == Task::SequenceClassification { 1 } else { 4 };
        let want = |channel: usize| {
            hidden.chunks(36).take(tokens).map(|x| expect(x.to_vec())[channel]).collect::<Vec<_>>()
        };
        let got = match task {
            Task::QuestionAnswering => [values(&outputs["start_logits"]), values(&outputs["end_logits"])],
            _ => {
                let logits = values(&outputs["logits"]);
                [0, 1].map(|i| logits.iter().skip(i).step_by(2).copied().collect())
            }
        };
        for (got, want) in got.iter().zip([want(5), want(9)]) {
            let worst = got.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0.0, f32::max);
            assert!(got.len() == want.len() && worst < 1e-5, "{name}, {task}: {got:?}, expected {want:?}");
        }
    }
}

/// ModernBERT's classifier may take the mean over what is not padding.
#[test]
fn the_mean_is_classified_without_padding() {
    let dir = grafted("modernbert-mlm", json!({"classifier_pooling": "mean"}), classifier(), &[]);
    let run = |inputs: &Inputs| {
        values(&encoder(&open(&dir), Task::SequenceClassification, inputs).unwrap()["logits"])
    };
    let alone = run(&inputs(&[&[5, 6, 7]], None));
    let padded = run(&inputs(&[&[5, 6, 7, 305, 305]], Some(&[&[1, 1, 1, 0, 0]])));
    let first = run(&inputs(&[&[5]], None));
    let off = |x: &[f32]| alone.iter().zip(x).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(off(&padded) < 1e-5 && off(&first) > 1e-2, "{alone:?}, {padded:?}, {first:?}");
}

/// Sentence embeddings from the last hidden states, by mode.
#[test]
fn embeddings_are_pooled_as_the_files_say() {
    type Pool = fn(&[[f32; 36]]) -> [f32; 36];
    let mean: Pool = |x| std::array::from_fn(|c| (x[0][c] + x[1][c] + x[2][c]) / 3.0);
    let modes: [(&str, Pool); 5] = [
        ("pooling_mode_mean_tokens", mean),
        ("pooling_mode_cls_token", |x| x[0]),
        ("pooling_mode_lasttoken", |x| x[2]),
        ("pooling_mode_max_tokens", |x| std::array::from_fn(|c| x[0][c].max(x[1][c]).max(x[2][c]))),
        ("pooling_mode_mean_sqrt_len_tokens", |x| {
            std::array::from_fn(|c| (x[0][c] + x[1][c] + x[2][c]) / 3f32.sqrt())
        }),
    ];
    for (flag, pool) in modes {
        for normalize in [false, true] {
            let mut modules =
                vec![json!({"type": "Transformer", "path": ""}), json!({"type": "Pooling", "path": "p"})];
            modules.extend(normalize.then(|| json!({"type": "Normalize", "path": "n"})));
            let files = [("modules.json", json!(modules)), ("p/config.json", json!({flag: true}))];
            let dir = grafted("bert", json!({}), Vec::new(), &files);
            let checkpoint = open(&dir);
            assert_eq!(checkpoint.task().unwrap(), Task::Embedding);
            let outputs =
                encoder(&checkpoint, Task::Embedding, &inputs(&[&[5, 6, 7, 0]], Some(&[&[1, 1, 1, 0]])))
                    .unwrap();
            let hidden = values(&outputs["last_hidden_state"]);
            let mut want = pool(hidden.as_chunks::<36>().0);
            if normalize {
                let length = want.iter().map(|x| x * x).sum::<f32>().sqrt();
                want = want.map(|x| x / length);
            }
            let got = values(&outputs["embedding"]);
            let worst = got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, f32::max);
            assert!(got.len() == 36 && worst < 1e-5, "{flag}, normalized {normalize}: off by {worst}");
        }
    }
    let plain = Checkpoint::open_dir(&models().join("tiny/bert")).unwrap();
    let outputs = encoder(&plain, Task::Embedding, &inputs(&[&[5]], None)).unwrap();
    assert_eq!(values(&outputs["embedding"]), values(&outputs["last_hidden_state"]), "the mean of one token");
}

#[test]
fn padding_changes_nothing_and_is_never_nan() {
    for name in ["bert", "roberta", "mpnet", "albert", "modernbert", "distilbert", "electra"] {
        let checkpoint = Checkpoint::open_dir(&models().join("tiny").join(name)).unwrap();
        let pad = u32::try_from(checkpoint.config.usize(&["pad_token_id"]).unwrap()).unwrap();
        let run = |inputs: &Inputs| {
            values(&encoder(&checkpoint, Task::FeatureExtraction, inputs).unwrap()["last_hidden_state"])
        };
        let alone = run(&inputs(&[&[5, 9, 7]], None));
        let padded = run(&inputs(&[&[5, 9, 7, pad, pad], &[pad; 5]], Some(&[&[1, 1, 1, 0, 0], &[0; 5]])));
        let worst = alone.iter().zip(&padded).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-5, "{name}: {worst}");
        assert!(padded.iter().all(|x| x.is_finite()), "{name}: not finite");
    }
}

/// 42 rows of positions that begin after padding id 1 leave 40.
#[test]
fn positions_run_out_where_they_should() {
    for (name, longest) in
        [("xlm-roberta", 40), ("roberta", 40), ("mpnet", 40), ("bert", 40), ("modernbert", 64)]
    {
        let checkpoint = Checkpoint::open_dir(&models().join("tiny").join(name)).unwrap();
        let run = |n: usize| encoder(&checkpoint, Task::FeatureExtraction, &inputs(&[&vec![7; n]], None));
        assert!(run(longest).is_ok(), "{name}: {:?}", run(longest).err());
        assert!(run(longest + 1).is_err(), "{name}: {} tokens were taken", longest + 1);
    }
}

#[test]
fn what_cannot_be_run_is_refused() {
    let fine = inputs(&[&[5, 6]], None);
    let ragged = inputs(&[&[5, 6], &[5]], None);
    let types = Inputs { token_type_ids: Some(vec![vec![0, 1]]), ..fine.clone() };
    let rows: [(&str, Value, Task, &Inputs, &str); 11] = [
        ("bert", json!({"model_type": "bort"}), Task::FeatureExtraction, &fine, "`modernbert`"),
        ("bert", json!({"hidden_act": "snake"}), Task::FeatureExtraction, &fine, "`snake`"),
        (
            "bert",
            json!({"position_embedding_type": "relative_key"}),
            Task::FeatureExtraction,
            &fine,
            "relative_key",
        ),
        ("bert", json!({"num_attention_heads": 5}), Task::FeatureExtraction, &fine, "5 heads"),
        ("albert", json!({"num_hidden_layers": 1u64 << 60}), Task::FeatureExtraction, &fine, "1 to 1024"),
        ("bert", json!({}), Task::SequenceClassification, &fine, "`classifier.weight`"),
        ("bert", json!({}), Task::PreTraining, &fine, "discriminator"),
        ("bert", json!({}), Task::FeatureExtraction, &ragged, "a row of 1 tokens, expected 2"),
        ("bert", json!({}), Task::FeatureExtraction, &inputs(&[&[131]], None), "131 rows"),
        ("distilbert", json!({}), Task::FeatureExtraction, &types, "token_type_ids"),
        (
            "bert-mlm",
            json!({"tie_word_embeddings": false}),
            Task::MaskedLm,
            &fine,
            "`cls.predictions.decoder.weight`",
        ),
    ];
    for (name, config, task, inputs, words) in rows {
        let dir = grafted(name, config, Vec::new(), &[]);
        let error = encoder(&open(&dir), task, inputs).unwrap_err().to_string();
        assert!(error.contains(words), "`{words}` is not in: {error}");
    }
}

/// A copy of a stored checkpoint with other config values, more tensors and more files.
fn grafted(name: &str, config: Value, tensors: Vec<Raw>, files: &[(&str, Value)]) -> TempDir {
    let source = models().join("tiny").join(name);
    let read = |file: &str| std::fs::read(source.join(file)).unwrap();
    let mut merged: serde_json::Map<String, Value> = serde_json::from_slice(&read("config.json")).unwrap();
    merged.extend(config.as_object().unwrap().clone());
    let mut all = tensors;
    let weights = std::fs::read_dir(&source).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    for file in weights.filter(|n| n.starts_with("model") && n.ends_with(".safetensors")) {
        let bytes = read(&file);
        for (name, t) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let dtype: &str = match t.dtype() {
                safetensors::Dtype::F32 => "F32",
                safetensors::Dtype::F16 => "F16",
                safetensors::Dtype::BF16 => "BF16",
                safetensors::Dtype::I64 => "I64",
                other => panic!("{other:?}"),
            };
            all.push((name, dtype, t.shape().to_vec(), t.data().to_vec()));
        }
    }
    let config = Value::Object(merged).to_string().into_bytes();
    let mut written = vec![("config.json", config), ("model.safetensors", pack(&all))];
    written.extend(files.iter().map(|(name, json)| (*name, json.to_string().into_bytes())));
    folder(&written)
}

fn open(dir: &TempDir) -> Checkpoint {
    Checkpoint::open_dir(dir.path()).unwrap()
}

fn inputs(ids: &[&[u32]], mask: Option<&[&[u32]]>) -> Inputs {
    let rows = |rows: &[&[u32]]| rows.iter().map(|row| row.to_vec()).collect::<Vec<_>>();
    let ones = ids.iter().map(|row| vec![1; row.len()]).collect();
    Inputs { input_ids: rows(ids), attention_mask: mask.map_or(ones, rows), token_type_ids: None }
}

fn values(tensor: &candle_core::Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn classifier() -> Vec<Raw> {
    vec![raw_f32("classifier.weight", &[2, 36], &picking([5, 9])), bias("classifier", 2)]
}

fn layer_norm(x: Vec<f32>, epsilon: f32) -> Vec<f32> {
    let mean = x.iter().sum::<f32>() / 36.0;
    let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / 36.0;
    x.into_iter().map(|x| (x - mean) / (variance + epsilon).sqrt()).collect()
}

fn picking(channels: [usize; 2]) -> Vec<f32> {
    channels.iter().flat_map(|c| (0..36).map(move |i| if i == *c { 1.0 } else { 0.0 })).collect()
}

fn bias(name: &str, width: usize) -> Raw {
    raw_f32(&format!("{name}.bias"), &[width], &vec![0.0; width])
}

/// The series of the error function, enough digits for values of a few units.
fn erf(x: f32) -> f32 {
    let x = f64::from(x);
    let (mut term, mut sum) = (x, x);
    for n in 1..100 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    #[expect(clippy::cast_possible_truncation, reason = "compared in 32 bits")]
    let erf = (sum * 2.0 / std::f64::consts::PI.sqrt()) as f32;
    erf
}

fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models")
}

struct Stored {
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Stored {
    fn floats(&self) -> Vec<f32> {
        self.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    fn rows(&self) -> Vec<Vec<u32>> {
        let ids: Vec<u32> = self
            .bytes
            .as_chunks::<8>()
            .0
            .iter()
            .map(|b| u32::try_from(i64::from_le_bytes(*b)).unwrap())
            .collect();
        ids.chunks(self.shape[1]).map(<[u32]>::to_vec).collect()
    }
}

fn stored(path: &Path) -> BTreeMap<String, Stored> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors();
    tensors
        .into_iter()
        .map(|(name, t)| (name, Stored { shape: t.shape().to_vec(), bytes: t.data().to_vec() }))
        .collect()
}

/// The largest difference over all outputs, relative to the spread of the output; padding is left out.
fn worst(dir: &Path, reference: &Path) -> f32 {
    let stored = stored(reference);
    let inputs = Inputs {
        input_ids: stored["input_ids"].rows(),
        attention_mask: stored["attention_mask"].rows(),
        token_type_ids: stored.get("token_type_ids").map(Stored::rows),
    };
    let checkpoint = Checkpoint::open(dir.to_str().unwrap()).unwrap();
    let task = checkpoint.task().unwrap();
    let outputs = encoder(&checkpoint, task, &inputs).unwrap();
    let known = ["last_hidden_state", "pooler_output", "logits"];
    let expected: Vec<_> = stored.iter().filter(|(name, _)| known.contains(&name.as_str())).collect();
    assert!(!expected.is_empty());
    let compare = |(name, want): &(&String, &Stored)| {
        let got = outputs.get(*name).unwrap_or_else(|| panic!("{}: no {name}", dir.display()));
        assert_eq!(got.dims(), want.shape, "{}: {name}", dir.display());
        let got = got.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        difference(&got, &want.floats(), &want.shape, &inputs.attention_mask)
    };
    expected.iter().map(compare).fold(0.0, f32::max)
}

fn difference(got: &[f32], want: &[f32], shape: &[usize], mask: &[Vec<u32>]) -> f32 {
    let real: Vec<bool> = mask.iter().flatten().map(|m| *m != 0).collect();
    let by_token = shape.len() > 1 && shape[0] * shape[1] == real.len();
    let each = if by_token { got.len() / real.len() } else { 1 };
    let kept = |i: usize| !by_token || real[i / each];
    let pairs: Vec<(f32, f32)> =
        got.iter().zip(want).enumerate().filter(|(i, _)| kept(*i)).map(|(_, (a, b))| (*a, *b)).collect();
    let (low, high) = pairs.iter().fold((f32::MAX, f32::MIN), |(l, h), (_, w)| (l.min(*w), h.max(*w)));
    pairs.iter().map(|(g, w)| if g.is_nan() { f32::INFINITY } else { (g - w).abs() }).fold(0.0, f32::max)
        / (high - low)
}
