//! `silane quantize`, and `convert --quantize`.

use std::{fs, path::Path};

use expect_test::expect;
use serde_json::json;
use silane::{
    ops::Opset,
    package::{Save, open_program, save},
    quant::candidates,
};

use super::{Bench, files, models::Model};

#[test]
fn a_report_is_told() {
    let bench = Bench::with_models(&["rxn-albert-mlm"]);
    let args = ["convert", "rxn-albert-mlm", "-o", "a.mlpackage", "--sequence-length", "16"];
    assert_eq!(bench.run(&args).code, 0);
    fs::write(
        bench.path("recipe.toml"),
        "default = \"lut4:g16\"\n\n[[rule]]\nop = \"gather\"\nscheme = \"int8\"\n\n[[rule]]\nweight = \"*decoder*\"\nscheme = \"fp16\"\n",
    )
    .unwrap();
    expect![[r#"
        $ silane quantize a.mlpackage -o q.mlpackage --scheme recipe.toml
        weight                                                                       shape             scheme    bits/weight  SQNR dB  max error
        albert_embeddings_word_embeddings_x                                          [591, 128]        int8             8.12     43.6    1.03e-2
        albert_encoder_embedding_hidden_mapping_in_weight                            [256, 128, 1, 1]  lut4:g16         4.12     20.1    1.25e-1
        albert_encoder_albert_layer_groups_0_albert_layers_0_attention_query_weight  [256, 256, 1, 1]  lut4:g16         4.06     20.3    2.24e-2
        albert_encoder_albert_layer_groups_0_albert_layers_0_attention_key_weight    [256, 256, 1, 1]  lut4:g16         4.06     20.1    1.56e-1
        albert_encoder_albert_layer_groups_0_albert_layers_0_attention_value_weight  [256, 256, 1, 1]  lut4:g16         4.06     20.2    1.16e-1
        albert_encoder_albert_layer_groups_0_albert_layers_0_attention_dense_weight  [256, 256, 1, 1]  lut4:g16         4.06     19.6    1.24e-1
        albert_encoder_albert_layer_groups_0_albert_layers_0_ffn_weight              [512, 256, 1, 1]  lut4:g16         4.06     19.9    1.61e-1
        albert_encoder_albert_layer_groups_0_albert_layers_0_ffn_output_weight       [256, 512, 1, 1]  lut4:g16         4.03     19.6    2.77e-1
        predictions_dense_weight                                                     [128, 256, 1, 1]  lut4:g16         4.06     19.9    1.89e-1
        stderr:   quantized 9 weights, 665,472 elements, to 4.52 bits; SQNR 21.0 dB, at worst 19.6 (`albert_encoder_albert_layer_groups_0_albert_layers_0_ffn_output_weight`)
        stderr:   left as they are:
        stderr:     1 constant of 75,648 elements: left as it is, by rule 2
        stderr:     5 constants of 2,816 elements: `y` of add, which is no weight
        stderr:     9 constants of 2,767 elements: `bias` of conv, which is no weight
        stderr:     4 constants of 768 elements: `y` of mul, which is no weight
        stderr:   weights 1.3 MB → 540.1 kB, 16.00 → 6.43 bits each
        stderr:   wrote q.mlpackage: 828.8 kB, of which weights 542.6 kB, in … s
        stderr:   tokenizer and config are in q
        [exit 0]

        $ silane quantize q.mlpackage -o dense.mlpackage --decompress
        stderr:   wrote dense.mlpackage: 1.8 MB, of which weights 1.5 MB, in … s
        stderr:   tokenizer and config are in dense
        [exit 0]

        $ silane validate q.mlpackage --reference rxn-albert-mlm
        PASS logits: max error …; wanted at least 11.1 dB, as it is quantized
             KL divergence …
        [exit 0]

    "#]].assert_eq(&bench.transcript(&[
        "quantize a.mlpackage -o q.mlpackage --scheme recipe.toml",
        "quantize q.mlpackage -o dense.mlpackage --decompress",
        "validate q.mlpackage --reference rxn-albert-mlm",
    ]));
}

