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
    prefills: Vec<Prefill>,
    /// Block-sparse prefill needs means of blocks that some call left out.
    stale: bool,
    pub(super) context: usize,
    pub(super) position: usize,
    /// The outputs that hold logits, in the order of the vocabulary.
    head: Vec<String>,
}

/// What a package says of the token after the last one.
pub(super) enum Scores {
    Logits(Vec<f32>),
    /// The likeliest token and its logit.
    Best {
        token: u32,
        score: f32,
    },
}

impl Scores {
    pub(super) fn best(&self) -> u32 {
        match self {
            Scores::Logits(logits) => best(logits),
            Scores::Best { token, .. } => *token,
        }
    }

    pub(super) fn logits(&self) -> Result<&[f32]> {
        match self {
            Scores::Logits(logits) => Ok(logits),
            Scores::Best { .. } => {
                bail!("the package gives the likeliest token only"; hint: "convert with `--logits last`")
            }
        }
    }

    /// Of the call's last token; the pieces of a head that was left in pieces are joined.
    fn of(mut outputs: BTreeMap<String, Val>, head: &[String]) -> Result<Scores> {
        if let (Some(token), Some(score)) = (outputs.remove("token_ids"), outputs.remove("token_scores")) {
            let token = token.to_ints()?.first().and_then(|i| u32::try_from(*i).ok());
            return match (token, score.to_floats()?.first()) {
                (Some(token), Some(score)) => Ok(Scores::Best { token, score: *score }),
                _ => bail!("`token_ids` holds no token id"),
            };
        }
        let mut logits = Vec::new();
        for name in head {
            let Some(piece) = outputs.remove(name) else { bail!("there is no output `{name}`") };
            let rows = piece.tensor()?.dims().last().copied().unwrap_or(0);
            let all = piece.to_floats()?;
            logits.extend_from_slice(&all[all.len().saturating_sub(rows)..]);
        }
        Ok(Scores::Logits(logits))
    }
}

/// A function that takes a chunk of tokens.
#[derive(Debug, Clone)]
struct Prefill {
    name: String,
    tokens: usize,
    /// Positions at which it may begin, and what they are multiples of.
    positions: (usize, usize),
    align: usize,
    /// It leaves some of the cache to means, and is not for the last tokens of a prompt.
    sparse: bool,
    /// How many past keys it attends to exactly, if it is sparse.
    keys: usize,
}

/// What a call gave.
pub(super) struct Fed {
    pub(super) scores: Scores,
    /// Hidden states after each layer.
    pub(super) layers: BTreeMap<usize, Vec<f32>>,
}

/// A chunk of a text on its way.
pub(super) enum Step {
    Exact,
    /// Fed both ways; the text goes on from the block-sparse one. Keys that are attended to exactly, and
    /// all that are visible, summed over the chunk's tokens.
    Both {
        exact: Fed,
        sparse: Fed,
        kept: f64,
        visible: f64,
    },
}

impl Prefill {
    /// Those of the contract for a context, the ones that see least first.
    fn all(contract: &Json, context: usize) -> Vec<Prefill> {
        let mut all: Vec<Prefill> = contract["functions"]
            .as_object()
            .into_iter()
            .flatten()
            .filter(|(name, f)| name.starts_with("prefill") && number(&f["context"]) <= Some(context))
            .filter_map(|(name, f)| {
                let tokens = number(&f["tokens"])?;
                Some(Prefill {
                    name: name.clone(),
                    tokens,
                    positions: (
                        number(&f["min_position"]).unwrap_or(0),
                        number(&f["max_position"]).unwrap_or(context.saturating_sub(tokens)),
                    ),
                    align: number(&f["position_multiple_of"]).unwrap_or(1).max(1),
                    sparse: f["attention"]["form"] == "block-sparse",
                    keys: number(&f["attention"]["budget"]).unwrap_or(0)
                        * number(&f["attention"]["block"]).unwrap_or(0),
                })
            })
            .collect();
        all.sort_by_key(|p| (p.positions.1, p.name.clone()));
        all
    }

