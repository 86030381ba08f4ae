//! GPT-NeoX, Bloom and Falcon: queries, keys and values fused head by head, parallel or serial blocks,
//! rotary positions or ALiBi.

use super::{
    decoder::{Decoder, Ids, Place, Shape},
    llama,
    shapes::{self, Plain},
};
use crate::{
    checkpoint::Config,
    error::Result,
    nn::{
        Act, Hidden, Net,
        cache::{Attention, Steps},
        head_norm::HeadNorm,
        stack::Projection,
    },
};

pub(super) static GPT_NEOX: Decoder = Decoder {
    bases: &["gpt_neox"],
    shape: |config, context| {
        let rotary = config.f64_or(&["rotary_pct", "partial_rotary_factor"], 0.25)?;
        shapes::shape(config, context, &Plain { embedding: "embed_in", rotary, ..Plain::LLAMA })
    },
    prepare: |_| Ok(()),
    embed: |n, shape, ids| {
        let pieces = n.embeds_in_pieces(shape, "embed_out");
        let rows = n.lookup_tokens("embed_in", ids.input_ids, pieces)?;
        n.to_hidden("embeddings", rows)
    },
    learned_positions: false,
    layer: neox,
    norm: |n, x| n.layer_norm("final_layer_norm", eps(n)?, x),
    logits: |n, shape, x| n.logits_of(shape, "embed_out", false, x),
    routed: None,
    turns: None,
};

pub(super) static BLOOM: Decoder = Decoder {
    bases: &["transformer"],
    shape: |config, context| {
        let mut shape = shapes::shape(
            config,
            context,
            &Plain { embedding: "word_embeddings", rotary: 0.0, ..Plain::LLAMA },
        )?;
        shape.slopes = Some(slopes(shape.heads.query));
        Ok(shape)
    },
    embed: |n, shape, ids| {
        let x = words(n, shape, ids)?;
        n.layer_norm("word_embeddings_layernorm", eps(n)?, x)
    },
    layer: bloom,
    norm: |n, x| n.layer_norm("ln_f", eps(n)?, x),
    logits: |n, shape, x| n.logits_of(shape, "lm_head", true, x),
    ..GPT_NEOX
};

pub(super) static FALCON: Decoder = Decoder { shape: falcon_shape, embed: words, layer: falcon, ..BLOOM };

fn words(n: &mut Net<'_>, shape: &Shape, ids: &Ids) -> Result<Hidden> {
    llama::embed(n, shape, ids)
}

fn eps(n: &Net<'_>) -> Result<f64> {
    n.checkpoint.config.f64_or(&["layer_norm_epsilon", "layer_norm_eps"], 1e-5)
}

/// Rows of a fused layer in which every head has its query, key and value in turn.
fn per_head(n: &Net<'_>, name: &str, shape: &Shape) -> Result<[Projection; 3]> {
    let (heads, d) = (shape.heads.query, shape.heads.dim);
    let fused = n.projection(name)?;
    let part =
        |i: usize| fused.clone().take((0..heads).flat_map(move |h| (h * 3 + i) * d..(h * 3 + i + 1) * d));
    Ok([part(0), part(1), part(2)])
}

fn plain(shape: &Shape, qkv: [Projection; 3]) -> Attention {
    Attention { qkv, scale: Net::score_scale(shape.heads.dim), soft_cap: None, norm: HeadNorm::None }
}

fn neox(n: &mut Net<'_>, shape: &Shape, steps: &mut Steps, place: Place, x: Hidden) -> Result<Hidden> {
    let config = &n.checkpoint.config;
    let act = Act::parse(config.str_or(&["hidden_act"], "gelu")?)?;
    let parallel = config.bool_or(&["use_parallel_residual"], true)?;
    let eps = eps(n)?;
    n.within(&format!("layers.{}", place.layer), |n| {
        let attention = plain(shape, per_head(n, "attention.query_key_value", shape)?);
        let h = n.layer_norm("input_layernorm", eps, x)?;
        let a = n.cached_attention("attention", steps, place.at(), attention, h)?;
        let o = n.projection("attention.dense")?;
        let a = n.attention_output("attention.dense", shape.heads, o, a)?;
        let y = n.add(x, a)?;
        let h = n.layer_norm("post_attention_layernorm", eps, if parallel { x } else { y })?;
        let h = n.feed_forward("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", act, h)?;
        n.add(y, h)
    })
}

