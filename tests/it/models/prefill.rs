//! Prefill in tiles and in blocks against dense prefill and against what Transformers computed.

use silane::{
    checkpoint::Checkpoint,
    graph::Measure,
    interp::{Precision, compare::compare},
    mil::DType,
    models::{
        Chunks, Logits,
        calls::{Attention, SPARSE, Tiles},
    },
    nn::cache::{
        Update,
        sparse::{Gather, Scoring, Select, Sparse},
    },
};

use super::{
    decoders::{CONTEXT, Text, VARIANTS, assert_near, chunks, programs, row, try_programs},
    fixture, floats, open,
};

/// The logits that a function gives.
fn logits(text: &mut Text<'_>, function: &str, ids: &[i64], position: usize) -> Vec<f32> {
    text.by(function, ids, position).values().flat_map(floats).collect()
}

fn tiled(tile: usize, group: usize) -> Attention {
    Attention::Tiled(Tiles { tile: Some(tile), group: Some(group), filled: false })
}

/// Grouped heads, windows, soft caps, two rotary bases, norms of heads: whatever the family, tiles compute
/// what Transformers does. Families with ALiBi are refused by name of the reason.
#[test]
fn tiles_compute_what_transformers_does() {
    for (i, name) in VARIANTS.iter().enumerate() {
        let checkpoint = open(&fixture(&format!("tiny/{name}")));
        let (ids, expected) = row(name);
        let (chunk, parts) = ([4, 3, 7][i % 3], 1 + i % 2);
        for update in [Update::Slice, Update::Blend] {
            for (float, precision) in [
                (DType::F32, Precision::Fp32),
                (DType::F16, Precision::Fp16),
                (DType::F16, Precision::Fp16Flush),
            ] {
                let attention = tiled([16, 8, 2][i % 3], 1 + i % 2);
                let built =
                    try_programs(&checkpoint, float, Chunks { attention, ..chunks(chunk, parts, update) });
                let programs = match built {
                    Err(error) if ["bloom", "falcon-alibi"].contains(name) => {
                        assert!(error.to_string().contains("ALiBi"), "{error}");
                        continue;
                    }
                    built => built.unwrap(),
                };
                let mut text = Text::new(&programs, precision);
                let end = ids.len() - 1;
                let mut starts: Vec<usize> = (0..end / chunk).map(|c| c * chunk).collect();
                starts.push(end - chunk);
                let what = format!("{name}, {float}, {precision:?}, {update:?}");
                for start in starts {
                    let seen = text.feed(&ids[start..start + chunk], start);
                    assert_near(&what, &seen, &expected[start + chunk - 1], float);
                }
                assert_near(&what, &text.feed(&ids[end..], end), &expected[end], float);
            }
        }
    }
}

/// What is left to rounding when the sums run in another order.
#[test]
fn tiles_are_dense_attention() {
    for name in ["qwen2", "qwen2-window", "gemma2", "gemma3_text"] {
        let checkpoint = open(&fixture(&format!("tiny/{name}")));
        let ids: Vec<i64> = (0..56).map(|i| 3 + i * 37 % 200).collect();
        let feed = |attention, update| {
            let chunks = Chunks { attention, logits: Logits::All, ..chunks(8, 1, update) };
            let programs = programs(&checkpoint, DType::F32, chunks);
            let mut text = Text::new(&programs, Precision::Fp32);
            ids.chunks(8).enumerate().flat_map(|(i, ids)| text.feed(ids, 8 * i)).collect::<Vec<f32>>()
        };
        let dense = feed(Attention::Dense, Update::Slice);
        for (tile, group, update) in [(16, 1, Update::Slice), (32, 2, Update::Blend), (2, 2, Update::Slice)] {
            // Tiles of two keys are 29, of which eight at a time are merged.
            let seen = feed(tiled(tile, group), update);
            let c = compare(&seen, &dense, 0.0).unwrap();
            assert!(c.relative() < 1e-5, "{name}, tiles of {tile}: off by {:.1e}", c.relative());
        }
    }
}