#[test]
fn what_cannot_be_done_is_refused() {
    let bench = Bench::with_packages(&[
        "conv_ios16.mlpackage",
        "fp32_ios15.mlpackage",
        "identity.mlmodel",
        "lut6_ios18.mlpackage",
        "milc_int8_enumerated.mlpackage",
        "sentiment_pipeline.mlmodel",
        "silero_vad_compiled.mlmodelc",
    ]);
    fs::write(bench.path("none.toml"), "default = \"lut4\"\n[[rule]]\nop = \"lstm\"\nscheme = \"int8\"\n")
        .unwrap();
    fs::write(bench.path("odd.toml"), "default = \"lut5\"\n").unwrap();
    let before = bench.files();
    expect![[r#"
        $ silane quantize identity.mlmodel -o o.mlpackage
        stderr: error: identity.mlmodel: a neural network of 1 layer (`neuralNetwork`), not an ML Program
        stderr:   hint: convert the original model to an ML Program, iOS 15 and later
        [exit 2]

        $ silane quantize sentiment_pipeline.mlmodel -o o.mlpackage
        stderr: error: sentiment_pipeline.mlmodel: a pipeline of 2 models (pipeline, glmClassifier), not an ML Program
        stderr:   hint: `inspect` lists the models in it
        [exit 2]

        $ silane quantize silero_vad_compiled.mlmodelc -o o.mlpackage
        stderr: error: silero_vad_compiled.mlmodelc: a compiled bundle (`.mlmodelc`), not an ML Program
        stderr:   hint: open the package it was compiled from; a bundle cannot be turned back
        [exit 2]

        $ silane quantize milc_int8_enumerated.mlpackage -o o.mlpackage
        stderr: error: milc_int8_enumerated.mlpackage/Data/com.apple.CoreML/model.mlmodel: field 16 of `Metadata` is not known here; a rewritten package would lose that
        stderr:   hint: it can be inspected, validated and run
        [exit 2]

        $ silane quantize conv_ios16.mlpackage -o o.mlpackage --scheme int8
        stderr: error: conv_ios16.mlpackage: there is no weight to quantize
        stderr:   hint: `silane quantize` takes small ones with `--smallest N`, compressed ones with `--recompress`
        stderr:   left as they are:
        stderr:     3 constants of 176 elements: fewer than 2048 elements
        stderr:     1 constant of 4 elements: `bias` of conv, which is no weight
        [exit 2]

        $ silane quantize lut6_ios18.mlpackage -o o.mlpackage --budget 8bpw
        stderr: error: lut6_ios18.mlpackage: there is no weight to quantize
        stderr:   hint: `silane quantize` takes small ones with `--smallest N`, compressed ones with `--recompress`
        stderr:   left as they are:
        stderr:     3 constants of 135 elements: compressed already, by constexpr_lut_to_dense
        stderr:     3 constants of 15 elements: `bias` of linear, which is no weight
        [exit 2]

        $ silane quantize conv_ios16.mlpackage -o o.mlpackage --scheme lut4:g16 --smallest 1
        stderr: error: conv_ios16.mlpackage: `lut4:g16` needs CoreML8 (iOS 18, macOS 15), the program is for CoreML6 (iOS 16, macOS 13), which has `int8`, `uint8`, `lut1`, `lut2`, `lut4`, `lut6`, `lut8` and `sparseN`
        stderr:   hint: `--minimum-os ios18` raises the program
        [exit 2]

        $ silane quantize fp32_ios15.mlpackage -o o.mlpackage --scheme int8
        stderr: error: fp32_ios15.mlpackage: `int8` needs CoreML6 (iOS 16, macOS 13), the program is for CoreML5 (iOS 15, macOS 12), which has none of the compressed forms
        stderr:   hint: `--minimum-os ios16` raises the program
        [exit 2]

        $ silane quantize lut6_ios18.mlpackage -o o.mlpackage --scheme int4:b32
        stderr: error: lut6_ios18.mlpackage: `int4:b32` on target `ane`: the Neural Engine takes scales per tensor and per output channel; with blocks it has been seen to fail, to fall back, and to compute something else
        stderr:   hint: `int8` has a scale per channel, `lut4:g16` has four bits; `--target gpu` and `--allow-slow` take it all the same
        [exit 2]

        $ silane quantize lut6_ios18.mlpackage -o o.mlpackage --scheme int9
        stderr: error: `int9` is no scheme
        stderr:   hint: fp16; int8, uint8, int4, uint4 with `:o`, `:s`, `:t`, `:bN`; lut1, 2, 3, 4, 6, 8 with `:gN`, `:gNi`, `:v2`, `:v4`, `:i8`, `:exact`; sparseP, N:M, alone or before `+`; w8a8
        [exit 2]

        $ silane quantize lut6_ios18.mlpackage -o o.mlpackage --scheme w8a8
        stderr: error: lut6_ios18.mlpackage: `w8a8` quantizes activations, and nothing is known of their ranges
        stderr:   hint: `silane convert CHECKPOINT --quantize w8a8 --calibrate TEXT` learns them from a text; `int8` compresses the weights alone
        [exit 2]

        $ silane quantize lut6_ios18.mlpackage -o o.mlpackage --scheme odd.toml
        stderr: error: odd.toml: default: `lut5` has indices of 5 bits, Core ML has 1, 2, 3, 4, 6 and 8
        [exit 2]

        $ silane quantize lut6_ios18.mlpackage -o o.mlpackage --scheme none.toml
        stderr: error: rule 1 of the recipe, op `lstm`, fits no weight
        stderr:   hint: `silane inspect PACKAGE --weights` lists the names; the kinds of ops are `conv`, `linear`, `matmul`, `gather` and so on
        [exit 2]

        $ silane quantize conv_ios16.mlpackage -o o.mlpackage --decompress
        stderr: error: conv_ios16.mlpackage: no weight is compressed
        [exit 2]

        $ silane quantize lut6_ios18.mlpackage -o lut6_ios18.mlpackage --force --recompress --smallest 1
        stderr: error: lut6_ios18.mlpackage is the package that is being read
        stderr:   hint: write to another place
        [exit 2]

        $ silane quantize lut6_ios18.mlpackage -o conv_ios16.mlpackage
        stderr: error: conv_ios16.mlpackage: exists already
        stderr:   hint: `--force` replaces it
        [exit 2]

        $ silane quantize lut6_ios18.mlpackage -o o.mlmodel
        stderr: error: o.mlmodel: the output is a package
        stderr:   hint: give it the extension `.mlpackage`
        [exit 2]

    "#]].assert_eq(&bench.transcript(&[
        "quantize identity.mlmodel -o o.mlpackage",
        "quantize sentiment_pipeline.mlmodel -o o.mlpackage",
        "quantize silero_vad_compiled.mlmodelc -o o.mlpackage",
        "quantize milc_int8_enumerated.mlpackage -o o.mlpackage",
        "quantize conv_ios16.mlpackage -o o.mlpackage --scheme int8",
        "quantize lut6_ios18.mlpackage -o o.mlpackage --budget 8bpw",
        "quantize conv_ios16.mlpackage -o o.mlpackage --scheme lut4:g16 --smallest 1",
        "quantize fp32_ios15.mlpackage -o o.mlpackage --scheme int8",
        "quantize lut6_ios18.mlpackage -o o.mlpackage --scheme int4:b32",
        "quantize lut6_ios18.mlpackage -o o.mlpackage --scheme int9",
        "quantize lut6_ios18.mlpackage -o o.mlpackage --scheme w8a8",
        "quantize lut6_ios18.mlpackage -o o.mlpackage --scheme odd.toml",
        "quantize lut6_ios18.mlpackage -o o.mlpackage --scheme none.toml",
        "quantize conv_ios16.mlpackage -o o.mlpackage --decompress",
        "quantize lut6_ios18.mlpackage -o lut6_ios18.mlpackage --force --recompress --smallest 1",
        "quantize lut6_ios18.mlpackage -o conv_ios16.mlpackage",
        "quantize lut6_ios18.mlpackage -o o.mlmodel",
    ]));
    assert_eq!(bench.files(), before);
}