    fn takes(&self, position: usize) -> bool {
        (self.positions.0..=self.positions.1).contains(&position) && position.is_multiple_of(self.align)
    }
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
        let whole = contract(last)?;
        for package in &packages {
            let part = contract(package)?;
            for key in ["family", "context_length", "prefill_chunk", "logits", "vocabulary", "parts"] {
                if part[key] != whole[key] {
                    let (seen, expected) = (&part[key], &whole[key]);
                    bail!(
                        "{}: `{key}` is {seen}, the last part has {expected}", package.path.display();
                        hint: "these parts are of several conversions: convert all of them in one"
                    );
                }
            }
        }
        Ok(Model { packages, contract: whole, folder: folder.to_path_buf() })
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
            prefills: Prefill::all(&self.contract, context),
            stale: false,
            context,
            position: 0,
            head: self.head(),
        })
    }

    /// Whether the package gives the likeliest token, and no logits.
    pub(super) fn is_argmax(&self) -> bool {
        self.contract["logits"] == "argmax"
    }

    /// The family of a model whose activations are rotated.
    pub(super) fn rotated_family(&self) -> Option<&str> {
        self.contract["family"].as_str().filter(|_| self.contract["rotated"] == true)
    }

    fn head(&self) -> Vec<String> {
        let outputs = self.contract["head_outputs"].as_array();
        match outputs.map(|all| all.iter().filter_map(|o| Some(o["name"].as_str()?.to_string())).collect()) {
            Some(names) => names,
            None => vec!["logits".into()],
        }
    }

    /// Tokens that end a text.
    pub(super) fn ends(&self) -> Vec<u32> {
        let ids = self.contract["eos_token_id"].as_array().into_iter().flatten();
        ids.filter_map(|i| u32::try_from(i.as_u64()?).ok()).collect()
    }
}