/// A bucket's function that counts on the bucket below takes the mask off its tiles, and nothing else.
#[test]
fn buckets_share_one_cache() {
    let checkpoint = open(&fixture("tiny/qwen2"));
    let ids: Vec<i64> = (0..64).map(|i| 3 + i * 37 % 200).collect();
    let mut ops = Vec::new();
    let mut all = Vec::new();
    for filled in [false, true] {
        let attention = Attention::Tiled(Tiles { tile: Some(32), group: Some(2), filled });
        let chunks =
            Chunks { attention, buckets: vec![32, 64], logits: Logits::All, ..chunks(32, 1, Update::Slice) };
        let programs = programs(&checkpoint, DType::F32, chunks);
        let names: Vec<&str> = programs[0].functions.keys().map(String::as_str).collect();
        assert_eq!(names, ["decode", "prefill_32", "prefill_64"]);
        ops.push(Measure::of(&programs[0].functions["prefill_64"]).ops);
        let mut text = Text::new(&programs, Precision::Fp32);
        all.push(
            [logits(&mut text, "prefill_32", &ids[..32], 0), logits(&mut text, "prefill_64", &ids[32..], 32)]
                .concat(),
        );
    }
    assert_eq!(all[0], all[1]);
    assert!(ops[1] < ops[0], "{ops:?}");
}

fn sparse(budget: usize) -> Sparse {
    Sparse { block: 8, budget, sinks: 1, window: 1, dense_layers: 0, ..SPARSE }
}

/// With every past block chosen, nothing is left to a mean; with fewer, both ways to fetch blocks agree.
#[test]
fn block_sparse_prefill_with_all_blocks_is_exact() {
    for name in ["qwen2", "gemma3_text", "gemma2", "phi"] {
        let checkpoint = open(&fixture(&format!("tiny/{name}")));
        let ids: Vec<i64> = (0..64).map(|i| 3 + i * 37 % 200).collect();
        let exact = {
            let chunks = Chunks { logits: Logits::All, ..chunks(8, 1, Update::Slice) };
            let programs = programs(&checkpoint, DType::F32, chunks);
            let mut text = Text::new(&programs, Precision::Fp32);
            ids.chunks(8).enumerate().map(|(i, ids)| text.feed(ids, 8 * i)).collect::<Vec<_>>()
        };
        let feed = |sparse: Sparse, update| {
            let attention = Attention::Sparse(sparse, Tiles { tile: Some(16), group: None, filled: false });
            let chunks = Chunks { attention, logits: Logits::All, ..chunks(8, 1, update) };
            let programs = programs(&checkpoint, DType::F32, chunks);
            let mut text = Text::new(&programs, Precision::Fp32);
            let call = |(i, ids): (usize, &[i64])| {
                let name = if i < sparse.budget { "prefill" } else { "prefill_sparse" };
                logits(&mut text, name, ids, 8 * i)
            };
            ids.chunks(8).enumerate().map(call).collect::<Vec<_>>()
        };
        for update in [Update::Slice, Update::Blend] {
            for gather in [Gather::Index, Gather::OneHot] {
                let seen = feed(Sparse { gather, ..sparse(7) }, update);
                assert_near(name, &seen[7], &exact[7], DType::F32);
            }
        }
        for select in [Select::Head, Select::Layer] {
            for (alpha, scoring) in [(0.0, Scoring::Row), (0.9, Scoring::Tile)] {
                let with = |gather| {
                    feed(Sparse { gather, select, alpha, scoring, ..sparse(3) }, Update::Slice).concat()
                };
                let c = compare(&with(Gather::Index), &with(Gather::OneHot), 0.0).unwrap();
                assert!(c.relative() < 1e-6, "{name}, {select:?}: off by {:.1e}", c.relative());
                // Something was left to its mean.
                let off = compare(&with(Gather::Index), &exact.concat(), 0.0).unwrap();
                assert!(off.relative() > 1e-4 && off.seen_non_finite == 0, "{name}, {select:?}");
            }
        }
    }
}

