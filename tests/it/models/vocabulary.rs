//! Ways that a language model's head may come out: in pieces, and as the likeliest token.

use serde_json::json;
use silane::{
    checkpoint::{Checkpoint, Task},
    interp::Precision,
    mil::{DType, Program},
    models::{self, Chunks, Logits},
    nn::cache::Update,
};

use super::{
    Model, Plan,
    decoders::{Text, chunks, programs, try_programs},
    floats, plan,
};

const IDS: [i64; 6] = [7, 21, 5, 99, 11, 3];
const HIDDEN: usize = 48;

/// A Llama of so many words; those from 307 on are random.
fn wide(words: usize) -> Model {
    let mut model = Model::load("tiny/llama");
    model.set("vocab_size", json!(words));
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        let known = model.values(name).clone();
        model.random(name, &[words, HIDDEN]);
        // Near the first ones, so that any may be the likeliest.
        model.values(name).iter_mut().for_each(|v| *v *= 0.1);
        let kept = known.len().min(words * HIDDEN);
        model.values(name)[..kept].copy_from_slice(&known[..kept]);
    }
    model
}

fn build(checkpoint: &Checkpoint, float: DType, logits: Logits) -> Vec<Program> {
    programs(checkpoint, float, Chunks { logits, ..chunks(3, 1, Update::Slice) })
}

/// Token, and score, after each of a prompt's calls.
fn choices(programs: &[Program], precision: Precision) -> Vec<(i64, f32)> {
    let mut text = Text::new(programs, precision);
    let mut seen = Vec::new();
    for (ids, position) in [(&IDS[..3], 0), (&IDS[3..4], 3), (&IDS[4..5], 4), (&IDS[3..6], 3)] {
        let outputs = text.call(ids, position);
        let names: Vec<&str> = outputs.keys().map(String::as_str).collect();
        assert_eq!(names, ["token_ids", "token_scores"]);
        for value in outputs.values() {
            assert_eq!(value.tensor().unwrap().dims(), [1, 1]);
        }
        seen.push((outputs["token_ids"].to_ints().unwrap()[0], floats(&outputs["token_scores"])[0]));
    }
    seen
}

/// The first of the largest logits, and it, after the same calls.
fn expected(programs: &[Program], precision: Precision) -> Vec<(i64, f32)> {
    let mut text = Text::new(programs, precision);
    let first = |logits: Vec<f32>| {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        (logits.iter().position(|l| *l == largest).unwrap().try_into().unwrap(), largest)
    };
    let calls = [(&IDS[..3], 0), (&IDS[3..4], 3), (&IDS[4..5], 4), (&IDS[3..6], 3)];
    calls.map(|(ids, position)| first(text.feed(ids, position))).to_vec()
}

/// Vocabularies of one column and of several, with and without a rest, in one piece and in several.
#[test]
fn the_likeliest_token_is_the_first_of_the_largest_logits() {
    for words in [307, 2048, 2049, 4096, 16_384, 16_385, 40_000] {
        let (_dir, checkpoint) = wide(words).open();
        for (float, precision) in [(DType::F16, Precision::Fp16), (DType::F32, Precision::Fp32)] {
            let [argmax, last] =
                [Logits::Argmax, Logits::Last].map(|logits| build(&checkpoint, float, logits));
            assert_eq!(choices(&argmax, precision), expected(&last, precision), "{words} words, {float}");
        }
    }
}

/// Equal rows of the head give equal logits, wherever they are; the lowest id wins.
#[test]
fn ties_go_to_the_lowest_id() {
    let words = 40_000;
    let mut model = wide(words);
    let (_dir, checkpoint) = model.open();
    let likeliest = expected(&build(&checkpoint, DType::F16, Logits::Last), Precision::Fp16)[0].0;
    let from = usize::try_from(likeliest).unwrap() * HIDDEN;
    let row = model.values("lm_head.weight")[from..from + HIDDEN].to_vec();
    // In one column, in two, in the second piece, in the rest; each is lower than all before.
    for ids in [[39_990, 39_999], [36_000, 39_000], [17_000, 35_000], [2_047, 2_048], [1_000, 1_001]] {
        for id in ids {
            model.values("lm_head.weight")[id * HIDDEN..][..HIDDEN].copy_from_slice(&row);
        }
        let (_dir, checkpoint) = model.open();
        let seen = choices(&build(&checkpoint, DType::F16, Logits::Argmax), Precision::Fp16)[0].0;
        let lowest = i64::try_from(ids[0]).unwrap().min(likeliest);
        assert_eq!(seen, lowest, "{ids:?} and {likeliest} are equal");
    }
}

