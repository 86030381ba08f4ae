//! Language models: what comes out, how parts fit each other, and what is told about their size.

use std::fs;

use expect_test::expect;
use serde_json::{Value, json};
use silane::{
    interp::Precision,
    mil::{DType, Type},
    nn::cache::Update,
    package,
};

use super::{
    Bench,
    models::{
        Model,
        decoders::{Text, chunks, programs},
    },
};

const SIZES: [&str; 4] = ["--context-length", "64", "--prefill-chunk", "8"];

fn convert(bench: &Bench, checkpoint: &str, output: &str, options: &[&str]) -> String {
    let ran = bench.run(&[&["convert", checkpoint, "-o", output][..], &SIZES, options].concat());
    assert_eq!(ran.code, 0, "{}", ran.err);
    ran.err
}

fn contract(bench: &Bench, package: &str) -> Value {
    let shown = bench.run(&["inspect", package, "--json"]).json();
    serde_json::from_str(shown["metadata"]["user_defined"]["silane.contract"].as_str().unwrap()).unwrap()
}

#[test]
fn the_likeliest_token_is_run_and_judged() {
    let bench = Bench::with_models(&["tiny/llama"]);
    convert(&bench, "llama", "a.mlpackage", &["--logits", "argmax"]);
    convert(&bench, "llama", "l.mlpackage", &[]);
    assert_eq!(contract(&bench, "a.mlpackage")["logits"], "argmax");
    let text = |package: &str| bench.run(&["run", package, "--prompt", "the cat sat"]).out;
    assert_eq!(text("a.mlpackage"), text("l.mlpackage"));
    expect![[r#"
        $ silane validate a.mlpackage --reference llama
        PASS token_scores after prefill: max error …; wanted at least 50 dB
        PASS token_scores of decode: max error …; wanted at least 50 dB
        PASS token_scores of prefill: max error …; wanted at least 50 dB
        PASS token_ids after prefill: 6 of 6 tokens equal
        PASS token_ids of decode: 40 of 40 tokens equal
        PASS token_ids of prefill: 7 of 7 tokens equal
        PASS greedy text: 16 of 16 tokens equal
        not compared: logits of tokens that were not chosen: the package gives the likeliest token and its score only
        [exit 0]

        $ silane validate a.mlpackage --reference llama/reference.safetensors
        PASS token_scores after prefill: max error …; wanted at least 50 dB
        PASS token_scores of decode: max error …; wanted at least 50 dB
        PASS token_scores of prefill: max error …; wanted at least 50 dB
        PASS token_ids after prefill: 4 of 4 tokens equal
        PASS token_ids of decode: 11 of 11 tokens equal
        PASS token_ids of prefill: 5 of 5 tokens equal
        PASS greedy text: 12 of 12 tokens equal
        not compared: logits of tokens that were not chosen: the package gives the likeliest token and its score only
        [exit 0]

        $ silane validate a.mlpackage --reference llama --text llama/config.json
        stderr: error: `--text` needs logits, the package gives the likeliest token only
        stderr:   hint: convert with `--logits last`
        [exit 2]

        $ silane run a.mlpackage --prompt a --temperature 0.5
        stderr: error: the package gives the likeliest token only, so there is nothing to choose from
        stderr:   hint: leave `--temperature`, `--top-k` and `--top-p` out, or convert with `--logits last`
        [exit 2]

        $ silane run a.mlpackage --prompt a --top-k 3
        stderr: error: the package gives the likeliest token only, so there is nothing to choose from
        stderr:   hint: leave `--temperature`, `--top-k` and `--top-p` out, or convert with `--logits last`
        [exit 2]

        $ silane convert llama -o b.mlpackage --logits argmax --head-outputs split
        stderr: error: `--logits argmax` gives no logits that could be split
        stderr:   hint: leave `--head-outputs split` out
        [exit 2]

        $ silane convert llama --dry-run --head-outputs split
        stderr: note: the head of 307 rows is one piece, its output is `logits`
        stderr: llama · causal-lm · fp16 · context 64 · prefill 64 · iOS 18, macOS 15
        stderr:   311 ops: reshape 44, mul 36, split 30, slice_by_size 29, add 28
        stderr:   ops by function: decode 149, prefill 162
        stderr:   nothing written, in … s
        [exit 0]

    "#]]
    .assert_eq(&bench.transcript(&[
        "validate a.mlpackage --reference llama",
        "validate a.mlpackage --reference llama/reference.safetensors",
        "validate a.mlpackage --reference llama --text llama/config.json",
        "run a.mlpackage --prompt a --temperature 0.5",
        "run a.mlpackage --prompt a --top-k 3",
        "convert llama -o b.mlpackage --logits argmax --head-outputs split",
        "convert llama --dry-run --head-outputs split",
    ]));
    let report = bench.run(&["validate", "a.mlpackage", "--reference", "llama", "--json"]).json();
    let decode = &report["choices"]["token_ids of decode"];
    assert_eq!(
        (&decode["tokens"], &decode["equal"], &decode["pass"]),
        (&json!(40), &json!(40), &json!(true))
    );
    assert!(report["not_compared"].as_str().unwrap().contains("logits"));
}

/// Scores and tokens are judged apart: a head that is another's fails by both, and one whose rows have
/// changed places by its tokens only.
#[test]
fn wrong_choices_fail() {
    let rows = |model: &mut Model| {
        let rows = model.values("lm_head.weight");
        rows.rotate_right(48);
    };
    let values = |model: &mut Model| {
        model.values("lm_head.weight").iter_mut().step_by(3).for_each(|v| *v *= 1.5);
    };
    type Edit = fn(&mut Model);
    for (edit, scores) in [(rows as Edit, "PASS"), (values as Edit, "FAIL")] {
        let bench = Bench::with_models(&["tiny/llama"]);
        let mut model = Model::load("tiny/llama");
        edit(&mut model);
        convert(&bench, model.write().path().to_str().unwrap(), "a.mlpackage", &["--logits", "argmax"]);
        let ran = bench.run(&["validate", "a.mlpackage", "--reference", "llama"]);
        assert_eq!(ran.code, 1, "{}", ran.out);
        for line in ran.out.lines().filter(|l| l.contains(" token_scores ")) {
            assert!(line.starts_with(scores), "{}", ran.out);
        }
        assert!(ran.out.contains("\nFAIL token_ids of decode: "), "{}", ran.out);
        assert!(ran.out.contains("\nFAIL greedy text: "), "{}", ran.out);
        // Of logits too, the error that was seen is no excuse.
        convert(&bench, model.write().path().to_str().unwrap(), "l.mlpackage", &[]);
        let ran = bench.run(&["validate", "l.mlpackage", "--reference", "llama"]);
        assert!(ran.code == 1 && ran.out.contains("\nFAIL greedy text: "), "{}", ran.out);
    }
}

/// A head in pieces, in a part of its own, is joined by the host.
#[test]
fn a_head_in_pieces_is_run_and_judged() {
    let bench = Bench::new();
    let mut model = Model::load("tiny/llama");
    model.set("vocab_size", json!(20_000));
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        model.random(name, &[20_000, 48]);
    }
    let dir = model.write();
    let checkpoint = dir.path().to_str().unwrap();
    for (name, options) in [
        ("joined.mlpackage", &[][..]),
        ("split.mlpackage", &["--head-outputs", "split"]),
        ("all.mlpackage", &["--head-outputs", "split", "--logits", "all"]),
        ("parts", &["--head-outputs", "split", "--parts", "3"]),
    ] {
        convert(&bench, checkpoint, name, options);
        let run = |name: &str| bench.run(&["run", name, "--prompt", "the cat", "--max-tokens", "8"]).out;
        assert_eq!(run(name), run("joined.mlpackage"), "{name}");
        let report = bench.run(&["validate", name, "--reference", checkpoint, "--json"]);
        assert_eq!(report.code, 0, "{name}: {}", report.out);
        let outputs = report.json()["outputs"].as_array().unwrap().clone();
        let decode = outputs.iter().find(|o| o["name"] == "logits of decode").unwrap();
        assert_eq!(decode["values"], 40 * 20_000, "{name}");
    }
    let head = contract(&bench, "parts/head.mlpackage")["head_outputs"].clone();
    assert_eq!(
        head,
        json!([{ "name": "logits_1of2", "rows": [0, 16_384] }, { "name": "logits_2of2", "rows": [16_384, 20_000] }])
    );
}

/// Each part takes what the one before it gives; caches add up; all say the same context and chunk.
#[test]
fn parts_fit_each_other() {
    let bench = Bench::with_models(&["tiny/llama"]);
    let said = convert(&bench, "llama", "parts", &["--parts", "4"]);
    assert!(said.contains("· context 64 · prefill 8 ·"), "{said}");
    let stems = contract(&bench, "parts/head.mlpackage")["parts"].clone();
    let stems: Vec<&str> = stems.as_array().unwrap().iter().map(|s| s.as_str().unwrap()).collect();
    assert_eq!(stems, ["embeddings", "layers_1of2", "layers_2of2", "head"]);
    let mut rows = 0;
    let mut before: Option<silane::mil::Program> = None;
    for (i, stem) in stems.iter().enumerate() {
        let path = format!("parts/{stem}.mlpackage");
        let shown = bench.run(&["inspect", &path]).out;
        let line =
            format!("llama for causal-lm, context 64, prefill 8 (dense), logits last, part {} of 4", i + 1);
        assert!(shown.contains(&line), "{shown}");
        let contract = contract(&bench, &path);
        assert_eq!((&contract["context_length"], &contract["prefill_chunk"]), (&json!([64]), &json!(8)));
        let program = package::open_program(&bench.path(&path)).unwrap().program;
        assert_eq!(program.functions.keys().collect::<Vec<_>>(), ["decode", "prefill"]);
        for (name, tokens) in [("decode", 1), ("prefill", 8)] {
            let f = &program.functions[name];
            let input = |n: &str| f.inputs.iter().find(|id| f.name(**id) == n).map(|id| f.ty(*id).clone());
            let hidden = Type::tensor(DType::F16, [1, 48, 1, tokens]);
            if let Some(before) = &before {
                let f = &before.functions[name];
                let [output] = f.body.outputs[..] else { panic!("{stem}: several outputs before") };
                assert_eq!(f.name(output), "output_hidden_states");
                assert_eq!(input("hidden_states"), Some(f.ty(output).clone()), "{stem}, {name}");
                assert_eq!(input("hidden_states"), Some(hidden));
            } else {
                assert_eq!(input("input_ids"), Some(Type::tensor(DType::I32, [1, tokens])));
            }
            let state = input("kv_cache");
            assert_eq!(state.is_some(), stem.starts_with("layers"), "{stem}");
            assert_eq!(input("position_ids").is_some(), state.is_some(), "{stem}");
            if let Some(state) = state {
                let shape = state.as_state().unwrap().shape().unwrap();
                assert_eq!(json!(shape), contract["cache"]["shape"], "{stem}");
                assert_eq!(shape[1..], [2, 64, 32], "{stem}");
                rows += shape[0];
            }
        }
        before = Some(program);
    }
    assert_eq!(rows, 2 * 2 * 3, "keys and values of 3 layers, in both functions");
    let folder = bench.run(&["inspect", "parts"]);
    assert!(folder.code == 2 && folder.err.contains("`parts/head.mlpackage`"), "{}", folder.err);
}

/// Parts of two conversions are no model.
#[test]
fn parts_of_several_conversions_are_refused() {
    let bench = Bench::with_models(&["tiny/llama"]);
    for (key, options) in [
        ("context_length", ["--context-length", "32", "--prefill-chunk", "8"]),
        ("prefill_chunk", ["--context-length", "64", "--prefill-chunk", "4"]),
    ] {
        convert(&bench, "llama", "parts", &["--parts", "3", "--force"]);
        let other = ["convert", "llama", "-o", "other", "--parts", "3", "--force"];
        assert_eq!(bench.run(&[&other[..], &options].concat()).code, 0);
        let part = "layers_1of1.mlpackage";
        fs::remove_dir_all(bench.path("parts").join(part)).unwrap();
        fs::rename(bench.path("other").join(part), bench.path("parts").join(part)).unwrap();
        for line in [&["run", "parts", "--prompt", "a"][..], &["validate", "parts", "--reference", "llama"]] {
            let ran = bench.run(line);
            assert_eq!(ran.code, 2, "{key}: {}", ran.out);
            assert!(ran.err.contains(&format!("{part}: `{key}` is ")), "{}", ran.err);
        }
    }
}

/// Without a context, the checkpoint's own is taken, and a chunk that fits it.
#[test]
fn the_context_is_the_checkpoints_own() {
    let bench = Bench::with_models(&["tiny/llama"]);
    let ran = bench.run(&["convert", "llama", "--dry-run"]);
    assert!(ran.err.contains("· context 64 · prefill 64 ·"), "{}", ran.err);
    for (longest, context) in [(40, 64), (4096, 2048)] {
        let mut model = Model::load("tiny/llama");
        model.set("max_position_embeddings", json!(longest));
        let summary =
            bench.run(&["convert", model.write().path().to_str().unwrap(), "--dry-run", "--json"]).json();
        assert_eq!(summary["context_length"], json!([context]));
        assert_eq!(summary["prefill_chunk"], json!(longest.min(256)));
    }
}

/// What a mixture of experts costs is told, by the numbers of its config and tensors.
#[test]
fn the_cost_of_experts_is_told() {
    // Of each layer with experts: as many matrices as experts and parts, of 48 by the width.
    for (name, layers, width) in [("mixtral", 3, 38), ("qwen3_moe", 2, 22)] {
        let bench = Bench::with_models(&[&format!("tiny/{name}")]);
        let ran = bench.run(&["convert", name, "--dry-run"]);
        let line = format!(
            "experts: all 4 are computed for each token in {layers} layers, where the router picks 2: 2.0 ×"
        );
        assert!(ran.err.contains(&line), "{}", ran.err);
        let experts = &bench.run(&["convert", name, "--dry-run", "--json"]).json()["experts"];
        let number = |key: &str| experts[key].as_u64().unwrap();
        let model = Model::load(&format!("tiny/{name}"));
        let all: usize = model.tensors.values().map(|(_, values)| values.len()).sum();
        let looked_up = model.tensors["model.embed_tokens.weight"].1.len();
        assert_eq!(number("parameters_computed"), (all - looked_up) as u64);
        assert_eq!(
            number("parameters_computed") - number("parameters_chosen"),
            layers * 2 * 3 * 48 * width,
            "{name}"
        );
    }
    let bench = Bench::with_models(&["tiny/llama"]);
    assert!(bench.run(&["convert", "llama", "--dry-run", "--json"]).json()["experts"].is_null());
}

/// A Mixtral of 80 layers, each of 16 experts.
fn deep() -> Model {
    let (hidden, width, layers, experts) = (32, 4, 80, 16);
    let mut model = Model::load("tiny/mixtral");
    model.tensors.clear();
    for (key, value) in [
        ("vocab_size", 307),
        ("hidden_size", hidden),
        ("intermediate_size", width),
        ("num_hidden_layers", layers),
        ("num_attention_heads", 2),
        ("num_key_value_heads", 1),
        ("num_local_experts", experts),
    ] {
        model.set(key, json!(value));
    }
    model.set("tie_word_embeddings", json!(true));
    model.random("model.embed_tokens.weight", &[307, hidden]).random("model.norm.weight", &[hidden]);
    for layer in 0..layers {
        let at = |name: &str| format!("model.layers.{layer}.{name}.weight");
        for (name, shape) in [
            ("input_layernorm", &[hidden][..]),
            ("post_attention_layernorm", &[hidden]),
            ("self_attn.q_proj", &[hidden, hidden]),
            ("self_attn.k_proj", &[hidden / 2, hidden]),
            ("self_attn.v_proj", &[hidden / 2, hidden]),
            ("self_attn.o_proj", &[hidden, hidden]),
            ("block_sparse_moe.gate", &[experts, hidden]),
        ] {
            model.random(&at(name), shape);
        }
        for expert in 0..experts {
            for (name, shape) in [("w1", [width, hidden]), ("w2", [hidden, width]), ("w3", [width, hidden])] {
                model.random(&at(&format!("block_sparse_moe.experts.{expert}.{name}")), &shape);
            }
        }
    }
    model
}

/// A function with more ops than Core ML is known to load is noted; in parts there is no such function, and
/// the numbers are the same.
#[test]
fn deep_models_are_noted_and_cut() {
    let bench = Bench::new();
    let dir = deep().write();
    let checkpoint = dir.path().to_str().unwrap();
    let summary = |parts: &str| {
        let args = ["convert", checkpoint, "--dry-run", "--parts", parts];
        let ran = bench.run(&[&args[..], &SIZES].concat());
        assert_eq!(ran.code, 0, "{}", ran.err);
        let said = ran.err.clone();
        let json = bench.run(&[&args[..], &SIZES, &["--json"]].concat()).json();
        let most = json["functions"].as_object().unwrap().values().filter_map(Value::as_u64).max().unwrap();
        (said, json["ops"].as_u64().unwrap(), most)
    };
    let (said, ops, most) = summary("1");
    assert!(most > 8000 && ops > most, "{most} of {ops} ops");
    assert!(said.contains("note: decode: ") && said.contains("note: prefill: "), "{said}");
    assert!(said.contains(&format!(" {most} ops; Core ML has failed to load programs beyond")), "{said}");
    assert!(said.contains(&format!("  {},{:03} ops: ", ops / 1000, ops % 1000)), "{said}");
    assert!(said.contains("  ops by function: decode "), "{said}");
    let (said, _, most) = summary("5");
    assert!(most < 8000 && !said.contains("has failed to load"), "{most} ops: {said}");
    assert!(said.contains("layers_3of3.prefill "), "{said}");

    let checkpoint = silane::checkpoint::Checkpoint::open_dir(dir.path()).unwrap();
    let run = |parts: usize| {
        let programs = programs(&checkpoint, DType::F16, chunks(4, parts, Update::Slice));
        let mut text = Text::new(&programs, Precision::Fp16);
        [text.feed(&[7, 21, 5, 99], 0), text.feed(&[11], 4)].concat()
    };
    let whole = run(1);
    assert!(whole.iter().all(|l| l.is_finite()) && whole[0] != whole[1]);
    assert!(run(5) == whole, "parts compute something else");
}

/// Long prompts go through buckets, and where they may through blocks; both are measured on a text.
#[test]
fn prefill_takes_the_function_that_fits() {
    let bench = Bench::with_models(&["tiny/gemma3_text"]);
    let blocks = "block-sparse:block=8,budget=3,sinks=1,window=2,dense-layers=0";
    convert(&bench, "gemma3_text", "dense.mlpackage", &["--attention", "dense"]);
    convert(&bench, "gemma3_text", "tiled.mlpackage", &["--attention", "tiled:tile=32", "--buckets", "32"]);
    convert(&bench, "gemma3_text", "blocks.mlpackage", &["--attention", blocks, "--buckets", "32"]);
    let functions = contract(&bench, "blocks.mlpackage")["functions"].clone();
    let positions =
        |name: &str| [&functions[name]["min_position"], &functions[name]["max_position"]].map(|p| p.as_u64());
    assert_eq!(positions("prefill_32"), [Some(0), Some(24)]);
    assert_eq!(positions("prefill_64"), [Some(0), Some(56)]);
    assert_eq!(positions("prefill_sparse"), [Some(24), Some(56)]);

    let prompt = "the cat sat on the mat and looked at the sea for a while";
    let text = |package: &str| bench.run(&["run", package, "--prompt", prompt, "--max-tokens", "6"]);
    assert_eq!(text("tiled.mlpackage").out, text("dense.mlpackage").out);
    assert_eq!(text("blocks.mlpackage").code, 0);

    fs::write(bench.path("t.txt"), prompt.repeat(8)).unwrap();
    let judged = bench.run(&[
        "validate",
        "blocks.mlpackage",
        "--reference",
        "gemma3_text",
        "--text",
        "t.txt",
        "--json",
    ]);
    assert_eq!(judged.code, 0, "{}", judged.err);
    let told = &judged.json()["block_sparse"];
    // Chunks at 24, 32, 40 and 48; the one at 56 is the last. Of 8 queries' keys 3 blocks and the new ones.
    assert_eq!(told["chunks"], 4);
    let (kept, visible) = (4.0 * (24.0 * 8.0 + 36.0), (24.0 + 32.0 + 40.0 + 48.0) * 8.0 + 4.0 * 36.0);
    assert_eq!(told["density"].as_f64(), Some(kept / visible));
    assert!(told["layer_errors"].as_array().unwrap().iter().any(|e| e.as_f64() > Some(1e-4)), "{told}");
}
