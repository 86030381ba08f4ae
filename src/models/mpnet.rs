//! MPNet: RoBERTa's positions, and a bias on the scores that depends on the distance, the same in every
//! layer.

use super::{
    bert::{self, Names},
    encoder::{Encoder, Inputs},
    roberta,
};
use crate::{
    bail,
    error::Result,
    nn::{Act, Hidden, Mask, Net},
};

pub(super) static MPNET: Encoder = Encoder {
    base: "mpnet",
    segments: false,
    longest: roberta::longest,
    body,
    pools_to_classify: false,
    per_token: None,
    classify: Some(roberta::classify),
    masked_lm: Some(roberta::masked_lm),
    discriminate: None,
};

fn body(n: &mut Net<'_>, inputs: &Inputs) -> Result<Hidden> {
    let mut x = n.within("embeddings", |n| {
        let words = n.lookup("word_embeddings", inputs.input_ids)?;
        let positions = roberta::positions(n, inputs.input_ids)?;
        let positions = n.lookup("position_embeddings", positions)?;
        let sum = n.binary("add", "sum", words, positions)?;
        let x = n.to_hidden("embeddings", sum)?;
        n.layer_norm("LayerNorm", bert::eps(n)?, x)
    })?;
    let mask = n.within("encoder", |n| biases(n, inputs))?;
    for i in 0..n.checkpoint.config.usize(&["num_hidden_layers"])? {
        x = n.within(&format!("encoder.layer.{i}"), |n| layer(n, x, &mask))?;
    }
    Ok(x)
}

/// Padding mask and relative bias of each head, joined once for all layers: `[B, K, 1, Q]`.
fn biases(n: &mut Net<'_>, inputs: &Inputs) -> Result<Mask> {
    let table = n.source("relative_attention_bias.weight")?;
    let [buckets, heads] = table.shape[..] else {
        bail!("relative_attention_bias.weight: {:?} is no [buckets, heads]", table.shape);
    };
    let tokens = n.tokens;
    let mut masks = Vec::with_capacity(heads);
    for head in 0..heads {
        let how = format!("head {head} over {tokens} tokens, keys first");
        let bias = n.store(&table, &how, [1, tokens, 1, tokens], move |table| {
            let at =
                |k: usize, q: usize| table.get(bucket(k, q, buckets) * heads + head).copied().unwrap_or(0.0);
            Ok((0..tokens).flat_map(|k| (0..tokens).map(move |q| at(k, q))).collect())
        });
        masks.push(n.binary("add", &format!("bias_{head}"), inputs.mask, bias)?);
    }
    Ok(Mask(masks))
}

/// T5's bidirectional buckets: half for each direction, exact up to a quarter, then logarithmic up to a
/// distance of 128.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "small counts"
)]
fn bucket(key: usize, query: usize, buckets: usize) -> usize {
    let half = buckets / 2;
    let exact = half / 2;
    let distance = key.abs_diff(query);
    let far = || {
        let ratio = (distance as f32 / exact as f32).ln() / (128.0 / exact as f32).ln();
        (exact + (ratio * (half - exact) as f32) as usize).min(half - 1)
    };
    let within = if distance < exact { distance } else { far() };
    if key > query { half + within } else { within }
}

const NAMES: Names = Names {
    query: "attention.attn.q",
    key: "attention.attn.k",
    value: "attention.attn.v",
    attention: "attention.attn",
    output: "attention.attn.o",
    attention_norm: "attention.LayerNorm",
    up: "intermediate.dense",
    down: "output.dense",
    norm: "output.LayerNorm",
};

fn layer(n: &mut Net<'_>, x: Hidden, mask: &Mask) -> Result<Hidden> {
    let config = &n.checkpoint.config;
    let act = Act::parse(config.str_or(&["hidden_act"], "gelu")?)?;
    let (heads, eps) = (config.usize(&["num_attention_heads"])?, bert::eps(n)?);
    if mask.0.len() != heads {
        bail!("{} heads have a relative bias, the config says {heads}", mask.0.len());
    }
    bert::post_norm(n, &NAMES, (heads, act, eps), x, mask)
}
