//! What is computed from the last hidden states, by task and family.

use std::collections::BTreeMap;

use candle_core::{D, Tensor};

use super::{
    model::{Family, Model, activation},
    pool,
    scope::project,
};
use crate::{
    bail,
    checkpoint::{PoolingMode, Task},
    error::{Context, Result},
};

type Outputs = BTreeMap<String, Tensor>;

pub(super) fn outputs(model: &Model<'_>, task: Task, hidden: &Tensor) -> Result<Outputs> {
    let mut out = Outputs::new();
    match task {
        Task::FeatureExtraction => {
            if let Some(pooled) = pooled(model, hidden)? {
                out.insert("pooler_output".to_string(), pooled);
            }
        }
        Task::Embedding => {
            out.insert("embedding".to_string(), pool::embedding(model, hidden)?);
        }
        Task::QuestionAnswering => {
            let logits = question_answering(model, hidden)?;
            for (i, name) in ["start_logits", "end_logits"].into_iter().enumerate() {
                out.insert(name.to_string(), logits.narrow(D::Minus1, i, 1)?.squeeze(D::Minus1)?);
            }
        }
        Task::SequenceClassification => {
            out.insert("logits".to_string(), sequence_classification(model, hidden)?);
        }
        Task::TokenClassification => {
            let x = if model.family == Family::ModernBert { &modern_head(model, hidden)? } else { hidden };
            out.insert("logits".to_string(), model.root.linear("classifier", x)?);
        }
        Task::MaskedLm => {
            out.insert("logits".to_string(), masked_lm(model, hidden)?);
        }
        Task::PreTraining => {
            out.insert("logits".to_string(), discriminator(model, hidden)?);
        }
        Task::CausalLm => bail!("an encoder does not continue text"),
    }
    Ok(out)
}

/// The pooler's output, if the checkpoint has a pooler.
fn pooled(model: &Model<'_>, hidden: &Tensor) -> Result<Option<Tensor>> {
    let name = if model.family == Family::Albert { "pooler" } else { "pooler.dense" };
    if !model.base.has(&format!("{name}.weight")) {
        return Ok(None);
    }
    Ok(Some(model.base.linear(name, &model.first_token(hidden)?)?.tanh()?))
}

fn sequence_classification(model: &Model<'_>, hidden: &Tensor) -> Result<Tensor> {
    let (root, first) = (&model.root, model.first_token(hidden)?);
    match model.family {
        Family::Bert | Family::Albert => match pooled(model, hidden)? {
            Some(pooled) => root.linear("classifier", &pooled),
            None => bail!("sequence classification needs a pooler, the checkpoint has none"),
        },
        Family::DistilBert => root.linear("classifier", &root.linear("pre_classifier", &first)?.relu()?),
        Family::Roberta | Family::Mpnet => {
            root.linear("classifier.out_proj", &root.linear("classifier.dense", &first)?.tanh()?)
        }
        Family::Electra => {
            root.linear("classifier.out_proj", &root.linear("classifier.dense", &first)?.gelu_erf()?)
        }
        Family::ModernBert => {
            let pooled = match model.config.str_or(&["classifier_pooling"], "cls")? {
                "cls" => first,
                "mean" => pool::pool(PoolingMode::Mean, hidden, &model.inputs.attention_mask)?,
                _ => return Err(model.config.wrong("classifier_pooling", "`cls` or `mean`")),
            };
            root.linear("classifier", &modern_head(model, &pooled)?)
        }
    }
}

fn question_answering(model: &Model<'_>, hidden: &Tensor) -> Result<Tensor> {
    let logits = match model.family {
        Family::ModernBert => model.root.linear("classifier", &modern_head(model, hidden)?)?,
        _ => model.root.linear("qa_outputs", hidden)?,
    };
    match logits.dim(D::Minus1)? {
        2 => Ok(logits),
        n => bail!("question answering takes 2 outputs, start and end; the head has {n}"),
    }
}

