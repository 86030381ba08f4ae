//! Checkpoints that other converters get wrong.

use serde_json::json;
use silane::{
    checkpoint::Task,
    interp::compare::compare,
    mil::{Arg, DType},
    reference,
};

use super::{
    Model, Plan, assert_agrees, build, fixture, floats, inputs, open, plan, run, slice, try_build, values,
};

const FAMILIES: [&str; 8] =
    ["albert", "bert", "distilbert", "electra", "modernbert", "mpnet", "roberta", "xlm-roberta"];

/// Ids beyond 16 bits, signed or not, find their rows.
#[test]
fn large_vocabularies_are_looked_up_whole() {
    let ids = [0, 32767, 32768, 65535, 65536, 69999];
    let (_dir, checkpoint) = Model::small_bert(70_000).open();
    assert_agrees("70000 words", &checkpoint, Task::FeatureExtraction, &inputs(&[&ids], None));
    // One token alone attends to itself only, so that equal outputs would be equal rows.
    let program = build(&checkpoint, &Plan { float: DType::F32, ..plan(&checkpoint, 1, 1) });
    let alone = ids.map(|id| floats(&run(&program, &values(&inputs(&[&[id]], None)))["last_hidden_state"]));
    for (i, a) in alone.iter().enumerate() {
        for (j, b) in alone.iter().enumerate().skip(i + 1) {
            assert!(compare(a, b, 0.0).unwrap().relative() > 1e-2, "{} and {} are one row", ids[i], ids[j]);
        }
    }
    let main = &program.functions["main"];
    let gather = main.body.ops.iter().find(|op| op.kind == "gather").unwrap();
    assert_eq!(gather.params["indices"], [Arg::Value(main.inputs[0])], "the ids are cast on the way");
}

/// A vocabulary that is too wide for the Neural Engine is projected in pieces, in order.
#[test]
fn wide_heads_are_split() {
    for (vocabulary, pieces) in [(16_384, vec![16_384]), (40_000, vec![16_384, 16_384, 7_232])] {
        for tied in [true, false] {
            let mut model = masked_lm(vocabulary);
            if !tied {
                model.set("tie_word_embeddings", json!(false));
                model.random("cls.predictions.decoder.weight", &[vocabulary, 8]);
            }
            let (_dir, checkpoint) = model.open();
            let last = u32::try_from(vocabulary - 1).unwrap();
            let what = format!("{vocabulary} words, tied {tied}");
            assert_agrees(&what, &checkpoint, Task::MaskedLm, &inputs(&[&[5, last]], None));
            let program = build(&checkpoint, &plan(&checkpoint, 1, 2));
            let main = &program.functions["main"];
            let channels =
                |op: &silane::mil::Op| main.ty(op.outputs[0]).as_tensor().unwrap().shape().unwrap()[1];
            let convs = main.body.ops.iter().filter(|op| op.kind == "conv").map(channels);
            assert_eq!(convs.filter(|c| *c > 100).collect::<Vec<_>>(), pieces, "{what}");
        }
    }
}

/// Where a norm's weight is no safe divisor, the bias still comes out exactly.
#[test]
fn norm_weights_may_be_zero() {
    let cases: [(&str, [f32; 4], [f32; 4]); 3] = [
        ("zeros", [0.0, 1e-8, -0.5, 0.0], [0.3, -2.0, 0.3, 1000.0]),
        ("tiny", [1e-6, -1e-7, 7e-5, 1e-3], [0.3, -2.0, 60000.0, -2.0]),
        ("small but safe", [1e-4, -1e-3, -0.5, 0.25], [0.3, -2.0, 0.3, -2.0]),
    ];
    for (what, weights, biases) in cases {
        let mut model = Model::small_bert(20);
        for norm in ["embeddings.LayerNorm", "encoder.layer.0.output.LayerNorm"] {
            model.values(&format!("{norm}.weight"))[..4].copy_from_slice(&weights);
            let large = biases.map(|b| if norm.starts_with("embeddings") { b.clamp(-2.0, 2.0) } else { b });
            model.values(&format!("{norm}.bias"))[..4].copy_from_slice(&large);
        }
        let (_dir, checkpoint) = model.open();
        let inputs = inputs(&[&[5, 9, 7]], None);
        let expected = reference::encoder(&checkpoint, Task::FeatureExtraction, &inputs).unwrap();
        let expected = floats(&expected["last_hidden_state"].clone().into());
        for (float, limit) in [(DType::F32, 1e-5), (DType::F16, 4e-3)] {
            let program = build(&checkpoint, &Plan { float, ..plan(&checkpoint, 1, 3) });
            let seen = floats(&run(&program, &values(&inputs))["last_hidden_state"]);
            for (i, (seen, expected)) in seen.iter().zip(&expected).enumerate() {
                let (channel, off) = (i % 8, (seen - expected).abs());
                assert!(
                    off <= limit * expected.abs().max(1.0),
                    "{what}, {float}, {i}: {seen} for {expected}"
                );
                if channel < 4 && weights[channel] == 0.0 {
                    let bias = biases[channel];
                    let exact = if float == DType::F16 { half::f16::from_f32(bias).to_f32() } else { bias };
                    assert_eq!(*seen, exact, "{what}, {float}, channel {channel}");
                }
            }
        }
    }
}

