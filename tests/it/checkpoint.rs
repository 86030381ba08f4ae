//! Checkpoints as they come: what is read, what is refused, and with which words.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use silane::{
    checkpoint::{Checkpoint, Config, Pooling, PoolingMode, Task, Tokenizer, hub, tokenizer_files},
    mil::{DType, Numbers},
};
use tempfile::TempDir;

/// A tensor to be written: name, dtype as safetensors spells it, shape, bytes.
pub(crate) type Raw = (String, &'static str, Vec<usize>, Vec<u8>);

pub(crate) fn raw(name: &str, dtype: &'static str, shape: &[usize], bytes: impl Into<Vec<u8>>) -> Raw {
    (name.to_string(), dtype, shape.to_vec(), bytes.into())
}

pub(crate) fn raw_f32(name: &str, shape: &[usize], values: &[f32]) -> Raw {
    raw(name, "F32", shape, values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
}

/// A safetensors file.
pub(crate) fn pack(tensors: &[Raw]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let begin = data.len();
        data.extend_from_slice(bytes);
        header.insert(
            name.clone(),
            json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()]}),
        );
    }
    with_header(Value::Object(header).to_string().as_bytes(), &data)
}

fn with_header(header: &[u8], data: &[u8]) -> Vec<u8> {
    let mut file = u64::try_from(header.len()).unwrap().to_le_bytes().to_vec();
    file.extend_from_slice(header);
    file.extend_from_slice(data);
    file
}

