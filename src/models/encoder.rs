//! The frame of encoders: ids in, one pass over the whole sequence, the task's outputs.

use std::collections::BTreeMap;

use serde_json::json;

use super::{Part, Plan};
use crate::{
    bail,
    checkpoint::{Checkpoint, Config, PoolingMode, Task},
    error::{Context, Error, Result},
    graph::Builder,
    mil::{DType, Program, Type, ValueId},
    nn::{Hidden, Mask, Net},
};

/// What a family of encoders says about itself.
pub struct Encoder {
    /// Name of the bare model inside a checkpoint with a head: `bert` in `bert.encoder.layer.0…`.
    pub base: &'static str,
    /// Whether tokens have segments.
    pub segments: bool,
    /// The longest sequence that the checkpoint has positions for.
    pub longest: fn(&Config) -> Result<usize>,
    /// Embeddings and layers, in the scope of the bare model.
    pub body: fn(&mut Net<'_>, &Inputs) -> Result<Hidden>,
    /// Whether the classifier may take the mean of the tokens.
    pub pools_to_classify: bool,
    /// What comes between the last hidden states and the classifier of each token.
    pub per_token: Option<Head>,
    /// Heads, in the scope of the checkpoint.
    pub classify: Option<Head>,
    pub masked_lm: Option<Head>,
    /// ELECTRA's discriminator.
    pub discriminate: Option<Head>,
}

/// From the last hidden states to logits.
pub type Head = fn(&mut Net<'_>, &Inputs, Hidden) -> Result<Hidden>;

/// The function's inputs, and what is made from them once.
pub struct Inputs {
    pub input_ids: ValueId,
    pub token_type_ids: Option<ValueId>,
    /// Added to scores: `[B, S, 1, 1]`.
    pub mask: ValueId,
    /// 1 for real tokens, `[B, 1, 1, S]`; there when the task pools.
    pub token_weights: Option<ValueId>,
    /// Name of the bare model in the current checkpoint, empty when it is bare itself.
    pub base: String,
}

impl Inputs {
    /// The full name of a place in the bare model.
    pub fn in_base(&self, name: &str) -> String {
        if self.base.is_empty() { name.into() } else { format!("{}.{name}", self.base) }
    }

    pub fn masks(&self) -> Mask {
        Mask(vec![self.mask])
    }
}

pub fn build(encoder: &Encoder, checkpoint: &Checkpoint, plan: &Plan, model_type: &str) -> Result<Part> {
    let config = &checkpoint.config;
    let tokens = tokens(encoder, checkpoint, plan)?;
    if plan.token_type_ids && !encoder.segments {
        bail!("{model_type} has no token types"; hint: "leave `--token-type-ids` out");
    }
    let mut net = Net::new(checkpoint, Builder::new(plan.opset), plan.float, plan.batch, tokens);
    let prefixed = checkpoint.tensors.names().any(|n| n.starts_with(&format!("{}.", encoder.base)));
    let base = if prefixed { encoder.base } else { "" };
    let (outputs, docs) =
        function(encoder, &mut net, plan, base).within(|| doing(checkpoint, plan.task, model_type))?;

    let function = net.builder.finish(outputs);
    let describe = |id: &ValueId| {
        let value = function.value(*id);
        let tensor = value.ty.as_tensor();
        json!({
            "name": value.name,
            "dtype": tensor.map_or("", |t| t.dtype.name()),
            "shape": tensor.and_then(|t| t.shape()),
        })
    };
    let contract = json!({
        "version": 1,
        "family": model_type,
        "task": plan.task.to_string(),
        "functions": { "main": {
            "inputs": function.inputs.iter().map(describe).collect::<Vec<_>>(),
            "outputs": function.body.outputs.iter().map(describe).collect::<Vec<_>>(),
        }},
        "batch": plan.batch,
        "sequence_length": tokens,
        "padding": "right or left; 0 in attention_mask",
        "labels": labels(config, plan.task)?,
    });
    let program =
        Program { functions: BTreeMap::from([("main".to_string(), function)]), ..Program::default() };
    Ok(Part { stem: "model".into(), program, docs, contract, notes: Vec::new() })
}

/// What is being built; a task that the checkpoint was not made for may be why something is missing.
fn doing(checkpoint: &Checkpoint, task: Task, model_type: &str) -> String {
    let made = match checkpoint.task() {
        Ok(made) if made != task => format!("; the checkpoint was made for {made}"),
        _ => String::new(),
    };
    format!("while building {model_type}, task {task}{made}")
}

/// Tokens per row: as asked, or what suits the checkpoint.
fn tokens(encoder: &Encoder, checkpoint: &Checkpoint, plan: &Plan) -> Result<usize> {
    let longest = (encoder.longest)(&checkpoint.config)?;
    match plan.tokens {
        Some(0) => bail!("a sequence of 0 tokens is asked for"),
        Some(n) if n > longest => {
            bail!("a sequence of {n} tokens is asked for, the checkpoint has positions for {longest}"; hint: "`--sequence-length {longest}` is the longest that works")
        }
        Some(n) => Ok(n),
        None => Ok(longest.min(128)),
    }
}

fn labels(config: &Config, task: Task) -> Result<Option<Vec<String>>> {
    match task {
        Task::SequenceClassification | Task::TokenClassification => config.labels().map(Some),
        _ => Ok(None),
    }
}

type Described = (Vec<ValueId>, BTreeMap<String, String>);

fn function(encoder: &Encoder, net: &mut Net<'_>, plan: &Plan, base: &str) -> Result<Described> {
    let mut docs = BTreeMap::new();
    let ids = |net: &Net<'_>| Type::tensor(DType::I32, [net.batch, net.tokens]);
    let input_ids = net.builder.input("input_ids", ids(net))?;
    docs.insert("input_ids".into(), "Token ids, one row per text".into());
    let attention_mask = net.builder.input("attention_mask", ids(net))?;
    docs.insert("attention_mask".into(), "1 for real tokens, 0 for padding".into());
    let token_type_ids = match plan.token_type_ids {
        true => {
            docs.insert("token_type_ids".into(), "Segment of each token, 0 or 1".into());
            Some(net.builder.input("token_type_ids", ids(net))?)
        }
        false => None,
    };
    let mask = net.padding_mask(attention_mask)?;
    let pools = matches!(plan.task, Task::Embedding)
        || (plan.task == Task::SequenceClassification && encoder.pools_to_classify);
    let token_weights = if pools { Some(net.token_weights(attention_mask)?) } else { None };
    let inputs = Inputs { input_ids, token_type_ids, mask, token_weights, base: base.into() };
    let hidden = net.within(base, |net| (encoder.body)(net, &inputs))?;
    let outputs = heads(encoder, net, plan.task, &inputs, hidden, &mut docs)?;
    Ok((outputs, docs))
}

fn heads(
    encoder: &Encoder,
    net: &mut Net<'_>,
    task: Task,
    inputs: &Inputs,
    hidden: Hidden,
    docs: &mut BTreeMap<String, String>,
) -> Result<Vec<ValueId>> {
    let mut doc = |name: &str, text: &str| docs.insert(name.into(), text.into());
    let head =
        |h: Option<Head>| h.ok_or_else(|| Error::new(format!("task {task} is not known for this family")));
    match task {
        Task::FeatureExtraction => {
            doc("last_hidden_state", "Hidden states after the last layer, one vector per token");
            Ok(vec![net.per_token("last_hidden_state", hidden)?])
        }
        Task::Embedding => {
            doc("embedding", "One vector per text");
            let x = embedding(net, inputs, hidden)?;
            Ok(vec![net.per_row("embedding", x)?])
        }
        Task::SequenceClassification => {
            doc("logits", "Scores of the labels, before softmax");
            let x = head(encoder.classify)?(net, inputs, hidden)?;
            Ok(vec![net.per_row("logits", x)?])
        }
        Task::TokenClassification => {
            doc("logits", "Scores of the labels per token, before softmax");
            let x = encoder.per_token.map_or(Ok(hidden), |f| f(net, inputs, hidden))?;
            let x = net.linear("classifier", x)?;
            Ok(vec![net.per_token("logits", x)?])
        }
        Task::QuestionAnswering => {
            doc("start_logits", "Scores of each token as the answer's first");
            doc("end_logits", "Scores of each token as the answer's last");
            let x = encoder.per_token.map_or(Ok(hidden), |f| f(net, inputs, hidden))?;
            let name = if net.has("qa_outputs.weight") { "qa_outputs" } else { "classifier" };
            let x = net.linear(name, x)?;
            let parts = net.split_channels("qa_outputs_split", x.0, 1, 2)?;
            Ok(vec![net.per_position("start_logits", parts[0])?, net.per_position("end_logits", parts[1])?])
        }
        Task::MaskedLm => {
            doc("logits", "Scores of the vocabulary per token, before softmax");
            let x = head(encoder.masked_lm)?(net, inputs, hidden)?;
            Ok(vec![net.per_token("logits", x)?])
        }
        Task::PreTraining => {
            doc("logits", "Score of each token being replaced, before sigmoid");
            let x = head(encoder.discriminate)?(net, inputs, hidden)?;
            Ok(vec![net.per_position("logits", x.0)?])
        }
        Task::CausalLm => bail!("task {task} is not known for this family"),
    }
}

/// One vector per text, as the sentence-transformers files say; the mean of the tokens without them.
fn embedding(net: &mut Net<'_>, inputs: &Inputs, hidden: Hidden) -> Result<Hidden> {
    let pooling = net.checkpoint.pooling()?;
    let weights = inputs.token_weights.ok_or_else(|| Error::new("no token weights to pool with"))?;
    let x = match pooling.map_or(PoolingMode::Mean, |p| p.mode) {
        PoolingMode::Cls => net.first_token("pooling", hidden)?,
        PoolingMode::Mean => net.mean_of_tokens("pooling", hidden, weights)?,
        PoolingMode::Max => net.max_of_tokens("pooling", hidden, weights)?,
        other => {
            bail!("pooling {other:?} is not supported"; hint: "supported are the first token, the mean and the largest")
        }
    };
    if pooling.is_some_and(|p| p.normalize) { net.unit_length("normalize", x) } else { Ok(x) }
}
