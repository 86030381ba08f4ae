//! The frame of decoders: functions × parts over one set of weights, with the cache as state.
//!
//! `decode` takes one token, `prefill` a chunk of them; both read and write the state `kv_cache`. A part
//! is built from its range of layers, never cut out of a graph: the first one embeds, the last one
//! projects, and hidden states `[1, C, 1, T]` pass between them.

use std::{collections::BTreeMap, ops::Range};

use serde_json::{Value as Json, json};

use super::{
    Part, Plan, Routed,
    calls::{Attention, Call, calls},
    rotate::Turns,
};
use crate::{
    bail,
    checkpoint::{Checkpoint, Config},
    error::{Context, Result},
    graph::Builder,
    mil::{DType, Function, Program, Type, ValueId},
    nn::{
        Hidden, Net,
        cache::{Form, Heads, Kind, Setup, Steps, Update, sparse},
        head::WIDEST,
    },
};

/// What a family of decoders says about itself.
pub struct Decoder {
    /// What the bare model may be called inside the checkpoint; nothing when it is none of them.
    pub bases: &'static [&'static str],
    /// Sizes, and what kinds of layers there are.
    pub shape: fn(&Config, usize) -> Result<Shape>,
    /// Settings of the function under construction, before anything is built.
    pub prepare: fn(&mut Net<'_>) -> Result<()>,
    /// From ids to the residual stream, in the scope of the bare model.
    pub embed: fn(&mut Net<'_>, &Shape, &Ids) -> Result<Hidden>,
    /// Whether `embed` looks at positions.
    pub learned_positions: bool,
    /// One layer, in the scope of the bare model.
    pub layer: Layer,
    /// The last norm, in the scope of the bare model.
    pub norm: fn(&mut Net<'_>, Hidden) -> Result<Hidden>,
    /// Logits from normalised hidden states, in the scope of the checkpoint: one piece, or several along the
    /// vocabulary.
    pub logits: fn(&mut Net<'_>, &Shape, Hidden) -> Result<Vec<Hidden>>,
    /// What a router chooses from, where layers have experts.
    pub routed: Option<fn(&Config) -> Result<Routed>>,
    /// What a rotation is folded into, where one can be.
    pub turns: Option<&'static Turns>,
}

/// One layer: its place in the part's cache, and its number in the model.
pub type Layer = fn(&mut Net<'_>, &Shape, &mut Steps, Place, Hidden) -> Result<Hidden>;

#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// Row in the cache of the part.
    pub row: usize,
    /// Number in the model.
    pub layer: usize,
    pub kind: usize,
}

impl Place {
    pub fn at(self) -> (usize, usize) {
        (self.row, self.kind)
    }
}

pub struct Ids {
    pub input_ids: ValueId,
    /// There when the family has learned positions.
    pub position_ids: Option<ValueId>,
}

/// Sizes of a decoder, from its config.
#[derive(Debug, Clone)]
pub struct Shape {
    pub hidden: usize,
    pub layers: usize,
    pub heads: Heads,
    pub vocab: usize,
    pub kinds: Vec<Kind>,
    /// The kind of each layer.
    pub kind_of: Vec<usize>,
    /// ALiBi's slopes, one per query head.
    pub slopes: Option<Vec<f32>>,
    /// The longest context that the checkpoint was made for.
    pub longest: usize,
    /// Name of the bare model in the checkpoint.
    pub base: String,
    /// The embedding's name in the bare model, for tied heads.
    pub embedding: &'static str,
    /// Whether the head is the embedding in this very part, so that both are stored in the same pieces.
    pub tied_here: bool,
}

/// The longest context that is taken when none is asked for.
pub const CONTEXT: usize = 2048;

/// Ops that a function may have unless told otherwise: compilers were seen to take a few thousand.
pub const MAX_OPS: usize = 8000;

/// Decoder-only settings of a plan.
#[derive(Debug, Clone)]
pub struct Chunks {
    /// Slots of the cache; several make functions for each, none takes what the checkpoint says, at most
    /// [`CONTEXT`].
    pub contexts: Vec<usize>,
    /// Tokens of a prefill call, fewer where the context is left to the checkpoint and is shorter; `None`
    /// leaves prefill out.
    pub chunk: Option<usize>,
    pub logits: Logits,
    /// Whether the pieces of a wide head are outputs of their own.
    pub split_head: bool,
    pub update: Update,
    pub parts: Parts,
    pub attention: Attention,
    /// Slots that prefill functions see, one function for each; none make one for the context.
    pub buckets: Vec<usize>,
    /// How many ops a function may have: heads are taken together until it has no more.
    pub max_ops: usize,
}

impl Default for Chunks {
    /// What `convert` takes when nothing is asked for.
    fn default() -> Self {
        Chunks {
            contexts: Vec::new(),
            chunk: Some(256),
            logits: Logits::Last,
            split_head: false,
            update: Update::Slice,
            parts: Parts::Count(1),
            attention: Attention::Auto,
            buckets: Vec::new(),
            max_ops: MAX_OPS,
        }
    }
}

/// What the head gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Logits {
    /// Logits of a call's last token.
    Last,
    /// Logits of each of a call's tokens.
    All,
    /// The likeliest token after the last one, and its logit.
    Argmax,
}

#[derive(Debug, Clone, Copy)]
pub enum Parts {
    Count(usize),
    /// As many as it takes to stay below so many bytes of weights each.
    Below(u64),
}

/// What one part holds.
#[derive(Debug, Clone)]
struct Piece {
    stem: String,
    embeds: bool,
    layers: Range<usize>,
    projects: bool,
}

pub fn build(decoder: &Decoder, checkpoint: &Checkpoint, plan: &Plan, model_type: &str) -> Result<Vec<Part>> {
    let config = text_config(checkpoint);
    let mut notes = Vec::new();
    let mut contexts = Vec::new();
    let (asked, chunk) = match plan.chunks.contexts.as_slice() {
        [] => {
            let longest = (decoder.shape)(&config, CONTEXT)?.longest.min(CONTEXT);
            (vec![longest], plan.chunks.chunk.map(|c| c.min(longest)))
        }
        asked => (asked.to_vec(), plan.chunks.chunk),
    };
    for asked in &asked {
        let context = asked.div_ceil(32) * 32;
        if context != *asked {
            notes.push(format!("the context is rounded up from {asked} to {context}, a multiple of 32"));
        }
        contexts.push(context);
    }
    contexts.sort_unstable();
    contexts.dedup();
    let Some(capacity) = contexts.last().copied().filter(|c| *c > 0) else {
        bail!("a context of 0 tokens is asked for");
    };
    let head = &plan.chunks;
    if head.split_head && head.logits == Logits::Argmax {
        bail!("`--logits argmax` gives no logits that could be split"; hint: "leave `--head-outputs split` out");
    }
    let mut shape = (decoder.shape)(&config, capacity)?;
    if head.split_head && shape.vocab <= WIDEST {
        notes.push(format!("the head of {} rows is one piece, its output is `logits`", shape.vocab));
    }
    shape.base = base(decoder, checkpoint).to_string();
    if capacity > shape.longest {
        let longest = shape.longest;
        if capacity.saturating_sub(32) >= longest {
            bail!(
                "a context of {capacity} tokens is asked for, the checkpoint was made for {longest}";
                hint: "`--context-length {longest}` is the longest that works"
            );
        }
        notes.push(format!("positions from {longest} on are padding: the checkpoint has no more"));
    }
    if let Some(chunk) = chunk
        && (chunk == 0 || chunk > contexts[0])
    {
        bail!("a prefill chunk of {chunk} tokens does not fit a context of {}", contexts[0]);
    }
    let pieces = pieces(&plan.chunks.parts, checkpoint, &shape);
    let calls = calls(&plan.chunks, chunk, &contexts, shape.heads, shape.slopes.is_some())?;
    let frame = Frame { decoder, checkpoint, plan, shape, contexts, calls, capacity, chunk, model_type };
    let stems: Vec<String> = pieces.iter().map(|p| p.stem.clone()).collect();
    let mut parts = Vec::new();
    for piece in &pieces {
        let mut part = frame.part(piece, &stems).within(|| format!("while building {model_type}"))?;
        notes.append(&mut part.notes);
        part.notes = std::mem::take(&mut notes);
        parts.push(part);
    }
    Ok(parts)
}

/// What the bare model is called inside the checkpoint.
pub(super) fn base(decoder: &Decoder, checkpoint: &Checkpoint) -> &'static str {
    let has = |base: &&&str| checkpoint.tensors.names().any(|n| n.starts_with(&format!("{base}.")));
    decoder.bases.iter().find(has).copied().unwrap_or_default()
}

/// The language model's config: a multimodal checkpoint keeps it in `text_config`.
pub fn text_config(checkpoint: &Checkpoint) -> Config {
    checkpoint.config.nested("text_config").unwrap_or_else(|| checkpoint.config.clone())
}

struct Frame<'a> {
    decoder: &'a Decoder,
    checkpoint: &'a Checkpoint,
    plan: &'a Plan,
    shape: Shape,
    contexts: Vec<usize>,
    calls: Vec<Call>,
    capacity: usize,
    chunk: Option<usize>,
    model_type: &'a str,
}

