//! `Manifest.json`: the list of a package's items. What we do not know in it is kept.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Value, ser::PrettyFormatter};

use crate::{
    bail,
    error::{Error, Result},
};

#[derive(Debug, Clone, PartialEq)]
pub struct Manifest {
    /// The identifier of the model's item.
    pub root: String,
    pub items: BTreeMap<String, Item>,
    /// Everything else at the top level.
    pub other: BTreeMap<String, Value>,
}

/// A file or directory of the package.
#[derive(Debug, Clone, PartialEq)]
pub struct Item {
    /// From `Data/`, with `/` between its parts.
    pub path: String,
    /// Author, name, description and whatever else is said.
    pub other: BTreeMap<String, Value>,
}

type Object = BTreeMap<String, Value>;

impl Manifest {
    pub fn parse(text: &[u8]) -> Result<Self> {
        if text.starts_with(super::LFS_POINTER) {
            bail!("is a Git LFS pointer, not a manifest"; hint: "run `git lfs pull` where it was cloned");
        }
        let json = |e: serde_json::Error| Error::new(format!("not valid: {e}"));
        let mut other: Object = serde_json::from_slice(text).map_err(json)?;
        let root = string(&mut other, "rootModelIdentifier")?;
        let Some(Value::Object(entries)) = other.remove("itemInfoEntries") else {
            bail!("`itemInfoEntries` is missing, an object is expected");
        };
        let mut items = BTreeMap::new();
        for (id, entry) in entries {
            let Value::Object(entry) = entry else { bail!("item `{id}` is no object") };
            let mut other: Object = entry.into_iter().collect();
            let path = string(&mut other, "path").map_err(|e| e.at(format!("item `{id}`")))?;
            items.insert(id, Item { path, other });
        }
        Ok(Self { root, items, other })
    }

    /// The text, with sorted keys and the indent that other tools use.
    pub fn text(&self) -> Result<String> {
        let items: Object = self.items.iter().map(|(id, item)| (id.clone(), item.json())).collect();
        let mut top = self.other.clone();
        top.insert("fileFormatVersion".into(), "1.0.0".into());
        top.insert("itemInfoEntries".into(), Value::Object(items.into_iter().collect()));
        top.insert("rootModelIdentifier".into(), self.root.as_str().into());
        let mut out = Vec::new();
        let mut json =
            serde_json::Serializer::with_formatter(&mut out, PrettyFormatter::with_indent(b"    "));
        let failed = |e: String| Error::new(format!("the manifest cannot be written: {e}"));
        top.serialize(&mut json).map_err(|e| failed(e.to_string()))?;
        out.push(b'\n');
        String::from_utf8(out).map_err(|e| failed(e.to_string()))
    }
}

impl Item {
    pub(super) fn new(path: &str, name: &str, description: &str) -> Self {
        let other = [("author", super::AUTHOR), ("name", name), ("description", description)];
        let other = other.into_iter().map(|(key, value)| (key.to_string(), value.into())).collect();
        Self { path: path.into(), other }
    }

    fn json(&self) -> Value {
        let path = ("path".to_string(), Value::from(self.path.as_str()));
        let sorted: Object = self.other.clone().into_iter().chain([path]).collect();
        Value::Object(sorted.into_iter().collect())
    }
}

/// An identifier in the form of a random UUID, made from a digest of content.
pub(super) fn identifier(digest: &[u8; 32]) -> String {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    uuid::Builder::from_random_bytes(bytes).into_uuid().to_string()
}

fn string(object: &mut Object, key: &str) -> Result<String> {
    match object.remove(key) {
        Some(Value::String(s)) => Ok(s),
        Some(other) => bail!("`{key}` is {other}, a string is expected"),
        None => bail!("`{key}` is missing"),
    }
}
