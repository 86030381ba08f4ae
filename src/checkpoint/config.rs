//! `config.json` with typed getters; every error names the file and the keys.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{architecture, read_json};
use crate::{
    bail,
    error::{Error, Result},
};

#[derive(Debug, Clone)]
pub struct Config {
    path: PathBuf,
    /// Keys above this one: `text_config.`, or nothing.
    prefix: String,
    values: Map<String, Value>,
}

impl Config {
    pub fn open(path: &Path) -> Result<Config> {
        match read_json(path)? {
            Value::Object(values) => Ok(Config { path: path.to_path_buf(), prefix: String::new(), values }),
            _ => bail!("{}: not a JSON object", path.display()),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn raw(&self) -> &Map<String, Value> {
        &self.values
    }

    /// The architecture; refused when the class in `architectures` belongs to another.
    pub fn model_type(&self) -> Result<&str> {
        let model_type = self.str(&["model_type"])?;
        architecture::agree(self, model_type)?;
        Ok(model_type)
    }

    /// Whether the head is the word embedding, if the config or its `text_config` says so.
    pub fn tied_embeddings(&self) -> Result<Option<bool>> {
        let keys = ["tie_word_embeddings"];
        match self.opt_bool(&keys)? {
            Some(tied) => Ok(Some(tied)),
            None => self.nested("text_config").map_or(Ok(None), |text| text.opt_bool(&keys)),
        }
    }

    /// The class names that the checkpoint was saved from.
    pub fn architectures(&self) -> Vec<&str> {
        self.strings("architectures")
    }

    /// The element type the weights are meant to have: `float32`, `float16`, `bfloat16`.
    pub fn torch_dtype(&self) -> Result<Option<&str>> {
        self.opt_str(&["torch_dtype", "dtype"])
    }

    /// The labels in the order of the logits. `num_labels` wins over an `id2label` of another length, as in
    /// Transformers.
    pub fn labels(&self) -> Result<Vec<String>> {
        let count = self.opt_usize(&["num_labels"])?;
        let named = self.id2label()?;
        match (count, named) {
            (Some(n), Some(named)) if named.len() == n => Ok(named),
            (None, Some(named)) => Ok(named),
            (count, _) => {
                let count = count.unwrap_or(2);
                if count > 1 << 20 {
                    return Err(self.wrong("num_labels", "at most 1048576"));
                }
                Ok((0..count).map(|i| format!("LABEL_{i}")).collect())
            }
        }
    }

    pub fn num_labels(&self) -> Result<usize> {
        self.labels().map(|l| l.len())
    }

    /// A config inside this one, such as `text_config`.
    pub fn nested(&self, key: &str) -> Option<Config> {
        let values = self.values.get(key)?.as_object()?.clone();
        Some(Config { path: self.path.clone(), prefix: format!("{}{key}.", self.prefix), values })
    }

    /// The first of `keys` that is there and not null.
    pub fn get(&self, keys: &[&str]) -> Option<&Value> {
        self.find(keys).map(|(_, value)| value)
    }

    pub fn usize(&self, keys: &[&str]) -> Result<usize> {
        self.opt_usize(keys)?.ok_or_else(|| self.missing(keys))
    }

    pub fn usize_or(&self, keys: &[&str], default: usize) -> Result<usize> {
        Ok(self.opt_usize(keys)?.unwrap_or(default))
    }

    pub fn opt_usize(&self, keys: &[&str]) -> Result<Option<usize>> {
        self.typed(keys, "a whole number", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    pub fn f64(&self, keys: &[&str]) -> Result<f64> {
        self.opt_f64(keys)?.ok_or_else(|| self.missing(keys))
    }

    pub fn f64_or(&self, keys: &[&str], default: f64) -> Result<f64> {
        Ok(self.opt_f64(keys)?.unwrap_or(default))
    }

    pub fn opt_f64(&self, keys: &[&str]) -> Result<Option<f64>> {
        self.typed(keys, "a number", Value::as_f64)
    }

    pub fn bool(&self, keys: &[&str]) -> Result<bool> {
        self.opt_bool(keys)?.ok_or_else(|| self.missing(keys))
    }

    pub fn bool_or(&self, keys: &[&str], default: bool) -> Result<bool> {
        Ok(self.opt_bool(keys)?.unwrap_or(default))
    }

    pub fn opt_bool(&self, keys: &[&str]) -> Result<Option<bool>> {
        self.typed(keys, "true or false", Value::as_bool)
    }

    pub fn str(&self, keys: &[&str]) -> Result<&str> {
        self.opt_str(keys)?.ok_or_else(|| self.missing(keys))
    }

    pub fn str_or<'a>(&'a self, keys: &[&str], default: &'a str) -> Result<&'a str> {
        Ok(self.opt_str(keys)?.unwrap_or(default))
    }

    pub fn opt_str(&self, keys: &[&str]) -> Result<Option<&str>> {
        self.typed(keys, "a string", Value::as_str)
    }

    /// The strings of an array; empty when the key is absent.
    pub fn strings(&self, key: &str) -> Vec<&str> {
        let items = self.values.get(key).and_then(Value::as_array);
        items.into_iter().flatten().filter_map(Value::as_str).collect()
    }

    /// The whole numbers of an array, if the key is there.
    pub fn opt_usizes(&self, key: &str) -> Result<Option<Vec<usize>>> {
        self.typed(&[key], "an array of whole numbers", |v| {
            v.as_array()?.iter().map(|n| n.as_u64().and_then(|n| usize::try_from(n).ok())).collect()
        })
    }

    /// An error about the value of `key`: what it is and what was expected.
    pub fn wrong(&self, key: &str, expected: &str) -> Error {
        let seen = self.values.get(key).map_or_else(|| "absent".to_string(), short);
        Error::new(format!("{}: `{}{key}` is {seen}, expected {expected}", self.path.display(), self.prefix))
    }

    fn find<'a>(&self, keys: &[&'a str]) -> Option<(&'a str, &Value)> {
        keys.iter().find_map(|k| Some((*k, self.values.get(*k).filter(|v| !v.is_null())?)))
    }

    fn typed<'a, T>(
        &'a self,
        keys: &[&str],
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some((key, value)) = self.find(keys) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.wrong(key, expected))
    }

    fn missing(&self, keys: &[&str]) -> Error {
        let keys: Vec<String> = keys.iter().map(|k| format!("`{}{k}`", self.prefix)).collect();
        Error::new(format!("{}: there is no {}", self.path.display(), keys.join(" or ")))
    }

    fn id2label(&self) -> Result<Option<Vec<String>>> {
        self.typed(&["id2label"], "an object of labels numbered from 0", |v| {
            let object = v.as_object()?;
            (0..object.len())
                .map(|i| object.get(&i.to_string()).and_then(Value::as_str).map(str::to_string))
                .collect()
        })
    }
}

fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((cut, _)) => format!("`{}…`", &text[..cut]),
        None => format!("`{text}`"),
    }
}