/// Means are those of the keys and values in the cache, whoever fed them.
#[test]
fn repooling_gives_what_aligned_chunks_left() {
    let checkpoint = open(&fixture("tiny/qwen2"));
    let ids: Vec<i64> = (0..64).map(|i| 3 + i * 37 % 200).collect();
    for parts in [1, 3] {
        let attention = Attention::Sparse(sparse(3), Tiles::default());
        let programs =
            programs(&checkpoint, DType::F16, Chunks { attention, ..chunks(8, parts, Update::Slice) });
        let means = |text: &Text<'_>| {
            let held = text.machines.iter().filter_map(|(_, states)| states.get("kv_mean"));
            held.flat_map(|t| t.flatten_all().unwrap().to_vec1::<f32>().unwrap()).collect::<Vec<f32>>()
        };
        let mut chunked = Text::new(&programs, Precision::Fp16);
        ids.chunks(8).enumerate().for_each(|(i, ids)| drop(logits(&mut chunked, "prefill", ids, 8 * i)));
        let mut decoded = Text::new(&programs, Precision::Fp16);
        ids.iter().enumerate().for_each(|(i, id)| drop(logits(&mut decoded, "decode", &[*id], i)));
        assert!(means(&decoded).iter().all(|v| *v == 0.0));
        for (machine, states) in &mut decoded.machines {
            if machine.inputs("repool").is_ok() {
                machine.run("repool", &std::collections::BTreeMap::new(), states, None).unwrap();
            }
        }
        let c = compare(&means(&decoded), &means(&chunked), 0.0).unwrap();
        assert!(c.relative() < 2e-3, "{parts} parts: off by {:.1e}", c.relative());
    }
}

/// The fewest heads at a time with which a function keeps to the limit of its ops.
#[test]
fn more_heads_at_a_time_make_fewer_ops() {
    let checkpoint = open(&fixture("tiny/qwen2"));
    let ops = |max_ops: usize, group: Option<usize>| {
        let attention = Attention::Tiled(Tiles { tile: Some(8), group, filled: false });
        let chunks = Chunks { attention, max_ops, ..chunks(8, 1, Update::Slice) };
        Measure::of(&programs(&checkpoint, DType::F16, chunks)[0].functions["prefill"]).ops
    };
    let (one, two) = (ops(8000, Some(1)), ops(8000, Some(2)));
    assert!(two < one);
    assert_eq!((ops(8000, None), ops(one - 1, None)), (one, two));
}

#[test]
fn what_cannot_be_built_is_refused() {
    let checkpoint = open(&fixture("tiny/qwen2"));
    let error = |change: &dyn Fn(&mut Chunks)| {
        let mut chunks = chunks(8, 1, Update::Slice);
        change(&mut chunks);
        try_programs(&checkpoint, DType::F16, chunks).unwrap_err().to_string()
    };
    let blocks = |sparse: Sparse| Attention::Sparse(sparse, Tiles::default());
    for (change, message) in [
        (&(|c: &mut Chunks| c.buckets = vec![4]) as &dyn Fn(&mut Chunks), "a bucket of 4 tokens"),
        (&|c| c.buckets = vec![128], "a bucket of 128 tokens"),
        (&|c| (c.chunk, c.buckets) = (None, vec![32]), "and no prefill"),
        (&|c| (c.chunk, c.attention) = (None, blocks(sparse(3))), "and no prefill"),
        (&|c| (c.contexts, c.buckets) = (vec![32, 64], vec![32]), "several contexts and buckets"),
        (&|c| c.attention = blocks(Sparse { block: 12, ..sparse(3) }), "blocks of 12 keys"),
        (&|c| c.attention = blocks(sparse(1)), "a budget of 1 blocks does not hold 1 sinks"),
        (&|c| c.attention = blocks(sparse(8)), "is more than the context of 64"),
        (
            &|c| (c.attention, c.contexts) = (blocks(sparse(3)), vec![32, 64]),
            "block-sparse prefill is built for one context",
        ),
    ] {
        let error = error(change);
        assert!(error.contains(message), "{error}");
    }
    assert_eq!(CONTEXT, 64);
}

