//! Rotated checkpoints: the same outputs in every family that can be rotated, and a reason for the others.

use std::collections::BTreeMap;

use silane::{
    checkpoint::Checkpoint,
    interp::Precision,
    mil::DType,
    models,
    nn::cache::Update,
    quant::{Calibration, Method},
    reference::Decoder,
};

use super::{
    Model,
    decoders::{Text, VARIANTS, assert_near, chunks, programs, row},
    fixture, open,
};

/// Families that normalise what blocks give, so that the residual stream stays.
const STAYS: [&str; 4] = ["gemma2", "gemma3_text", "gemma3_text-types", "olmo2"];

/// Families whose norms subtract means.
const REFUSED: [&str; 10] =
    ["bloom", "cohere", "falcon", "gpt2", "gpt_neo", "gpt_neox", "opt", "phi", "stablelm", "starcoder2"];

fn rotated(checkpoint: &Checkpoint) -> silane::Result<models::Rotated> {
    models::rotated(checkpoint, checkpoint.config.model_type()?)
}

#[test]
fn rotated_models_compute_what_transformers_does() {
    for (i, name) in VARIANTS.iter().enumerate() {
        let plain = open(&fixture(&format!("tiny/{name}")));
        let rotated = match rotated(&plain) {
            Ok(rotated) => rotated,
            Err(e) => {
                assert!(REFUSED.contains(&name.split('-').next().unwrap()), "{name}: {e}");
                assert!(e.to_string().contains("subtract means"), "{name}: {e}");
                continue;
            }
        };
        assert_eq!(rotated.left.is_some(), STAYS.contains(name), "{name}");
        let (ids, expected) = row(name);
        let parts = 1 + i % 3;
        for (float, precision) in [(DType::F32, Precision::Fp32), (DType::F16, Precision::Fp16)] {
            let programs = programs(&rotated.checkpoint, float, chunks(4, parts, Update::Slice));
            let mut text = Text::new(&programs, precision);
            assert_near(&format!("{name}, prefill"), &text.feed(&ids[..4], 0), &expected[3], float);
            for (t, expected) in expected.iter().enumerate().skip(4) {
                let what = format!("{name}, {float}, {parts} parts, token {t}");
                assert_near(&what, &text.feed(&ids[t..=t], t), expected, float);
            }
        }
        // The reference of a rotated model is what quantization is calibrated on.
        let ids: Vec<u32> = ids.iter().map(|i| u32::try_from(*i).unwrap()).collect();
        let logits = Decoder::open(&rotated.checkpoint).unwrap().forward(&[ids], None).unwrap().logits;
        let logits = logits.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_near(&format!("{name}, reference"), &logits, &expected.concat(), DType::F32);
    }
}

/// A model whose norms make some channels large, which the layers that read them make up for, and whose words have
/// large channels too.
fn uneven(name: &str) -> Model {
    let mut model = Model::load(&format!("tiny/{name}"));
    let width = model.tensors["model.norm.weight"].0[0];
    let plus = if name.starts_with("gemma") { 1.0 } else { 0.0 };
    let by = |channel: usize| if channel % 16 == 3 { 12.0 } else { 1.0 };
    let norms = ["input_layernorm.weight", "post_attention_layernorm.weight"];
    let readers = ["q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight"];
    // Where the stream stays, only the words matter.
    let pre_norms = !STAYS.contains(&name);
    for name in model.tensors.keys().cloned().collect::<Vec<_>>() {
        let values = model.values(&name).iter_mut().enumerate();
        if pre_norms && norms.iter().any(|norm| name.ends_with(norm)) {
            values.for_each(|(i, v)| *v = (*v + plus) * by(i) - plus);
        } else if pre_norms && readers.iter().any(|reader| name.ends_with(reader)) {
            values.for_each(|(i, v)| *v /= by(i % width));
        } else if name.ends_with("embed_tokens.weight") {
            values.for_each(|(i, v)| *v *= by(i % width).sqrt());
        }
    }
    model
}

#[test]
fn rounding_a_rotated_model_loses_less() {
    let row: Vec<u32> = (0..40).map(|i| (i * i * 11 + i * 5) % 250 + 5).collect();
    let calibration =
        Calibration { method: Method::Importance, inputs: BTreeMap::new(), costs: BTreeMap::new() };
    for (name, scheme) in [
        ("smollm3", "int4"),
        ("smollm3", "lut4:g16"),
        ("smollm3", "lut3:g16"),
        ("llama", "int4"),
        ("gemma", "int4"),
        ("gemma3_text", "int4"),
    ] {
        let (_dir, plain) = uneven(name).open();
        let rotated = rotated(&plain).unwrap().checkpoint;
        let scheme = scheme.parse().unwrap();
        let [before, after] = [&plain, &rotated].map(|checkpoint| {
            let mut decoder = Decoder::open(checkpoint).unwrap();
            let mut rounded = decoder.clone();
            for (name, shape) in decoder.weights() {
                let values = decoder.weight(&name).unwrap();
                let looked_up = decoder.looks_up(&name);
                let made = calibration.compressed(&name, &values, shape, looked_up, &scheme).unwrap();
                rounded.replace(&name, made).unwrap();
            }
            decoder.divergence(&rounded, std::slice::from_ref(&row), 1).unwrap()
        });
        println!("{name}, {scheme}: {before:.4} nats, rotated {after:.4}");
        assert!(after < 0.8 * before, "{name}, {scheme}: {before} nats, rotated {after}");
    }
}

#[test]
fn what_is_not_known_of_is_refused() {
    let mut model = Model::load("tiny/llama");
    model.random("model.layers.1.mlp.extra.weight", &[64, 64]);
    let (_dir, checkpoint) = model.open();
    let e = rotated(&checkpoint).unwrap_err().to_string();
    assert!(e.contains("`model.layers.1.mlp.extra.weight`") && e.contains("not known"), "{e}");

    let mut model = Model::load("tiny/llama");
    model.tensors.get_mut("model.layers.0.mlp.up_proj.weight").unwrap().0.reverse();
    let (_dir, checkpoint) = model.open();
    let e = rotated(&checkpoint).unwrap_err().to_string();
    assert!(e.contains("model.layers.0.mlp.up_proj.weight"), "{e}");

    let e = models::rotated(&open(&fixture("tiny/bert")), "bert").unwrap_err().to_string();
    assert!(e.contains("bert is an encoder"), "{e}");
}
