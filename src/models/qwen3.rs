//! Qwen 3: a Llama whose queries and keys are normalised per head, dense or with experts.

use super::{
    Routed,
    decoder::{Decoder, Place, Shape},
    llama,
    rotate::{QKV, Turns},
};
use crate::{
    checkpoint::Config,
    error::Result,
    nn::{Hidden, Net, cache::Steps, head_norm::HeadNorm, moe::Experts},
};

pub(super) static QWEN3: Decoder = Decoder { layer, turns: Some(&TURNS), ..llama::QWEN2 };

pub(super) static QWEN3_MOE: Decoder = Decoder { layer: sparse, routed: Some(routed), ..QWEN3 };

/// Some layers of those with experts may be dense.
const TURNS: Turns = Turns {
    norms: &[
        QKV,
        (
            "post_attention_layernorm",
            &["mlp.gate_proj", "mlp.up_proj", "mlp.gate", "mlp.experts.*.gate_proj", "mlp.experts.*.up_proj"],
        ),
    ],
    writers: &["self_attn.o_proj", "mlp.down_proj", "mlp.experts.*.down_proj"],
    others: &["self_attn.q_norm", "self_attn.k_norm"],
    ..Turns::LLAMA
};

fn routed(config: &Config) -> Result<Routed> {
    Routed::of(config, "num_experts")
}

fn norm(n: &Net<'_>) -> Result<HeadNorm> {
    Ok(HeadNorm::Rms { query: "self_attn.q_norm", key: "self_attn.k_norm", eps: llama::eps(n)?, plus: 0.0 })
}

fn layer(n: &mut Net<'_>, shape: &Shape, steps: &mut Steps, place: Place, x: Hidden) -> Result<Hidden> {
    n.within(&format!("layers.{}", place.layer), |n| {
        let attention = llama::attention(n, shape, norm(n)?)?;
        llama::block(n, steps, place, attention, 1.0, x, |n, h| llama::mlp(n, 1.0, h))
    })
}

fn sparse(n: &mut Net<'_>, shape: &Shape, steps: &mut Steps, place: Place, x: Hidden) -> Result<Hidden> {
    n.within(&format!("layers.{}", place.layer), |n| {
        let attention = llama::attention(n, shape, norm(n)?)?;
        llama::block(n, steps, place, attention, 1.0, x, |n, h| {
            if n.has("mlp.gate_proj.weight") { llama::mlp(n, 1.0, h) } else { experts(n, h) }
        })
    })
}

fn experts(n: &mut Net<'_>, x: Hidden) -> Result<Hidden> {
    let config = &n.checkpoint.config;
    let routed = routed(config)?;
    let experts = Experts {
        router: "mlp.gate",
        experts: "mlp.experts",
        count: routed.count,
        chosen: routed.chosen,
        parts: ["gate_proj", "up_proj", "down_proj"],
        act: llama::act(n)?,
        normalise: config.bool_or(&["norm_topk_prob"], false)?,
    };
    n.experts(&experts, x)
}
