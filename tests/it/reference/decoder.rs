//! The reference for causal language models against what Transformers computed.

use candle_core::Tensor;
use serde_json::{Value, json};
use silane::{
    checkpoint::{Checkpoint, Task},
    reference::{Decoder, DecoderOutput, decoder},
};

use super::{difference, grafted, models, open, stored, values};

#[test]
fn agrees_with_transformers() {
    let names = decoders();
    assert_eq!(names.len(), 41);
    for name in names {
        let (decoder, stored) =
            (load(&name), stored(&models().join("tiny").join(&name).join("reference.safetensors")));
        let mask = stored["attention_mask"].rows();
        let output = decoder.forward(&stored["input_ids"].rows(), Some(&mask)).unwrap();
        for (what, got) in [("logits", &output.logits), ("last_hidden_state", &output.last_hidden_state)] {
            let want = &stored[what];
            assert_eq!(got.dims(), want.shape, "{name}: {what}");
            let worst = difference(&values(got), &want.floats(), &want.shape, &mask);
            println!("{name}: {what} {worst:.1e}");
            assert!(worst < 1e-5, "{name}: {what}, {worst:e} of the spread");
        }
        let greedy = &stored["greedy.logits"];
        let (tokens, logits) = continued(&decoder, &stored["greedy.prompt_ids"].rows()[0], 12);
        assert_eq!(tokens, stored["greedy.token_ids"].rows()[0], "{name}");
        let worst = difference(&logits, &greedy.floats(), &greedy.shape, &[]);
        assert!(worst < 1e-5, "{name}: greedy logits, {worst:e} of the spread");
    }
}

/// A text alone, with padding before it or after it, and beside a row of padding alone.
#[test]
fn padding_changes_nothing_and_is_never_nan() {
    for name in decoders() {
        let decoder = load(&name);
        let run = |ids: &[&[u32]], mask: &[&[u32]]| {
            let rows = |rows: &[&[u32]]| rows.iter().map(|r| r.to_vec()).collect::<Vec<_>>();
            decoder.forward(&rows(ids), Some(&rows(mask))).unwrap().logits
        };
        let alone = values(&decoder.forward(&[vec![5, 9, 7]], None).unwrap().logits);
        let padded = run(
            &[&[3, 3, 5, 9, 7], &[5, 9, 7, 3, 3], &[3; 5]],
            &[&[0, 0, 1, 1, 1], &[1, 1, 1, 0, 0], &[0; 5]],
        );
        assert!(values(&padded).iter().all(|x| x.is_finite()), "{name}: not finite");
        let row =
            |row: usize, from: usize| values(&padded.narrow(0, row, 1).unwrap().narrow(1, from, 3).unwrap());
        for (place, got) in [("before", row(0, 2)), ("after", row(1, 0))] {
            let worst = difference(&got, &alone, &[1], &[]);
            assert!(worst < 1e-5, "{name}: padding {place} the text, {worst:e} of the spread");
        }
    }
}