impl Frame<'_> {
    fn part(&self, piece: &Piece, stems: &[String]) -> Result<Part> {
        let mut functions = BTreeMap::new();
        let mut described = serde_json::Map::new();
        let mut notes = Vec::new();
        let mut rows = Json::Null;
        for call in &self.calls {
            if call.tokens == 0 && piece.layers.is_empty() {
                continue;
            }
            let name = &call.name;
            let (function, call) = self
                .call(piece, call, &mut notes)
                .within(|| format!("function `{name}` of `{}`", piece.stem))?;
            described.insert(name.clone(), describe(&function, &call));
            if piece.projects && call.tokens > 0 && self.plan.chunks.logits != Logits::Argmax {
                rows = rows_of(&function);
            }
            functions.insert(name.clone(), function);
        }
        let largest = self.contexts.len() - 1;
        let default = match largest {
            0 => "decode".to_string(),
            _ => format!("decode_{}", self.capacity),
        };
        let program = Program { functions, default_function: default, ..Program::default() };
        Ok(Part {
            stem: piece.stem.clone(),
            program,
            docs: docs(&rows),
            contract: self.contract(piece, stems, described, rows),
            notes,
        })
    }

    /// A function, its tiles of the first sizes with which it stays below the limit of ops.
    fn call(&self, piece: &Piece, call: &Call, notes: &mut Vec<String>) -> Result<(Function, Call)> {
        if call.tokens == 0 {
            return Ok((self.repool(piece, call)?, call.clone()));
        }
        let limit = self.plan.chunks.max_ops;
        let candidates = match (call.form, piece.layers.is_empty()) {
            (Form::Dense, _) | (_, true) => return Ok((self.function(piece, call)?, call.clone())),
            _ => call.candidates(self.shape.heads),
        };
        let mut last = None;
        for call in candidates {
            let function = self.function(piece, &call)?;
            let ops = function.body.ops.iter().filter(|op| op.kind != "const").count();
            if ops <= limit {
                return Ok((function, call));
            }
            // The one with the fewest ops, if none has few enough.
            if last.as_ref().is_none_or(|(_, _, least)| ops < *least) {
                last = Some((function, call, ops));
            }
        }
        let Some((function, call, ops)) = last else { bail!("there is no group of heads") };
        notes.push(format!(
            "function `{}` of `{}` has {ops} ops, over the limit of {limit}; larger `tile`s, a `group` of more heads, or `--parts` make fewer",
            call.name, piece.stem
        ));
        Ok((function, call))
    }

    /// The function that makes the means of a block-sparse package anew.
    fn repool(&self, piece: &Piece, call: &Call) -> Result<Function> {
        let mut net = Net::new(self.checkpoint, Builder::new(self.plan.opset), DType::F16, 1, 1);
        let Some(block) = self.block() else { bail!("there are no blocks to pool") };
        let sizes = (piece.layers.len(), call.context, block);
        let output = sparse::repool(&mut net, self.shape.heads, sizes)?;
        Ok(net.builder.finish(vec![output]))
    }

    /// Keys of a block in a block-sparse package.
    fn block(&self) -> Option<usize> {
        self.calls.iter().find_map(|call| match call.form {
            Form::Sparse(sparse, _) => Some(sparse.block),
            _ => None,
        })
    }

    fn function(&self, piece: &Piece, call: &Call) -> Result<Function> {
        let (context, tokens) = (call.context, call.tokens);
        let mut net = Net::new(self.checkpoint, Builder::new(self.plan.opset), self.plan.float, 1, tokens);
        net.split_head = self.plan.chunks.split_head || self.plan.chunks.logits == Logits::Argmax;
        (self.decoder.prepare)(&mut net)?;
        let mut shape = self.shape.clone();
        shape.tied_here = piece.embeds && piece.projects;
        let ids = Type::tensor(DType::I32, [1, tokens]);
        let mut x = None;
        let mut input_ids = None;
        if piece.embeds {
            input_ids = Some(net.builder.input("input_ids", ids.clone())?);
        } else {
            let ty = Type::tensor(self.plan.float, [1, shape.hidden, 1, tokens]);
            x = Some(Hidden(net.builder.input("hidden_states", ty)?));
        }
        let looks = !piece.layers.is_empty() || (piece.embeds && self.decoder.learned_positions);
        let position_ids = match looks {
            true => Some(net.builder.input("position_ids", ids)?),
            false => None,
        };
        let mut steps = match (position_ids, piece.layers.is_empty()) {
            (Some(positions), false) => {
                let setup = Setup {
                    heads: shape.heads,
                    context,
                    capacity: self.capacity,
                    layers: piece.layers.len(),
                    kinds: shape.kinds.clone(),
                    slopes: shape.slopes.clone(),
                    update: self.plan.chunks.update,
                    form: call.form,
                    first_layer: piece.layers.start,
                    block: self.block(),
                };
                Some(Steps::new(&mut net, setup, positions)?)
            }
            _ => None,
        };
        let base = shape.base.clone();
        if let Some(input_ids) = input_ids {
            let ids = Ids { input_ids, position_ids };
            x = Some(net.within(&base, |n| (self.decoder.embed)(n, &shape, &ids))?);
        }
        let Some(mut x) = x else { bail!("a part without input") };
        if let Some(steps) = &mut steps {
            for (row, layer) in piece.layers.clone().enumerate() {
                let place = Place { row, layer, kind: shape.kind_of[layer] };
                x = net
                    .within(&base, |n| (self.decoder.layer)(n, &shape, steps, place, x))
                    .within(|| format!("layer {layer}"))?;
            }
            steps.finish(&mut net)?;
        }
        let outputs = match piece.projects {
            true => self.project(&mut net, &shape, &base, x)?,
            false => vec![net.hidden_output("output_hidden_states", x)?],
        };
        Ok(net.builder.finish(outputs))
    }

    fn project(&self, net: &mut Net<'_>, shape: &Shape, base: &str, x: Hidden) -> Result<Vec<ValueId>> {
        let x = match self.plan.chunks.logits {
            Logits::All => x,
            Logits::Last | Logits::Argmax => net.last_token("last_token", x)?,
        };
        let x = net.within(base, |n| (self.decoder.norm)(n, x))?;
        let x = net.within(base, |n| {
            let x = match n.has("norm_scale.weight") {
                // Of a rotated model whose head is tied.
                true => {
                    let rest = n.linear("norm_scale", x)?;
                    n.add(x, rest)?
                }
                false => x,
            };
            n.linear_if_any("project_out", x)
        })?;
        let pieces = (self.decoder.logits)(net, shape, x)?;
        if self.plan.chunks.logits == Logits::Argmax {
            return Ok(net.best_token("token_ids", "token_scores", &pieces)?.into());
        }
        let count = pieces.len();
        let named = |(i, x)| net.token_logits(&piece_name(i, count), x);
        pieces.into_iter().enumerate().map(named).collect()
    }

    fn contract(
        &self,
        piece: &Piece,
        stems: &[String],
        functions: serde_json::Map<String, Json>,
        head: Json,
    ) -> Json {
        let h = self.shape.heads;
        let rows = 2 * piece.layers.len();
        let cache = (!piece.layers.is_empty()).then(|| {
            json!({
                "state": "kv_cache",
                "shape": [rows, h.kv, self.capacity, h.padded],
                "layers": [piece.layers.start, piece.layers.end],
                "head_dim": h.dim,
            })
        });
        json!({
            "version": 1,
            "family": self.model_type,
            "task": "causal-lm",
            "functions": functions,
            "context_length": self.contexts,
            "prefill_chunk": self.chunk.filter(|c| *c > 1),
            "buckets": self.buckets(),
            "logits": match self.plan.chunks.logits {
                Logits::Last => "last",
                Logits::All => "all",
                Logits::Argmax => "argmax",
            },
            "head_outputs": head,
            "cache": cache,
            "pooled": self.block().filter(|_| !piece.layers.is_empty()).map(|block| json!({
                "state": "kv_mean",
                "shape": [rows, h.kv, self.capacity / block, h.padded],
                "block": block,
                "repool": "call it before `prefill_sparse` when tokens were decoded, padded or fed at other positions than multiples of the block since the last call",
            })),
            "vocabulary": self.shape.vocab,
            "rotated": self.checkpoint.rotated,
            "parts": stems,
            "part": stems.iter().position(|s| *s == piece.stem),
            "bos_token_id": self.special("bos_token_id"),
            "eos_token_id": self.special("eos_token_id"),
            "positions": "consecutive, below the context length; a position at or past it is the host's error",
            "prefill": "full chunks; the last one is fed again so that it ends at the last token, or a short prompt is padded after its tokens",
        })
    }

    /// Slots that the prefill functions see, where there is a choice.
    fn buckets(&self) -> Option<Vec<usize>> {
        let exact = self
            .calls
            .iter()
            .filter(|c| c.name.starts_with("prefill") && !matches!(c.form, Form::Sparse(..)));
        let sees: Vec<usize> = exact.map(|c| c.positions.1 + c.tokens).collect();
        (!self.plan.chunks.buckets.is_empty()).then_some(sees)
    }

    /// Ids from the generation config, or else the config.
    fn special(&self, key: &str) -> Json {
        let generation = self.checkpoint.dir.join("generation_config.json");
        let from_generation = std::fs::read(generation)
            .ok()
            .and_then(|text| serde_json::from_slice::<Json>(&text).ok())
            .and_then(|json| json.get(key).cloned());
        let value = from_generation.or_else(|| text_config(self.checkpoint).get(&[key]).cloned());
        match value {
            Some(Json::Array(ids)) => Json::Array(ids),
            Some(Json::Number(id)) => json!([id]),
            _ => json!([]),
        }
    }
}

