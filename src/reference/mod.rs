//! Plain forward passes in f32, to judge converted programs by: `[batch, sequence, channels]`, the whole
//! sequence at once, nothing clever.
//!
//! The one rule: it reads the checkpoint and shares nothing else with the program that is judged.

mod decoder;
mod heads;
mod model;
mod modernbert;
mod pool;
mod postnorm;
mod scope;
mod watch;

use std::collections::BTreeMap;

use candle_core::Tensor;

use self::model::{Family, Model};
pub use self::{
    decoder::{Decoder, DecoderOutput, Predictions, observe, observe_by_layer},
    watch::{Divisors, Given, Observed, Wanted},
};
use crate::{
    checkpoint::{Checkpoint, Task},
    error::{Context, Result},
};

/// A batch of token ids; all rows have one length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inputs {
    pub input_ids: Vec<Vec<u32>>,
    /// 1 for a token, 0 for padding.
    pub attention_mask: Vec<Vec<u32>>,
    /// All 0 when there are none.
    pub token_type_ids: Option<Vec<Vec<u32>>>,
}

/// Runs an encoder: `last_hidden_state` always, and by task `pooler_output`, `embedding`, `logits`, or
/// `start_logits` and `end_logits`.
pub fn encoder(checkpoint: &Checkpoint, task: Task, inputs: &Inputs) -> Result<BTreeMap<String, Tensor>> {
    let family = Family::of(&checkpoint.config)?;
    forward(checkpoint, family, task, inputs)
        .within(|| format!("while running the reference for {}, task {task}", checkpoint.dir.display()))
}

/// Runs a causal language model once: the logits of every token, `[batch, sequence, vocabulary]`.
pub fn decoder(
    checkpoint: &Checkpoint,
    ids: &[Vec<u32>],
    attention_mask: Option<&[Vec<u32>]>,
) -> Result<Tensor> {
    Ok(Decoder::open(checkpoint)?.forward(ids, attention_mask)?.logits)
}

fn forward(
    checkpoint: &Checkpoint,
    family: Family,
    task: Task,
    inputs: &Inputs,
) -> Result<BTreeMap<String, Tensor>> {
    let model = Model::new(checkpoint, family, inputs)?;
    let hidden = match family {
        Family::ModernBert => modernbert::hidden(&model)?,
        _ => postnorm::hidden(&model)?,
    };
    let mut outputs = heads::outputs(&model, task, &hidden)?;
    outputs.insert("last_hidden_state".to_string(), hidden);
    Ok(outputs)
}