/// Joined in the order of their names, the pieces are the logits, whatever the parts.
#[test]
fn pieces_of_the_head_join_to_its_logits() {
    for name in ["llama", "gemma2"] {
        let model = match name {
            "llama" => wide(40_000),
            _ => {
                // Tied, and capped after the head.
                let mut model = Model::load("tiny/gemma2");
                model.set("vocab_size", json!(40_000));
                model.random("model.embed_tokens.weight", &[40_000, HIDDEN]);
                model
            }
        };
        let (_dir, checkpoint) = model.open();
        for logits in [Logits::Last, Logits::All] {
            let run = |split_head: bool, parts: usize| {
                let chunks = Chunks { logits, split_head, ..chunks(3, parts, Update::Slice) };
                let programs = programs(&checkpoint, DType::F16, chunks);
                let mut text = Text::new(&programs, Precision::Fp16);
                let mut rows: Vec<Vec<f32>> = Vec::new();
                for (ids, position) in [(&IDS[..3], 0), (&IDS[3..4], 3)] {
                    let outputs = text.call(ids, position);
                    let names: Vec<&str> = outputs.keys().map(String::as_str).collect();
                    match split_head {
                        true => assert_eq!(names, ["logits_1of3", "logits_2of3", "logits_3of3"]),
                        false => assert_eq!(names, ["logits"]),
                    }
                    let tokens = outputs.values().next().unwrap().tensor().unwrap().dims()[1];
                    assert_eq!(tokens, if logits == Logits::All { ids.len() } else { 1 });
                    for token in 0..tokens {
                        let of = |v: &silane::ops::Val| {
                            let row = v.tensor().unwrap().narrow(1, token, 1).unwrap();
                            floats(&silane::ops::Val::Tensor(row))
                        };
                        rows.push(outputs.values().flat_map(of).collect());
                    }
                }
                rows
            };
            let joined = run(false, 1);
            assert!(joined.iter().all(|row| row.len() == 40_000));
            for parts in [1, 3] {
                assert!(run(true, parts) == joined, "{name}, {logits:?}, {parts} parts");
            }
        }
    }
}

/// Names sort as the rows do, and the contract says which rows.
#[test]
fn pieces_are_named_in_order() {
    for (words, names) in [
        (307, vec!["logits"]),
        (16_384, vec!["logits"]),
        (16_385, vec!["logits_1of2", "logits_2of2"]),
        (163_841, vec!["logits_01of11", "logits_02of11", "logits_11of11"]),
    ] {
        let mut model = Model::load("tiny/llama");
        model.set("vocab_size", json!(words)).set("tie_word_embeddings", json!(true));
        model.tensors.remove("lm_head.weight");
        model.random("model.embed_tokens.weight", &[words, HIDDEN]);
        let (_dir, checkpoint) = model.open();
        let chunks = Chunks { split_head: true, ..chunks(3, 3, Update::Slice) };
        let plan = Plan { task: Task::CausalLm, chunks, ..plan(&checkpoint, 1, 1) };
        let parts = models::build(&checkpoint, &plan, "llama").unwrap();
        assert_eq!(parts[0].notes.is_empty(), words > 16_384, "{:?}", parts[0].notes);
        assert!(parts[..2].iter().all(|p| p.contract["head_outputs"].is_null()));
        let listed = parts[2].contract["head_outputs"].as_array().unwrap();
        let all: Vec<&str> = listed.iter().map(|o| o["name"].as_str().unwrap()).collect();
        assert!(all.is_sorted() && names.iter().all(|n| all.contains(n)), "{all:?}");
        assert_eq!(all.len(), words.div_ceil(16_384));
        let mut end = 0;
        for output in listed {
            assert_eq!(output["rows"][0], json!(end));
            end = usize::try_from(output["rows"][1].as_u64().unwrap()).unwrap();
        }
        assert_eq!(end, words);
    }
}

#[test]
fn the_likeliest_token_has_no_pieces() {
    let (_dir, checkpoint) = wide(307).open();
    let chunks = Chunks { logits: Logits::Argmax, split_head: true, ..chunks(3, 1, Update::Slice) };
    let error = try_programs(&checkpoint, DType::F16, chunks).unwrap_err();
    assert!(error.to_string().contains("`--logits argmax` gives no logits"), "{error}");
}