fn describe(function: &Function, call: &Call) -> Json {
    let one = |id: &ValueId| {
        let value = function.value(*id);
        let tensor = value.ty.as_tensor().or_else(|| value.ty.as_state());
        json!({
            "name": value.name,
            "dtype": tensor.map_or("", |t| t.dtype.name()),
            "shape": tensor.and_then(|t| t.shape()),
            "state": value.ty.as_state().is_some(),
        })
    };
    let attention = match call.form {
        Form::Dense => json!({ "form": "dense" }),
        Form::Tiled(t) => {
            json!({ "form": "tiled", "tile": t.tile, "head_group": t.group, "filled": t.filled })
        }
        Form::Sparse(s, t) => json!({
            "form": "block-sparse", "tile": t.tile, "head_group": t.group, "block": s.block, "budget": s.budget,
            "sinks": s.sinks, "window": s.window, "alpha": s.alpha, "dense_layers": s.dense_layers,
            "correction": s.correction,
        }),
    };
    json!({
        "tokens": call.tokens,
        "context": call.context,
        "min_position": call.positions.0,
        "max_position": call.positions.1,
        "position_multiple_of": call.align,
        "attention": attention,
        "inputs": function.inputs.iter().map(one).collect::<Vec<_>>(),
        "outputs": function.body.outputs.iter().map(one).collect::<Vec<_>>(),
    })
}