#[test]
fn json_is_the_only_thing_on_stdout() {
    let bench = Bench::with_packages(&["multifunction_state_ios18.mlpackage"]);
    let args = ["quantize", "multifunction_state_ios18.mlpackage", "-o", "q.mlpackage", "--scheme", "int8"];
    let more = ["--smallest", "16", "--json", "--write-recipe", "used.toml"];
    let ran = bench.run(&[args.as_slice(), &more].concat());
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    let said = ran.json();
    assert_eq!(said["output"], "q.mlpackage");
    assert_eq!(said["recipe"], "default = \"int8\"\nsmallest = 16\n");
    for tensor in said["tensors"].as_array().unwrap() {
        assert_eq!(tensor["scheme"], "int8");
        assert!(tensor["sqnr_db"].as_f64().unwrap() > 30.0 && tensor["max_error"].as_f64().unwrap() > 0.0);
        // Both functions read each weight.
        assert_eq!(tensor["functions"], json!(["decode", "prefill"]));
    }
    assert!(said["weight_bytes"]["after"].as_u64() < said["weight_bytes"]["before"].as_u64());
    let recipe = fs::read_to_string(bench.path("used.toml")).unwrap();
    assert_eq!(recipe, said["recipe"].as_str().unwrap());
    let again =
        ["quantize", "multifunction_state_ios18.mlpackage", "-o", "r.mlpackage", "--scheme", "used.toml"];
    assert_eq!(bench.run(&again).code, 0);
    assert_eq!(
        files(&bench.path("q.mlpackage")).into_values().collect::<Vec<_>>(),
        files(&bench.path("r.mlpackage")).into_values().collect::<Vec<_>>()
    );
}

