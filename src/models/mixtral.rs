//! Mixtral: a Mistral whose feed-forward block is a mixture of experts.

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

pub(super) static MIXTRAL: Decoder =
    Decoder { layer, routed: Some(routed), turns: Some(&TURNS), ..llama::MISTRAL };

const TURNS: Turns = Turns {
    norms: &[
        QKV,
        (
            "post_attention_layernorm",
            &["block_sparse_moe.gate", "block_sparse_moe.experts.*.w1", "block_sparse_moe.experts.*.w3"],
        ),
    ],
    writers: &["self_attn.o_proj", "block_sparse_moe.experts.*.w2"],
    ..Turns::LLAMA
};

fn routed(config: &Config) -> Result<Routed> {
    Routed::of(config, "num_local_experts")
}

fn layer(n: &mut Net<'_>, shape: &Shape, steps: &mut Steps, place: Place, x: Hidden) -> Result<Hidden> {
    n.within(&format!("layers.{}", place.layer), |n| {
        let attention = llama::attention(n, shape, HeadNorm::None)?;
        llama::block(n, steps, place, attention, 1.0, x, |n, h| {
            let routed = routed(&n.checkpoint.config)?;
            let experts = Experts {
                router: "block_sparse_moe.gate",
                experts: "block_sparse_moe.experts",
                count: routed.count,
                chosen: routed.chosen,
                parts: ["w1", "w3", "w2"],
                act: llama::act(n)?,
                normalise: true,
            };
            n.experts(&experts, h)
        })
    })
}
