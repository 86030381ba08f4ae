//! Driving a language model's package, or its parts, by the native contract.
//!
//! A prompt goes in by full chunks. What is left is fed by a chunk that ends at the last token, computing
//! some positions again, which changes nothing; a prompt shorter than a chunk is padded behind, and its last
//! token then decoded.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde_json::Value as Json;

use super::layers::Seen;
use crate::{
    bail,
    error::{Context, Error, Result},
    interp::{Machine, Precision, States},
    mil::Op,
    ops::Val,
    package::{self, Package},
};

/// A package or a folder of parts, opened.
pub(super) struct Model {
    packages: Vec<Package>,
    pub(super) contract: Json,
    /// Where tokenizer and config are.
    pub(super) folder: PathBuf,
}

/// A conversation with a model: its states, and how far it is.
pub(super) struct Session<'a> {
    machines: Vec<(Machine<'a>, States)>,
    decode: String,
    prefill: Option<(String, usize)>,
    pub(super) context: usize,
    pub(super) position: usize,
    vocabulary: usize,
    /// Whether logits of all tokens of a call come out.
    all: bool,
}

impl Model {
    /// Opens a package, or a folder in which the first part is named by the contract.
    pub(super) fn open(path: &Path) -> Result<Model> {
        if path.is_dir() && !path.join("Manifest.json").exists() {
            return Model::open_parts(path);
        }
        let package = package::open_program(path)?;
        let contract = contract(&package)?;
        if contract["parts"].as_array().is_some_and(|p| p.len() > 1) {
            let folder = path.parent().unwrap_or(Path::new("."));
            bail!("{}: this is one part of a model", path.display(); hint: "give the folder of all parts: `{}`", folder.display());
        }
        Ok(Model { packages: vec![package], contract, folder: path.with_extension("") })
    }

    fn open_parts(folder: &Path) -> Result<Model> {
        let mut first: Vec<PathBuf> = std::fs::read_dir(folder)
            .map_err(|e| crate::error::io(folder, &e))?
            .filter_map(|e| Some(e.ok()?.path()))
            .filter(|p| p.extension().is_some_and(|e| e == "mlpackage"))
            .collect();
        first.sort();
        let Some(any) = first.first() else {
            bail!("{}: there is no package in the folder", folder.display());
        };
        let stems = contract(&package::open_program(any)?)?["parts"].clone();
        let stems: Vec<&str> = stems.as_array().into_iter().flatten().filter_map(Json::as_str).collect();
        let mut packages = Vec::new();
        for stem in &stems {
            packages.push(package::open_program(&folder.join(format!("{stem}.mlpackage")))?);
        }
        let Some(last) = packages.last() else {
            bail!("{}: the parts are not named in `{}`", folder.display(), any.display());
        };
        let contract = contract(last)?;
        Ok(Model { packages, contract, folder: folder.to_path_buf() })
    }

    /// Opens what is a language model by its contract; `None` for anything else.
    pub(super) fn open_causal(path: &Path) -> Result<Option<Model>> {
        let folder = path.is_dir() && !path.join("Manifest.json").exists();
        if folder || contract(&package::open_program(path)?).is_ok_and(|c| c["task"] == "causal-lm") {
            return Model::open(path).map(Some);
        }
        Ok(None)
    }

    pub(super) fn packages(&self) -> &[Package] {
        &self.packages
    }

    /// The last part's program, which gives the logits.
    pub(super) fn program(&self) -> &crate::mil::Program {
        &self.packages[self.packages.len() - 1].program
    }

    pub(super) fn session(&self, precision: Precision) -> Result<Session<'_>> {
        let number = |v: &Json| v.as_u64().and_then(|n| usize::try_from(n).ok());
        let contexts: Vec<usize> =
            self.contract["context_length"].as_array().into_iter().flatten().filter_map(number).collect();
        let Some(context) = contexts.iter().copied().max() else {
            bail!("the contract has no `context_length`");
        };
        let suffix = if contexts.len() > 1 { format!("_{context}") } else { String::new() };
        let decode = format!("decode{suffix}");
        let mut machines = Vec::new();
        for package in &self.packages {
            let machine = Machine::new(&package.program, precision);
            let states = machine.states(&decode).at(package.path.display())?;
            machines.push((machine, states));
        }
        Ok(Session {
            machines,
            decode,
            prefill: number(&self.contract["prefill_chunk"]).map(|n| (format!("prefill{suffix}"), n)),
            context,
            position: 0,
            vocabulary: number(&self.contract["vocabulary"]).unwrap_or(0),
            all: self.contract["logits"] == "all",
        })
    }

    /// Tokens that end a text.
    pub(super) fn ends(&self) -> Vec<u32> {
        let ids = self.contract["eos_token_id"].as_array().into_iter().flatten();
        ids.filter_map(|i| u32::try_from(i.as_u64()?).ok()).collect()
    }
}

