//! OPT: learned positions two rows down, norms before or after, embeddings perhaps of another width.

use super::{
    decoder::{Decoder, Ids, Place, Shape},
    llama,
    shapes::{self, Plain},
};
use crate::{
    bail,
    error::Result,
    nn::{Act, Hidden, Net, cache::Steps, head_norm::HeadNorm},
};

pub(super) static OPT: Decoder = Decoder {
    bases: &["model.decoder", "decoder"],
    shape: |config, context| shapes::shape(config, context, &Plain { rotary: 0.0, ..Plain::LLAMA }),
    prepare: |_| Ok(()),
    embed,
    learned_positions: true,
    layer,
    norm,
    logits: |n, shape, x| n.logits_of(shape, "lm_head", true, x),
    routed: None,
    turns: None,
};

const EPS: f64 = 1e-5;
/// The first rows of the positions' table are never used.
const OFFSET: i32 = 2;

fn embed(n: &mut Net<'_>, shape: &Shape, ids: &Ids) -> Result<Hidden> {
    // Positions first: no integer work is left once the first projection runs.
    let Some(positions) = ids.position_ids else { bail!("learned positions need position_ids") };
    let positions = n.binary("add", "position_rows", positions, OFFSET)?;
    let positions = n.lookup("embed_positions", positions)?;
    let positions = n.to_hidden("positions", positions)?;
    let x = llama::embed(n, shape, ids)?;
    n.add(x, positions)
}

fn before(n: &Net<'_>) -> Result<bool> {
    n.checkpoint.config.bool_or(&["do_layer_norm_before"], true)
}

fn layer(n: &mut Net<'_>, shape: &Shape, steps: &mut Steps, place: Place, x: Hidden) -> Result<Hidden> {
    let act = Act::parse(n.checkpoint.config.str_or(&["activation_function"], "relu")?)?;
    let before = before(n)?;
    n.within(&format!("layers.{}", place.layer), |n| {
        let attention = llama::attention(n, shape, HeadNorm::None)?;
        let h = if before { n.layer_norm("self_attn_layer_norm", EPS, x)? } else { x };
        let a = n.cached_attention("self_attn", steps, place.at(), attention, h)?;
        let o = n.projection("self_attn.out_proj")?;
        let a = n.attention_output("self_attn.out_proj", shape.heads, o, a)?;
        let x = n.add(x, a)?;
        let x = if before { x } else { n.layer_norm("self_attn_layer_norm", EPS, x)? };
        let h = if before { n.layer_norm("final_layer_norm", EPS, x)? } else { x };
        let h = n.feed_forward("fc1", "fc2", act, h)?;
        let x = n.add(x, h)?;
        if before { Ok(x) } else { n.layer_norm("final_layer_norm", EPS, x) }
    })
}

fn norm(n: &mut Net<'_>, x: Hidden) -> Result<Hidden> {
    if n.has("final_layer_norm.weight") { n.layer_norm("final_layer_norm", EPS, x) } else { Ok(x) }
}