/// A checkpoint of a real model's sizes, two layers deep, whose weights are a hole in a file.
fn hollow(config: &serde_json::Value, names: &[(&str, &[usize])]) -> (tempfile::TempDir, Checkpoint) {
    let size = |key: &str| usize::try_from(config[key].as_u64().unwrap()).unwrap();
    let (hidden, ffn, dim) = (size("hidden_size"), size("intermediate_size"), size("head_dim"));
    let (q, kv) = (size("num_attention_heads") * dim, size("num_key_value_heads") * dim);
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_string(), vec![size("vocab_size"), hidden]),
        ("model.norm.weight".into(), vec![hidden]),
    ];
    for layer in 0..2 {
        for (name, shape) in [
            ("self_attn.q_proj", vec![q, hidden]),
            ("self_attn.k_proj", vec![kv, hidden]),
            ("self_attn.v_proj", vec![kv, hidden]),
            ("self_attn.o_proj", vec![hidden, q]),
            ("mlp.gate_proj", vec![ffn, hidden]),
            ("mlp.up_proj", vec![ffn, hidden]),
            ("mlp.down_proj", vec![hidden, ffn]),
            ("input_layernorm", vec![hidden]),
            ("post_attention_layernorm", vec![hidden]),
        ] {
            tensors.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
        let more =
            names.iter().map(|(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape.to_vec()));
        tensors.extend(more);
    }
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in tensors {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        header.insert(
            name,
            serde_json::json!({ "dtype": "F16", "shape": shape, "data_offsets": [start, end] }),
        );
    }
    let header = serde_json::Value::Object(header).to_string();
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let mut bytes = u64::try_from(header.len()).unwrap().to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    let path = dir.path().join("model.safetensors");
    std::fs::write(&path, &bytes).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(u64::try_from(bytes.len() + end).unwrap()).unwrap();
    let checkpoint = open(dir.path());
    (dir, checkpoint)
}

/// Of models up to a billion weights: no operand of attention is over 2 MiB, which is what fits on chip; nothing
/// is tiled; and where blocks are fetched by one-hot products nothing is looked up behind the head.
#[test]
fn operands_of_attention_fit_on_chip() {
    let common = |family: &str, sizes: [usize; 6]| {
        let [hidden, ffn, heads, kv, dim, vocab] = sizes;
        serde_json::json!({
            "architectures": [format!("{family}ForCausalLM")], "model_type": family.to_lowercase(),
            "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads, "num_key_value_heads": kv,
            "head_dim": dim, "vocab_size": vocab, "num_hidden_layers": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "max_position_embeddings": 8192, "tie_word_embeddings": true, "hidden_act": "silu",
        })
    };
    let llama = common("Llama", [2048, 8192, 32, 8, 64, 128_256]);
    let qwen = common("Qwen3", [1024, 3072, 16, 8, 128, 151_936]);
    let norms: &[(&str, &[usize])] = &[("self_attn.q_norm", &[128]), ("self_attn.k_norm", &[128])];
    for (config, more) in [(&llama, &[][..]), (&qwen, norms)] {
        let (_dir, checkpoint) = hollow(config, more);
        for attention in
            [Attention::Auto, Attention::Sparse(Sparse { dense_layers: 0, ..SPARSE }, Tiles::default())]
        {
            let chunks = Chunks {
                attention,
                contexts: vec![8192],
                buckets: vec![256, 512, 1024, 2048, 4096],
                ..chunks(256, 1, Update::Slice)
            };
            let programs = programs(&checkpoint, DType::F16, chunks);
            for (name, f) in programs[0].functions.iter().filter(|(name, _)| name.starts_with("prefill")) {
                let convs: Vec<usize> =
                    (0..f.body.ops.len()).filter(|i| f.body.ops[*i].kind == "conv").collect();
                for (i, op) in f.body.ops.iter().enumerate() {
                    assert_ne!(op.kind, "tile", "{name}");
                    assert!(i < convs[0] || op.kind != "gather", "{name}: a gather behind the head");
                    let computes = [
                        "matmul",
                        "softmax",
                        "add",
                        "mul",
                        "sub",
                        "exp",
                        "real_div",
                        "reduce_max",
                        "reduce_sum",
                    ];
                    let attends = op.outputs.iter().any(|id| f.name(*id).contains("self_attn"));
                    if !attends || !computes.contains(&op.kind.as_str()) {
                        continue;
                    }
                    let read = op.args().filter_map(|arg| match arg {
                        silane::mil::Arg::Value(id) => Some(*id),
                        silane::mil::Arg::Const(_) => None,
                    });
                    for id in read.chain(op.outputs.iter().copied()) {
                        let bytes = f.ty(id).as_tensor().and_then(|t| t.count()).unwrap_or(0) * 2;
                        // A one-hot product reads all past blocks once, whatever they are.
                        let all_blocks = f.name(id).contains("_blocks");
                        assert!(bytes <= 2 << 20 || all_blocks, "{name}: {} of {bytes} bytes", f.name(id));
                    }
                }
            }
        }
    }
}
