//! Gemma 1, 2 and 3: norms that add one to their weight, scaled embeddings, tanh GELU; from 2 on norms
//! after the blocks and windows, soft caps in 2, normalised heads and two rotations in 3.
//!
//! Their residual streams pass what fp16 holds, so the stream is kept smaller by [`RESIDUAL`]: exact, as
//! every reader of it normalises it, with the epsilon scaled along.

use super::{
    decoder::{Decoder, Ids, Place, Shape, text_config},
    llama,
    rotate::Turns,
    shapes,
};
use crate::{
    checkpoint::Config,
    error::Result,
    nn::{
        Act, Hidden, Net,
        cache::{Attention, Kind, Steps},
        head_norm::HeadNorm,
        rms::Rms,
        rotary::Rope,
    },
};

/// A power of two; the largest streams seen in public measurements are 3e5.
const RESIDUAL: f32 = 1.0 / 16.0;

pub(super) static GEMMA: Decoder = Decoder {
    shape: |config, context| shapes::shape(config, context, &shapes::Plain::LLAMA),
    prepare: |n| {
        n.residual = RESIDUAL;
        Ok(())
    },
    embed,
    layer: first,
    norm,
    logits: |n, shape, x| n.logits_of(shape, "lm_head", true, x),
    turns: Some(&Turns { plus: 1.0, ..Turns::LLAMA }),
    ..llama::LLAMA
};

pub(super) static GEMMA2: Decoder =
    Decoder { shape: shape2, layer: later, logits: logits2, turns: Some(&Turns::NORMED_BLOCKS), ..GEMMA };

pub(super) static GEMMA3: Decoder = Decoder { shape: shape3, ..GEMMA2 };

fn embed(n: &mut Net<'_>, shape: &Shape, ids: &Ids) -> Result<Hidden> {
    let x = llama::embed(n, shape, ids)?;
    #[expect(clippy::cast_precision_loss, reason = "a width")]
    let root = (shape.hidden as f32).sqrt();
    n.scale("embedding_scale", x, root * RESIDUAL)
}

fn act(n: &Net<'_>) -> Result<Act> {
    Act::parse(text_config(n.checkpoint).str_or(&["hidden_activation", "hidden_act"], "gelu_pytorch_tanh")?)
}

/// Of the residual stream.
fn before<'a>(n: &Net<'_>, name: &'a str) -> Result<Rms<'a>> {
    Ok(Rms { plus: 1.0, input: RESIDUAL, ..Rms::new(name, llama::eps(n)?) })
}

/// Of a block's result, on its way to the stream.
fn after<'a>(n: &Net<'_>, name: &'a str) -> Result<Rms<'a>> {
    Ok(Rms { plus: 1.0, output: RESIDUAL, ..Rms::new(name, llama::eps(n)?) })
}

fn norm(n: &mut Net<'_>, x: Hidden) -> Result<Hidden> {
    let norm = before(n, "norm")?;
    n.rms(norm, x)
}

