//! OLMo 2: norms after the blocks, and queries and keys normalised over all heads together.

use super::{
    decoder::{Decoder, Place, Shape},
    llama,
    rotate::Turns,
};
use crate::{
    error::Result,
    nn::{Hidden, Net, cache::Steps, head_norm::HeadNorm, rms::Rms},
};

pub(super) static OLMO2: Decoder = Decoder { layer, turns: Some(&Turns::NORMED_BLOCKS), ..llama::LLAMA };

fn layer(n: &mut Net<'_>, shape: &Shape, steps: &mut Steps, place: Place, x: Hidden) -> Result<Hidden> {
    n.within(&format!("layers.{}", place.layer), |n| {
        let eps = llama::eps(n)?;
        let norm = HeadNorm::RmsWhole { query: "self_attn.q_norm", key: "self_attn.k_norm", eps };
        let attention = llama::attention(n, shape, norm)?;
        let a = n.cached_attention("self_attn", steps, place.at(), attention, x)?;
        let o = n.projection("self_attn.o_proj")?;
        let a = n.attention_output("self_attn.o_proj", shape.heads, o, a)?;
        let a = n.rms(Rms::new("post_attention_layernorm", eps), a)?;
        let x = n.add(x, a)?;
        let h = llama::mlp(n, 1.0, x)?;
        let h = n.rms(Rms::new("post_feedforward_layernorm", eps), h)?;
        n.add(x, h)
    })
}