/// A row of nothing but padding, one token after seven of padding, and one before.
#[test]
fn padding_is_never_infinite() {
    for name in FAMILIES {
        let checkpoint = open(&fixture(&format!("tiny/{name}")));
        let pad = u32::try_from(checkpoint.config.usize(&["pad_token_id"]).unwrap()).unwrap();
        let (mut left, mut right) = ([pad; 8], [pad; 8]);
        (left[7], right[0]) = (17, 17);
        let (one_left, one_right) = ([0, 0, 0, 0, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0, 0, 0]);
        let inputs = inputs(&[&[pad; 8], &left, &right], Some(&[&[0; 8], &one_left, &one_right]));
        // Running checks that no op gives anything infinite.
        assert_agrees(name, &checkpoint, Task::FeatureExtraction, &inputs);
        let padded =
            &run(&build(&checkpoint, &plan(&checkpoint, 3, 8)), &values(&inputs))["last_hidden_state"];
        let alone = super::inputs(&[&[17]], None);
        let alone =
            floats(&run(&build(&checkpoint, &plan(&checkpoint, 1, 1)), &values(&alone))["last_hidden_state"]);
        let token = |row: usize, at: usize| floats(&slice(padded, row, 1))[at * 36..(at + 1) * 36].to_vec();
        let psnr = |seen: &[f32]| compare(seen, &alone, 1e-2).unwrap().psnr;
        assert!(psnr(&token(2, 0)) > 60.0, "{name}: padding behind changes the token");
        // Positions that are counted by real tokens do not mind padding in front.
        if ["modernbert", "mpnet", "roberta", "xlm-roberta"].contains(&name) {
            assert!(psnr(&token(1, 7)) > 60.0, "{name}: padding in front changes the token");
        }
    }
}

/// Rows of positions up to the padding id's are no token's.
#[test]
fn positions_run_out_where_they_should() {
    for (name, longest) in [
        ("xlm-roberta", 40),
        ("roberta", 40),
        ("mpnet", 40),
        ("bert", 40),
        ("albert", 40),
        ("distilbert", 40),
        ("electra", 40),
        ("modernbert", 64),
    ] {
        let checkpoint = open(&fixture(&format!("tiny/{name}")));
        let ids = vec![7; longest];
        assert_agrees(name, &checkpoint, Task::FeatureExtraction, &inputs(&[&ids], None));
        let error = try_build(&checkpoint, &plan(&checkpoint, 1, longest + 1)).unwrap_err().to_string();
        for word in [format!("{} tokens", longest + 1), format!("`--sequence-length {longest}`")] {
            assert!(error.contains(&word), "{name}: `{word}` is not in: {error}");
        }
    }
}

/// Without a head of its own, the table of words serves, unless the config says that it does not.
#[test]
fn a_head_is_tied_only_where_the_config_says_so() {
    for (tie, own, fine) in [
        (None, false, true),
        (Some(true), false, true),
        (Some(false), false, false),
        (Some(false), true, true),
    ] {
        let mut model = masked_lm(50);
        if let Some(tie) = tie {
            model.set("tie_word_embeddings", json!(tie));
        }
        if own {
            model.random("cls.predictions.decoder.weight", &[50, 8]);
        }
        let (_dir, checkpoint) = model.open();
        if fine {
            let what = format!("tie {tie:?}, own {own}");
            assert_agrees(&what, &checkpoint, Task::MaskedLm, &inputs(&[&[5, 9]], None));
        } else {
            let error = try_build(&checkpoint, &plan(&checkpoint, 1, 2)).unwrap_err().to_string();
            assert!(error.contains("`cls.predictions.decoder.weight`"), "{error}");
            assert!(error.contains("tie_word_embeddings"), "{error}");
        }
    }
}

fn masked_lm(vocabulary: usize) -> Model {
    let mut model = Model::small_bert(vocabulary);
    model.set("architectures", json!(["BertForMaskedLM"]));
    model.linear("cls.predictions.transform.dense", 8, 8).norm("cls.predictions.transform.LayerNorm", 8);
    model.random("cls.predictions.bias", &[vocabulary]);
    model
}
