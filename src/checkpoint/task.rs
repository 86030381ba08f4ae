//! What a checkpoint is asked to compute.

use std::{fmt, str::FromStr};

use super::{Config, architecture};
use crate::{
    bail,
    error::{Error, Result},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Task {
    /// The last hidden states.
    FeatureExtraction,
    /// One vector a text, pooled as the sentence-transformers files say.
    Embedding,
    SequenceClassification,
    TokenClassification,
    QuestionAnswering,
    MaskedLm,
    /// ELECTRA's discriminator: which tokens were replaced.
    PreTraining,
    /// The next token of a text.
    CausalLm,
}

/// Task, the end of the class name, our name, and the Hub's name of the pipeline.
const TABLE: [(Task, &str, &str, &str); 8] = [
    (Task::FeatureExtraction, "Model", "feature-extraction", "base"),
    (Task::Embedding, "", "embedding", "sentence-similarity"),
    (
        Task::SequenceClassification,
        "ForSequenceClassification",
        "sequence-classification",
        "text-classification",
    ),
    (Task::TokenClassification, "ForTokenClassification", "token-classification", "ner"),
    (Task::QuestionAnswering, "ForQuestionAnswering", "question-answering", "extractive-qa"),
    (Task::MaskedLm, "ForMaskedLM", "masked-lm", "fill-mask"),
    (Task::PreTraining, "ForPreTraining", "pre-training", "replaced-token-detection"),
    (Task::CausalLm, "ForCausalLM", "causal-lm", "text-generation"),
];

impl Task {
    pub const ALL: [Task; 8] = [
        Task::FeatureExtraction,
        Task::Embedding,
        Task::SequenceClassification,
        Task::TokenClassification,
        Task::QuestionAnswering,
        Task::MaskedLm,
        Task::PreTraining,
        Task::CausalLm,
    ];

    /// The task of the class that `architectures` names. A bare model continues text if its type does, else
    /// it extracts features.
    pub fn of(config: &Config) -> Result<Task> {
        let decoder = config.opt_str(&["model_type"])?.and_then(architecture::is_decoder);
        let bare = if decoder == Some(true) { Task::CausalLm } else { Task::FeatureExtraction };
        let classes = config.architectures();
        let Some(class) = classes.first() else { return Ok(bare) };
        let found = TABLE.iter().find(|(_, end, _, _)| !end.is_empty() && class.ends_with(end));
        let causal = class.ends_with("LMHeadModel") || class.ends_with("ForCausalLM");
        match found {
            // An encoder with a causal head, such as `BertLMHeadModel`, is no decoder.
            _ if causal && decoder != Some(false) => Ok(Task::CausalLm),
            Some((Task::PreTraining, ..)) if config.model_type()? != "electra" => Ok(Task::MaskedLm),
            Some((Task::FeatureExtraction, ..)) if !causal => Ok(bare),
            Some((task, ..)) if !causal => Ok(*task),
            _ => bail!(
                "{}: no task is known for the class `{class}`", config.path().display();
                hint: "say one with `--task`: {}", names()
            ),
        }
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = TABLE.iter().find(|(task, ..)| task == self);
        f.write_str(row.map_or("", |(_, _, name, _)| name))
    }
}

impl FromStr for Task {
    type Err = Error;

    /// Reads our name, or the Hub's name of the pipeline.
    fn from_str(s: &str) -> Result<Task> {
        match TABLE.iter().find(|(_, _, name, pipeline)| s == *name || s == *pipeline) {
            Some((task, ..)) => Ok(*task),
            None => bail!("task `{s}` is not known"; hint: "one of {}", names()),
        }
    }
}

fn names() -> String {
    Task::ALL.map(|t| format!("`{t}`")).join(", ")
}
