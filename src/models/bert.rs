//! BERT: absolute positions, segments, norms after the residual sums.

use super::encoder::{Encoder, Inputs};
use crate::{
    checkpoint::Config,
    error::Result,
    nn::{Act, Hidden, Mask, Net},
};

pub(super) static BERT: Encoder = Encoder {
    base: "bert",
    segments: true,
    longest,
    body,
    pools_to_classify: false,
    per_token: None,
    classify: Some(classify),
    masked_lm: Some(masked_lm),
    discriminate: None,
};

pub(super) fn longest(config: &Config) -> Result<usize> {
    config.usize(&["max_position_embeddings"])
}

fn body(n: &mut Net<'_>, inputs: &Inputs) -> Result<Hidden> {
    let x = n.within("embeddings", |n| embeddings(n, inputs))?;
    layers(n, x, &inputs.masks())
}

/// Word, position and segment rows, summed and normalised.
pub(super) fn embeddings(n: &mut Net<'_>, inputs: &Inputs) -> Result<Hidden> {
    let words = n.lookup("word_embeddings", inputs.input_ids)?;
    let (sum, positions) = match inputs.token_type_ids {
        Some(types) => {
            let types = n.lookup("token_type_embeddings", types)?;
            (n.binary("add", "words_and_types", words, types)?, n.source("position_embeddings.weight")?)
        }
        None => (words, n.table_plus_row("position_embeddings", "token_type_embeddings", 0)?),
    };
    let x = n.to_hidden("embeddings", sum)?;
    let x = n.add_positions("position_embeddings", &positions, x)?;
    n.layer_norm("LayerNorm", eps(n)?, x)
}

/// `encoder.layer.N`, shared by the families that kept BERT's layers.
pub(super) fn layers(n: &mut Net<'_>, mut x: Hidden, mask: &Mask) -> Result<Hidden> {
    for i in 0..n.checkpoint.config.usize(&["num_hidden_layers"])? {
        x = n.within(&format!("encoder.layer.{i}"), |n| layer(n, x, mask))?;
    }
    Ok(x)
}

/// The places of a layer whose norms come after the residual sums.
pub(super) struct Names {
    pub(super) query: &'static str,
    pub(super) key: &'static str,
    pub(super) value: &'static str,
    pub(super) attention: &'static str,
    pub(super) output: &'static str,
    pub(super) attention_norm: &'static str,
    pub(super) up: &'static str,
    pub(super) down: &'static str,
    pub(super) norm: &'static str,
}

const NAMES: Names = Names {
    query: "attention.self.query",
    key: "attention.self.key",
    value: "attention.self.value",
    attention: "attention.self",
    output: "attention.output.dense",
    attention_norm: "attention.output.LayerNorm",
    up: "intermediate.dense",
    down: "output.dense",
    norm: "output.LayerNorm",
};

fn layer(n: &mut Net<'_>, x: Hidden, mask: &Mask) -> Result<Hidden> {
    let config = &n.checkpoint.config;
    let act = Act::parse(config.str_or(&["hidden_act"], "gelu")?)?;
    let (heads, eps) = (config.usize(&["num_attention_heads"])?, eps(n)?);
    post_norm(n, &NAMES, (heads, act, eps), x, mask)
}

/// Attention and feed-forward, each added to what went in and then normalised.
pub(super) fn post_norm(
    n: &mut Net<'_>,
    names: &Names,
    (heads, act, eps): (usize, Act, f64),
    x: Hidden,
    mask: &Mask,
) -> Result<Hidden> {
    let scale = Net::score_scale(n.channels(x)? / heads.max(1));
    let q = n.queries(names.query, x, heads, scale)?;
    let k = n.linear(names.key, x)?;
    let v = n.linear(names.value, x)?;
    let a = n.attention(names.attention, heads, [q, k, v], Some(mask))?;
    let a = n.linear(names.output, a)?;
    let x = n.add(x, a)?;
    let x = n.layer_norm(names.attention_norm, eps, x)?;
    let h = n.linear(names.up, x)?;
    let h = n.act(act, h)?;
    let h = n.linear(names.down, h)?;
    let x = n.add(x, h)?;
    n.layer_norm(names.norm, eps, x)
}

pub(super) fn eps(n: &Net<'_>) -> Result<f64> {
    n.checkpoint.config.f64_or(&["layer_norm_eps"], 1e-12)
}

fn classify(n: &mut Net<'_>, inputs: &Inputs, x: Hidden) -> Result<Hidden> {
    let x = n.first_token("pooler", x)?;
    let x = n.within(&inputs.base, |n| n.linear("pooler.dense", x))?;
    let x = n.act(Act::Tanh, x)?;
    n.linear("classifier", x)
}

fn masked_lm(n: &mut Net<'_>, inputs: &Inputs, x: Hidden) -> Result<Hidden> {
    let act = Act::parse(n.checkpoint.config.str_or(&["hidden_act"], "gelu")?)?;
    let words = inputs.in_base("embeddings.word_embeddings.weight");
    n.within("cls.predictions", |n| {
        let x = n.linear("transform.dense", x)?;
        let x = n.act(act, x)?;
        n.layer_norm("transform.LayerNorm", eps(n)?, x)
    })
    .and_then(|x| n.tied_vocabulary("cls.predictions.decoder", "cls.predictions.bias", &words, x))
}
