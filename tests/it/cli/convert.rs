//! `silane convert`.

use std::fs;

use expect_test::expect;
use serde_json::{Value, json};

use super::{Bench, files, models::Model};

#[test]
fn a_summary_is_told_on_stderr() {
    let bench = Bench::with_models(&["tiny/bert", "tiny/bert-cls", "tiny/modernbert-mlm"]);
    expect![[r#"
        $ silane convert bert -o out.mlpackage --validate
        stderr: bert · feature-extraction · fp16 · 1 × 40 tokens · iOS 18, macOS 15
        stderr:   109 ops: add 23, conv 18, einsum 18, softmax 9, split 9
        stderr:   wrote out.mlpackage: 125.0 kB, of which weights 81.8 kB, in … s
        stderr:   tokenizer and config are in out
        stderr: PASS last_hidden_state: max error …; wanted at least 50 dB
        [exit 0]

        $ silane convert bert-cls -o cls --batch 2 --sequence-length 9 --token-type-ids --no-tokenizer
        stderr: bert · sequence-classification · fp16 · 2 × 9 tokens · iOS 18, macOS 15
        stderr:   114 ops: add 24, conv 20, einsum 18, softmax 9, split 9
        stderr:   wrote cls.mlpackage: 131.1 kB, of which weights 83.2 kB, in … s
        [exit 0]

        $ silane convert modernbert-mlm -o mlm.mlpackage --precision fp32 --minimum-os ios16 --validate
        stderr: modernbert · masked-lm · fp32 · 1 × 64 tokens · iOS 16, macOS 13
        stderr:   243 ops: mul 47, add 38, concat 32, conv 30, einsum 24
        stderr:   wrote mlm.mlpackage: 347.3 kB, of which weights 270.3 kB, in … s
        stderr:   tokenizer and config are in mlm
        stderr: PASS logits: max error …; wanted at most 1e-4 of the spread
        stderr:      KL divergence …
        [exit 0]

    "#]]
    .assert_eq(&bench.transcript(&[
        "convert bert -o out.mlpackage --validate",
        "convert bert-cls -o cls --batch 2 --sequence-length 9 --token-type-ids --no-tokenizer",
        "convert modernbert-mlm -o mlm.mlpackage --precision fp32 --minimum-os ios16 --validate",
    ]));
    for there in ["out/tokenizer.json", "out/config.json", "cls.mlpackage/Manifest.json"] {
        assert!(bench.path(there).is_file(), "{there}");
    }
    assert!(!bench.path("cls").exists(), "`--no-tokenizer` wrote one");
}

#[test]
fn every_model_type_is_listed() {
    let ran = Bench::new().run(&["convert", "--list"]);
    let types: Vec<&str> = ran.out.lines().collect();
    assert_eq!((ran.code, types), (0, silane::models::model_types().collect()));
}

#[test]
fn json_is_the_only_thing_on_stdout() {
    let bench = Bench::with_models(&["tiny/bert"]);
    let ran = bench.run(&["convert", "bert", "-o", "out.mlpackage", "--json", "--validate"]);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    let summary = ran.json();
    for (key, value) in [
        ("model_type", json!("bert")),
        ("task", json!("feature-extraction")),
        ("output", json!("out.mlpackage")),
        ("sequence_length", json!(40)),
        ("opset", json!("CoreML8")),
    ] {
        assert_eq!(summary[key], value, "{key}");
    }
    assert_eq!(summary["validation"]["pass"], json!(true));
    let written: usize = files(&bench.path("out.mlpackage/Data")).values().map(Vec::len).sum();
    assert_eq!(summary["bytes"], json!(written));
}

#[test]
fn a_dry_run_writes_nothing() {
    let bench = Bench::with_models(&["tiny/bert"]);
    let before = bench.files();
    expect![[r#"
        $ silane convert bert --dry-run
        stderr: bert · feature-extraction · fp16 · 1 × 40 tokens · iOS 18, macOS 15
        stderr:   109 ops: add 23, conv 18, einsum 18, softmax 9, split 9
        stderr:   nothing written, in … s
        [exit 0]

        $ silane convert bert --dry-run --validate -o out.mlpackage
        stderr: bert · feature-extraction · fp16 · 1 × 40 tokens · iOS 18, macOS 15
        stderr:   109 ops: add 23, conv 18, einsum 18, softmax 9, split 9
        stderr:   nothing written, in … s
        [exit 0]

    "#]]
    .assert_eq(
        &bench.transcript(&["convert bert --dry-run", "convert bert --dry-run --validate -o out.mlpackage"]),
    );
    let ran = bench.run(&["convert", "bert", "-o", "out.mlpackage", "--dry-run", "--json"]);
    assert_eq!((ran.code, ran.json().get("output")), (0, None));
    assert_eq!(bench.files(), before);
}

/// What is wrong is told before anything is read or written.
#[test]
fn requests_that_cannot_be_met_are_refused() {
    let bench = Bench::with_models(&["tiny/bert", "tiny/xlm-roberta", "tiny/mpnet"]);
    fs::create_dir(bench.path("empty")).unwrap();
    let before = bench.files();
    expect![[r#"
        $ silane convert
        stderr: error: the following required arguments were not provided:
        stderr:   --output <OUT>
        stderr:   <CHECKPOINT>
        stderr: 
        stderr: Usage: silane convert --output <OUT> <CHECKPOINT>
        stderr: 
        stderr: For more information, try '--help'.
        [exit 2]

        $ silane convert bert
        stderr: error: the following required arguments were not provided:
        stderr:   --output <OUT>
        stderr: 
        stderr: Usage: silane convert --output <OUT> <CHECKPOINT>
        stderr: 
        stderr: For more information, try '--help'.
        [exit 2]

        $ silane convert nowhere -o out.mlmodel
        stderr: error: out.mlmodel: the output is a package
        stderr:   hint: give it the extension `.mlpackage`
        [exit 2]

        $ silane convert bert -o ..
        stderr: error: ..: the output is a package
        stderr:   hint: give it the extension `.mlpackage`
        [exit 2]

        $ silane convert nowhere -o out.mlpackage
        stderr: error: nowhere: there is no such folder, and it is not in the Hub's cache at hub/hub
        stderr:   hint: download it with `hf download nowhere`
        [exit 2]

        $ silane convert org/nowhere -o out.mlpackage
        stderr: error: org/nowhere: there is no such folder, and it is not in the Hub's cache at hub/hub
        stderr:   hint: download it with `hf download org/nowhere`
        [exit 2]

        $ silane convert empty -o out.mlpackage
        stderr: error: empty: there is no `config.json`
        stderr:   hint: a checkpoint is a folder with `config.json` and `model.safetensors`, as `save_pretrained` writes it
        [exit 2]

        $ silane convert bert/config.json -o out.mlpackage
        stderr: error: bert/config.json: this is a file, a checkpoint is a folder
        stderr:   hint: give the folder that holds `config.json`
        [exit 2]

        $ silane convert xlm-roberta -o out.mlpackage --sequence-length 41
        stderr: error: a sequence of 41 tokens is asked for, the checkpoint has positions for 40
        stderr:   hint: `--sequence-length 40` is the longest that works
        [exit 2]

        $ silane convert bert -o out.mlpackage --sequence-length 0
        stderr: error: a sequence of 0 tokens is asked for
        [exit 2]

        $ silane convert bert -o out.mlpackage --batch 0
        stderr: error: a batch of 0 rows is asked for
        [exit 2]

        $ silane convert bert -o out.mlpackage --task translation
        stderr: error: invalid value 'translation' for '--task <TASK>': task `translation` is not known
        stderr:   hint: one of `feature-extraction`, `embedding`, `sequence-classification`, `token-classification`, `question-answering`, `masked-lm`, `pre-training`, `causal-lm`
        stderr: 
        stderr: For more information, try '--help'.
        [exit 2]

        $ silane convert bert -o out.mlpackage --task masked-lm
        stderr: error: the checkpoint has no tensor `cls.predictions.transform.dense.weight`
        stderr:   while building bert, task masked-lm; the checkpoint was made for feature-extraction
        [exit 2]

        $ silane convert mpnet -o out.mlpackage --token-type-ids
        stderr: error: mpnet has no token types
        stderr:   hint: leave `--token-type-ids` out
        [exit 2]

        $ silane convert bert -o no/such/folder/out.mlpackage
        stderr: error: no/such/folder: there is no such folder to write to
        stderr:   hint: make it first
        [exit 2]

    "#]].assert_eq(&bench.transcript(&[
        "convert",
        "convert bert",
        // Not even the checkpoint has to be there for this one.
        "convert nowhere -o out.mlmodel",
        "convert bert -o ..",
        "convert nowhere -o out.mlpackage",
        "convert org/nowhere -o out.mlpackage",
        "convert empty -o out.mlpackage",
        "convert bert/config.json -o out.mlpackage",
        "convert xlm-roberta -o out.mlpackage --sequence-length 41",
        "convert bert -o out.mlpackage --sequence-length 0",
        "convert bert -o out.mlpackage --batch 0",
        "convert bert -o out.mlpackage --task translation",
        "convert bert -o out.mlpackage --task masked-lm",
        "convert mpnet -o out.mlpackage --token-type-ids",
        "convert bert -o no/such/folder/out.mlpackage",
    ]));
    assert_eq!(bench.files(), before);
}

#[test]
fn architectures_that_are_not_known_are_refused() {
    for (model_type, words) in [
        (json!("bort"), vec!["`bort` is not supported", "nearest is `bert`"]),
        (json!("phi3"), vec!["`phi3`", "`BertModel`"]),
        (json!(null), vec!["model_type"]),
        (json!(7), vec!["model_type", "7"]),
    ] {
        let bench = Bench::with_models(&["tiny/bert"]);
        edit_config(&bench, "bert", "model_type", model_type);
        let before = bench.files();
        let ran = bench.run(&["convert", "bert", "-o", "out.mlpackage", "--json"]);
        assert_eq!((ran.code, ran.out.as_str()), (2, ""));
        words.iter().for_each(|word| assert!(ran.err.contains(word), "`{word}` is not in: {}", ran.err));
        assert_eq!(bench.files(), before);
    }
}

/// Values that fp16 cannot hold are never written as infinity.
#[test]
fn weights_that_do_not_fit_are_named() {
    let tensor = "encoder.layer.1.output.dense.weight";
    for (value, words) in [
        (1e5, vec![tensor, "1 of 2520 values", "largest 100000", "0 not a number", "--precision fp32"]),
        (-7e4, vec![tensor, "largest -70000"]),
        (f32::NAN, vec![tensor, "1 of 2520 values are not finite"]),
        (f32::NEG_INFINITY, vec![tensor, "1 of 2520 values are not finite"]),
    ] {
        let mut model = Model::load("tiny/bert");
        model.values(tensor)[17] = value;
        let (bench, checkpoint) = (Bench::new(), model.write());
        let dir = checkpoint.path().to_str().unwrap();
        let ran = bench.run(&["convert", dir, "-o", "out.mlpackage"]);
        assert_eq!(ran.code, 2, "{value}");
        words.iter().for_each(|word| assert!(ran.err.contains(word), "`{word}` is not in: {}", ran.err));
        assert_eq!(bench.files().len(), 0, "{value}: something was left behind");
        let ran = bench.run(&["convert", dir, "-o", "out.mlpackage", "--precision", "fp32"]);
        assert_eq!(ran.code == 0, value.is_finite(), "{value}: {}", ran.err);
    }
}

#[test]
fn outputs_are_replaced_only_on_demand() {
    let bench = Bench::with_models(&["tiny/bert", "tiny/roberta"]);
    expect![[r#"
        $ silane convert bert -o out.mlpackage
        stderr: bert · feature-extraction · fp16 · 1 × 40 tokens · iOS 18, macOS 15
        stderr:   109 ops: add 23, conv 18, einsum 18, softmax 9, split 9
        stderr:   wrote out.mlpackage: 125.0 kB, of which weights 81.8 kB, in … s
        stderr:   tokenizer and config are in out
        [exit 0]

        $ silane convert bert -o out.mlpackage
        stderr: error: out.mlpackage: exists already
        stderr:   hint: `--force` replaces it
        [exit 2]

        $ silane convert roberta -o out.mlpackage --force
        stderr: roberta · feature-extraction · fp16 · 1 × 40 tokens · iOS 18, macOS 15
        stderr:   115 ops: add 24, conv 18, einsum 18, mul 9, softmax 9
        stderr:   wrote out.mlpackage: 138.8 kB, of which weights 94.7 kB, in … s
        stderr:   tokenizer and config are in out
        [exit 0]

    "#]]
    .assert_eq(&bench.transcript(&[
        "convert bert -o out.mlpackage",
        "convert bert -o out.mlpackage",
        "convert roberta -o out.mlpackage --force",
    ]));
    let contract = bench.run(&["inspect", "out.mlpackage", "--json"]).json();
    assert!(contract["metadata"]["user_defined"]["silane.contract"].as_str().unwrap().contains("roberta"));
    assert_eq!(
        fs::read(bench.path("out/config.json")).unwrap(),
        fs::read(bench.path("roberta/config.json")).unwrap()
    );
}

/// Neither a checkpoint that the output's name leads to nor one beside it is lost.
#[test]
fn checkpoints_are_never_overwritten() {
    let bench = Bench::with_models(&["tiny/bert", "tiny/roberta"]);
    fs::rename(bench.path("bert"), bench.path("bert.mlpackage")).unwrap();
    #[cfg(unix)]
    std::os::unix::fs::symlink(bench.path("bert.mlpackage"), bench.path("link.mlpackage")).unwrap();
    #[cfg(not(unix))]
    fs::create_dir(bench.path("link.mlpackage")).unwrap();
    let before = bench.files();
    for line in [
        &["convert", "bert.mlpackage", "-o", "bert.mlpackage"][..],
        &["convert", "bert.mlpackage", "-o", "bert.mlpackage", "--force"],
        &["convert", "bert.mlpackage", "-o", "link.mlpackage"],
        &["convert", "link.mlpackage", "-o", "bert.mlpackage", "--force"],
        #[cfg(unix)]
        &["convert", "bert.mlpackage", "-o", "link.mlpackage", "--force"],
    ] {
        let ran = bench.run(line);
        assert_eq!(ran.code, 2, "{line:?}: {}", ran.err);
        assert_eq!(bench.files(), before, "{line:?}");
    }
    let ran = bench.run(&["convert", "bert.mlpackage", "-o", "roberta.mlpackage", "--force"]);
    assert!(ran.code == 0 && ran.err.contains("roberta: holds other files too"), "{}", ran.err);
    let after = bench.files();
    before.iter().for_each(|(path, bytes)| assert!(after[path] == *bytes, "{} was changed", path.display()));
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let bench = Bench::with_models(&["rxn-albert-mlm"]);
    for threads in ["1", "2"] {
        let args = ["convert", "rxn-albert-mlm", "-o", &format!("{threads}.mlpackage")];
        let status = bench.command(&args).env("RAYON_NUM_THREADS", threads).output().unwrap().status;
        assert!(status.success());
    }
    let inside = |name: &str| -> Vec<_> {
        let dir = bench.path(name);
        let relative = |(path, bytes): (std::path::PathBuf, Vec<u8>)| {
            (path.strip_prefix(&dir).unwrap().to_path_buf(), bytes)
        };
        files(&dir).into_iter().map(relative).collect()
    };
    let (one, two) = (inside("1.mlpackage"), inside("2.mlpackage"));
    assert!(one.len() == 3 && one == two, "the packages differ");
}

fn edit_config(bench: &Bench, checkpoint: &str, key: &str, value: Value) {
    let path = bench.path(checkpoint).join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config[key] = value;
    fs::write(path, config.to_string()).unwrap();
}
