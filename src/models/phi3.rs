//! Phi 3: a Llama with fused projections, a window, and longrope.

use super::{
    decoder::{Decoder, Place, Shape},
    llama,
    rotate::Turns,
    shapes::{self, Plain},
};
use crate::{
    error::Result,
    nn::{
        Hidden, Net,
        cache::{Attention, Steps},
        head_norm::HeadNorm,
    },
};

pub(super) static PHI3: Decoder = Decoder {
    shape: |config, context| {
        let rotary = config.f64_or(&["partial_rotary_factor"], 1.0)?;
        shapes::shape(config, context, &Plain { rotary, window: shapes::window_everywhere, ..Plain::LLAMA })
    },
    layer,
    turns: Some(&TURNS),
    ..llama::LLAMA
};

const TURNS: Turns = Turns {
    norms: &[
        ("input_layernorm", &["self_attn.qkv_proj"]),
        ("post_attention_layernorm", &["mlp.gate_up_proj"]),
    ],
    values: "self_attn.qkv_proj",
    ..Turns::LLAMA
};

fn layer(n: &mut Net<'_>, shape: &Shape, steps: &mut Steps, place: Place, x: Hidden) -> Result<Hidden> {
    n.within(&format!("layers.{}", place.layer), |n| {
        let (q, kv) = (shape.heads.query * shape.heads.dim, shape.heads.kv * shape.heads.dim);
        let fused = n.projection("self_attn.qkv_proj")?;
        let part = |rows: std::ops::Range<usize>| fused.clone().take(rows);
        let attention = Attention {
            qkv: [part(0..q), part(q..q + kv), part(q + kv..q + 2 * kv)],
            scale: Net::score_scale(shape.heads.dim),
            soft_cap: None,
            norm: HeadNorm::None,
        };
        llama::block(n, steps, place, attention, 1.0, x, |n, h| {
            let act = llama::act(n)?;
            let both = n.linear("mlp.gate_up_proj", h)?;
            let h = n.gate_halves("mlp.gate_up", act, both)?;
            n.linear("mlp.down_proj", h)
        })
    })
}
