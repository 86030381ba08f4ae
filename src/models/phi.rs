//! Phi, StableLM, Cohere and StarCoder 2: LayerNorm in Llama's place, and in most blocks side by side.

use super::{
    decoder::{Decoder, Place, Shape},
    llama,
    shapes::{self, Plain},
};
use crate::{
    error::Result,
    mil::{DType, Weight},
    nn::{
        Act, Hidden, Net,
        cache::{Attention, Steps},
        head_norm::HeadNorm,
    },
};

pub(super) static PHI: Decoder = Decoder {
    shape: |config, context| {
        let rotary = config.f64_or(&["partial_rotary_factor"], 0.5)?;
        shapes::shape(config, context, &Plain { rotary, ..Plain::LLAMA })
    },
    layer: phi,
    norm: |n, x| n.layer_norm("final_layernorm", eps(n)?, x),
    turns: None,
    ..llama::LLAMA
};

pub(super) static STABLELM: Decoder = Decoder {
    shape: |config, context| {
        let rotary = config.f64_or(&["partial_rotary_factor"], 0.25)?;
        shapes::shape(config, context, &Plain { rotary, ..Plain::LLAMA })
    },
    layer: stablelm,
    norm: |n, x| n.layer_norm("norm", eps(n)?, x),
    turns: None,
    ..llama::LLAMA
};

pub(super) static COHERE: Decoder = Decoder {
    shape: |config, context| shapes::shape(config, context, &Plain { interleaved: true, ..Plain::LLAMA }),
    layer: cohere,
    norm: |n, x| n.layer_norm("norm", eps(n)?, x),
    logits: |n, shape, x| {
        let x = n.logits_of(shape, "lm_head", true, x)?;
        #[expect(clippy::cast_possible_truncation, reason = "a factor of 32 bits")]
        let by = n.checkpoint.config.f64_or(&["logit_scale"], 0.0625)? as f32;
        n.scale_each("logit_scale", x, by)
    },
    turns: None,
    ..llama::LLAMA
};

pub(super) static STARCODER2: Decoder = Decoder {
    shape: |config, context| {
        shapes::shape(config, context, &Plain { window: shapes::window_everywhere, ..Plain::LLAMA })
    },
    layer: starcoder2,
    norm: |n, x| n.layer_norm("norm", eps(n)?, x),
    logits: |n, shape, x| n.logits_of(shape, "lm_head", true, x),
    turns: None,
    ..llama::LLAMA
};

fn eps(n: &Net<'_>) -> Result<f64> {
    n.checkpoint.config.f64_or(&["layer_norm_eps", "norm_epsilon"], 1e-5)
}

fn phi(n: &mut Net<'_>, shape: &Shape, steps: &mut Steps, place: Place, x: Hidden) -> Result<Hidden> {
    let act = Act::parse(n.checkpoint.config.str_or(&["hidden_act"], "gelu_new")?)?;
    let eps = eps(n)?;
    n.within(&format!("layers.{}", place.layer), |n| {
        let norm = match n.has("self_attn.q_layernorm.weight") {
            true => {
                let side = |n: &Net<'_>, name: &str| -> Result<(Weight, Option<Weight>)> {
                    Ok((n.source(&format!("{name}.weight"))?, Some(n.source(&format!("{name}.bias"))?)))
                };
                let (query, key) = (side(n, "self_attn.q_layernorm")?, side(n, "self_attn.k_layernorm")?);
                HeadNorm::Layer { query, key, eps }
            }
            false => HeadNorm::None,
        };
        let attention = llama::attention(n, shape, norm)?;
        let h = n.layer_norm("input_layernorm", eps, x)?;
        let a = n.cached_attention("self_attn", steps, place.at(), attention, h)?;
        let o = n.projection("self_attn.dense")?;
        let a = n.attention_output("self_attn.dense", shape.heads, o, a)?;
        let m = n.feed_forward("mlp.fc1", "mlp.fc2", act, h)?;
        let x = n.add(x, a)?;
        n.add(x, m)
    })
}