/// A folder with these files.
pub(crate) fn folder(files: &[(&str, Vec<u8>)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    dir
}

fn bytes(json: &Value) -> Vec<u8> {
    json.to_string().into_bytes()
}

fn bert() -> Vec<u8> {
    bytes(&json!({"model_type": "bert", "architectures": ["BertModel"]}))
}

fn open(dir: &TempDir) -> silane::Result<Checkpoint> {
    Checkpoint::open(dir.path().to_str().unwrap())
}

/// Opens a folder of these files beside a `config.json`, which must fail, and says how.
fn refusal(files: &[(&str, Vec<u8>)]) -> String {
    let mut all = vec![("config.json", bert())];
    all.extend(files.iter().cloned());
    open(&folder(&all)).expect_err("the checkpoint was opened").to_string()
}

fn assert_says(message: &str, words: &[&str]) {
    for word in words {
        assert!(message.contains(word), "`{word}` is not in: {message}");
    }
}

fn tiny(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/tiny").join(name)
}

#[test]
fn pointers_and_cut_files_are_told_apart() {
    let whole = pack(&[raw_f32("w", &[2], &[1.0, 2.0])]);
    let mut long_header = whole.clone();
    long_header[0] = 200;
    let mut huge_header = whole.clone();
    huge_header[7] = 0x7f;
    let mut longer = whole.clone();
    longer.push(0);
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 90868376\n";
    let (n, cut) = (whole.len().to_string(), (whole.len() - 1).to_string());
    for (file, words) in [
        (pointer.as_bytes().to_vec(), vec!["Git LFS pointer", "90868376", "git lfs pull"]),
        (Vec::new(), vec!["truncated", "0 bytes"]),
        (whole[..4].to_vec(), vec!["truncated", "4 bytes"]),
        (whole[..whole.len() - 1].to_vec(), vec!["truncated", &n, &cut]),
        (long_header, vec!["truncated", "208", &n]),
        (huge_header, vec!["not a safetensors file", "at most"]),
        (longer, vec![n.as_str()]),
    ] {
        let message = refusal(&[("model.safetensors", file)]);
        assert_says(&message, &words);
        assert_says(&message, &["model.safetensors"]);
    }
}

#[test]
fn lying_headers_are_refused() {
    let entry = |dtype: &str, shape: Value, offsets: Value| {
        let header = json!({"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}});
        with_header(&bytes(&header), &[0; 8])
    };
    // The sizes follow from the offsets, so only how the two lie is wrong.
    let two = |a: [u64; 2], b: [u64; 2]| {
        let t = |[x, y]: [u64; 2]| json!({"dtype": "U8", "shape": [y - x], "data_offsets": [x, y]});
        with_header(&bytes(&json!({"a": t(a), "b": t(b)})), &[0; 8])
    };
    for (file, words) in [
        (entry("F32", json!([2]), json!([0, 4])), "takes 8 bytes"),
        (entry("F32", json!([2]), json!([8, 0])), "offsets"),
        (entry("F32", json!([1u64 << 40, 1u64 << 40]), json!([0, 8])), "too large"),
        (entry("F32", json!([u64::MAX]), json!([0, 8])), "too large"),
        (entry("F32", json!([2]), json!([u64::MAX - 8, u64::MAX])), "offsets"),
        (entry("F32", json!([-2]), json!([0, 8])), "bad header entry"),
        (entry("F32", json!([2, 100]), json!([0, 800])), "truncated"),
        (entry("F4", json!([16]), json!([0, 8])), "`F4`"),
        (two([0, 5], [4, 8]), "overlaps"),
        (two([0, 8], [0, 8]), "overlaps"),
        (two([0, 3], [4, 8]), "hole"),
        (two([1, 4], [4, 8]), "hole"),
        (two([0, 4], [4, 7]), "describes"),
        (with_header(b"[]", &[]), "not valid JSON"),
        (with_header(b"{\"w\": 1}", &[]), "tensor `w`"),
        (with_header(&[b'['; 5000], &[]), "not valid JSON"),
    ] {
        assert_says(&refusal(&[("model.safetensors", file)]), &[words, "model.safetensors"]);
    }
}

/// Whatever is broken, opening and reading end in a value or an error.
#[test]
fn damage_never_panics() {
    let config = std::fs::read(tiny("bert").join("config.json")).unwrap();
    let whole = pack(&[
        raw_f32("a.weight", &[4, 3], &[1.5; 12]),
        raw("b", "BF16", &[3], [0; 6]),
        raw("c.mask", "BOOL", &[2, 1], [1, 0]),
        raw("d", "I64", &[], 7i64.to_le_bytes()),
    ]);
    let mut state = 1u64;
    let mut random = |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).unwrap() % n
    };
    let dir = folder(&[("config.json", config), ("model.safetensors", whole.clone())]);
    let mut refused = 0;
    for round in 0..600 {
        let mut file = whole.clone();
        match round % 3 {
            0 => file.truncate(random(whole.len())),
            1 => file[random(whole.len())] ^= 1 << random(8),
            _ => {
                let at = random(whole.len());
                let piece = file[at..whole.len().min(at + 9)].to_vec();
                file.splice(at..at, piece);
            }
        }
        std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
        match open(&dir) {
            Err(_) => refused += 1,
            Ok(checkpoint) => {
                for name in checkpoint.tensors.names() {
                    let _ = half(&checkpoint, name).and_then(|w| w.bytes());
                }
            }
        }
    }
    assert!(refused > 400, "only {refused} of 600 were refused");
}

/// A tensor as an fp16 package stores it.
fn half(checkpoint: &Checkpoint, name: &str) -> silane::Result<silane::mil::Weight> {
    let weight = checkpoint.tensors.float_weight(name)?;
    Ok(weight.map("fp16", DType::F16, weight.shape.clone(), Ok))
}

#[test]
fn packed_checkpoints_are_refused() {
    let quantized = |method: &str| {
        bytes(&json!({"model_type": "llama", "quantization_config": {"quant_method": method, "bits": 4}}))
    };
    let packed = |name: &str, dtype| pack(&[raw(name, dtype, &[2], [0; 8])]);
    let plain = bert();
    for (config, weights, words) in [
        (quantized("gptq"), packed("l.qweight", "I32"), vec!["gptq", "l.qweight", "config.json"]),
        (quantized("awq"), packed("l.qzeros", "I32"), vec!["awq", "l.qzeros"]),
        (
            quantized("bitsandbytes"),
            packed("l.weight.absmax", "F32"),
            vec!["bitsandbytes", "l.weight.absmax"],
        ),
        (quantized("hqq"), packed("l.weight", "F32"), vec!["hqq"]),
        (plain.clone(), packed("l.qweight", "I32"), vec!["l.qweight", "gptq"]),
        (plain, packed("l.g_idx", "I32"), vec!["l.g_idx"]),
    ] {
        let dir = folder(&[("config.json", config), ("model.safetensors", weights)]);
        assert_says(&open(&dir).unwrap_err().to_string(), &words);
    }
}

#[test]
fn fp8_needs_its_scales() {
    let config = bytes(&json!({
        "model_type": "llama",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 3]},
    }));
    // 0x38 is 1, 0x40 is 2
    let eights = raw("w", "F8_E4M3", &[3, 4], [0x38; 8].into_iter().chain([0x40; 4]).collect::<Vec<u8>>());
    let files =
        |tensors: &[Raw]| folder(&[("config.json", config.clone()), ("model.safetensors", pack(tensors))]);
    assert_says(
        &open(&files(std::slice::from_ref(&eights))).unwrap_err().to_string(),
        &["fp8e4m3", "w_scale_inv"],
    );
    let wrong = raw_f32("w_scale_inv", &[1, 2], &[1.0; 2]);
    assert_says(&open(&files(&[eights.clone(), wrong])).unwrap_err().to_string(), &["[1, 2]", "[2, 2]"]);
    let scale = raw_f32("w_scale_inv", &[2, 2], &[0.5, 3.0, 0.25, 10.0]);
    let dir = files(&[eights, scale]);
    let values = open(&dir).unwrap().tensors.floats("w").unwrap();
    assert_eq!(values, [0.5, 0.5, 0.5, 3.0, 0.5, 0.5, 0.5, 3.0, 0.5, 0.5, 0.5, 20.0]);
}

