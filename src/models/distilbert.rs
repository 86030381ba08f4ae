//! DistilBERT: BERT's layers under other names, without segments or pooler.

use super::{
    bert::{self, Names},
    encoder::{Encoder, Inputs},
};
use crate::{
    checkpoint::Config,
    error::Result,
    nn::{Act, Hidden, Mask, Net},
};

pub(super) static DISTILBERT: Encoder = Encoder {
    base: "distilbert",
    segments: false,
    longest,
    body,
    pools_to_classify: false,
    per_token: None,
    classify: Some(classify),
    masked_lm: Some(masked_lm),
    discriminate: None,
};

const EPS: f64 = 1e-12;

fn longest(config: &Config) -> Result<usize> {
    config.usize(&["max_position_embeddings"])
}

fn body(n: &mut Net<'_>, inputs: &Inputs) -> Result<Hidden> {
    let mut x = n.within("embeddings", |n| {
        let words = n.lookup("word_embeddings", inputs.input_ids)?;
        let x = n.to_hidden("embeddings", words)?;
        let positions = n.source("position_embeddings.weight")?;
        let x = n.add_positions("position_embeddings", &positions, x)?;
        n.layer_norm("LayerNorm", EPS, x)
    })?;
    let mask = inputs.masks();
    for i in 0..n.checkpoint.config.usize(&["n_layers", "num_hidden_layers"])? {
        x = n.within(&format!("transformer.layer.{i}"), |n| layer(n, x, &mask))?;
    }
    Ok(x)
}

const NAMES: Names = Names {
    query: "attention.q_lin",
    key: "attention.k_lin",
    value: "attention.v_lin",
    attention: "attention",
    output: "attention.out_lin",
    attention_norm: "sa_layer_norm",
    up: "ffn.lin1",
    down: "ffn.lin2",
    norm: "output_layer_norm",
};

fn layer(n: &mut Net<'_>, x: Hidden, mask: &Mask) -> Result<Hidden> {
    let config = &n.checkpoint.config;
    let heads = config.usize(&["n_heads", "num_attention_heads"])?;
    let act = Act::parse(config.str_or(&["activation"], "gelu")?)?;
    bert::post_norm(n, &NAMES, (heads, act, EPS), x, mask)
}

fn classify(n: &mut Net<'_>, _: &Inputs, x: Hidden) -> Result<Hidden> {
    let x = n.first_token("first_token", x)?;
    let x = n.linear("pre_classifier", x)?;
    let x = n.act(Act::Relu, x)?;
    n.linear("classifier", x)
}

fn masked_lm(n: &mut Net<'_>, inputs: &Inputs, x: Hidden) -> Result<Hidden> {
    let act = Act::parse(n.checkpoint.config.str_or(&["activation"], "gelu")?)?;
    let x = n.linear("vocab_transform", x)?;
    let x = n.act(act, x)?;
    let x = n.layer_norm("vocab_layer_norm", EPS, x)?;
    let words = inputs.in_base("embeddings.word_embeddings.weight");
    n.tied_vocabulary("vocab_projector", "vocab_projector.bias", &words, x)
}
