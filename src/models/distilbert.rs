//! DistilBERT: BERT's layers under other names, without segments or pooler.

use super::encoder::{Encoder, Inputs};
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

fn layer(n: &mut Net<'_>, x: Hidden, mask: &Mask) -> Result<Hidden> {
    let config = &n.checkpoint.config;
    let heads = config.usize(&["n_heads", "num_attention_heads"])?;
    let act = Act::parse(config.str_or(&["activation"], "gelu")?)?;
    let scale = Net::score_scale(n.channels(x)? / heads.max(1));
    let q = n.queries("attention.q_lin", x, heads, scale)?;
    let k = n.linear("attention.k_lin", x)?;
    let v = n.linear("attention.v_lin", x)?;
    let a = n.attention("attention", heads, [q, k, v], Some(mask))?;
    let a = n.linear("attention.out_lin", a)?;
    let x = n.add(x, a)?;
    let x = n.layer_norm("sa_layer_norm", EPS, x)?;
    let h = n.linear("ffn.lin1", x)?;
    let h = n.act(act, h)?;
    let h = n.linear("ffn.lin2", h)?;
    let x = n.add(x, h)?;
    n.layer_norm("output_layer_norm", EPS, x)
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