fn contract(package: &Package) -> Result<Json> {
    match package.interface.metadata.user_defined.get("silane.contract") {
        Some(text) => serde_json::from_str(text).map_err(|e| Error::new(format!("silane.contract: {e}"))),
        None => bail!("{}: the package has no contract to run it by", package.path.display()),
    }
}

impl Session<'_> {
    /// Tokens of a prefill call.
    pub(super) fn chunk(&self) -> Option<usize> {
        self.prefill.as_ref().map(|p| p.1)
    }

    /// Feeds one token and gives the logits of what comes next.
    pub(super) fn decode(&mut self, id: u32) -> Result<Vec<f32>> {
        let function = self.decode.clone();
        let logits = self.call(&function, &[id], self.position, None)?;
        self.position += 1;
        Ok(logits)
    }

    /// Feeds one token and gives the hidden states after each layer.
    pub(super) fn decode_layers(&mut self, id: u32) -> Result<BTreeMap<usize, Vec<f32>>> {
        let function = self.decode.clone();
        let mut seen = Seen::default();
        self.call(&function, &[id], self.position, Some(&mut seen))?;
        self.position += 1;
        seen.floats()
    }

    /// Feeds a whole prompt from where the session is, and gives the logits of what comes next. `all` are
    /// the tokens of the session from its start, of which the last chunk may be fed again.
    pub(super) fn prompt(&mut self, all: &[u32]) -> Result<Vec<f32>> {
        let Some(last) = all.last().copied().filter(|_| self.position < all.len()) else {
            bail!("there is no new token to feed");
        };
        if all.len() > self.context {
            bail!("{} tokens do not fit a context of {}", all.len(), self.context; hint: "convert with a longer `--context-length`");
        }
        if let Some((function, chunk)) = self.prefill.clone() {
            while all.len() - self.position >= chunk {
                let ids = &all[self.position..self.position + chunk];
                let logits = self.call(&function, ids, self.position, None)?;
                self.position += chunk;
                if self.position == all.len() {
                    return Ok(self.last(logits));
                }
            }
            if all.len() >= chunk {
                let start = all.len() - chunk;
                let logits = self.call(&function, &all[start..], start, None)?;
                self.position = all.len();
                return Ok(self.last(logits));
            }
            if all.len() - self.position > 1 && self.position + chunk <= self.context {
                let mut ids = all[self.position..].to_vec();
                ids.resize(chunk, last);
                self.call(&function, &ids, self.position, None)?;
                self.position = all.len() - 1;
            }
        }
        let mut logits = Vec::new();
        while self.position < all.len() {
            logits = self.decode(all[self.position])?;
        }
        Ok(logits)
    }

    fn last(&self, logits: Vec<f32>) -> Vec<f32> {
        if !self.all || self.vocabulary == 0 {
            return logits;
        }
        logits[logits.len().saturating_sub(self.vocabulary)..].to_vec()
    }

    /// Runs a function of every part in turn.
    fn call(
        &mut self,
        function: &str,
        ids: &[u32],
        position: usize,
        mut seen: Option<&mut Seen>,
    ) -> Result<Vec<f32>> {
        let n = ids.len();
        if position + n > self.context {
            bail!(
                "position {} is past the context of {}", position + n - 1, self.context;
                hint: "convert with a longer `--context-length`"
            );
        }
        let ids = Val::ints(ids.iter().map(|i| i64::from(*i)).collect(), &[1, n])?;
        let first = i64::try_from(position).unwrap_or(i64::MAX);
        let positions = Val::ints((0..n).map(|i| first + i64::try_from(i).unwrap_or(0)).collect(), &[1, n])?;
        let mut carried: Option<Val> = None;
        for (machine, states) in &mut self.machines {
            let mut inputs = BTreeMap::new();
            for name in machine.inputs(function)? {
                let value = match (name.as_str(), &carried) {
                    ("input_ids", _) => ids.clone(),
                    ("position_ids", _) => positions.clone(),
                    ("hidden_states", Some(x)) => x.clone(),
                    (other, _) => {
                        bail!("function `{function}` wants `{other}`, which the contract does not know")
                    }
                };
                inputs.insert(name, value);
            }
            let outputs = match seen.as_deref_mut() {
                Some(seen) => {
                    let mut tap = |_: &Op, name: &str, value: &Val| seen.see(name, value);
                    machine.run(function, &inputs, states, Some(&mut tap))?
                }
                None => machine.run(function, &inputs, states, None)?,
            };
            carried = outputs.into_values().next();
        }
        match carried {
            Some(logits) => logits.to_floats(),
            None => bail!("function `{function}` gave nothing"),
        }
    }
}

/// The first of the largest.
pub(super) fn best(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, v) in logits.iter().enumerate() {
        if *v > logits[best] {
            best = i;
        }
    }
    u32::try_from(best).unwrap_or(0)
}