/// Author, licence, version, descriptions, user-defined keys and unknown items of the manifest.
#[test]
fn what_a_package_says_of_itself_is_kept() {
    let bench = Bench::with_packages(&["lut6_ios18.mlpackage", "multifunction_state_ios18.mlpackage"]);
    let mut package = open_program(&bench.path("multifunction_state_ios18.mlpackage")).unwrap();
    let metadata = &mut package.interface.metadata;
    metadata.author = "someone".into();
    metadata.license = "free".into();
    metadata.version = "3".into();
    metadata.description = "of two functions".into();
    metadata.user_defined.insert("my.key".into(), "my value".into());
    for f in &mut package.interface.functions {
        f.inputs.iter_mut().chain(&mut f.outputs).for_each(|i| i.description = format!("what {} is", i.name));
    }
    let checked = silane::graph::check(package.program.clone()).unwrap();
    let full = bench.path("full.mlpackage");
    save(&full, &checked, &package.interface, Save::default()).unwrap();
    let manifest = fs::read_to_string(full.join("Manifest.json")).unwrap();
    let item = "\"itemInfoEntries\": {\"F\": {\"author\": \"me\", \"description\": \"\", \"name\": \"extra\", \"path\": \"me/extra.json\", \"flag\": true},";
    fs::write(full.join("Manifest.json"), manifest.replacen("\"itemInfoEntries\": {", item, 1)).unwrap();
    fs::create_dir(full.join("Data/me")).unwrap();
    fs::write(full.join("Data/me/extra.json"), "{}").unwrap();
    let args = ["quantize", "full.mlpackage", "-o", "q.mlpackage", "--scheme", "lut4", "--smallest", "16"];
    assert_eq!(bench.run(&args).code, 0);
    let (before, after) = (open_program(&full).unwrap(), open_program(&bench.path("q.mlpackage")).unwrap());
    let mut interface = after.interface.clone();
    let said = interface.metadata.user_defined.remove("silane.quantization").unwrap();
    assert_eq!(interface, before.interface);
    assert!(said.contains("\"lut4\":{"), "{said}");
    let (old, new) = (before.manifest.unwrap(), after.manifest.unwrap());
    assert_eq!(new.items["F"], old.items["F"]);
    assert_eq!(fs::read_to_string(bench.path("q.mlpackage/Data/me/extra.json")).unwrap(), "{}");
    for id in new.items.keys().filter(|id| *id != "F") {
        assert_eq!(uuid::Uuid::parse_str(id).unwrap().get_version_num(), 4);
    }
    // The same once more, made dense: nothing is said of schemes then.
    let args = ["quantize", "q.mlpackage", "-o", "d.mlpackage", "--decompress"];
    assert_eq!(bench.run(&args).code, 0);
    assert_eq!(open_program(&bench.path("d.mlpackage")).unwrap().interface, before.interface);
}

/// Converted and compressed in one step or in two, on any number of threads: the same bytes.
#[test]
fn the_same_bytes_come_out_however_it_is_done() {
    let bench = Bench::with_models(&["rxn-albert-mlm"]);
    let run = |threads: &str, args: &[&str]| {
        let done = bench.command(args).env("RAYON_NUM_THREADS", threads).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    };
    for scheme in ["lut4:g8", "int8", "lut3", "sparse50"] {
        let convert =
            ["convert", "rxn-albert-mlm", "--sequence-length", "8", "--no-tokenizer", "--force", "-o"];
        run("1", &[&convert[..], &["one.mlpackage", "--quantize", scheme]].concat());
        run("2", &[&convert[..], &["two.mlpackage", "--quantize", scheme]].concat());
        run("2", &[&convert[..], &["plain.mlpackage"]].concat());
        run("3", &["quantize", "plain.mlpackage", "-o", "post.mlpackage", "--scheme", scheme, "--force"]);
        let bytes = |name: &str| {
            let at = bench.path(name).join("Data/com.apple.CoreML");
            [fs::read(at.join("weights/weight.bin")).unwrap(), fs::read(at.join("model.mlmodel")).unwrap()]
        };
        assert!(bytes("one.mlpackage") == bytes("two.mlpackage"), "{scheme}: threads make a difference");
        assert!(
            bytes("one.mlpackage") == bytes("post.mlpackage"),
            "{scheme}: quantizing later makes a difference"
        );
    }
}

/// Encoders and language models, whole and in parts, pass at the error that the bits allow.
#[test]
fn quantized_models_are_valid() {
    for (name, scheme, more) in [
        ("tiny/bert", "int8", &[][..]),
        ("tiny/modernbert-mlm", "lut6:g16", &[]),
        ("tiny/llama", "lut8", &["--context-length", "32", "--prefill-chunk", "8"]),
        ("tiny/gemma3_text", "lut4:g8", &["--context-length", "32", "--prefill-chunk", "8", "--parts", "2"]),
    ] {
        let folder = name.rsplit('/').next().unwrap();
        let bench = Bench::with_models(&[name]);
        let args = ["convert", folder, "-o", "out", "--quantize", scheme, "--validate", "--json"];
        let ran = bench.run(&[args.as_slice(), more].concat());
        assert_eq!(ran.code, 0, "{name}: {}{}", ran.out, ran.err);
        let said = ran.json();
        assert_eq!(said["validation"]["pass"], true, "{name}");
        let first = if more.contains(&"--parts") {
            said["quantization"].as_object().unwrap().values().next()
        } else {
            Some(&said["quantization"])
        };
        assert!(first.unwrap()["tensors"].as_array().unwrap().len() > 1, "{name}");
    }
}

/// A folder of parts is quantized as one, tokenizer and config are taken along.
#[test]
fn parts_are_quantized_together() {
    let bench = Bench::with_models(&["tiny/llama"]);
    let convert =
        ["convert", "llama", "-o", "parts", "--parts", "2", "--context-length", "32", "--prefill-chunk", "8"];
    assert_eq!(bench.run(&convert).code, 0);
    let ran = bench.run(&[
        "quantize",
        "parts",
        "-o",
        "small",
        "--scheme",
        "int8",
        "--reference",
        "llama",
        "--json",
    ]);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    let said = ran.json();
    assert!(said["parts"].as_object().unwrap().len() >= 2, "{said}");
    assert_eq!(said["validation"]["after"]["pass"], true);
    assert!(bench.path("small/config.json").is_file());
    assert_eq!(bench.run(&["validate", "small", "--reference", "llama"]).code, 0);
    let refused = bench.run(&["quantize", "small", "-o", "parts", "--scheme", "int8"]);
    assert_eq!(refused.code, 2);
    assert!(refused.err.contains("exists already"), "{}", refused.err);
}