fn first(n: &mut Net<'_>, shape: &Shape, steps: &mut Steps, place: Place, x: Hidden) -> Result<Hidden> {
    n.within(&format!("layers.{}", place.layer), |n| {
        let norm = before(n, "input_layernorm")?;
        let h = n.rms(norm, x)?;
        let attention = llama::attention(n, shape, HeadNorm::None)?;
        let a = n.cached_attention("self_attn", steps, place.at(), attention, h)?;
        let o = n.projection("self_attn.o_proj")?.scaled(RESIDUAL);
        let a = n.attention_output("self_attn.o_proj", shape.heads, o, a)?;
        let x = n.add(x, a)?;
        let norm = before(n, "post_attention_layernorm")?;
        let h = n.rms(norm, x)?;
        let act = act(n)?;
        let h = n.gated_scaled(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"], act, RESIDUAL, h)?;
        n.add(x, h)
    })
}

fn later(n: &mut Net<'_>, shape: &Shape, steps: &mut Steps, place: Place, x: Hidden) -> Result<Hidden> {
    let config = text_config(n.checkpoint);
    n.within(&format!("layers.{}", place.layer), |n| {
        let head_norm = match n.has("self_attn.q_norm.weight") {
            true => HeadNorm::Rms {
                query: "self_attn.q_norm",
                key: "self_attn.k_norm",
                eps: llama::eps(n)?,
                plus: 1.0,
            },
            false => HeadNorm::None,
        };
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_precision_loss,
            reason = "factors of 32 bits"
        )]
        let attention = Attention {
            scale: config.f64_or(&["query_pre_attn_scalar"], shape.heads.dim as f64)?.powf(-0.5) as f32,
            soft_cap: config.opt_f64(&["attn_logit_softcapping"])?.map(|c| c as f32),
            ..llama::attention(n, shape, head_norm)?
        };
        let norm = before(n, "input_layernorm")?;
        let h = n.rms(norm, x)?;
        let a = n.cached_attention("self_attn", steps, place.at(), attention, h)?;
        let o = n.projection("self_attn.o_proj")?;
        let a = n.attention_output("self_attn.o_proj", shape.heads, o, a)?;
        let norm = after(n, "post_attention_layernorm")?;
        let a = n.rms(norm, a)?;
        let x = n.add(x, a)?;
        let norm = before(n, "pre_feedforward_layernorm")?;
        let h = n.rms(norm, x)?;
        let act = act(n)?;
        let h = n.gated(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"], act, h)?;
        let norm = after(n, "post_feedforward_layernorm")?;
        let h = n.rms(norm, h)?;
        n.add(x, h)
    })
}

/// Logits, softly capped where the config says so.
fn logits2(n: &mut Net<'_>, shape: &Shape, x: Hidden) -> Result<Vec<Hidden>> {
    let pieces = n.logits_of(shape, "lm_head", true, x)?;
    let Some(cap) = text_config(n.checkpoint).opt_f64(&["final_logit_softcapping"])? else {
        return Ok(pieces);
    };
    #[expect(clippy::cast_possible_truncation, reason = "a factor of 32 bits")]
    let cap = cap as f32;
    let capped = |x| {
        let x = n.scale("soft_cap_in", x, 1.0 / cap)?;
        let x = n.act(Act::Tanh, x)?;
        n.scale("soft_cap_out", x, cap)
    };
    pieces.into_iter().map(capped).collect()
}

/// Every other layer has a window, the first one too.
fn shape2(config: &Config, context: usize) -> Result<Shape> {
    shapes::shape(
        config,
        context,
        &shapes::Plain {
            window: |config, layer| {
                let slides = match shapes::layer_type(config, layer) {
                    Some(kind) => kind == "sliding_attention",
                    None => layer % 2 == 0,
                };
                if slides { config.opt_usize(&["sliding_window"]) } else { Ok(None) }
            },
            ..shapes::Plain::LLAMA
        },
    )
}

/// Layers with a window have a rotation of their own, without scaling.
fn shape3(config: &Config, context: usize) -> Result<Shape> {
    let mut shape = shapes::sizes(config, "embed_tokens")?;
    let dims = shape.heads.dim;
    let (theta, scaling) = shapes::theta(config, Some("full_attention"))?;
    let global = Rope::of(config, theta, scaling, dims, context)?;
    let local_theta = match config.opt_f64(&["rope_local_base_freq"])? {
        Some(theta) => theta,
        None if config.get(&["rope_parameters"]).is_some() => {
            shapes::theta(config, Some("sliding_attention"))?.0
        }
        None => 10000.0,
    };
    let local = Rope::of(config, local_theta, None, dims, context)?;
    let pattern = config.usize_or(&["sliding_window_pattern", "_sliding_window_pattern"], 6)?.max(1);
    for layer in 0..shape.layers {
        let slides = match shapes::layer_type(config, layer) {
            Some(kind) => kind == "sliding_attention",
            None => (layer + 1) % pattern != 0,
        };
        let kind = match slides {
            true => Kind { rope: Some(local.clone()), window: config.opt_usize(&["sliding_window"])? },
            false => Kind { rope: Some(global.clone()), window: None },
        };
        shapes::add(&mut shape, kind);
    }
    Ok(shape)
}