/// `logits`, or `logits_1of3`; numbers are as wide as the largest, so that names sort in order.
fn piece_name(i: usize, count: usize) -> String {
    match count {
        1 => "logits".into(),
        _ => format!("logits_{:0width$}of{count}", i + 1, width = count.to_string().len()),
    }
}

/// The rows of the vocabulary that each output holds.
fn rows_of(function: &Function) -> Json {
    let mut end = 0;
    let one = |id: &ValueId| {
        let shape = function.ty(*id).as_tensor().and_then(|t| t.shape());
        let start = end;
        end += shape.and_then(|s| s.last().copied()).unwrap_or(0);
        json!({ "name": function.name(*id), "rows": [start, end] })
    };
    function.body.outputs.iter().map(one).collect()
}

fn docs(rows: &Json) -> BTreeMap<String, String> {
    let piece = |output: &Json| {
        let (name, [start, end]) = (output["name"].as_str()?, [0, 1].map(|i| output["rows"][i].as_u64()));
        let doc = format!("Scores of tokens {} to {}, before softmax", start?, end?.saturating_sub(1));
        Some((name.to_string(), doc))
    };
    let mut docs: BTreeMap<String, String> =
        rows.as_array().into_iter().flatten().filter_map(piece).collect();
    let fixed = [
        ("input_ids", "Token ids"),
        ("position_ids", "Position of each token, consecutive and below the context length"),
        ("hidden_states", "What the part before gives"),
        ("output_hidden_states", "What the next part takes"),
        ("kv_cache", "Keys and values of all tokens so far: keys of each layer first, then values"),
        ("kv_mean", "Means of blocks of the cache, for block-sparse prefill"),
        ("pooled", "The first mean; what counts is the state"),
        ("logits", "Scores of the vocabulary, before softmax"),
        ("token_ids", "The likeliest next token; the lowest id of several"),
        ("token_scores", "Its score, before softmax"),
    ]
    .map(|(k, v)| (k.to_string(), v.to_string()));
    docs.extend(fixed);
    docs
}

