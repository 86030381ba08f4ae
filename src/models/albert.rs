//! ALBERT: narrow embeddings, and layers that share their weights in groups.

use super::{
    bert::{self, Names},
    encoder::{Encoder, Inputs},
};
use crate::{
    bail,
    error::Result,
    nn::{Act, Hidden, Mask, Net},
};

pub(super) static ALBERT: Encoder = Encoder {
    base: "albert",
    segments: true,
    longest: bert::longest,
    body,
    pools_to_classify: false,
    per_token: None,
    classify: Some(classify),
    masked_lm: Some(masked_lm),
    discriminate: None,
};

fn body(n: &mut Net<'_>, inputs: &Inputs) -> Result<Hidden> {
    let x = n.within("embeddings", |n| bert::embeddings(n, inputs))?;
    let mut x = n.linear("encoder.embedding_hidden_mapping_in", x)?;
    let config = &n.checkpoint.config;
    let layers = config.usize(&["num_hidden_layers"])?;
    let (groups, inner) =
        (config.usize_or(&["num_hidden_groups"], 1)?, config.usize_or(&["inner_group_num"], 1)?);
    if groups == 0 || groups > layers {
        bail!("config.json: {layers} layers cannot be in {groups} groups");
    }
    let mask = inputs.masks();
    for i in 0..layers {
        let group = i * groups / layers;
        for j in 0..inner {
            let place = format!("encoder.albert_layer_groups.{group}.albert_layers.{j}");
            x = n.within(&place, |n| layer(n, x, &mask))?;
        }
    }
    Ok(x)
}

const NAMES: Names = Names {
    query: "attention.query",
    key: "attention.key",
    value: "attention.value",
    attention: "attention",
    output: "attention.dense",
    attention_norm: "attention.LayerNorm",
    up: "ffn",
    down: "ffn_output",
    norm: "full_layer_layer_norm",
};

fn layer(n: &mut Net<'_>, x: Hidden, mask: &Mask) -> Result<Hidden> {
    let (heads, act, eps) = (n.checkpoint.config.usize(&["num_attention_heads"])?, act(n)?, bert::eps(n)?);
    bert::post_norm(n, &NAMES, (heads, act, eps), x, mask)
}

fn act(n: &Net<'_>) -> Result<Act> {
    Act::parse(n.checkpoint.config.str_or(&["hidden_act"], "gelu_new")?)
}

fn classify(n: &mut Net<'_>, inputs: &Inputs, x: Hidden) -> Result<Hidden> {
    let x = n.first_token("pooler", x)?;
    let x = n.within(&inputs.base, |n| n.linear("pooler", x))?;
    let x = n.act(Act::Tanh, x)?;
    n.linear("classifier", x)
}

fn masked_lm(n: &mut Net<'_>, inputs: &Inputs, x: Hidden) -> Result<Hidden> {
    let x = n.linear("predictions.dense", x)?;
    let x = n.act(act(n)?, x)?;
    let x = n.layer_norm("predictions.LayerNorm", bert::eps(n)?, x)?;
    let words = inputs.in_base("embeddings.word_embeddings.weight");
    n.tied_vocabulary("predictions.decoder", "predictions.bias", &words, x)
}
