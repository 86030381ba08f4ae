//! `silane run`: text or tensors in, results out.

use std::fs;

use expect_test::expect;
use safetensors::{Dtype, SafeTensors};

use super::{Bench, models::Model};

#[test]
fn texts_are_answered_by_task() {
    let bench =
        Bench::with_models(&["rxn-albert-mlm", "tiny/bert-cls", "tiny/distilbert-tokens", "tiny/bert"]);
    for (name, args) in [
        ("rxn-albert-mlm", &["--sequence-length", "32"][..]),
        ("bert-cls", &["--batch", "2"]),
        ("distilbert-tokens", &[]),
        ("bert", &["--task", "embedding", "--sequence-length", "8"]),
    ] {
        let output = format!("{name}.mlpackage");
        let ran = bench.run(&[&["convert", name, "-o", &output][..], args].concat());
        assert_eq!(ran.code, 0, "{}", ran.err);
    }
    super::copy(&bench.path("bert.mlpackage"), &bench.path("lonely.mlpackage"));
    expect![[r#"
        $ silane run rxn-albert-mlm.mlpackage --prompt 'CC(=[MASK])Oc1ccccc1' --top 3
        0.…  O
        0.…  [SeH]
        0.…  S
        [exit 0]

        $ silane run rxn-albert-mlm.mlpackage --prompt CC
        stderr: error: no token of the text is masked
        stderr:   hint: write `[MASK]` where one is missing
        [exit 2]

        $ silane run bert-cls.mlpackage --prompt 'a b c'
        0.…  no
        0.…  maybe
        0.…  yes
        [exit 0]

        $ silane run distilbert-tokens.mlpackage --prompt 'a b'
        0.…  [CLS]            LABEL_4
        0.…  a                LABEL_4
        0.…  b                LABEL_4
        0.…  [SEP]            LABEL_4
        [exit 0]

        $ silane run bert.mlpackage --prompt 'a b' --prompt 'a b' --prompt 'c d'
        1.0000  a b | a b
        0.…  a b | c d
        0.…  a b | c d
        [exit 0]

        $ silane run bert.mlpackage --prompt 'a b c d e f g h'
        stderr: error: the text is 10 tokens long, the package takes 8
        stderr:   hint: convert with a longer `--sequence-length`
        [exit 2]

        $ silane run bert.mlpackage --prompt 'a b' --tokenizer nowhere
        stderr: error: nowhere: there is no `tokenizer.json`
        stderr:   hint: write one with Transformers: `AutoTokenizer.from_pretrained(dir).save_pretrained(dir)`
        [exit 2]

        $ silane run lonely.mlpackage --prompt 'a b'
        stderr: error: lonely: there is no tokenizer beside the package
        stderr:   hint: say where it is with `--tokenizer DIR`, such as the checkpoint's folder
        [exit 2]

        $ silane run bert.mlpackage
        stderr: error: there is nothing to run on
        stderr:   hint: give a text with `--prompt`, or tensors with `--inputs`
        [exit 2]

        $ silane run bert.mlpackage --prompt a --function decode
        stderr: error: the package has no function `decode`
        stderr:   hint: it has `main`
        [exit 2]

        $ silane run nowhere.mlpackage --prompt a
        stderr: error: nowhere.mlpackage: No such file or directory (os error 2)
        [exit 2]

    "#]]
    .assert_eq(&bench.transcript(&[
        "run rxn-albert-mlm.mlpackage --prompt 'CC(=[MASK])Oc1ccccc1' --top 3",
        "run rxn-albert-mlm.mlpackage --prompt CC",
        "run bert-cls.mlpackage --prompt 'a b c'",
        "run distilbert-tokens.mlpackage --prompt 'a b'",
        "run bert.mlpackage --prompt 'a b' --prompt 'a b' --prompt 'c d'",
        "run bert.mlpackage --prompt 'a b c d e f g h'",
        "run bert.mlpackage --prompt 'a b' --tokenizer nowhere",
        "run lonely.mlpackage --prompt 'a b'",
        "run bert.mlpackage",
        "run bert.mlpackage --prompt a --function decode",
        "run nowhere.mlpackage --prompt a",
    ]));
}

/// The answer to a question is cut from the passage.
#[test]
fn answers_are_spans_of_the_passage() {
    let bench = Bench::new();
    let mut model = Model::load("tiny/bert");
    model.set("architectures", serde_json::json!(["BertForQuestionAnswering"])).linear("qa_outputs", 2, 36);
    let checkpoint = model.write();
    let dir = checkpoint.path().to_str().unwrap();
    let args = ["convert", dir, "-o", "qa.mlpackage", "--sequence-length", "16", "--token-type-ids"];
    assert_eq!(bench.run(&args).code, 0);
    let ran = bench.run(&["run", "qa.mlpackage", "--prompt", "who", "--pair", "a b c"]);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    assert!("a b c".contains(ran.out.trim()) && !ran.out.trim().is_empty(), "{}", ran.out);
    let alone = bench.run(&["run", "qa.mlpackage", "--prompt", "who"]);
    assert!(alone.code == 2 && alone.err.contains("`--pair`"), "{}", alone.err);
}

/// Tensors in and out, in the package's types or in fp32.
#[test]
fn tensors_go_in_and_out() {
    let bench = Bench::with_models(&["tiny/electra-discriminator"]);
    let name = "electra-discriminator";
    let args = ["--batch", "2", "--sequence-length", "9", "--token-type-ids"];
    assert_eq!(bench.run(&[&["convert", name, "-o", "a.mlpackage"][..], &args].concat()).code, 0);
    let inputs = format!("{name}/reference.safetensors");
    let stored = logits(&fs::read(bench.path(&inputs)).unwrap());
    for (precision, dtype, limit) in [("fp16", Dtype::F16, 3e-2), ("fp32", Dtype::F32, 1e-2)] {
        let args = ["run", "a.mlpackage", "--inputs", &inputs, "--outputs", "o.safetensors"];
        let ran = bench.run(&[&args[..], &["--precision", precision]].concat());
        assert_eq!((ran.code, ran.out.as_str(), ran.err.as_str()), (0, "", ""));
        let seen = logits(&fs::read(bench.path("o.safetensors")).unwrap());
        assert_eq!((seen.0, &seen.1), (dtype, &vec![2, 9]));
        // The second row has five real tokens.
        let real = (0..9).chain(9..14);
        let worst = real.map(|i| (seen.2[i] - stored.2[i]).abs()).fold(0.0, f32::max);
        assert!(worst < limit, "{precision}: {worst}");
    }
    expect![[r#"
        $ silane run a.mlpackage --inputs nowhere.safetensors
        stderr: error: nowhere.safetensors: No such file or directory (os error 2)
        [exit 2]

        $ silane run a.mlpackage --inputs electra-discriminator/config.json
        stderr: error: electra-discriminator/config.json: not a safetensors file: header too large
        [exit 2]

        $ silane run a.mlpackage --inputs a.mlpackage --prompt a
        stderr: error: the argument '--inputs <FILE.safetensors>' cannot be used with '--prompt <TEXT>'
        stderr: 
        stderr: Usage: silane run --inputs <FILE.safetensors> <PACKAGE>
        stderr: 
        stderr: For more information, try '--help'.
        [exit 2]

        $ silane run a.mlpackage --prompt a --prompt b --outputs o.safetensors
        stderr: error: 2 texts are given, `--outputs` takes the result of one
        [exit 2]

    "#]]
    .assert_eq(&bench.transcript(&[
        "run a.mlpackage --inputs nowhere.safetensors",
        "run a.mlpackage --inputs electra-discriminator/config.json",
        "run a.mlpackage --inputs a.mlpackage --prompt a",
        "run a.mlpackage --prompt a --prompt b --outputs o.safetensors",
    ]));
    let summary = bench.run(&["run", "a.mlpackage", "--inputs", &inputs]).out;
    assert!(summary.starts_with("logits [2, 9]  min ") && summary.ends_with("not finite 0\n"), "{summary}");
}

fn logits(file: &[u8]) -> (Dtype, Vec<usize>, Vec<f32>) {
    let file = SafeTensors::deserialize(file).unwrap();
    let tensor = file.tensor("logits").unwrap();
    let values = match tensor.dtype() {
        Dtype::F16 => {
            let halves = tensor.data().as_chunks::<2>().0;
            halves.iter().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect()
        }
        _ => tensor.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
    };
    (tensor.dtype(), tensor.shape().to_vec(), values)
}