/// Which part holds what. One part is all; two are halves; more are the embedding, ranges of layers, and
/// the head.
fn pieces(parts: &Parts, checkpoint: &Checkpoint, shape: &Shape) -> Vec<Piece> {
    let count = match parts {
        Parts::Count(n) => (*n).max(1),
        Parts::Below(limit) => count_below(*limit, checkpoint, shape),
    };
    let all = shape.layers;
    let piece = |stem: String, embeds, layers, projects| Piece { stem, embeds, layers, projects };
    match count {
        1 => vec![piece("model".into(), true, 0..all, true)],
        2 => {
            let middle = all.div_ceil(2);
            vec![
                piece("layers_1of2".into(), true, 0..middle, false),
                piece("layers_2of2".into(), false, middle..all, true),
            ]
        }
        n => {
            let ranges = (n - 2).min(all.max(1));
            let mut pieces = vec![piece("embeddings".into(), true, 0..0, false)];
            for i in 0..ranges {
                let range = all * i / ranges..all * (i + 1) / ranges;
                pieces.push(piece(format!("layers_{}of{ranges}", i + 1), false, range, false));
            }
            pieces.push(piece("head".into(), false, all..all, true));
            pieces
        }
    }
}

/// The fewest parts whose weights stay below `limit` bytes each, in fp16.
fn count_below(limit: u64, checkpoint: &Checkpoint, shape: &Shape) -> usize {
    let elements = |info: &crate::checkpoint::Info| info.shape.iter().map(|d| *d as u64).product::<u64>();
    let total: u64 =
        checkpoint.tensors.names().filter_map(|n| checkpoint.tensors.get(n)).map(elements).sum::<u64>() * 2;
    if total <= limit {
        return 1;
    }
    let table = 2 * (shape.vocab * shape.hidden) as u64;
    let layers = total.saturating_sub(table).max(1);
    let ranges = layers.div_ceil(limit.max(1)).clamp(1, shape.layers.max(1) as u64);
    usize::try_from(ranges).unwrap_or(shape.layers) + 2
}
