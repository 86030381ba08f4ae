//! Sizes, kinds of layers and heads of decoders, read from the spellings that configs have.

use serde_json::Value as Json;

use super::decoder::Shape;
use crate::{
    bail,
    checkpoint::Config,
    error::Result,
    nn::{
        Hidden, Net,
        cache::{Heads, Kind},
        rotary::Rope,
    },
};

/// What decides a decoder's kinds of layers.
pub(super) struct Plain {
    /// Name of the token embedding in the bare model.
    pub embedding: &'static str,
    /// Share of a head's channels that rotate; 0 for models without rotary positions.
    pub rotary: f64,
    pub interleaved: bool,
    /// The window of each layer.
    pub window: fn(&Config, usize) -> Result<Option<usize>>,
    /// Whether a layer rotates.
    pub rotates: fn(&Config, usize) -> Result<bool>,
}

impl Plain {
    pub(super) const LLAMA: Plain = Plain {
        embedding: "embed_tokens",
        rotary: 1.0,
        interleaved: false,
        window: |_, _| Ok(None),
        rotates: |_, _| Ok(true),
    };
}

/// The shape of a decoder with one rotation for all layers that rotate.
pub(super) fn shape(config: &Config, context: usize, plain: &Plain) -> Result<Shape> {
    let mut shape = sizes(config, plain.embedding)?;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a head's size"
    )]
    let dims = (shape.heads.dim as f64 * plain.rotary) as usize;
    let rope = match dims {
        0 => None,
        dims => {
            let (theta, scaling) = theta(config, None)?;
            Some(Rope { interleaved: plain.interleaved, ..Rope::of(config, theta, scaling, dims, context)? })
        }
    };
    for layer in 0..shape.layers {
        let rope = if (plain.rotates)(config, layer)? { rope.clone() } else { None };
        add(&mut shape, Kind { rope, window: (plain.window)(config, layer)? });
    }
    Ok(shape)
}

/// Sizes without kinds.
pub(super) fn sizes(config: &Config, embedding: &'static str) -> Result<Shape> {
    let hidden = config.usize(&["hidden_size", "n_embd"])?;
    let query = config.usize(&["num_attention_heads", "n_head", "num_heads"])?;
    let kv = config.usize_or(&["num_key_value_heads", "num_kv_heads"], query)?;
    if query == 0 || kv == 0 || query % kv != 0 {
        bail!("{}: {query} query heads cannot share {kv} key and value heads", config.path().display());
    }
    let dim = match config.opt_usize(&["head_dim"])? {
        Some(dim) => dim,
        None if hidden % query == 0 => hidden / query,
        None => bail!("{}: {hidden} channels do not split into {query} heads", config.path().display()),
    };
    Ok(Shape {
        hidden,
        layers: config.usize(&["num_hidden_layers", "n_layer", "num_layers"])?,
        heads: Heads { query, kv, dim, padded: dim.div_ceil(32) * 32 },
        vocab: config.usize(&["vocab_size"])?,
        kinds: Vec::new(),
        kind_of: Vec::new(),
        slopes: None,
        longest: config.usize_or(&["max_position_embeddings", "n_positions", "seq_length"], 2048)?,
        base: String::new(),
        embedding,
        tied_here: false,
    })
}

/// Adds the next layer's kind.
pub(super) fn add(shape: &mut Shape, kind: Kind) {
    let known = shape.kinds.iter().position(|k| *k == kind);
    shape.kind_of.push(known.unwrap_or(shape.kinds.len()));
    if known.is_none() {
        shape.kinds.push(kind);
    }
}

/// Base and scaling of the rotation; newer configs have both in `rope_parameters`, there perhaps by the
/// kind of layer.
pub(super) fn theta<'a>(config: &'a Config, kind: Option<&str>) -> Result<(f64, Option<&'a Json>)> {
    let parameters = config.get(&["rope_parameters"]);
    let parameters = match kind.and_then(|k| parameters?.get(k)) {
        Some(of_kind) => Some(of_kind),
        None => parameters,
    };
    let scaling = config.get(&["rope_scaling"]).or(parameters);
    let inside = parameters.and_then(|p| p.get("rope_theta")).and_then(Json::as_f64);
    let theta = match inside {
        Some(theta) => theta,
        None => config.f64_or(&["rope_theta", "rotary_emb_base"], 10000.0)?,
    };
    if theta <= 1.0 {
        bail!("{}: a rope base of {theta} is no base", config.path().display());
    }
    Ok((theta, scaling))
}

/// What newer configs say of a layer: `full_attention`, `sliding_attention`.
pub(super) fn layer_type(config: &Config, layer: usize) -> Option<String> {
    config.strings("layer_types").get(layer).map(|s| (*s).to_string())
}

/// `sliding_window` in every layer.
pub(super) fn window_everywhere(config: &Config, layer: usize) -> Result<Option<usize>> {
    match layer_type(config, layer).as_deref() {
        Some("full_attention") => Ok(None),
        _ => config.opt_usize(&["sliding_window"]),
    }
}

impl Net<'_> {
    /// The head: `name` where the checkpoint has it, the embedding where they are tied. One piece, unless
    /// the function keeps the head's pieces apart.
    pub(super) fn logits_of(
        &mut self,
        shape: &Shape,
        name: &str,
        tied: bool,
        x: Hidden,
    ) -> Result<Vec<Hidden>> {
        let own = format!("{name}.weight");
        let bias = format!("{name}.bias");
        let bias = self.has(&bias).then_some(bias);
        if self.has(&own) {
            return self.pieces(name, &own, bias.as_deref(), x);
        }
        if !self.checkpoint.config.tied_embeddings()?.unwrap_or(tied) {
            let e = self.checkpoint.tensors.missing(&own);
            return Err(
                e.hint("config.json says that head and embedding are not tied, so the head must be there")
            );
        }
        let table = match shape.base.as_str() {
            "" => format!("{}.weight", shape.embedding),
            base => format!("{base}.{}.weight", shape.embedding),
        };
        self.pieces(name, &table, bias.as_deref(), x)
    }

    fn pieces(&mut self, name: &str, table: &str, bias: Option<&str>, x: Hidden) -> Result<Vec<Hidden>> {
        match self.split_head {
            true => self.vocabulary_pieces(name, table, bias, x),
            false => Ok(vec![self.vocabulary(name, table, bias, x)?]),
        }
    }

    /// Whether the embedding is cut as a tied head in the same part is.
    pub(super) fn embeds_in_pieces(&self, shape: &Shape, head: &str) -> bool {
        shape.tied_here && !self.checkpoint.tensors.contains(&format!("{head}.weight"))
    }
}
