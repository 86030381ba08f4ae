//! Which files of a folder hold the weights.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use serde_json::Value;

use super::{read_json, read_json_if_any};
use crate::{
    bail,
    error::{Result, io},
};

/// The files to read, and the index if there is one.
#[derive(Debug, Default)]
pub(super) struct WeightFiles {
    pub(super) files: Vec<PathBuf>,
    /// Tensor name → file name.
    pub(super) index: Option<BTreeMap<String, String>>,
    pub(super) notes: Vec<String>,
}

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Finds the weights as Transformers does: `model.safetensors`, else the index; then, unlike it, shards
/// without an index, or the only safetensors file there is.
pub(super) fn find(dir: &Path) -> Result<WeightFiles> {
    let names = file_names(dir)?;
    let safetensors: Vec<&String> = names.iter().filter(|n| n.ends_with(".safetensors")).collect();
    let shards: Vec<&String> = safetensors.iter().copied().filter(|n| shard(n).is_some()).collect();
    let mut found = if names.contains(SINGLE) {
        WeightFiles { files: vec![dir.join(SINGLE)], ..WeightFiles::default() }
    } else if names.contains(INDEX) {
        from_index(dir, &names)?
    } else if !shards.is_empty() {
        without_index(dir, &shards)?
    } else {
        refuse_adapter(dir)?;
        match safetensors.as_slice() {
            [only] => WeightFiles {
                files: vec![dir.join(only)],
                index: None,
                notes: vec![format!("the weights are read from `{only}`, there is no `{SINGLE}`")],
            },
            [] => return Err(no_weights(dir, &names)),
            _ => {
                bail!("{}: there is no `{SINGLE}`, and {} other safetensors files", dir.display(), safetensors.len();
                hint: "rename the one that holds the model to `{SINGLE}`")
            }
        }
    };
    if let Some(pickle) = names.iter().find(|n| is_pickle(n)) {
        found.notes.push(format!("`{pickle}` is ignored, the weights are read from safetensors"));
    }
    Ok(found)
}

/// Refuses a LoRA adapter, naming the model it belongs to.
pub(super) fn refuse_adapter(dir: &Path) -> Result<()> {
    let path = dir.join("adapter_config.json");
    let Some(adapter) = read_json_if_any(&path)? else { return Ok(()) };
    let base = adapter.get("base_model_name_or_path").and_then(Value::as_str).unwrap_or("a base model");
    bail!(
        "{}: this is an adapter for `{base}`, not a model", dir.display();
        hint: "merge it into its base model with `merge_and_unload()` of peft, then `save_pretrained`"
    );
}

fn file_names(dir: &Path) -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(dir).map_err(|e| io(dir, &e))? {
        let entry = entry.map_err(|e| io(dir, &e))?;
        if let Ok(name) = entry.file_name().into_string() {
            names.insert(name);
        }
    }
    Ok(names)
}

fn from_index(dir: &Path, names: &BTreeSet<String>) -> Result<WeightFiles> {
    let path = dir.join(INDEX);
    let json = read_json(&path)?;
    let Some(map) = json.get("weight_map").and_then(Value::as_object) else {
        bail!("{}: there is no `weight_map`", path.display());
    };
    let mut index = BTreeMap::new();
    for (tensor, file) in map {
        // Only names that were listed from the folder are opened, so none can lead out of it.
        match file.as_str() {
            Some(file) if names.contains(file) => index.insert(tensor.clone(), file.to_string()),
            Some(file) => bail!(
                "{}: tensor `{tensor}` is in `{file}`, and that file is not there", path.display();
                hint: "the download is not complete, fetch it again"
            ),
            None => bail!("{}: the file of tensor `{tensor}` is not a string", path.display()),
        };
    }
    let files: BTreeSet<&String> = index.values().collect();
    Ok(WeightFiles {
        files: files.into_iter().map(|f| dir.join(f)).collect(),
        index: Some(index),
        notes: Vec::new(),
    })
}

fn without_index(dir: &Path, shards: &[&String]) -> Result<WeightFiles> {
    let count = shards.iter().filter_map(|n| shard(n)).map(|(_, of)| of).max().unwrap_or(0);
    if shards.len() != count {
        bail!(
            "{}: {} of {count} shards are there, and no `{INDEX}`", dir.display(), shards.len();
            hint: "the download is not complete, fetch it again"
        );
    }
    Ok(WeightFiles {
        files: shards.iter().map(|n| dir.join(n)).collect(),
        index: None,
        notes: vec![format!("there is no `{INDEX}`; all {count} shards are read")],
    })
}

/// `model-00001-of-00002.safetensors` → (1, 2)
fn shard(name: &str) -> Option<(usize, usize)> {
    let (number, of) = name.strip_prefix("model-")?.strip_suffix(".safetensors")?.split_once("-of-")?;
    Some((number.parse().ok()?, of.parse().ok()?))
}

fn is_pickle(name: &str) -> bool {
    let model = ["pytorch_model", "model", "consolidated"].iter().any(|s| name.starts_with(s));
    model && [".bin", ".pt", ".pth", ".ckpt"].iter().any(|end| name.ends_with(end))
}

fn no_weights(dir: &Path, names: &BTreeSet<String>) -> crate::Error {
    let dir = dir.display();
    if let Some(pickle) = names.iter().find(|n| is_pickle(n)) {
        return crate::Error::new(format!(
            "{dir}: the weights are in `{pickle}`, a Python pickle; silane never runs one, and reads safetensors only"
        ))
        .hint("load it with Transformers and write it anew: `AutoModel.from_pretrained(dir).save_pretrained(out)`, with the class that `architectures` names");
    }
    let other = [".gguf", ".onnx", ".h5", ".msgpack", ".tflite"];
    let what = match names.iter().find(|n| other.iter().any(|end| n.ends_with(end))) {
        Some(file) => format!("{dir}: there is no `{SINGLE}`; `{file}` is in a format that is not read"),
        None => format!("{dir}: there is no `{SINGLE}`, no `{INDEX}`, and no other safetensors file"),
    };
    crate::Error::new(what).hint("download the safetensors files of the model")
}