fn stablelm(n: &mut Net<'_>, shape: &Shape, steps: &mut Steps, place: Place, x: Hidden) -> Result<Hidden> {
    let parallel = n.checkpoint.config.bool_or(&["use_parallel_residual"], false)?;
    let eps = eps(n)?;
    n.within(&format!("layers.{}", place.layer), |n| {
        let norm = match n.has("self_attn.q_layernorm.norms.0.weight") {
            true => HeadNorm::Layer {
                query: (head_norms(n, "self_attn.q_layernorm.norms", shape.heads.query)?, None),
                key: (head_norms(n, "self_attn.k_layernorm.norms", shape.heads.kv)?, None),
                eps,
            },
            false => HeadNorm::None,
        };
        let attention = llama::attention(n, shape, norm)?;
        let h = n.layer_norm("input_layernorm", eps, x)?;
        let a = n.cached_attention("self_attn", steps, place.at(), attention, h)?;
        let o = n.projection("self_attn.o_proj")?;
        let a = n.attention_output("self_attn.o_proj", shape.heads, o, a)?;
        let x = n.add(x, a)?;
        let h = if parallel { h } else { n.layer_norm("post_attention_layernorm", eps, x)? };
        let h = llama::mlp(n, 1.0, h)?;
        n.add(x, h)
    })
}

/// One norm's weight per head, joined.
fn head_norms(n: &Net<'_>, name: &str, heads: usize) -> Result<Weight> {
    let each: Vec<Weight> =
        (0..heads).map(|h| n.source(&format!("{name}.{h}.weight"))).collect::<Result<_>>()?;
    let keys: Vec<&str> = each.iter().map(|w| w.key.as_str()).collect();
    let count: usize = each.iter().map(Weight::count).sum();
    let key = keys.join(" & ");
    Ok(Weight::new(key, DType::F32, [count], move || {
        let mut all = Vec::with_capacity(count);
        for w in &each {
            all.extend(w.floats()?);
        }
        Ok(crate::mil::constant::encode_floats(DType::F32, &all)?.into())
    }))
}

fn cohere(n: &mut Net<'_>, shape: &Shape, steps: &mut Steps, place: Place, x: Hidden) -> Result<Hidden> {
    let eps = eps(n)?;
    n.within(&format!("layers.{}", place.layer), |n| {
        let norm = match n.has("self_attn.q_norm.weight") {
            true => HeadNorm::Layer {
                query: (n.source("self_attn.q_norm.weight")?, None),
                key: (n.source("self_attn.k_norm.weight")?, None),
                eps,
            },
            false => HeadNorm::None,
        };
        let attention = llama::attention(n, shape, norm)?;
        let h = n.layer_norm("input_layernorm", eps, x)?;
        let a = n.cached_attention("self_attn", steps, place.at(), attention, h)?;
        let o = n.projection("self_attn.o_proj")?;
        let a = n.attention_output("self_attn.o_proj", shape.heads, o, a)?;
        let m = llama::mlp(n, 1.0, h)?;
        let x = n.add(x, a)?;
        n.add(x, m)
    })
}

fn starcoder2(n: &mut Net<'_>, shape: &Shape, steps: &mut Steps, place: Place, x: Hidden) -> Result<Hidden> {
    let act = Act::parse(n.checkpoint.config.str_or(&["hidden_act"], "gelu_pytorch_tanh")?)?;
    let eps = eps(n)?;
    n.within(&format!("layers.{}", place.layer), |n| {
        let attention: Attention = llama::attention(n, shape, HeadNorm::None)?;
        let h = n.layer_norm("input_layernorm", eps, x)?;
        let a = n.cached_attention("self_attn", steps, place.at(), attention, h)?;
        let o = n.projection("self_attn.o_proj")?;
        let a = n.attention_output("self_attn.o_proj", shape.heads, o, a)?;
        let x = n.add(x, a)?;
        let h = n.layer_norm("post_attention_layernorm", eps, x)?;
        let h = n.feed_forward("mlp.c_fc", "mlp.c_proj", act, h)?;
        n.add(x, h)
    })
}