/// A checkpoint that is wrong in one place is still told from a right one.
#[test]
fn quantized_models_that_are_wrong_fail() {
    let bench = Bench::new();
    let right = Model::load("tiny/bert");
    let mut wrong = Model::load("tiny/bert");
    for (name, (_, values)) in &mut wrong.tensors {
        if name.ends_with("attention.output.dense.weight") {
            values.iter_mut().for_each(|v| *v = -*v);
        }
    }
    let (right, wrong) = (right.write(), wrong.write());
    let [right, wrong] = [&right, &wrong].map(|d| d.path().to_str().unwrap());
    let args = ["convert", wrong, "-o", "w.mlpackage", "--quantize", "int8", "--no-tokenizer"];
    assert_eq!(bench.run(&args).code, 0);
    assert_eq!(bench.run(&["validate", "w.mlpackage", "--reference", wrong]).code, 0);
    assert_eq!(bench.run(&["validate", "w.mlpackage", "--reference", right]).code, 1);
}

/// Weights are compressed by what a text taught, schemes are chosen by it, and perplexity is told.
#[test]
fn a_text_helps_to_quantize() {
    let bench = Bench::with_models(&["tiny/llama"]);
    let words: Vec<String> = (0..400).map(|i| format!("word{} of {}", i % 17, (i * 7) % 23)).collect();
    fs::write(bench.path("text.txt"), words.join(" ")).unwrap();
    let convert = |out: &str, more: &[&str]| {
        let size = ["--context-length", "64", "--prefill-chunk", "16", "--no-tokenizer", "--json"];
        let args = [&["convert", "llama", "-o", out][..], &size, more].concat();
        let ran = bench.run(&args);
        let json: serde_json::Value = serde_json::from_str(&ran.out).unwrap_or_default();
        (ran.code, json, ran.err)
    };
    let calibrated = |json: &serde_json::Value| -> Vec<String> {
        let tensors = json["quantization"]["tensors"].as_array().unwrap();
        tensors.iter().map(|t| t["calibrated"].as_str().unwrap_or("-").to_string()).collect()
    };
    for (how, said) in [("--gptq", "gptq"), ("--importance", "importance")] {
        let more =
            ["--quantize", "lut4:g16", "--calibrate", "text.txt", how, "--text", "text.txt", "--force"];
        let (code, json, err) = convert("q.mlpackage", &more);
        assert_eq!(code, 0, "{err}");
        let all = calibrated(&json);
        assert!(all.iter().filter(|c| *c == said).count() > 10, "{all:?}");
        assert_eq!(all.iter().filter(|c| c.starts_with("no: the text taught nothing")).count(), 1, "{all:?}");
        let perplexity = &json["perplexity"];
        let [before, after] = ["reference", "package"].map(|k| perplexity[k].as_f64().unwrap());
        assert!(before > 1.0 && after > 1.0 && before != after, "{perplexity}");
    }
    let budget = ["--budget", "6.5bpw", "--calibrate", "text.txt", "--calibrate-tokens", "256"];
    let (code, json, err) = convert("b.mlpackage", &[&budget[..], &["--write-recipe", "r.toml"]].concat());
    assert_eq!(code, 0, "{err}");
    assert!(json["quantization"]["bits_per_weight"]["after"].as_f64().unwrap() <= 6.5);
    let recipe = ["--quantize", "r.toml", "--calibrate", "text.txt", "--calibrate-tokens", "256"];
    let (code, again, err) = convert("r.mlpackage", &recipe);
    assert_eq!(code, 0, "{err}");
    assert_eq!(json["quantization"], again["quantization"]);
    let contents = |name: &str| files(&bench.path(name)).into_values().collect::<Vec<_>>();
    assert!(contents("b.mlpackage") == contents("r.mlpackage"), "the recipe makes other bytes");
    let (code, json, err) = convert("m.mlpackage", &["--max-size", "100kB", "--calibrate", "text.txt"]);
    assert_eq!(code, 0, "{err}");
    assert!(json["quantization"]["weight_bytes"]["after"].as_u64().unwrap() <= 100_000);

    for (more, says) in [
        (&["--calibrate", "text.txt"][..], "a calibration text is given and nothing is quantized"),
        (&["--budget", "1bpw", "--calibrate", "text.txt"], "bytes at least"),
        (&["--budget", "4.5MB", "--calibrate", "text.txt"], "`4.5MB` is no budget"),
        (&["--quantize", "int8", "--calibrate", "nothing.txt"], "nothing.txt"),
        (&["--write-recipe", "x.toml"], "nothing is quantized, so there is no recipe"),
    ] {
        let (code, _, err) = convert("e.mlpackage", more);
        assert_eq!(code, 2, "{more:?}: {err}");
        assert!(err.contains(says), "{more:?}: {err}");
        assert!(!bench.path("e.mlpackage").exists(), "{more:?}");
    }
    fs::write(bench.path("short.txt"), "a").unwrap();
    let more = ["--quantize", "int8", "--calibrate", "short.txt", "--calibrate-tokens", "1"];
    let (code, _, err) = convert("e.mlpackage", &more);
    assert!(code == 2 && err.contains("are no text to calibrate on"), "{err}");
}