#[test]
fn pickles_are_never_read() {
    let message = refusal(&[("pytorch_model.bin", vec![0x80, 2])]);
    assert_says(&message, &["pytorch_model.bin", "pickle", "save_pretrained"]);
    assert_says(&refusal(&[("model.gguf", Vec::new())]), &["model.gguf"]);
    assert_says(&refusal(&[]), &["there is no `model.safetensors`"]);

    let weights = pack(&[raw_f32("w", &[1], &[1.0])]);
    let both = folder(&[
        ("config.json", bert()),
        ("model.safetensors", weights.clone()),
        ("pytorch_model.bin", vec![0]),
    ]);
    assert_says(&open(&both).unwrap().notes.join("\n"), &["`pytorch_model.bin` is ignored"]);
    let index = folder(&[
        ("config.json", bert()),
        ("model.safetensors", weights),
        ("pytorch_model.bin.index.json", b"{}".to_vec()),
    ]);
    assert_eq!(open(&index).unwrap().notes, Vec::<String>::new());
}

#[test]
fn index_and_shards_must_agree() {
    let (one, two) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    let index = |map: Value| ("model.safetensors.index.json", bytes(&json!({"weight_map": map})));
    let a = |v: f32| pack(&[raw_f32("a", &[1], &[v])]);
    let ab = |v: f32| pack(&[raw_f32("a", &[1], &[v]), raw_f32("b", &[1], &[2.0])]);
    let both = json!({"a": one, "b": two});
    for (files, words) in [
        (vec![index(both.clone()), (one, a(1.0))], vec!["`b`", two, "not there"]),
        (vec![index(json!({"a": two, "b": two})), (one, a(1.0)), (two, a(1.0))], vec!["`b`", two]),
        (vec![index(json!({"a": one, "b": one})), (one, a(1.0)), (two, ab(1.0))], vec!["`b`", one]),
        (vec![index(json!({"a": "../x.safetensors"})), (one, a(1.0))], vec!["../x.safetensors", "not there"]),
        (vec![index(both.clone()), (one, a(1.0)), (two, ab(3.0))], vec!["`a`", one, two, "different"]),
        (vec![(two, ab(1.0))], vec!["1 of 2 shards"]),
    ] {
        assert_says(&refusal(&files), &words);
    }

    let fine = |files: Vec<(&str, Vec<u8>)>| {
        let dir = folder(&[vec![("config.json", bert())], files].concat());
        let checkpoint = open(&dir).unwrap();
        assert_eq!(checkpoint.tensors.floats("b").unwrap(), [2.0]);
        checkpoint.notes.join("\n")
    };
    assert_says(
        &fine(vec![
            index(json!({"a": one, "c": two})),
            (one, ab(1.0)),
            (two, pack(&[raw_f32("c", &[1], &[0.0])])),
        ]),
        &["does not list", "`b`"],
    );
    assert_eq!(fine(vec![index(json!({"a": two, "b": two})), (one, a(1.0)), (two, ab(1.0))]), "");
    assert_says(&fine(vec![(one, a(1.0)), (two, ab(1.0))]), &["all 2 shards"]);
}