fn bloom(n: &mut Net<'_>, shape: &Shape, steps: &mut Steps, place: Place, x: Hidden) -> Result<Hidden> {
    let normed_residual =
        n.checkpoint.config.bool_or(&["apply_residual_connection_post_layernorm"], false)?;
    let eps = eps(n)?;
    n.within(&format!("h.{}", place.layer), |n| {
        let attention = plain(shape, per_head(n, "self_attention.query_key_value", shape)?);
        let h = n.layer_norm("input_layernorm", eps, x)?;
        let a = n.cached_attention("self_attention", steps, place.at(), attention, h)?;
        let o = n.projection("self_attention.dense")?;
        let a = n.attention_output("self_attention.dense", shape.heads, o, a)?;
        let x = n.add(if normed_residual { h } else { x }, a)?;
        let h = n.layer_norm("post_attention_layernorm", eps, x)?;
        let y = n.feed_forward("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", Act::GeluTanh, h)?;
        n.add(if normed_residual { h } else { x }, y)
    })
}

fn falcon_shape(config: &Config, context: usize) -> Result<Shape> {
    let alibi = config.bool_or(&["alibi"], false)?;
    let rotary = if alibi { 0.0 } else { 1.0 };
    let mut shape =
        shapes::shape(config, context, &Plain { embedding: "word_embeddings", rotary, ..Plain::LLAMA })?;
    shape.heads.kv = match (
        config.bool_or(&["new_decoder_architecture"], false)?,
        config.bool_or(&["multi_query"], true)?,
    ) {
        (true, _) => config.usize_or(&["num_kv_heads"], shape.heads.query)?,
        (false, true) => 1,
        (false, false) => shape.heads.query,
    };
    // The bias is added before the scale here.
    let scale = Net::score_scale(shape.heads.dim);
    shape.slopes = alibi.then(|| slopes(shape.heads.query).iter().map(|s| s * scale).collect());
    Ok(shape)
}

fn falcon(n: &mut Net<'_>, shape: &Shape, steps: &mut Steps, place: Place, x: Hidden) -> Result<Hidden> {
    let config = &n.checkpoint.config;
    let grouped = config.bool_or(&["new_decoder_architecture"], false)?;
    let parallel = config.bool_or(&["parallel_attn"], true)? || grouped;
    let act = Act::parse(config.str_or(&["activation"], "gelu")?)?;
    let eps = eps(n)?;
    n.within(&format!("h.{}", place.layer), |n| {
        let name = "self_attention.query_key_value";
        let (g, d, kv) = (shape.heads.group(), shape.heads.dim, shape.heads.kv);
        let qkv = if !grouped && kv > 1 {
            per_head(n, name, shape)?
        } else {
            // Each kv head has its queries, then its key, then its value.
            let fused = n.projection(name)?;
            let rows = |from: usize, count: usize| {
                (0..kv).flat_map(move |h| (h * (g + 2) + from) * d..(h * (g + 2) + from + count) * d)
            };
            [fused.clone().take(rows(0, g)), fused.clone().take(rows(g, 1)), fused.take(rows(g + 1, 1))]
        };
        let attention = plain(shape, qkv);
        let two = n.has("ln_attn.weight");
        let h = n.layer_norm(if two { "ln_attn" } else { "input_layernorm" }, eps, x)?;
        let a = n.cached_attention("self_attention", steps, place.at(), attention, h)?;
        let o = n.projection("self_attention.dense")?;
        let a = n.attention_output("self_attention.dense", shape.heads, o, a)?;
        let y = n.add(x, a)?;
        let h = match (parallel, two) {
            (true, true) => n.layer_norm("ln_mlp", eps, x)?,
            (true, false) => h,
            (false, _) => n.layer_norm("post_attention_layernorm", eps, y)?,
        };
        let h = n.feed_forward("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", act, h)?;
        n.add(y, h)
    })
}

/// ALiBi's slopes: a geometric row for the nearest power of two below, and every other one of the next
/// power's for the rest ([Press et al.](https://arxiv.org/abs/2108.12409)).
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "few heads")]
fn slopes(heads: usize) -> Vec<f32> {
    let power = if heads.is_power_of_two() { heads } else { heads.next_power_of_two() / 2 };
    let row = |n: usize, i: usize| 2f64.powf(-8.0 / n as f64).powf(i as f64) as f32;
    let first = (1..=power).map(|i| row(power, i));
    let rest = (0..heads - power).map(|i| row(2 * power, 2 * i + 1));
    first.chain(rest).collect()
}
