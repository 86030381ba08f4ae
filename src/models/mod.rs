//! Families of architectures: one short file each over the BC1S vocabulary, and one line in [`FAMILIES`].
//!
//! Names in a family's file are the checkpoint's own, so there is no mapping table. The frame does the
//! rest: inputs, masks, layers, outputs, and the notes for the host.

mod albert;
mod bert;
mod distilbert;
mod electra;
pub mod encoder;
mod modernbert;
mod mpnet;
mod roberta;

use std::collections::BTreeMap;

pub use encoder::Encoder;

use crate::{
    bail,
    checkpoint::{Checkpoint, Task},
    error::Result,
    mil::{DType, Program},
    ops::Opset,
};

/// Every family, by the `model_type` of its config.
pub static FAMILIES: &[Family] = &[
    Family { model_types: &["albert"], encoder: &albert::ALBERT },
    Family { model_types: &["bert"], encoder: &bert::BERT },
    Family { model_types: &["distilbert"], encoder: &distilbert::DISTILBERT },
    Family { model_types: &["electra"], encoder: &electra::ELECTRA },
    Family { model_types: &["modernbert"], encoder: &modernbert::MODERNBERT },
    Family { model_types: &["mpnet"], encoder: &mpnet::MPNET },
    Family { model_types: &["roberta", "xlm-roberta", "camembert"], encoder: &roberta::ROBERTA },
];

pub struct Family {
    pub model_types: &'static [&'static str],
    pub encoder: &'static Encoder,
}

/// What to build from a checkpoint.
#[derive(Debug, Clone)]
pub struct Plan {
    pub task: Task,
    pub batch: usize,
    /// Tokens per row; `None` takes what the checkpoint says, at most 128.
    pub tokens: Option<usize>,
    /// Whether segments are an input; otherwise all tokens are of segment 0.
    pub token_type_ids: bool,
    /// Element type of weights and activations, fp16 or fp32.
    pub float: DType,
    pub opset: Opset,
}

/// A program of a conversion, with what its host must know.
#[derive(Debug)]
pub struct Part {
    pub program: Program,
    /// Input or output → what it means.
    pub docs: BTreeMap<String, String>,
    /// The contract, as JSON.
    pub contract: serde_json::Value,
    /// Said to the user.
    pub notes: Vec<String>,
}

/// Builds the program that `plan` asks for.
pub fn build(checkpoint: &Checkpoint, plan: &Plan, model_type: &str) -> Result<Part> {
    encoder::build(find(model_type)?.encoder, checkpoint, plan, model_type)
}

/// The family of a `model_type`.
pub fn find(model_type: &str) -> Result<&'static Family> {
    if let Some(family) = FAMILIES.iter().find(|f| f.model_types.contains(&model_type)) {
        return Ok(family);
    }
    let nearest = model_types().min_by_key(|t| distance(t, model_type)).unwrap_or("bert");
    bail!(
        "model_type `{model_type}` is not supported";
        hint: "nearest is `{nearest}`; supported are {}", model_types().collect::<Vec<_>>().join(", ")
    )
}

pub fn model_types() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().flat_map(|f| f.model_types).copied()
}

/// Levenshtein distance, for suggestions.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let next = (diagonal + usize::from(x != *y)).min(row[j] + 1).min(row[j + 1] + 1);
            diagonal = std::mem::replace(&mut row[j + 1], next);
        }
    }
    row[b.len()]
}
