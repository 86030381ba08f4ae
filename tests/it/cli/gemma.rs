//! Gemma's conventions: a reference that missed any one of them would not agree with the package.

use serde_json::{Value, json};

use super::{Bench, models::Model};

type Edit = Box<dyn Fn(&mut Model)>;

/// A setting of the config that is another one.
fn with(key: &'static str, value: Value) -> (String, Edit) {
    let what = format!("`{key}` {value}");
    let edit = move |m: &mut Model| {
        m.set(key, value.clone());
    };
    (what, Box::new(edit))
}

/// Norms whose scale is their weight, not one more.
fn plain_norms(name: &'static str) -> (String, Edit) {
    let edit = move |m: &mut Model| {
        let ours = |n: &String| n.ends_with(&format!(".{name}.weight"));
        let names: Vec<String> = m.tensors.keys().filter(|n| ours(n)).cloned().collect();
        assert!(!names.is_empty(), "there is no `{name}`");
        names.iter().for_each(|n| m.values(n).iter_mut().for_each(|v| *v -= 1.0));
    };
    (format!("{name} without one more"), Box::new(edit))
}

/// Embeddings that are not scaled by the root of the width; the head, tied to them, stays as it is.
fn plain_embeddings() -> (String, Edit) {
    let edit = |m: &mut Model| {
        let words = m.tensors["model.embed_tokens.weight"].clone();
        let root = (m.config["hidden_size"].as_f64().unwrap() as f32).sqrt();
        m.values("model.embed_tokens.weight").iter_mut().for_each(|v| *v /= root);
        m.tensors.insert("lm_head.weight".into(), words);
        m.set("tie_word_embeddings", json!(false));
    };
    ("embeddings without scale".into(), Box::new(edit))
}

fn conventions(name: &str) -> Vec<(String, Edit)> {
    let mut all = vec![
        plain_norms("input_layernorm"),
        plain_norms("post_attention_layernorm"),
        plain_norms("norm"),
        plain_embeddings(),
        with("hidden_activation", json!("gelu")),
        with("hidden_activation", json!("silu")),
    ];
    if name != "gemma" {
        all.extend([
            plain_norms("pre_feedforward_layernorm"),
            plain_norms("post_feedforward_layernorm"),
            with("query_pre_attn_scalar", json!(20)),
            with("sliding_window", json!(5)),
            with("sliding_window", json!(64)),
        ]);
    }
    all.extend(match name {
        "gemma" => vec![with("rope_theta", json!(1e6))],
        "gemma2" => vec![
            with("attn_logit_softcapping", Value::Null),
            with("final_logit_softcapping", Value::Null),
            with("attn_logit_softcapping", json!(50.0)),
            with("final_logit_softcapping", json!(30.0)),
            with("rope_theta", json!(1e6)),
        ],
        "gemma3_text" => vec![
            plain_norms("q_norm"),
            plain_norms("k_norm"),
            with("rope_theta", json!(1e4)),
            with("rope_local_base_freq", json!(1e6)),
            with("rope_scaling", Value::Null),
            with("sliding_window_pattern", json!(2)),
        ],
        _ => vec![
            plain_norms("q_norm"),
            plain_norms("k_norm"),
            with("rope_theta", json!(1e4)),
            with("rope_local_base_freq", json!(1e6)),
            with("layer_types", json!(vec!["full_attention"; 4])),
            with("layer_types", json!(vec!["sliding_attention"; 4])),
        ],
    });
    all
}

/// The package and how it is computed, from the widest limit to the narrowest.
const WAYS: [(&str, &str); 3] = [("fp16", "fp16"), ("fp16", "fp32"), ("fp32", "fp32")];

/// The way that tells a convention from its absence. GELU by erf and by tanh differ by less than fp16 does,
/// and a base whose positions are divided by 8 hardly matters in a text of 40 tokens.
fn telling(name: &str, what: &str) -> usize {
    match (name, what) {
        (_, "`hidden_activation` \"gelu\"") => 2,
        ("gemma3_text", "`rope_theta` 10000.0") => 1,
        _ => 0,
    }
}

/// The package stays; each convention that the reference does without turns the verdict.
#[test]
fn every_convention_of_gemma_counts() {
    for name in ["gemma", "gemma2", "gemma3_text", "gemma3_text-types"] {
        let bench = Bench::with_models(&[&format!("tiny/{name}")]);
        for precision in ["fp16", "fp32"] {
            let package = format!("{precision}.mlpackage");
            let args = ["convert", name, "-o", &package, "--precision", precision, "--no-tokenizer"];
            assert_eq!(bench.run(&args).code, 0);
        }
        let verdict = |(package, precision): (&str, &str), reference: &str| {
            let package = format!("{package}.mlpackage");
            let ran = bench.run(&["validate", &package, "--reference", reference, "--precision", precision]);
            assert!(ran.code < 2, "{name}: {}", ran.err);
            ran.code
        };
        // Written anew, the checkpoint is the same.
        let same = Model::load(&format!("tiny/{name}")).write();
        assert_eq!(WAYS.map(|way| verdict(way, same.path().to_str().unwrap())), [0, 0, 0], "{name}");
        for (what, edit) in conventions(name) {
            let mut model = Model::load(&format!("tiny/{name}"));
            edit(&mut model);
            let other = model.write();
            let telling = telling(name, &what);
            for (i, way) in WAYS.into_iter().enumerate().take(telling + 1) {
                let code = verdict(way, other.path().to_str().unwrap());
                assert_eq!(code, i32::from(i == telling), "{name}, {way:?}: {what}");
            }
        }
    }
}