/// Without a text, a budget goes by the errors of weights: at conversion, and on a package that is there.
#[test]
fn a_budget_needs_no_text() {
    let bench = Bench::with_models(&["rxn-albert-mlm"]);
    let convert = ["convert", "rxn-albert-mlm", "--sequence-length", "16", "--no-tokenizer", "-o"];
    let run = |args: &[&str]| {
        let ran = bench.run(args);
        (ran.code, serde_json::from_str::<serde_json::Value>(&ran.out).unwrap_or_default(), ran.err)
    };
    let budget = ["--budget", "6.5bpw", "--json", "--write-recipe"];
    let (code, at_once, err) = run(&[&convert[..], &["b.mlpackage"], &budget, &["b.toml"]].concat());
    assert!(code == 0 && err.contains("by the errors of weights alone"), "{err}");
    assert_eq!(run(&[&convert[..], &["dense.mlpackage"]].concat()).0, 0);
    let quantize = ["quantize", "dense.mlpackage", "--force", "--json", "-o"];
    let (code, after, err) =
        run(&[&quantize[..], &["q.mlpackage"], &budget[..2], &["--write-recipe", "q.toml"]].concat());
    assert_eq!(code, 0, "{err}");
    assert_eq!(at_once["quantization"]["tensors"], after["tensors"]);
    assert_eq!(fs::read(bench.path("b.toml")).unwrap(), fs::read(bench.path("q.toml")).unwrap());
    assert!(after["bits_per_weight"]["after"].as_f64().unwrap() <= 6.5, "{after}");
    let recipe = run(&[&quantize[..], &["r.mlpackage", "--scheme", "q.toml"]].concat()).1;
    assert_eq!(recipe["tensors"], after["tensors"]);
    // Not behind one scheme for all of as many bytes.
    let (_, alone, _) = run(&[&quantize[..], &["u.mlpackage", "--scheme", "lut4:g16"]].concat());
    let size = alone["weight_bytes"]["after"].as_u64().unwrap();
    let (_, chosen, err) = run(&[&quantize[..], &["m.mlpackage", "--max-size", &size.to_string()]].concat());
    assert!(chosen["weight_bytes"]["after"].as_u64().unwrap() <= size, "{err}");
    let errors = |json: &serde_json::Value| -> f64 {
        let one = |t: &serde_json::Value| 10f64.powf(-t["sqnr_db"].as_f64().unwrap() / 10.0);
        json["tensors"].as_array().unwrap().iter().map(one).sum()
    };
    assert!(errors(&chosen) <= errors(&alone), "{} {}", errors(&chosen), errors(&alone));
    // Small weights are left where that is asked for, and the recipe says so.
    let small = ["--budget", "9bpw", "--smallest", "40000", "--write-recipe", "s.toml"];
    let (code, few, err) = run(&[&quantize[..], &["s.mlpackage"], &small].concat());
    assert_eq!(code, 0, "{err}");
    let count = |json: &serde_json::Value| json["tensors"].as_array().unwrap().len();
    assert!((1..count(&after)).contains(&count(&few)), "{few}");
    assert!(fs::read_to_string(bench.path("s.toml")).unwrap().contains("smallest = 40000"));
    let (code, _, err) = run(&[&quantize[..], &["n.mlpackage", "--budget", "1bpw"]].concat());
    assert!(code == 2 && err.contains("bytes at least"), "{err}");
    assert!(!bench.path("n.mlpackage").exists());
    let (code, _, err) =
        run(&[&quantize[..], &["n.mlpackage", "--budget", "4bpw", "--scheme", "int8"]].concat());
    assert!(code == 2 && err.contains("--scheme"), "{err}");
}

/// The help names what there is to choose from.
#[test]
fn help_names_what_a_budget_chooses_among() {
    let help = Bench::with_packages(&[]).run(&["quantize", "--help"]).out;
    for (opset, before) in [(Opset::Ios18, "A budget chooses among"), (Opset::Ios17, "before iOS 18 among")] {
        let all: Vec<String> = candidates(opset).unwrap().iter().map(ToString::to_string).collect();
        let (last, others) = all.split_last().unwrap();
        let said = format!("{before} {} and {last}", others.join(", "));
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(help.contains(&said), "{said}: {help}");
    }
}

