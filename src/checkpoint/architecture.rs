//! Which classes belong to which `model_type`.

use super::Config;
use crate::{bail, error::Result};

/// Model type, how the names of its classes begin, and whether it is a causal language model.
const TABLE: [(&str, &str, bool); 33] = [
    ("albert", "Albert", false),
    ("bert", "Bert", false),
    ("bloom", "Bloom", true),
    ("camembert", "Camembert", false),
    ("cohere", "Cohere", true),
    ("distilbert", "DistilBert", false),
    ("electra", "Electra", false),
    ("falcon", "Falcon", true),
    ("gemma", "Gemma", true),
    ("gemma2", "Gemma2", true),
    ("gemma3_text", "Gemma3", true),
    ("gpt2", "GPT2", true),
    ("gpt_neo", "GPTNeo", true),
    ("gpt_neox", "GPTNeoX", true),
    ("granite", "Granite", true),
    ("llama", "Llama", true),
    ("mamba", "Mamba", true),
    ("mistral", "Mistral", true),
    ("mixtral", "Mixtral", true),
    ("modernbert", "ModernBert", false),
    ("mpnet", "MPNet", false),
    ("olmo2", "Olmo2", true),
    ("opt", "OPT", true),
    ("phi", "Phi", true),
    ("phi3", "Phi3", true),
    ("qwen2", "Qwen2", true),
    ("qwen3", "Qwen3", true),
    ("qwen3_moe", "Qwen3Moe", true),
    ("roberta", "Roberta", false),
    ("smollm3", "SmolLM3", true),
    ("stablelm", "StableLm", true),
    ("starcoder2", "Starcoder2", true),
    ("xlm-roberta", "XLMRoberta", false),
];

/// What follows the family's name in a class.
const ENDS: [&str; 5] = ["For", "Model", "TextModel", "LMHeadModel", "DoubleHeadsModel"];

/// Whether models of this type continue text; `None` for one that is not known.
pub(super) fn is_decoder(model_type: &str) -> Option<bool> {
    row(model_type).map(|(.., decoder)| *decoder)
}

/// Refuses a class in `architectures` that is not one of `model_type`.
pub(super) fn agree(config: &Config, model_type: &str) -> Result<()> {
    let Some((_, family, _)) = row(model_type) else { return Ok(()) };
    let belongs = |class: &&str| {
        class.strip_prefix(family).is_some_and(|rest| ENDS.iter().any(|end| rest.starts_with(end)))
    };
    match config.architectures().into_iter().find(|class| !belongs(class)) {
        None => Ok(()),
        Some(class) => bail!(
            "{}: `model_type` is `{model_type}`, and `architectures` names `{class}`, which is not one of its classes",
            config.path().display();
            hint: "one of the two is wrong; correct `config.json`, or name the type with `--as`"
        ),
    }
}

fn row(model_type: &str) -> Option<&'static (&'static str, &'static str, bool)> {
    TABLE.iter().find(|(name, ..)| *name == model_type)
}