#[test]
fn adapters_are_refused_with_their_base() {
    let adapter = bytes(&json!({"base_model_name_or_path": "org/base", "peft_type": "LORA"}));
    let weights = pack(&[raw_f32("base_model.model.x.lora_A.weight", &[1], &[1.0])]);
    let files = [("adapter_config.json", adapter), ("adapter_model.safetensors", weights)];
    assert_says(&refusal(&files), &["adapter", "org/base", "merge"]);
    assert_says(&open(&folder(&files)).unwrap_err().to_string(), &["adapter", "org/base"]);
}

#[test]
fn values_beyond_fp16_are_never_silent() {
    let bf16 = |values: &[f32]| -> Vec<u8> {
        values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect()
    };
    let dir = folder(&[
        ("config.json", bert()),
        (
            "model.safetensors",
            pack(&[
                raw("wide", "BF16", &[5], bf16(&[1.0, 1e5, -70000.0, 1e-9, f32::NAN])),
                raw("fine", "BF16", &[3], bf16(&[1.5, 65280.0, 1e-9])),
                raw("inf", "F16", &[1], half::f16::INFINITY.to_le_bytes()),
                raw_f32("edge", &[2], &[65519.0, 65520.0]),
            ]),
        ),
    ]);
    let checkpoint = open(&dir).unwrap();
    for (name, words) in [
        ("wide", vec!["ckpt:wide", "3 of ", "largest 99840", "1 not a number"]),
        ("inf", vec!["ckpt:inf", "1 of 1", "inf"]),
        ("edge", vec!["ckpt:edge", "1 of 2", "65520"]),
    ] {
        let message = half(&checkpoint, name).unwrap().bytes().err().expect(name).to_string();
        assert_says(&message, &words);
    }
    let fine = half(&checkpoint, "fine").unwrap();
    assert_eq!((fine.dtype, fine.floats().unwrap()), (DType::F16, vec![1.5, 65280.0, 0.0]));
}

#[test]
fn every_dtype_is_read_and_integers_are_no_floats() {
    let rows: Vec<(&str, DType, Vec<u8>, Numbers)> = vec![
        ("F64", DType::F64, 1.5f64.to_le_bytes().to_vec(), Numbers::Floats(vec![1.5])),
        ("F32", DType::F32, 1.5f32.to_le_bytes().to_vec(), Numbers::Floats(vec![1.5])),
        ("F16", DType::F16, vec![0, 0x3e], Numbers::Floats(vec![1.5])),
        ("BF16", DType::BF16, vec![0xc0, 0x3f], Numbers::Floats(vec![1.5])),
        ("I8", DType::I8, vec![0xff], Numbers::Ints(vec![-1])),
        ("U8", DType::U8, vec![0xff], Numbers::Ints(vec![255])),
        ("I16", DType::I16, vec![0xfe, 0xff], Numbers::Ints(vec![-2])),
        ("I32", DType::I32, 7i32.to_le_bytes().to_vec(), Numbers::Ints(vec![7])),
        ("I64", DType::I64, (-7i64).to_le_bytes().to_vec(), Numbers::Ints(vec![-7])),
        ("BOOL", DType::Bool, vec![1], Numbers::Bools(vec![true])),
    ];
    let tensors: Vec<Raw> = rows.iter().map(|(d, _, bytes, _)| raw(d, d, &[1], bytes.clone())).collect();
    let dir = folder(&[("config.json", bert()), ("model.safetensors", pack(&tensors))]);
    let checkpoint = open(&dir).unwrap();
    for (name, dtype, _, numbers) in rows {
        let weight = checkpoint.tensors.weight(name).unwrap();
        assert_eq!((weight.dtype, weight.key.as_str()), (dtype, format!("ckpt:{name}").as_str()));
        assert_eq!(weight.numbers().unwrap(), numbers, "{name}");
        assert_eq!(half(&checkpoint, name).is_ok(), dtype.is_float(), "{name}");
        assert_eq!(checkpoint.tensors.floats(name).is_ok(), dtype.is_float(), "{name}");
    }
}