fn number(v: &Json) -> Option<usize> {
    v.as_u64().and_then(|n| usize::try_from(n).ok())
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
        self.prefills.first().map(|p| p.tokens)
    }

    /// How many tokens each prefill function sees.
    pub(super) fn edges(&self) -> Vec<usize> {
        self.prefills.iter().map(|p| p.positions.1 + p.tokens).collect()
    }

    /// The function for a chunk at a position that sees the least it has to; where the chunk is not the
    /// prompt's last, a block-sparse one if there is one.
    fn prefill(&self, position: usize, last: bool) -> Option<Prefill> {
        let fits = |sparse: bool| self.prefills.iter().find(|p| p.sparse == sparse && p.takes(position));
        let sparse = if last { None } else { fits(true) };
        sparse.or_else(|| fits(false)).cloned()
    }

    /// Feeds one token and gives the scores of what comes next.
    pub(super) fn decode(&mut self, id: u32) -> Result<Scores> {
        let function = self.decode.clone();
        let scores = self.call(&function, &[id], self.position, None)?;
        self.position += 1;
        Ok(scores)
    }

    /// Feeds one token and gives the hidden states after each layer.
    pub(super) fn decode_layers(&mut self, id: u32) -> Result<BTreeMap<usize, Vec<f32>>> {
        let function = self.decode.clone();
        let mut seen = Seen::of(1);
        self.call(&function, &[id], self.position, Some(&mut seen))?;
        self.position += 1;
        seen.floats()
    }

    /// Feeds a whole prompt from where the session is, and gives the scores of what comes next. `all` are
    /// the tokens of the session from its start, of which the last chunk may be fed again.
    pub(super) fn prompt(&mut self, all: &[u32]) -> Result<Scores> {
        let Some(last) = all.last().copied().filter(|_| self.position < all.len()) else {
            bail!("there is no new token to feed");
        };
        if all.len() > self.context {
            bail!("{} tokens do not fit a context of {}", all.len(), self.context; hint: "convert with a longer `--context-length`");
        }
        if let Some(chunk) = self.chunk() {
            while all.len() - self.position >= chunk {
                let rest = all.len() - self.position - chunk;
                let Some(function) = self.prefill(self.position, rest < chunk) else { break };
                let ids = &all[self.position..self.position + chunk];
                let scores = self.call(&function.name, ids, self.position, None)?;
                self.position += chunk;
                if self.position == all.len() {
                    return Ok(scores);
                }
            }
            let again = all.len().checked_sub(chunk).filter(|start| *start <= self.position);
            if let Some((start, function)) = again.and_then(|start| Some((start, self.prefill(start, true)?)))
            {
                let scores = self.call(&function.name, &all[start..], start, None)?;
                self.position = all.len();
                return Ok(scores);
            }
            if all.len() - self.position > 1
                && let Some(function) = self.prefill(self.position, true)
            {
                let mut ids = all[self.position..].to_vec();
                ids.resize(chunk, last);
                self.call(&function.name, &ids, self.position, None)?;
                self.stale = true;
                self.position = all.len() - 1;
            }
        }
        while self.position + 1 < all.len() {
            self.decode(all[self.position])?;
        }
        self.decode(last)
    }

    /// Whether some chunks may be prefilled block-sparse.
    pub(super) fn is_sparse(&self) -> bool {
        self.prefills.iter().any(|p| p.sparse)
    }

    /// Feeds the next full chunk of a text, block-sparse where that is possible, and exactly beside it.
    /// `None` where only a last chunk is left.
    pub(super) fn step(&mut self, all: &[u32]) -> Result<Option<Step>> {
        let (Some(chunk), position) = (self.chunk(), self.position) else { return Ok(None) };
        if all.len() < position + 2 * chunk {
            return Ok(None);
        }
        let ids = &all[position..position + chunk];
        let (Some(function), Some(exact)) = (self.prefill(position, false), self.prefill(position, true))
        else {
            return Ok(None);
        };
        self.position += chunk;
        if !function.sparse {
            self.call(&function.name, ids, position, None)?;
            return Ok(Some(Step::Exact));
        }
        let states: Vec<States> = self.machines.iter().map(|m| m.1.clone()).collect();
        let exact = self.fed(&exact.name, ids, position)?;
        self.machines.iter_mut().zip(states).for_each(|(m, states)| m.1 = states);
        let sparse = self.fed(&function.name, ids, position)?;
        #[expect(clippy::cast_precision_loss, reason = "a context is far below 2⁵³")]
        let of = |past: usize| (past * chunk + chunk * (chunk + 1) / 2) as f64;
        Ok(Some(Step::Both { exact, sparse, kept: of(function.keys), visible: of(position) }))
    }

    fn fed(&mut self, function: &str, ids: &[u32], position: usize) -> Result<Fed> {
        let mut seen = Seen::of(ids.len());
        let scores = self.call(function, ids, position, Some(&mut seen))?;
        Ok(Fed { scores, layers: seen.floats()? })
    }

    /// Makes the means of blocks anew from the cache.
    fn repool(&mut self) -> Result<()> {
        for (machine, states) in &mut self.machines {
            if machine.inputs("repool").is_ok() {
                machine.run("repool", &BTreeMap::new(), states, None)?;
            }
        }
        Ok(())
    }

    /// Runs a function of every part in turn.
    fn call(
        &mut self,
        function: &str,
        ids: &[u32],
        position: usize,
        mut seen: Option<&mut Seen>,
    ) -> Result<Scores> {
        let n = ids.len();
        let called = self.prefills.iter().find(|p| p.name == function);
        if called.is_some_and(|p| p.sparse) && std::mem::take(&mut self.stale) {
            self.repool()?;
        }
        // Means are made of whole blocks only.
        let aligned = self.prefills.iter().filter(|p| p.sparse).all(|p| position.is_multiple_of(p.align));
        self.stale |= n == 1 || !aligned;
        if position + n > self.context {
            bail!(
                "position {} is past the context of {}", position + n - 1, self.context;
                hint: "convert with a longer `--context-length`"
            );
        }
        let ids = Val::ints(ids.iter().map(|i| i64::from(*i)).collect(), &[1, n])?;
        let first = i64::try_from(position).unwrap_or(i64::MAX);
        let positions = Val::ints((0..n).map(|i| first + i64::try_from(i).unwrap_or(0)).collect(), &[1, n])?;
        let (mut carried, mut scores): (Option<Val>, _) = (None, BTreeMap::new());
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
            carried = outputs.get("output_hidden_states").cloned();
            scores = outputs;
        }
        Scores::of(scores, &self.head).at(format!("function `{function}`"))
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