fn discriminator(model: &Model<'_>, hidden: &Tensor) -> Result<Tensor> {
    if model.family != Family::Electra {
        bail!("only ELECTRA has a discriminator");
    }
    let head = model.root.join("discriminator_predictions");
    let x = activation(model.act()?, &head.linear("dense", hidden)?)?;
    Ok(head.linear("dense_prediction", &x)?.squeeze(D::Minus1)?)
}

/// A masked-language head: dense, activation, norm, and a decoder that may be the word embedding.
struct MaskedLm {
    dense: &'static str,
    /// Where the activation is not the config's.
    act: Option<&'static str>,
    norm: &'static str,
    decoder: &'static str,
    /// Where the bias is when it is not the decoder's.
    bias: &'static str,
}

const BERT: MaskedLm = MaskedLm {
    dense: "cls.predictions.transform.dense",
    act: None,
    norm: "cls.predictions.transform.LayerNorm",
    decoder: "cls.predictions.decoder",
    bias: "cls.predictions.bias",
};

const ALBERT: MaskedLm = MaskedLm {
    dense: "predictions.dense",
    act: None,
    norm: "predictions.LayerNorm",
    decoder: "predictions.decoder",
    bias: "predictions.bias",
};

const DISTILBERT: MaskedLm = MaskedLm {
    dense: "vocab_transform",
    act: None,
    norm: "vocab_layer_norm",
    decoder: "vocab_projector",
    bias: "vocab_projector.bias",
};

const ROBERTA: MaskedLm = MaskedLm {
    dense: "lm_head.dense",
    act: Some("gelu"),
    norm: "lm_head.layer_norm",
    decoder: "lm_head.decoder",
    bias: "lm_head.bias",
};

const ELECTRA: MaskedLm = MaskedLm {
    dense: "generator_predictions.dense",
    act: Some("gelu"),
    norm: "generator_predictions.LayerNorm",
    decoder: "generator_lm_head",
    bias: "generator_lm_head.bias",
};

fn masked_lm(model: &Model<'_>, hidden: &Tensor) -> Result<Tensor> {
    let head = match model.family {
        Family::Bert => &BERT,
        Family::Albert => &ALBERT,
        Family::DistilBert => &DISTILBERT,
        Family::Roberta | Family::Mpnet => &ROBERTA,
        Family::Electra => &ELECTRA,
        Family::ModernBert => {
            let words = "embeddings.tok_embeddings";
            return decode(model, "decoder", "decoder.bias", words, &modern_head(model, hidden)?);
        }
    };
    let act = head.act.map_or_else(|| model.act(), Ok)?;
    let x = activation(act, &model.root.linear(head.dense, hidden)?)?;
    let x = model.root.layer_norm(head.norm, &x, model.layer_norm_eps()?)?;
    decode(model, head.decoder, head.bias, "embeddings.word_embeddings", &x)
}

/// The decoder's own weight when the file has one, else the word embedding unless the config says that
/// they are not tied.
fn decode(model: &Model<'_>, decoder: &str, bias: &str, words: &str, x: &Tensor) -> Result<Tensor> {
    let (root, own) = (&model.root, format!("{decoder}.weight"));
    let tied = model.config.bool_or(&["tie_word_embeddings"], true)?;
    let weight =
        if root.has(&own) || !tied { root.tensor(&own)? } else { model.base.join(words).tensor("weight")? };
    let own_bias = format!("{decoder}.bias");
    let bias = [bias, own_bias.as_str()].into_iter().find(|name| root.has(name));
    project(x, &weight, bias.map(|name| root.tensor(name)).transpose()?.as_ref()).at(decoder)
}

/// ModernBERT's `head`: dense, activation, norm.
fn modern_head(model: &Model<'_>, x: &Tensor) -> Result<Tensor> {
    let head = model.root.join("head");
    let act = model.config.str_or(&["classifier_activation"], "gelu")?;
    head.layer_norm("norm", &activation(act, &head.linear("dense", x)?)?, model.layer_norm_eps()?)
}
