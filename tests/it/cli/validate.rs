//! `silane validate`: the verdict, and that it is the right one.

use expect_test::expect;

use super::{Bench, models::Model};

#[test]
fn verdicts_are_data_and_exit_codes() {
    let bench = Bench::with_models(&["tiny/bert", "tiny/bert-mlm"]);
    let done = bench.run(&["convert", "bert", "-o", "a.mlpackage"]).code;
    let args = ["--batch", "2", "--sequence-length", "9", "--token-type-ids", "--precision", "fp32"];
    let exact = bench.run(&[&["convert", "bert", "-o", "b.mlpackage"][..], &args].concat()).code;
    assert_eq!((done, exact), (0, 0));
    expect![[r#"
        $ silane validate a.mlpackage --reference bert
        PASS last_hidden_state: max error …; wanted at least 50 dB
        [exit 0]

        $ silane validate a.mlpackage --reference bert --precision fp32
        PASS last_hidden_state: max error …; wanted at most 2e-3 of the spread
        [exit 0]

        $ silane validate a.mlpackage --reference bert-mlm
        FAIL last_hidden_state: max error …; wanted at least 50 dB
             first value off: …
        [exit 1]

        $ silane validate a.mlpackage --reference bert/reference.safetensors
        stderr: error: the reference's `input_ids` is [2, 9], the package takes [1, 40]
        stderr:   hint: convert with `--batch 2 --sequence-length 9`
        [exit 2]

        $ silane validate b.mlpackage --reference bert/reference.safetensors
        PASS last_hidden_state: max error …; wanted at most 1e-4 of the spread
        [exit 0]

        $ silane validate bert --reference bert/reference.safetensors
        PASS last_hidden_state: max error …; wanted at most 1e-5 of the spread
        PASS pooler_output: max error …; wanted at most 1e-5 of the spread
        [exit 0]

        $ silane validate bert --reference bert
        stderr: error: bert: a checkpoint is validated against stored outputs
        stderr:   hint: give a `.safetensors` file to `--reference`
        [exit 2]

        $ silane validate a.mlpackage --reference nowhere.safetensors
        stderr: error: nowhere.safetensors: No such file or directory (os error 2)
        [exit 2]

        $ silane validate nowhere.mlpackage --reference bert
        stderr: error: nowhere.mlpackage: No such file or directory (os error 2)
        [exit 2]

        $ silane validate a.mlpackage
        stderr: error: the following required arguments were not provided:
        stderr:   --reference <CHECKPOINT|FILE.safetensors>
        stderr: 
        stderr: Usage: silane validate --reference <CHECKPOINT|FILE.safetensors> <PACKAGE>
        stderr: 
        stderr: For more information, try '--help'.
        [exit 2]

    "#]]
    .assert_eq(&bench.transcript(&[
        "validate a.mlpackage --reference bert",
        "validate a.mlpackage --reference bert --precision fp32",
        "validate a.mlpackage --reference bert-mlm",
        "validate a.mlpackage --reference bert/reference.safetensors",
        "validate b.mlpackage --reference bert/reference.safetensors",
        "validate bert --reference bert/reference.safetensors",
        "validate bert --reference bert",
        "validate a.mlpackage --reference nowhere.safetensors",
        "validate nowhere.mlpackage --reference bert",
        "validate a.mlpackage",
    ]));
    let ran = bench.run(&["validate", "a.mlpackage", "--reference", "bert-mlm", "--json"]);
    assert_eq!((ran.code, ran.err.as_str(), ran.json()["pass"].as_bool()), (1, "", Some(false)));
}

/// Every stored checkpoint passes with default settings.
#[test]
fn correct_conversions_pass() {
    for name in [
        "albert",
        "albert-groups",
        "bert",
        "bert-cls",
        "bert-mlm",
        "distilbert",
        "distilbert-cls",
        "distilbert-tokens",
        "electra",
        "electra-discriminator",
        "modernbert",
        "modernbert-mlm",
        "mpnet",
        "roberta",
        "roberta-mlm",
        "xlm-roberta",
    ] {
        let bench = Bench::with_models(&[&format!("tiny/{name}")]);
        let ran = bench.run(&["convert", name, "-o", "a.mlpackage", "--validate"]);
        assert_eq!(ran.code, 0, "{name}: {}", ran.err);
        assert!(ran.err.contains("\nPASS ") && !ran.err.contains("FAIL"), "{name}: {}", ran.err);
    }
}

/// One weight, one order or one position off is enough to fail, in every output.
#[test]
fn wrong_conversions_fail() {
    type Edit = fn(&mut Model);
    let rows: [(&str, &str, Edit); 7] = [
        ("tiny/bert", "a norm's weights doubled", |m| double(m, "encoder.layer.1.output.LayerNorm.weight")),
        ("tiny/bert", "two heads of the queries swapped", |m| {
            swap_heads(m, "encoder.layer.1.attention.self.query", 12);
        }),
        ("tiny/bert", "positions shifted", |m| shift(m, "embeddings.position_embeddings.weight", 36)),
        ("tiny/roberta", "positions shifted", |m| shift(m, "embeddings.position_embeddings.weight", 36)),
        ("rxn-albert-mlm", "a norm's weights doubled", |m| {
            double(m, "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.LayerNorm.weight");
        }),
        ("rxn-albert-mlm", "two heads of the queries swapped", |m| {
            swap_heads(m, "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.query", 32);
        }),
        ("rxn-albert-mlm", "positions shifted", |m| {
            shift(m, "albert.embeddings.position_embeddings.weight", 128);
        }),
    ];
    for (name, what, edit) in rows {
        let bench = Bench::with_models(&[name]);
        let mut model = Model::load(name);
        let right = model.write();
        edit(&mut model);
        let wrong = model.write();
        let reference = name.rsplit('/').next().unwrap();
        for (dir, code, verdict) in [(right, 0, "PASS"), (wrong, 1, "FAIL")] {
            let args = ["convert", dir.path().to_str().unwrap(), "-o", "a.mlpackage", "--force"];
            assert_eq!(bench.run(&[&args[..], &["--sequence-length", "24"]].concat()).code, 0);
            let ran = bench.run(&["validate", "a.mlpackage", "--reference", reference]);
            assert!(ran.code == code && ran.out.starts_with(verdict), "{name}, {what}: {}", ran.out);
        }
    }
}

fn double(model: &mut Model, name: &str) {
    model.values(name).iter_mut().for_each(|v| *v *= 2.0);
}

/// Swaps the first two heads of `dim` rows.
fn swap_heads(model: &mut Model, name: &str, dim: usize) {
    let width = model.tensors[&format!("{name}.weight")].0[1];
    for (tensor, size) in [("weight", dim * width), ("bias", dim)] {
        let (first, rest) = model.values(&format!("{name}.{tensor}")).split_at_mut(size);
        first.swap_with_slice(&mut rest[..size]);
    }
}

fn shift(model: &mut Model, name: &str, width: usize) {
    model.values(name).rotate_left(width);
}
