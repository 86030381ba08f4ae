//! Families of architectures: one short file each over the BC1S vocabulary, and one line in [`FAMILIES`].
//!
//! Names in a family's file are the checkpoint's own, so there is no mapping table. The frame does the
//! rest: inputs, masks, layers, outputs, and the notes for the host.

mod albert;
mod bert;
pub mod calls;
pub mod decoder;
mod distilbert;
mod electra;
pub mod encoder;
mod experts;
mod gemma;
mod gpt2;
mod llama;
mod mixtral;
mod modernbert;
mod mpnet;
mod neox;
mod olmo2;
mod opt;
mod phi;
mod phi3;
mod qwen3;
mod roberta;
mod rotate;
mod shapes;
pub mod sweep;

use std::collections::BTreeMap;

pub use decoder::{Chunks, Decoder, Logits, Parts};
pub use encoder::Encoder;
pub use experts::{Mixture, Routed};
pub use rotate::{Rotated, rotated};

use crate::{
    bail,
    checkpoint::{Checkpoint, Task},
    error::Result,
    mil::{DType, Program},
    ops::Opset,
};

/// Every family, by the `model_type` of its config.
pub static FAMILIES: &[Family] = &[
    Family { model_types: &["albert"], frame: Frame::Encoder(&albert::ALBERT) },
    Family { model_types: &["bert"], frame: Frame::Encoder(&bert::BERT) },
    Family { model_types: &["bloom"], frame: Frame::Decoder(&neox::BLOOM) },
    Family { model_types: &["cohere"], frame: Frame::Decoder(&phi::COHERE) },
    Family { model_types: &["distilbert"], frame: Frame::Encoder(&distilbert::DISTILBERT) },
    Family { model_types: &["electra"], frame: Frame::Encoder(&electra::ELECTRA) },
    Family { model_types: &["falcon"], frame: Frame::Decoder(&neox::FALCON) },
    Family { model_types: &["gemma"], frame: Frame::Decoder(&gemma::GEMMA) },
    Family { model_types: &["gemma2"], frame: Frame::Decoder(&gemma::GEMMA2) },
    Family { model_types: &["gemma3_text"], frame: Frame::Decoder(&gemma::GEMMA3) },
    Family { model_types: &["gpt2"], frame: Frame::Decoder(&gpt2::GPT2) },
    Family { model_types: &["gpt_neo"], frame: Frame::Decoder(&gpt2::GPT_NEO) },
    Family { model_types: &["gpt_neox"], frame: Frame::Decoder(&neox::GPT_NEOX) },
    Family { model_types: &["granite"], frame: Frame::Decoder(&llama::GRANITE) },
    Family { model_types: &["llama"], frame: Frame::Decoder(&llama::LLAMA) },
    Family { model_types: &["mistral"], frame: Frame::Decoder(&llama::MISTRAL) },
    Family { model_types: &["mixtral"], frame: Frame::Decoder(&mixtral::MIXTRAL) },
    Family { model_types: &["modernbert"], frame: Frame::Encoder(&modernbert::MODERNBERT) },
    Family { model_types: &["mpnet"], frame: Frame::Encoder(&mpnet::MPNET) },
    Family { model_types: &["olmo2"], frame: Frame::Decoder(&olmo2::OLMO2) },
    Family { model_types: &["opt"], frame: Frame::Decoder(&opt::OPT) },
    Family { model_types: &["phi"], frame: Frame::Decoder(&phi::PHI) },
    Family { model_types: &["phi3"], frame: Frame::Decoder(&phi3::PHI3) },
    Family { model_types: &["qwen2"], frame: Frame::Decoder(&llama::QWEN2) },
    Family { model_types: &["qwen3"], frame: Frame::Decoder(&qwen3::QWEN3) },
    Family { model_types: &["qwen3_moe"], frame: Frame::Decoder(&qwen3::QWEN3_MOE) },
    Family {
        model_types: &["roberta", "xlm-roberta", "camembert"],
        frame: Frame::Encoder(&roberta::ROBERTA),
    },
    Family { model_types: &["smollm3"], frame: Frame::Decoder(&llama::SMOLLM3) },
    Family { model_types: &["stablelm"], frame: Frame::Decoder(&phi::STABLELM) },
    Family { model_types: &["starcoder2"], frame: Frame::Decoder(&phi::STARCODER2) },
];

pub struct Family {
    pub model_types: &'static [&'static str],
    pub frame: Frame,
}

/// What surrounds a family's layers.
pub enum Frame {
    Encoder(&'static Encoder),
    Decoder(&'static Decoder),
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
    /// For decoders.
    pub chunks: Chunks,
}

impl Plan {
    /// A language model in fp16.
    pub fn language(chunks: Chunks) -> Plan {
        Plan {
            task: Task::CausalLm,
            batch: 1,
            tokens: None,
            token_type_ids: false,
            float: DType::F16,
            opset: Opset::Ios18,
            chunks,
        }
    }
}

/// A program of a conversion, with what its host must know.
#[derive(Debug)]
pub struct Part {
    /// The file's name in a folder of parts, without its extension.
    pub stem: String,
    pub program: Program,
    /// Input or output → what it means.
    pub docs: BTreeMap<String, String>,
    /// The contract, as JSON.
    pub contract: serde_json::Value,
    /// Said to the user.
    pub notes: Vec<String>,
}

/// Builds the programs that `plan` asks for: one, or a decoder's parts.
pub fn build(checkpoint: &Checkpoint, plan: &Plan, model_type: &str) -> Result<Vec<Part>> {
    match (&find(model_type)?.frame, plan.task) {
        (Frame::Decoder(decoder), Task::CausalLm) => decoder::build(decoder, checkpoint, plan, model_type),
        (Frame::Decoder(_), task) => {
            bail!("{model_type} is a decoder, its task is `causal-lm`, not `{task}`"; hint: "leave `--task` out")
        }
        (Frame::Encoder(_), Task::CausalLm) => {
            bail!("{model_type} is an encoder, which generates no text"; hint: "choose another `--task`")
        }
        (Frame::Encoder(encoder), _) => Ok(vec![encoder::build(encoder, checkpoint, plan, model_type)?]),
    }
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