#[test]
fn names_are_looked_up_and_suggested() {
    let checkpoint = Checkpoint::open(tiny("bert-mlm").to_str().unwrap()).unwrap();
    let tensors = &checkpoint.tensors;
    let gamma = tensors.weight("bert.embeddings.LayerNorm.weight").unwrap();
    assert_eq!(gamma.key, "ckpt:bert.embeddings.LayerNorm.gamma");
    assert_eq!(tensors.shape("bert.embeddings.LayerNorm.bias").unwrap(), [36]);
    let missing = tensors.weight("embeddings.word_embeddings.weight").unwrap_err();
    assert_says(missing.message(), &["no tensor `embeddings.word_embeddings.weight`"]);
    assert_says(missing.way_out().unwrap(), &["`bert.embeddings.word_embeddings.weight`"]);
}

#[test]
fn config_errors_name_file_and_keys() {
    let dir = folder(&[(
        "config.json",
        bytes(&json!({
            "hidden_size": "wide", "n_layers": 3, "eps": 1, "nothing": null,
            "num_labels": 3, "id2label": {"0": "a", "1": "b"},
            "text_config": {"heads": -1},
        })),
    )]);
    let config = Config::open(&dir.path().join("config.json")).unwrap();
    assert_eq!(config.usize(&["num_hidden_layers", "n_layers"]).unwrap(), 3);
    assert_eq!(config.f64(&["eps"]).unwrap(), 1.0);
    assert_eq!(config.usize_or(&["nothing"], 5).unwrap(), 5);
    assert_eq!(config.labels().unwrap(), ["LABEL_0", "LABEL_1", "LABEL_2"]);
    for (error, words) in [
        (config.usize(&["hidden_size", "dim"]).unwrap_err(), vec!["`hidden_size`", "wide", "whole number"]),
        (config.bool(&["a", "b"]).unwrap_err(), vec!["no `a` or `b`"]),
        (config.model_type().unwrap_err(), vec!["no `model_type`"]),
        (
            config.nested("text_config").unwrap().usize(&["heads"]).unwrap_err(),
            vec!["`text_config.heads`", "-1"],
        ),
    ] {
        assert_says(error.message(), &words);
        assert_says(error.message(), &["config.json"]);
    }
}

#[test]
fn tasks_follow_from_the_class() {
    for (class, model_type, task) in [
        ("BertModel", "bert", Task::FeatureExtraction),
        ("BertForMaskedLM", "bert", Task::MaskedLm),
        ("BertForPreTraining", "bert", Task::MaskedLm),
        ("ElectraForPreTraining", "electra", Task::PreTraining),
        ("RobertaForSequenceClassification", "roberta", Task::SequenceClassification),
        ("DistilBertForTokenClassification", "distilbert", Task::TokenClassification),
        ("BertForQuestionAnswering", "bert", Task::QuestionAnswering),
        ("LlamaForCausalLM", "llama", Task::CausalLm),
        ("GPT2LMHeadModel", "gpt2", Task::CausalLm),
        ("GPT2Model", "gpt2", Task::CausalLm),
        ("Gemma3TextModel", "gemma3_text", Task::CausalLm),
        ("RwkvForCausalLM", "rwkv", Task::CausalLm),
    ] {
        let config = config(&json!({"model_type": model_type, "architectures": [class]}));
        assert_eq!(Task::of(&config).unwrap(), task, "{class}");
    }
    for class in ["BertLMHeadModel", "RobertaForCausalLM"] {
        let model_type = if class.starts_with("Bert") { "bert" } else { "roberta" };
        let error =
            Task::of(&config(&json!({"model_type": model_type, "architectures": [class]}))).unwrap_err();
        assert_says(&error.to_string(), &[class, "--task"]);
    }
    assert_eq!("text-generation".parse::<Task>().unwrap(), Task::CausalLm);
    for task in Task::ALL {
        assert_eq!(task.to_string().parse::<Task>().unwrap(), task);
    }
    assert_says(&"poetry".parse::<Task>().unwrap_err().to_string(), &["poetry", "`masked-lm`"]);
}