/// Activations are quantized by what a text gave the layers, where the recipe says so, and validated as such.
#[test]
fn a_text_helps_to_quantize_activations() {
    let bench = Bench::with_models(&["tiny/llama"]);
    let words: Vec<String> = (0..400).map(|i| format!("word{} of {}", i % 17, (i * 7) % 23)).collect();
    fs::write(bench.path("text.txt"), words.join(" ")).unwrap();
    let recipe = "default = \"w8a8\"\n[[rule]]\nweight = \"*down_proj*\"\nscheme = \"lut6\"\n";
    fs::write(bench.path("mixed.toml"), recipe).unwrap();
    let convert = |out: &str, more: &[&str]| {
        let size = ["--context-length", "64", "--prefill-chunk", "16", "--no-tokenizer", "--json"];
        bench.run(&[&["convert", "llama", "-o", out][..], &size, more].concat())
    };
    let text = ["--calibrate", "text.txt", "--validate"];
    let ran =
        convert("w.mlpackage", &[&["--quantize", "w8a8", "--write-recipe", "r.toml"][..], &text].concat());
    assert_eq!(ran.code, 0, "{}", ran.err);
    let json = ran.json();
    assert_eq!(json["validation"]["pass"], true);
    assert!(fs::read_to_string(bench.path("r.toml")).unwrap().starts_with("default = \"w8a8\"\n"));
    let tensors = json["quantization"]["tensors"].as_array().unwrap().clone();
    let (with, without): (Vec<_>, Vec<_>) = tensors.iter().partition(|t| t["activations"].is_object());
    assert!(with.len() > 10 && with.iter().all(|t| t["scheme"] == "w8a8" && t["activations"]["bits"] == 8));
    assert!(with.iter().all(|t| t["activations"]["scale"].as_f64().unwrap() > 0.0));
    assert_eq!(without.len(), 1);
    assert_eq!(without[0]["activations"], "no: `gather` is no layer that takes them");
    assert_eq!(json["ops_by_kind"]["quantize"], json["ops_by_kind"]["dequantize"]);

    let again = convert("again.mlpackage", &[&["--quantize", "r.toml"][..], &text].concat()).json();
    assert_eq!(json["quantization"], again["quantization"]);
    let contents = |name: &str| files(&bench.path(name)).into_values().collect::<Vec<_>>();
    assert!(contents("w.mlpackage") == contents("again.mlpackage"), "other bytes");

    let mixed = convert("m.mlpackage", &[&["--quantize", "mixed.toml", "--gptq"][..], &text].concat());
    assert_eq!(mixed.code, 0, "{}", mixed.err);
    let fewer = mixed.json()["ops_by_kind"]["quantize"].as_u64().unwrap();
    assert!(fewer > 0 && fewer < json["ops_by_kind"]["quantize"].as_u64().unwrap());

    let args = ["convert", "llama", "-o", "t.mlpackage", "--context-length", "64", "--quantize", "w8a8"];
    let told = bench.run(&[&args[..], &["--calibrate", "text.txt"]].concat());
    assert!(told.err.contains("activations before 13 weights in 8 bits; SQNR "), "{}", told.err);
    assert!(told.err.contains("not before `model_embed_tokens_x`: `gather` is no layer"), "{}", told.err);

    let refused = convert("e.mlpackage", &["--quantize", "w8a8"]);
    assert_eq!(refused.code, 2);
    assert!(refused.err.contains("nothing is known of their ranges"), "{}", refused.err);
    assert!(refused.err.contains("--calibrate TEXT"), "{}", refused.err);
    assert!(!bench.path("e.mlpackage").exists());
}

