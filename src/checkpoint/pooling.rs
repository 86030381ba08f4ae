//! The sentence-transformers files: `modules.json`, the pooling config, and the longest sequence.

use std::path::Path;

use serde_json::Value;

use super::{Config, read_json, read_json_if_any};
use crate::{bail, error::Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pooling {
    pub mode: PoolingMode,
    /// Whether the vector is divided by its length.
    pub normalize: bool,
    /// Longer texts are cut to this many tokens.
    pub max_sequence_length: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolingMode {
    Cls,
    Mean,
    Max,
    /// The sum divided by the square root of the number of tokens.
    MeanSqrtLen,
    LastToken,
}

/// Mode, its flag in the pooling config, and its name in the newer form `pooling_mode`.
const MODES: [(PoolingMode, &str, &str); 5] = [
    (PoolingMode::Cls, "pooling_mode_cls_token", "cls"),
    (PoolingMode::Mean, "pooling_mode_mean_tokens", "mean"),
    (PoolingMode::Max, "pooling_mode_max_tokens", "max"),
    (PoolingMode::MeanSqrtLen, "pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
    (PoolingMode::LastToken, "pooling_mode_lasttoken", "lasttoken"),
];

impl Pooling {
    /// Reads the files in `dir`; `None` when there is no `modules.json`.
    pub fn open(dir: &Path) -> Result<Option<Pooling>> {
        let path = dir.join("modules.json");
        let Some(modules) = read_json_if_any(&path)? else { return Ok(None) };
        let Some(modules) = modules.as_array() else { bail!("{}: not a JSON array", path.display()) };
        let (mut mode, mut normalize) = (None, false);
        for (i, module) in modules.iter().enumerate() {
            let field = |key: &str| module.get(key).and_then(Value::as_str).unwrap_or("");
            let kind = field("type");
            match kind.rsplit('.').next().unwrap_or(kind) {
                "Transformer" if i == 0 => {}
                "Pooling" if i == 1 => mode = Some(pooling_mode(&subfolder(dir, field("path"))?)?),
                "Normalize" if i > 1 => normalize = true,
                _ => bail!(
                    "{}: module {i} is `{kind}`; only a transformer, then pooling, then normalization are supported",
                    path.display();
                    hint: "convert the transformer alone with `--task feature-extraction`"
                ),
            }
        }
        let Some(mode) = mode else { bail!("{}: there is no pooling module", path.display()) };
        Ok(Some(Pooling { mode, normalize, max_sequence_length: max_sequence_length(dir)? }))
    }
}

/// A folder inside `dir`, never one above it.
fn subfolder(dir: &Path, name: &str) -> Result<std::path::PathBuf> {
    if Path::new(name).components().all(|c| matches!(c, std::path::Component::Normal(_))) {
        return Ok(dir.join(name));
    }
    bail!("{}: `{name}` is not a folder inside the checkpoint", dir.join("modules.json").display())
}

fn pooling_mode(folder: &Path) -> Result<PoolingMode> {
    let path = folder.join("config.json");
    let config = Config::open(&path)?;
    let named = config.opt_str(&["pooling_mode"])?;
    let set = |(_, flag, name): &(PoolingMode, &str, &str)| match named {
        Some(mode) => Ok(mode == *name),
        None => config.bool_or(&[*flag], false),
    };
    let mut modes = Vec::new();
    for row in &MODES {
        if set(row)? {
            modes.push(row.0);
        }
    }
    if config.bool_or(&["pooling_mode_weightedmean_tokens"], false)? {
        bail!("{}: `pooling_mode_weightedmean_tokens` is not supported", path.display());
    }
    match modes.as_slice() {
        [mode] => Ok(*mode),
        [] => bail!("{}: no pooling mode that is supported is set", path.display()),
        _ => bail!("{}: {} pooling modes are set, only one is supported", path.display(), modes.len()),
    }
}

fn max_sequence_length(dir: &Path) -> Result<Option<usize>> {
    let path = dir.join("sentence_bert_config.json");
    if !path.is_file() {
        return Ok(None);
    }
    let length = read_json(&path)?.get("max_seq_length").and_then(Value::as_u64);
    Ok(length.and_then(|n| usize::try_from(n).ok()))
}
