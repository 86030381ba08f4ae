//! GPT-2 and GPT-Neo: learned positions, LayerNorm, a plain feed-forward block.

use super::{
    decoder::{Decoder, Ids, Place, Shape},
    shapes::{self, Plain},
};
use crate::{
    bail,
    checkpoint::Config,
    error::Result,
    nn::{
        Act, Hidden, Net,
        cache::{Attention, Steps},
        head_norm::HeadNorm,
        stack::Projection,
    },
};

pub(super) static GPT2: Decoder = Decoder {
    bases: &["transformer"],
    shape: |config, context| shapes::shape(config, context, &PLAIN),
    // Linear weights are Conv1D's, `[in, out]`.
    prepare: |n| {
        n.transposed_linears = true;
        Ok(())
    },
    embed,
    learned_positions: true,
    layer,
    norm: |n, x| n.layer_norm("ln_f", eps(n)?, x),
    logits: |n, shape, x| n.logits_of(shape, "lm_head", true, x),
    routed: None,
    turns: None,
};

pub(super) static GPT_NEO: Decoder = Decoder {
    shape: |config, context| shapes::shape(config, context, &Plain { window: neo_window, ..PLAIN }),
    prepare: |_| Ok(()),
    layer: neo_layer,
    ..GPT2
};

const PLAIN: Plain = Plain { embedding: "wte", rotary: 0.0, ..Plain::LLAMA };

fn eps(n: &Net<'_>) -> Result<f64> {
    n.checkpoint.config.f64_or(&["layer_norm_epsilon", "layer_norm_eps"], 1e-5)
}

fn act(n: &Net<'_>) -> Result<Act> {
    Act::parse(n.checkpoint.config.str_or(&["activation_function"], "gelu_new")?)
}

fn embed(n: &mut Net<'_>, shape: &Shape, ids: &Ids) -> Result<Hidden> {
    let pieces = n.embeds_in_pieces(shape, "lm_head");
    let words = n.lookup_tokens("wte", ids.input_ids, pieces)?;
    let Some(positions) = ids.position_ids else { bail!("learned positions need position_ids") };
    let positions = n.lookup("wpe", positions)?;
    let sum = n.binary("add", "words_and_positions", words, positions)?;
    n.to_hidden("embeddings", sum)
}

fn layer(n: &mut Net<'_>, shape: &Shape, steps: &mut Steps, place: Place, x: Hidden) -> Result<Hidden> {
    let by_layer = n.checkpoint.config.bool_or(&["scale_attn_by_inverse_layer_idx"], false)?;
    #[expect(clippy::cast_precision_loss, reason = "a layer's number")]
    let divisor = if by_layer { (place.layer + 1) as f32 } else { 1.0 };
    let scaled = n.checkpoint.config.bool_or(&["scale_attn_weights"], true)?;
    let scale = if scaled { Net::score_scale(shape.heads.dim) } else { 1.0 } / divisor;
    n.within(&format!("h.{}", place.layer), |n| {
        let c = shape.heads.query * shape.heads.dim;
        let fused = n.projection("attn.c_attn")?;
        let part = |i: usize| fused.clone().take(i * c..(i + 1) * c);
        block(n, steps, place, [part(0), part(1), part(2)], scale, "attn.c_proj", x)
    })
}

fn neo_layer(n: &mut Net<'_>, _: &Shape, steps: &mut Steps, place: Place, x: Hidden) -> Result<Hidden> {
    n.within(&format!("h.{}", place.layer), |n| {
        let p = |n: &Net<'_>, name: &str| n.projection(&format!("attn.attention.{name}"));
        let qkv = [p(n, "q_proj")?, p(n, "k_proj")?, p(n, "v_proj")?];
        block(n, steps, place, qkv, 1.0, "attn.attention.out_proj", x)
    })
}

fn block(
    n: &mut Net<'_>,
    steps: &mut Steps,
    place: Place,
    qkv: [Projection; 3],
    scale: f32,
    out: &str,
    x: Hidden,
) -> Result<Hidden> {
    let eps = eps(n)?;
    let h = n.layer_norm("ln_1", eps, x)?;
    let attention = Attention { qkv, scale, soft_cap: None, norm: HeadNorm::None };
    let a = n.cached_attention("attn", steps, place.at(), attention, h)?;
    let o = n.projection(out)?;
    let a = n.attention_output(out, steps.heads, o, a)?;
    let x = n.add(x, a)?;
    let h = n.layer_norm("ln_2", eps, x)?;
    let act = act(n)?;
    let h = n.feed_forward("mlp.c_fc", "mlp.c_proj", act, h)?;
    n.add(x, h)
}

/// `attention_types` is a list of `[kinds, how often]`; local layers have a window.
fn neo_window(config: &Config, layer: usize) -> Result<Option<usize>> {
    let types = config.get(&["attention_types"]).and_then(|t| t.as_array()).cloned().unwrap_or_default();
    let mut kinds = Vec::new();
    for group in &types {
        let names: Vec<&str> = group[0].as_array().into_iter().flatten().filter_map(|k| k.as_str()).collect();
        for _ in 0..group[1].as_u64().unwrap_or(1).min(1024) {
            kinds.extend(names.iter().copied());
        }
    }
    match kinds.get(layer) {
        Some(&"local") => Ok(Some(config.usize_or(&["window_size"], 256)?)),
        Some(&"global") => Ok(None),
        _ => bail!("{}: `attention_types` says nothing about layer {layer}", config.path().display()),
    }
}