/// Rotation alone changes nothing that is seen, and goes with whatever compresses.
#[test]
fn rotated_models_are_valid() {
    let bench = Bench::with_models(&["tiny/llama", "tiny/gpt2", "tiny/bert", "tiny/gemma2"]);
    let novel = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/text/moby-dick.txt");
    let text: String = fs::read_to_string(novel).unwrap().chars().take(10_000).collect();
    fs::write(bench.path("text.txt"), text).unwrap();
    let convert = |model: &str, out: &str, more: &[&str]| {
        let size =
            ["--context-length", "32", "--prefill-chunk", "8", "--no-tokenizer", "--force", "--rotate"];
        bench.run(&[&["convert", model, "-o", out][..], &size, more].concat())
    };
    let taught = ["--calibrate", "text.txt", "--calibrate-tokens", "512"];
    for more in [
        &[][..],
        &["--parts", "2"],
        &["--quantize", "int8"],
        &[&["--quantize", "lut6:g16", "--gptq"][..], &taught].concat(),
        &[&["--quantize", "w8a8", "--smooth", "0.5"][..], &taught].concat(),
        &[&["--budget", "8bpw", "--gptq"][..], &taught].concat(),
    ] {
        let ran = convert("llama", "r", &[more, &["--validate", "--json"]].concat());
        assert_eq!(ran.code, 0, "{more:?}: {}{}", ran.out, ran.err);
        let json = ran.json();
        assert_eq!(json["rotation"]["residual_stream"], true, "{more:?}");
        assert_eq!(json["rotation"]["weights"], 23, "{more:?}");
        if more.contains(&"--gptq") && more.contains(&"--quantize") {
            let tensors = json["quantization"]["tensors"].as_array().unwrap();
            assert!(tensors.iter().filter(|t| t["op"] == "conv").all(|t| t["calibrated"] == "gptq"));
        }
        for o in json["validation"]["outputs"].as_array().unwrap() {
            assert!(more.contains(&"--calibrate") || o["psnr"].as_f64().unwrap() > 40.0, "{more:?}: {o}");
        }
        if more.first() == Some(&"--parts") {
            fs::remove_dir_all(bench.path("r")).unwrap();
        }
    }
    let contents = |name: &str| files(&bench.path(name)).into_values().collect::<Vec<_>>();
    for (out, threads) in [("a.mlpackage", "1"), ("b.mlpackage", "3")] {
        let args = ["convert", "llama", "-o", out, "--no-tokenizer", "--rotate", "--quantize", "int4"];
        let done = bench.command(&args).env("RAYON_NUM_THREADS", threads).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }
    assert!(contents("a.mlpackage") == contents("b.mlpackage"), "other bytes");

    let told = convert("llama", "t", &[]);
    assert!(told.err.contains("rotated the residual stream and values: 23 weights"), "{}", told.err);
    let told = convert("gemma2", "g", &[]);
    assert!(told.err.contains("rotated embedding, head and values: 9 weights"), "{}", told.err);
    assert!(told.err.contains("not the residual stream: each block's result"), "{}", told.err);
    for (model, says) in
        [("gpt2", "the norms of gpt2 subtract means"), ("bert", "only language models are rotated")]
    {
        let ran = bench.run(&["convert", model, "-o", "e.mlpackage", "--rotate"]);
        assert!(ran.code == 2 && ran.err.contains(says), "{model}: {}", ran.err);
        assert!(!bench.path("e.mlpackage").exists());
    }
}

/// Smoothing alone changes nothing that is seen, and goes with every scheme.
#[test]
fn smoothed_models_are_valid() {
    let bench = Bench::with_models(&["tiny/llama"]);
    let novel = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/text/moby-dick.txt");
    let text: String = fs::read_to_string(novel).unwrap().chars().take(10_000).collect();
    fs::write(bench.path("text.txt"), text).unwrap();
    let convert = |out: &str, more: &[&str]| {
        let size = ["--context-length", "32", "--prefill-chunk", "8", "--no-tokenizer", "--force", "--json"];
        bench.run(&[&["convert", "llama", "-o", out][..], &size, more].concat())
    };
    let smooth = ["--calibrate", "text.txt", "--smooth", "0.5", "--validate"];
    for more in [
        &[][..],
        &["--parts", "2"],
        &["--quantize", "w8a8"],
        &["--quantize", "lut6:g16", "--gptq"],
        &["--quantize", "int8", "--importance"],
        &["--budget", "8bpw"],
    ] {
        let ran = convert("s", &[&smooth[..], more].concat());
        assert_eq!(ran.code, 0, "{more:?}: {}{}", ran.out, ran.err);
        let json = ran.json();
        assert_eq!(json["smoothing"]["alpha"], 0.5, "{more:?}");
        assert_eq!(json["smoothing"]["smoothed"].as_array().unwrap().len(), 10, "{more:?}");
        if more.contains(&"--gptq") {
            let tensors = json["quantization"]["tensors"].as_array().unwrap();
            assert!(tensors.iter().filter(|t| t["op"] == "conv").all(|t| t["calibrated"] == "gptq"));
        }
        for o in json["validation"]["outputs"].as_array().unwrap() {
            assert!(more.len() > 1 && more[0] != "--parts" || o["psnr"].as_f64().unwrap() > 60.0, "{o}");
        }
        if more.first() == Some(&"--parts") {
            fs::remove_dir_all(bench.path("s")).unwrap();
        }
    }
    let contents = |name: &str| files(&bench.path(name)).into_values().collect::<Vec<_>>();
    for out in ["a.mlpackage", "b.mlpackage"] {
        assert_eq!(convert(out, &[&smooth[..], &["--quantize", "w8a8"]].concat()).code, 0);
    }
    assert!(contents("a.mlpackage") == contents("b.mlpackage"), "other bytes");
    let told =
        bench.run(&["convert", "llama", "-o", "t.mlpackage", "--calibrate", "text.txt", "--smooth", "0.3"]);
    assert!(
        told.err
            .contains("smoothed 7 norms and 3 products before 10 weights, by 0.3; channels are divided by"),
        "{}",
        told.err
    );
    for (more, says) in [
        (&["--smooth", "0.5"][..], "--calibrate"),
        (&["--smooth", "2", "--calibrate", "text.txt"], "a number from 0 to 1 is expected"),
    ] {
        let ran = convert("e.mlpackage", more);
        assert!(ran.code == 2 && ran.err.contains(says), "{more:?}: {}", ran.err);
    }
}