/// Another architecture is not what the type says, however much its tensors look alike.
#[test]
fn a_class_of_another_type_is_refused() {
    let read = |model_type: &str, class: &str| {
        let config = config(&json!({"model_type": model_type, "architectures": [class]}));
        config.model_type().map(str::to_string)
    };
    for (model_type, class) in [
        ("llama", "PhiForCausalLM"),
        ("qwen2", "Qwen2MoeForCausalLM"),
        ("phi", "Phi3ForCausalLM"),
        ("gpt_neo", "GPTNeoXForCausalLM"),
        ("gemma3_text", "Gemma3nForCausalLM"),
        ("bert", "RobertaForMaskedLM"),
        ("llama", "LlamaBiModel"),
    ] {
        let error = read(model_type, class).unwrap_err().to_string();
        assert_says(&error, &[&format!("`{model_type}`"), &format!("`{class}`"), "--as"]);
    }
    for (model_type, class) in [
        ("gpt_neox", "GPTNeoXForCausalLM"),
        ("gemma3_text", "Gemma3ForCausalLM"),
        ("xlm-roberta", "XLMRobertaModel"),
        ("mixtral", "MixtralForCausalLM"),
        ("unheard_of", "PhiForCausalLM"),
    ] {
        assert_eq!(read(model_type, class).unwrap(), model_type);
    }
}

#[test]
fn the_tie_is_read_where_it_is() {
    for (json, tied) in [
        (json!({}), None),
        (json!({"tie_word_embeddings": true}), Some(true)),
        (json!({"text_config": {"tie_word_embeddings": true}}), Some(true)),
        (json!({"tie_word_embeddings": false, "text_config": {"tie_word_embeddings": true}}), Some(false)),
        (json!({"text_config": {}}), None),
    ] {
        assert_eq!(config(&json).tied_embeddings().unwrap(), tied, "{json}");
    }
}

fn config(json: &Value) -> Config {
    let dir = folder(&[("config.json", bytes(json))]);
    Config::open(&dir.path().join("config.json")).unwrap()
}

#[test]
fn sentence_transformers_files_are_read() {
    let module = |kind: &str, path: &str| json!({"type": format!("sentence_transformers.models.{kind}"), "path": path});
    let open = |modules: Value, pooling: Value| {
        let dir = folder(&[
            ("modules.json", bytes(&modules)),
            ("1_Pooling/config.json", bytes(&pooling)),
            ("sentence_bert_config.json", bytes(&json!({"max_seq_length": 256}))),
        ]);
        Pooling::open(dir.path())
    };
    let (transformer, pooling) = (module("Transformer", ""), module("Pooling", "1_Pooling"));
    let mean = json!({"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": false});
    let read = open(json!([transformer, pooling, module("Normalize", "2_Normalize")]), mean.clone()).unwrap();
    let expected = Pooling { mode: PoolingMode::Mean, normalize: true, max_sequence_length: Some(256) };
    assert_eq!(read, Some(expected));
    let cls = open(json!([transformer, pooling]), json!({"pooling_mode": "cls"})).unwrap().unwrap();
    assert_eq!((cls.mode, cls.normalize), (PoolingMode::Cls, false));

    let dense = json!([transformer, pooling, module("Dense", "2_Dense")]);
    let two = json!({"pooling_mode_mean_tokens": true, "pooling_mode_max_tokens": true});
    for (result, words) in [
        (open(dense, mean.clone()), vec!["models.Dense", "module 2"]),
        (open(json!([transformer]), mean), vec!["no pooling module"]),
        (open(json!([transformer, pooling]), two), vec!["2 pooling modes"]),
        (open(json!([transformer, module("Pooling", "../x")]), json!({})), vec!["`../x`"]),
    ] {
        assert_says(&result.unwrap_err().to_string(), &words);
    }
    assert_eq!(Pooling::open(&tiny("bert")).unwrap(), None);
}

