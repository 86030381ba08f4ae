//! ELECTRA: BERT with embeddings of a width of their own, and a discriminator.

use super::{
    bert,
    encoder::{Encoder, Inputs},
};
use crate::{
    error::Result,
    nn::{Act, Hidden, Net},
};

pub(super) static ELECTRA: Encoder = Encoder {
    base: "electra",
    segments: true,
    longest: bert::longest,
    body,
    pools_to_classify: false,
    per_token: None,
    classify: Some(classify),
    masked_lm: Some(masked_lm),
    discriminate: Some(discriminate),
};

fn body(n: &mut Net<'_>, inputs: &Inputs) -> Result<Hidden> {
    let x = n.within("embeddings", |n| bert::embeddings(n, inputs))?;
    let x = if n.has("embeddings_project.weight") { n.linear("embeddings_project", x)? } else { x };
    bert::layers(n, x, &inputs.masks())
}

fn act(n: &Net<'_>) -> Result<Act> {
    Act::parse(n.checkpoint.config.str_or(&["hidden_act"], "gelu")?)
}

fn classify(n: &mut Net<'_>, _: &Inputs, x: Hidden) -> Result<Hidden> {
    let x = n.first_token("first_token", x)?;
    let x = n.linear("classifier.dense", x)?;
    let x = n.act(Act::Gelu, x)?;
    n.linear("classifier.out_proj", x)
}

fn masked_lm(n: &mut Net<'_>, inputs: &Inputs, x: Hidden) -> Result<Hidden> {
    let x = n.linear("generator_predictions.dense", x)?;
    let x = n.act(Act::Gelu, x)?;
    let x = n.layer_norm("generator_predictions.LayerNorm", bert::eps(n)?, x)?;
    let words = inputs.in_base("embeddings.word_embeddings.weight");
    n.tied_vocabulary("generator_lm_head", "generator_lm_head.bias", &words, x)
}

fn discriminate(n: &mut Net<'_>, _: &Inputs, x: Hidden) -> Result<Hidden> {
    let x = n.linear("discriminator_predictions.dense", x)?;
    let x = n.act(act(n)?, x)?;
    n.linear("discriminator_predictions.dense_prediction", x)
}
