//! RoBERTa, XLM-RoBERTa and CamemBERT: BERT's layers; positions count the real tokens from the padding id
//! on.

use super::{
    bert,
    encoder::{Encoder, Inputs},
};
use crate::{
    checkpoint::Config,
    error::Result,
    mil::ValueId,
    nn::{Act, Hidden, Net},
};

pub(super) static ROBERTA: Encoder = Encoder {
    base: "roberta",
    segments: false,
    longest,
    body,
    pools_to_classify: false,
    per_token: None,
    classify: Some(classify),
    masked_lm: Some(masked_lm),
    discriminate: None,
};

/// Rows up to and with the padding id's are never a real token's.
pub(super) fn longest(config: &Config) -> Result<usize> {
    let (rows, pad) = (config.usize(&["max_position_embeddings"])?, config.usize_or(&["pad_token_id"], 1)?);
    Ok(rows.saturating_sub(pad + 1))
}

fn body(n: &mut Net<'_>, inputs: &Inputs) -> Result<Hidden> {
    let x = n.within("embeddings", |n| {
        let words = n.lookup("word_embeddings", inputs.input_ids)?;
        let table = n.table_plus_row("position_embeddings", "token_type_embeddings", 0)?;
        let positions = positions(n, inputs.input_ids)?;
        let positions = n.lookup_in("position_embeddings", table, positions)?;
        let sum = n.binary("add", "sum", words, positions)?;
        let x = n.to_hidden("embeddings", sum)?;
        n.layer_norm("LayerNorm", bert::eps(n)?, x)
    })?;
    bert::layers(n, x, &inputs.masks())
}

/// Padding keeps the padding id; real tokens count on from it.
pub(super) fn positions(n: &mut Net<'_>, input_ids: ValueId) -> Result<ValueId> {
    let pad = i32::try_from(n.checkpoint.config.usize_or(&["pad_token_id"], 1)?).unwrap_or(i32::MAX);
    let real = n.binary("not_equal", "is_real", input_ids, pad)?;
    let real = n.op("cast", "real", [("x", real.into()), ("dtype", "int32".into())])?;
    let count = n.op("cumsum", "count", [("x", real.into()), ("axis", 1.into())])?;
    let count = n.binary("mul", "count_real", count, real)?;
    n.binary("add", "position_ids", count, pad)
}

/// A dense layer on the first token, tanh, and the projection to labels.
pub(super) fn classify(n: &mut Net<'_>, _: &Inputs, x: Hidden) -> Result<Hidden> {
    let x = n.first_token("first_token", x)?;
    let x = n.linear("classifier.dense", x)?;
    let x = n.act(Act::Tanh, x)?;
    n.linear("classifier.out_proj", x)
}

pub(super) fn masked_lm(n: &mut Net<'_>, inputs: &Inputs, x: Hidden) -> Result<Hidden> {
    let x = n.linear("lm_head.dense", x)?;
    let x = n.act(Act::Gelu, x)?;
    let x = n.layer_norm("lm_head.layer_norm", bert::eps(n)?, x)?;
    let words = inputs.in_base("embeddings.word_embeddings.weight");
    n.tied_vocabulary("lm_head.decoder", "lm_head.bias", &words, x)
}