#[test]
fn tokenizers_agree_with_transformers() {
    for name in ["bert", "roberta", "xlm-roberta", "modernbert", "albert"] {
        let dir = tiny(name);
        let tokenizer = Tokenizer::open(&dir).unwrap();
        let file = std::fs::read(dir.join("reference.safetensors")).unwrap();
        let (_, header) = safetensors::SafeTensors::read_metadata(&file).unwrap();
        let metadata = header.metadata().clone().unwrap();
        let pairs: Vec<(String, Vec<u32>)> = serde_json::from_str(&metadata["tokenizer_check"]).unwrap();
        assert!(!pairs.is_empty());
        for (text, ids) in pairs {
            assert_eq!(tokenizer.encode(&text).unwrap().ids, ids, "{name}: {text}");
        }
        assert!(tokenizer.mask_id.is_some() && tokenizer.pad_id.is_some(), "{name}");
        let copied: Vec<PathBuf> = tokenizer_files(&dir);
        assert_eq!(copied.len(), 3, "{name}: {copied:?}");
    }
}

#[test]
fn texts_are_cut_padded_and_decoded() {
    let tokenizer = Tokenizer::open(&tiny("bert")).unwrap();
    let (text, short) = ("the cat and the dog", "the cat");
    let whole = tokenizer.encode(text).unwrap();
    let cut = tokenizer.encode_cut(text, 5).unwrap();
    let end = whole.ids.last().unwrap();
    assert_eq!(cut.ids, [&whole.ids[..4], std::slice::from_ref(end)].concat());
    assert_eq!(tokenizer.encode_cut(text, 100).unwrap(), whole);
    let batch = tokenizer.encode_batch(&[text, short], None).unwrap();
    assert_eq!(batch[0], whole);
    let real = tokenizer.encode(short).unwrap().ids.len();
    assert_eq!(batch[1].ids.len(), whole.ids.len());
    assert!(batch[1].ids[real..].iter().all(|id| Some(*id) == tokenizer.pad_id));
    assert_eq!(batch[1].attention_mask.iter().sum::<u32>(), u32::try_from(real).unwrap());
    assert_eq!(tokenizer.encode_batch(&[text], Some(7)).unwrap()[0].ids.len(), 7);
    let rows = tokenizer.encode_rows(&[text; 5].join(" "), 7).unwrap();
    let own: Vec<u32> = rows.iter().flat_map(|row| row.ids[1..row.ids.len() - 1].to_vec()).collect();
    assert_eq!(own, whole.ids[1..whole.ids.len() - 1].repeat(5));
    assert!(rows.iter().all(|row| row.ids[0] == whole.ids[0] && row.ids.last() == Some(end)), "{rows:?}");
    assert!(rows[..rows.len() - 1].iter().all(|row| row.ids.len() == 7), "{rows:?}");
    let pair = tokenizer.encode_pair(short, short).unwrap();
    assert!(pair.type_ids.contains(&1) && pair.ids.len() > real, "{pair:?}");
    assert_eq!(tokenizer.decode(&whole.ids, true).unwrap(), text);
}

#[test]
fn hub_ids_are_found_in_the_cache() {
    let cache = folder(&[
        ("models--org--name/refs/main", b"abc123\n".to_vec()),
        ("models--org--name/snapshots/abc123/config.json", bert()),
        ("models--org--half/refs/main", b"abc123".to_vec()),
    ]);
    let find = |id: &str| hub::resolve_in(cache.path(), id);
    let snapshot = cache.path().join("models--org--name/snapshots/abc123");
    assert_eq!(find("org/name").unwrap(), snapshot);
    assert_eq!(find("org/name@abc123").unwrap(), snapshot);
    for (id, words) in [
        ("org/other", "hf download org/other"),
        ("org/half", "no snapshot"),
        ("org/name@v2", "--revision v2"),
        ("../name", "not a Hub id"),
        ("a/b/c", "not a Hub id"),
        ("org/name@../..", "not a Hub id"),
    ] {
        assert_says(&find(id).unwrap_err().to_string(), &[id, words]);
    }
}
