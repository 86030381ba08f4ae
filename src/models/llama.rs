//! Llama, and what differs from it by a window or a scale: Mistral, Qwen 2, Granite, SmolLM 3.

use super::{
    decoder::{Decoder, Ids, Place, Shape},
    rotate::Turns,
    shapes::{self, Plain},
};
use crate::{
    checkpoint::Config,
    error::Result,
    nn::{
        Act, Hidden, Net,
        cache::{Attention, Steps},
        head_norm::HeadNorm,
    },
};

pub(super) static LLAMA: Decoder = Decoder {
    bases: &["model", "language_model.model", "model.language_model"],
    shape: |config, context| shapes::shape(config, context, &Plain::LLAMA),
    prepare: |_| Ok(()),
    embed,
    learned_positions: false,
    layer,
    norm,
    logits,
    routed: None,
    turns: Some(&Turns::LLAMA),
};

pub(super) static MISTRAL: Decoder = Decoder {
    shape: |config, context| {
        shapes::shape(config, context, &Plain { window: shapes::window_everywhere, ..Plain::LLAMA })
    },
    ..LLAMA
};

pub(super) static QWEN2: Decoder = Decoder {
    shape: |config, context| shapes::shape(config, context, &Plain { window: qwen2_window, ..Plain::LLAMA }),
    ..LLAMA
};

pub(super) static GRANITE: Decoder =
    Decoder { embed: granite_embed, layer: granite, logits: granite_logits, ..LLAMA };

pub(super) static SMOLLM3: Decoder = Decoder {
    shape: |config, context| {
        shapes::shape(
            config,
            context,
            &Plain { rotates: smollm3_rotates, window: qwen2_window, ..Plain::LLAMA },
        )
    },
    ..LLAMA
};

pub(super) fn embed(n: &mut Net<'_>, shape: &Shape, ids: &Ids) -> Result<Hidden> {
    let pieces = n.embeds_in_pieces(shape, "lm_head");
    let rows = n.lookup_tokens(shape.embedding, ids.input_ids, pieces)?;
    let x = n.to_hidden("embeddings", rows)?;
    n.linear_if_any("project_in", x)
}

pub(super) fn eps(n: &Net<'_>) -> Result<f64> {
    super::decoder::text_config(n.checkpoint).f64_or(&["rms_norm_eps"], 1e-6)
}

pub(super) fn act(n: &Net<'_>) -> Result<Act> {
    Act::parse(
        super::decoder::text_config(n.checkpoint).str_or(&["hidden_act", "hidden_activation"], "silu")?,
    )
}

/// Attention with separate projections and the usual scale.
pub(super) fn attention(n: &Net<'_>, shape: &Shape, norm: HeadNorm) -> Result<Attention> {
    Ok(Attention {
        qkv: [
            n.projection("self_attn.q_proj")?,
            n.projection("self_attn.k_proj")?,
            n.projection("self_attn.v_proj")?,
        ],
        scale: Net::score_scale(shape.heads.dim),
        soft_cap: None,
        norm,
    })
}

/// A layer whose blocks are normalised before, with everything added to the residual times `weight`.
pub(super) fn block(
    n: &mut Net<'_>,
    steps: &mut Steps,
    place: Place,
    attention: Attention,
    weight: f32,
    x: Hidden,
    mlp: impl FnOnce(&mut Net<'_>, Hidden) -> Result<Hidden>,
) -> Result<Hidden> {
    let eps = eps(n)?;
    let h = n.rms_norm("input_layernorm", eps, x)?;
    let a = n.cached_attention("self_attn", steps, place.at(), attention, h)?;
    let o = n.projection("self_attn.o_proj")?.scaled(weight);
    let a = n.attention_output("self_attn.o_proj", steps.heads, o, a)?;
    let x = n.add(x, a)?;
    let h = n.rms_norm("post_attention_layernorm", eps, x)?;
    let h = mlp(n, h)?;
    n.add(x, h)
}

/// The gated feed-forward block, times `weight`.
pub(super) fn mlp(n: &mut Net<'_>, weight: f32, x: Hidden) -> Result<Hidden> {
    let act = act(n)?;
    n.gated_scaled(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"], act, weight, x)
}

fn layer(n: &mut Net<'_>, shape: &Shape, steps: &mut Steps, place: Place, x: Hidden) -> Result<Hidden> {
    n.within(&format!("layers.{}", place.layer), |n| {
        let attention = attention(n, shape, HeadNorm::None)?;
        block(n, steps, place, attention, 1.0, x, |n, h| mlp(n, 1.0, h))
    })
}

pub(super) fn norm(n: &mut Net<'_>, x: Hidden) -> Result<Hidden> {
    n.rms_norm("norm", eps(n)?, x)
}

pub(super) fn logits(n: &mut Net<'_>, shape: &Shape, x: Hidden) -> Result<Vec<Hidden>> {
    n.logits_of(shape, "lm_head", false, x)
}

/// Only layers from `max_window_layers` on, and only when asked to.
fn qwen2_window(config: &Config, layer: usize) -> Result<Option<usize>> {
    let slides = match shapes::layer_type(config, layer) {
        Some(kind) => kind == "sliding_attention",
        None => {
            config.bool_or(&["use_sliding_window"], false)?
                && layer >= config.usize_or(&["max_window_layers"], 0)?
        }
    };
    if slides { config.opt_usize(&["sliding_window"]) } else { Ok(None) }
}

/// `no_rope_layers` holds 1 where a layer rotates; without it, every fourth does not.
fn smollm3_rotates(config: &Config, layer: usize) -> Result<bool> {
    match config.opt_usizes("no_rope_layers")? {
        Some(list) => Ok(list.get(layer).is_none_or(|flag| *flag == 1)),
        None => Ok(!(layer + 1).is_multiple_of(config.usize_or(&["no_rope_layer_interval"], 4)?.max(1))),
    }
}

fn granite_embed(n: &mut Net<'_>, shape: &Shape, ids: &Ids) -> Result<Hidden> {
    let x = embed(n, shape, ids)?;
    let by = multiplier(n, "embedding_multiplier")?;
    n.scale("embedding_multiplier", x, by)
}

fn granite(n: &mut Net<'_>, shape: &Shape, steps: &mut Steps, place: Place, x: Hidden) -> Result<Hidden> {
    n.within(&format!("layers.{}", place.layer), |n| {
        let weight = multiplier(n, "residual_multiplier")?;
        let scale = multiplier(n, "attention_multiplier")?;
        let attention = Attention { scale, ..attention(n, shape, HeadNorm::None)? };
        block(n, steps, place, attention, weight, x, |n, h| mlp(n, weight, h))
    })
}

fn granite_logits(n: &mut Net<'_>, shape: &Shape, x: Hidden) -> Result<Vec<Hidden>> {
    let x = n.logits_of(shape, "lm_head", true, x)?;
    let by = 1.0 / multiplier(n, "logits_scaling")?;
    n.scale_each("logits_scaling", x, by)
}

#[expect(clippy::cast_possible_truncation, reason = "a factor needs no more than 32 bits")]
fn multiplier(n: &Net<'_>, key: &str) -> Result<f32> {
    Ok(n.checkpoint.config.f64_or(&[key], 1.0)? as f32)
}