/// The same numbers in the form of version 4 of Transformers and of version 5.
#[test]
fn both_forms_of_the_config_are_read() {
    let rows = [
        (
            "llama",
            json!({"rope_theta": null, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ),
        (
            "llama-rope-llama3",
            json!({"rope_theta": null, "rope_scaling": null, "rope_parameters": {
                "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8, "rope_theta": 5e5}}),
        ),
        (
            "llama-rope-yarn",
            json!({"rope_theta": null, "rope_scaling": null, "rope_parameters": {
                "rope_type": "yarn", "original_max_position_embeddings": 16, "rope_theta": 1e4}}),
        ),
        (
            "phi3-longrope",
            json!({"partial_rotary_factor": null, "original_max_position_embeddings": null,
                "rope_theta": null, "rope_scaling": null, "rope_parameters": {
                "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.5, 2.5, 4.0],
                "original_max_position_embeddings": 8, "partial_rotary_factor": 0.5, "rope_theta": 1e4}}),
        ),
        (
            "gpt_neox",
            json!({"rotary_pct": null, "rotary_emb_base": null, "rope_parameters": {
                "rope_type": "default", "partial_rotary_factor": 0.25, "rope_theta": 1e4}}),
        ),
        (
            "gemma3_text",
            json!({"rope_theta": null, "rope_scaling": null, "rope_local_base_freq": null,
                "sliding_window_pattern": null,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
        ),
    ];
    for (name, config) in rows {
        let (old, new) = (run(name, json!({}), 11), run(name, config, 11));
        assert!(old == new, "{name}");
    }
}

/// Scaling that no stored output reaches, against another config that comes to the same.
#[test]
fn scaling_depends_on_the_length_as_it_should() {
    let head = 12f64;
    let stretched = |length: f64| 1e4 * (4.0 * length / 4.0 - 3.0).powf(head / (head - 2.0));
    let dynamic = json!({"max_position_embeddings": 4});
    for (length, theta) in [(3, 1e4), (4, 1e4), (8, stretched(8.0)), (9, stretched(9.0))] {
        let plain = json!({"rope_scaling": null, "rope_theta": theta});
        let (got, want) =
            (run("llama-rope-dynamic", dynamic.clone(), length), run("llama-rope-dynamic", plain, length));
        let worst = difference(&got, &want, &[1], &[]);
        assert!(worst < 1e-5, "dynamic, {length} tokens: {worst:e} of the spread");
    }
    let factors = json!({"rope_scaling": {"type": "su", "short_factor": [1.0, 1.0, 1.0],
        "long_factor": [2.0, 2.0, 2.0], "attention_factor": 1.0}});
    for (length, factor) in [(8, 1.0), (9, 2.0)] {
        let linear = json!({"rope_scaling": {"type": "linear", "factor": factor}});
        let (got, want) =
            (run("phi3-longrope", factors.clone(), length), run("phi3-longrope", linear, length));
        let worst = difference(&got, &want, &[1], &[]);
        assert!(worst < 1e-5, "longrope, {length} tokens: {worst:e} of the spread");
    }
}

/// Each convention, left out or turned, must be seen in the logits.
#[test]
fn every_number_of_the_config_counts() {
    for (name, config) in [
        ("gemma2", json!({"attn_logit_softcapping": null})),
        ("gemma2", json!({"final_logit_softcapping": null})),
        ("gemma2", json!({"query_pre_attn_scalar": 20})),
        (
            "gemma2",
            json!({"layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]}),
        ),
        ("gemma3_text", json!({"rope_local_base_freq": 1e6})),
        ("gemma3_text", json!({"rope_scaling": null})),
        ("mistral", json!({"sliding_window": 5})),
        ("mistral", json!({"sliding_window": null})),
        ("qwen2-window", json!({"max_window_layers": 2})),
        ("qwen2-window", json!({"use_sliding_window": false})),
        ("gpt_neo", json!({"window_size": 5})),
        ("smollm3", json!({"no_rope_layers": [1, 1, 1, 1]})),
        ("smollm3", json!({"use_sliding_window": true, "sliding_window": 4})),
        ("granite", json!({"residual_multiplier": 1.0})),
        ("granite", json!({"logits_scaling": 1.0})),
        ("cohere", json!({"logit_scale": 1.0})),
        ("gpt2-scaled", json!({"scale_attn_by_inverse_layer_idx": false})),
        ("qwen3_moe", json!({"norm_topk_prob": false})),
        ("qwen3_moe", json!({"num_experts_per_tok": 1})),
        ("llama-bias", json!({"rms_norm_eps": 1e-5})),
        ("phi", json!({"hidden_act": "gelu"})),
        ("falcon", json!({"alibi": true})),
    ] {
        let (stored, turned) = (run(name, json!({}), 11), run(name, config.clone(), 11));
        let worst = difference(&turned, &stored, &[1], &[]);
        assert!(worst > 1e-4, "{name}, {config}: only {worst:e} of the spread");
    }
}

/// A head that is missing is the word embedding only where the config says so.
#[test]
fn a_missing_head_is_the_embedding_if_the_config_says_so() {
    let tied = values(&load("llama-rope-llama3").forward(&[vec![5, 6, 7]], None).unwrap().logits);
    let nested = json!({"tie_word_embeddings": null, "text_config": {"tie_word_embeddings": true}});
    assert_eq!(run("llama-rope-llama3", nested, 3).len(), tied.len());
    for config in [json!({"tie_word_embeddings": false}), json!({"tie_word_embeddings": null})] {
        let dir = grafted("llama-rope-llama3", config, Vec::new(), &[]);
        let error = Decoder::open(&open(&dir)).err().unwrap().to_string();
        assert!(error.contains("`lm_head.weight`"), "{error}");
    }
}

/// The hidden states before the first layer and after each are those of a model cut off there.
#[test]
fn taps_are_the_states_between_layers() {
    for name in ["llama", "gpt2", "falcon-gqa", "opt-350m"] {
        let ids = [vec![5, 6, 7, 8]];
        let whole = load(name).forward(&ids, None).unwrap();
        assert_eq!(whole.taps.len(), 4, "{name}");
        let cut = json!({"num_hidden_layers": 2, "n_layer": 2});
        let dir = grafted(name, cut, Vec::new(), &[]);
        let short: DecoderOutput = Decoder::open(&open(&dir)).unwrap().forward(&ids, None).unwrap();
        let equal = |a: &Tensor, b: &Tensor| values(a) == values(b);
        assert!(short.taps.iter().zip(&whole.taps).all(|(a, b)| equal(a, b)), "{name}");
        assert!(!equal(&whole.taps[2], &whole.taps[3]), "{name}");
    }
}

#[test]
fn what_cannot_be_run_is_refused() {
    let scaled = |kind: &str| json!({"rope_scaling": {"rope_type": kind, "factor": 2.0}});
    let long = |numbers: usize| json!({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": vec![1.0; numbers]}});
    let rows: [(&str, Value, &str); 20] = [
        ("mamba", json!({}), "model_type `mamba` has no reference"),
        ("llama", json!({"model_type": "lama"}), "`smollm3`"),
        ("llama", json!({"model_type": null}), "`smollm3`"),
        ("llama", json!({"architectures": ["PhiForCausalLM"]}), "`PhiForCausalLM`"),
        ("llama", scaled("spiral"), "`rope_scaling.rope_type` is `\"spiral\"`"),
        ("llama", json!({"rope_scaling": {"factor": 2.0}}), "`rope_scaling.rope_type`"),
        ("llama", json!({"rope_scaling": {"type": "linear"}}), "`rope_scaling.factor`"),
        ("llama", json!({"rope_scaling": {"type": "linear", "factor": 0.0}}), "out of range"),
        ("llama", scaled("llama3"), "`rope_scaling.low_freq_factor`"),
        ("phi3-longrope", long(2), "3 numbers"),
        ("llama", json!({"num_hidden_layers": 1u64 << 60}), "1 to 1024"),
        ("llama", json!({"num_hidden_layers": 4}), "`model.layers.3."),
        ("llama", json!({"head_dim": 12}), "[80, 48]"),
        ("llama", json!({"head_dim": 1u64 << 62}), "1 to 1048576"),
        ("llama", json!({"num_key_value_heads": 3}), "`num_key_value_heads` 3"),
        ("llama", json!({"hidden_act": "snake"}), "`snake`"),
        ("gemma2", json!({"layer_types": ["full_attention"]}), "each of 4 layers"),
        ("gpt_neo", json!({"attention_types": [[["global"], u64::MAX]]}), "each of 4 layers"),
        ("mixtral", json!({"num_experts_per_tok": 5}), "1 to 4"),
        ("gemma3_text", json!({"use_bidirectional_attention": true}), "expected false"),
    ];
    for (name, config, words) in rows {
        let dir = grafted(name, config, Vec::new(), &[]);
        let error = decoder(&open(&dir), &[vec![5, 6]], None).unwrap_err().to_string();
        assert!(error.contains(words), "`{words}` is not in: {error}");
    }
    let llama = load("llama");
    for (ids, mask, words) in [
        (vec![vec![307]], None, "307 rows"),
        (vec![vec![5, 6], vec![5]], None, "a row of 1 tokens, expected 2"),
        (vec![vec![]], None, "no tokens"),
        (vec![vec![5, 6]], Some(vec![vec![1]]), "attention_mask"),
    ] {
        let error = llama.forward(&ids, mask.as_deref()).unwrap_err().to_string();
        assert!(error.contains(words), "`{words}` is not in: {error}");
    }
    let error = load("gpt2").forward(&[vec![5; 41]], None).unwrap_err().to_string();
    assert!(error.contains("40 rows"), "{error}");
}

/// All causal language models that are stored.
fn decoders() -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(models().join("tiny"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != "mamba")
        .filter(|name| {
            let checkpoint = Checkpoint::open_dir(&models().join("tiny").join(name)).unwrap();
            checkpoint.task().is_ok_and(|task| task == Task::CausalLm)
        })
        .collect();
    names.sort();
    names
}

fn load(name: &str) -> Decoder {
    Decoder::open(&Checkpoint::open_dir(&models().join("tiny").join(name)).unwrap()).unwrap()
}

/// The logits of a stored checkpoint with other config values, for some tokens.
fn run(name: &str, config: Value, tokens: u32) -> Vec<f32> {
    let dir = grafted(name, config, Vec::new(), &[]);
    let ids: Vec<u32> = (0..tokens).map(|i| 5 + 17 * i).collect();
    values(&decoder(&open(&dir), &[ids], None).unwrap())
}

/// The most likely tokens one by one, with the logits of each step.
fn continued(decoder: &Decoder, prompt: &[u32], steps: usize) -> (Vec<u32>, Vec<f32>) {
    let (mut ids, mut all) = (prompt.to_vec(), Vec::new());
    for _ in 0..steps {
        let logits = decoder.forward(&[ids.clone()], None).unwrap().logits;
        let last = values(&logits.narrow(1, ids.len() - 1, 1).unwrap());
        let best = (0u32..).zip(&last).max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
        ids.push(best);
        all.extend(last);
    }
    (ids.split_off(prompt.len()), all)
}
