//! Rotating a decoder: which of its weights an orthogonal matrix is folded into, so that the model stays what it is.
//!
//! The residual stream turns by one matrix: what is written to it comes out rotated, the scales of its norms move into
//! the layers that read them, and those take their inputs rotated. Into a head that is tied to the embedding no scale
//! can move: its norm keeps the scale's mean, and `norm_scale` adds the rest. Values turn head by head, up to the layer
//! that joins what heads attended to. Norms after blocks keep a stream as it is: then the rows of embedding and head
//! turn by themselves, and `project_in` and `project_out` turn what is looked up back and what the head is given ahead.

use super::{Decoder, Frame, decoder, find};
use crate::{
    bail,
    checkpoint::{Checkpoint, Fold, Scale, Table},
    error::{Context, Result},
    mil::Weight,
};

/// Where the weights of a family's layers meet its residual stream and its heads; names are those of a layer, `*`
/// stands for a number.
pub struct Turns {
    /// Norms of the residual stream, and the layers that read each.
    pub(super) norms: &'static [Read],
    /// Added to the weights of norms.
    pub(super) plus: f32,
    /// Layers that add to the stream.
    pub(super) writers: &'static [&'static str],
    /// What has to do with heads alone.
    pub(super) others: &'static [&'static str],
    /// Why the stream cannot be rotated, where it cannot.
    pub(super) stays: Option<&'static str>,
    /// Gives values, as the last of its outputs.
    pub(super) values: &'static str,
    /// Reads what heads attended to.
    pub(super) joined: &'static str,
}

/// A norm, and the layers that read it.
type Read = (&'static str, &'static [&'static str]);

/// Of attention with three projections.
pub(super) const QKV: Read =
    ("input_layernorm", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]);

impl Turns {
    pub(super) const LLAMA: Turns = Turns {
        norms: &[QKV, ("post_attention_layernorm", &["mlp.gate_proj", "mlp.up_proj"])],
        plus: 0.0,
        writers: &["self_attn.o_proj", "mlp.down_proj"],
        others: &["self_attn.rotary_emb"],
        stays: None,
        values: "self_attn.v_proj",
        joined: "self_attn.o_proj",
    };

    /// Of families that normalise what blocks give.
    pub(super) const NORMED_BLOCKS: Turns = Turns {
        stays: Some("each block's result is normalised before it is added to the residual stream"),
        ..Turns::LLAMA
    };
}

/// A checkpoint that computes the same with rotated weights, and what was rotated.
#[derive(Debug)]
pub struct Rotated {
    pub checkpoint: Checkpoint,
    /// Weights, biases not among them.
    pub weights: usize,
    /// Why the residual stream was not.
    pub left: Option<&'static str>,
}

/// The checkpoint, read as `model_type`, with rotated weights.
pub fn rotated(checkpoint: &Checkpoint, model_type: &str) -> Result<Rotated> {
    let Frame::Decoder(family) = &find(model_type)?.frame else {
        bail!("{model_type} is an encoder, and only language models are rotated"; hint: "leave `--rotate` out");
    };
    let Some(turns) = family.turns else {
        bail!(
            "the norms of {model_type} subtract means, which a rotation does not keep, so it cannot be rotated";
            hint: "leave `--rotate` out; `--smooth` works for it"
        );
    };
    let mut rotating = Rotating::new(family, turns, checkpoint)?;
    rotating.layers()?;
    match turns.stays {
        None => rotating.ends()?,
        Some(_) => rotating.table()?,
    }
    Ok(rotating.done)
}

struct Rotating<'a> {
    from: &'a Checkpoint,
    turns: &'a Turns,
    shape: decoder::Shape,
    done: Rotated,
}

impl<'a> Rotating<'a> {
    fn new(family: &Decoder, turns: &'a Turns, from: &'a Checkpoint) -> Result<Rotating<'a>> {
        // Sizes are the same for every context.
        let mut shape = (family.shape)(&decoder::text_config(from), 1)?;
        shape.base = decoder::base(family, from).into();
        let checkpoint = Checkpoint { rotated: true, ..from.clone() };
        let done = Rotated { checkpoint, weights: 0, left: turns.stays };
        Ok(Rotating { from, turns, shape, done })
    }

    /// A place in the bare model.
    fn place(&self, name: &str) -> String {
        if self.shape.base.is_empty() { name.into() } else { format!("{}.{name}", self.shape.base) }
    }

    fn layers(&mut self) -> Result<()> {
        let prefix = self.place("layers.");
        for name in self.from.tensors.names() {
            let Some((number, rest)) = name.strip_prefix(&prefix).and_then(|n| n.split_once('.')) else {
                continue;
            };
            let Some((layer, kind)) = rest.rsplit_once('.') else { continue };
            let fold = self.fold(&format!("{prefix}{number}"), layer, name)?;
            match (kind, fold) {
                ("weight", Some(fold)) => self.weight(name, &fold)?,
                ("bias", Some(fold)) => {
                    if let Some(bias) = fold.bias(&self.from.tensors.float_weight(name)?)? {
                        self.done.checkpoint.tensors.replace(name, bias);
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// What is folded into a linear layer; nothing for what stays as it is, and norms lose their scale here.
    fn fold(&mut self, place: &str, layer: &str, name: &str) -> Result<Option<Fold>> {
        let heads = self.shape.heads;
        let mut fold = Fold::default();
        if layer == self.turns.values {
            let out = self.from.tensors.shape(&format!("{place}.{layer}.weight"))?.first().copied();
            let Some(first) = out.and_then(|out| out.checked_sub(heads.kv * heads.dim)) else {
                bail!(
                    "{place}.{layer}: {out:?} outputs hold no values of {} heads of {}",
                    heads.kv,
                    heads.dim
                );
            };
            fold.outputs = Some((heads.dim, first));
        }
        if layer == self.turns.joined {
            fold.inputs = Some(heads.dim);
        }
        if self.turns.stays.is_some() {
            return Ok((fold.inputs.is_some() || fold.outputs.is_some()).then_some(fold));
        }
        if self.turns.norms.iter().any(|(norm, _)| *norm == layer) && name.ends_with(".weight") {
            let folded = self.scale(name)?.folded();
            self.done.checkpoint.tensors.replace(name, folded);
            return Ok(None);
        }
        let read = self.turns.norms.iter().find(|(_, readers)| readers.iter().any(|r| is(r, layer)));
        if let Some((norm, _)) = read {
            fold.scale = Some(self.scale(&format!("{place}.{norm}.weight"))?);
            fold.inputs = Some(self.shape.hidden);
        } else if self.turns.writers.iter().any(|w| is(w, layer)) {
            fold.outputs = Some((self.shape.hidden, 0));
        } else if self.turns.others.contains(&layer) {
            return Ok(None);
        } else {
            bail!("`{name}`: what it has to do with the residual stream is not known, so the model cannot be rotated"; hint: "leave `--rotate` out");
        }
        Ok(Some(fold))
    }

    /// The embedding, the last norm, and the head.
    fn ends(&mut self) -> Result<()> {
        let stream = Fold { inputs: Some(self.shape.hidden), ..Fold::default() };
        let embedding = self.place(&format!("{}.weight", self.shape.embedding));
        self.weight(&embedding, &stream)?;
        let norm = self.place("norm.weight");
        let scale = self.scale(&norm)?;
        if self.from.tensors.contains("lm_head.weight") {
            self.done.checkpoint.tensors.replace(&norm, scale.folded());
            return self.weight("lm_head.weight", &Fold { scale: Some(scale), ..stream });
        }
        let rest = self.place("norm_scale.weight");
        self.done.checkpoint.tensors.replace(&norm, scale.level());
        self.done.checkpoint.tensors.replace(&rest, scale.rest(&rest));
        Ok(())
    }

    /// The embedding and the head by themselves.
    fn table(&mut self) -> Result<()> {
        let Some(table) = Table::of(self.shape.hidden) else {
            bail!("{} channels are odd, so words cannot be rotated", self.shape.hidden; hint: "leave `--rotate` out");
        };
        let words = self.place(&format!("{}.weight", self.shape.embedding));
        let head = Some("lm_head.weight").filter(|head| self.from.tensors.contains(head));
        for name in [Some(words.as_str()), head].into_iter().flatten() {
            let rotated = table.weight(&self.from.tensors.float_weight(name)?)?;
            self.replace(name, rotated);
        }
        let (back, ahead) = (self.place("project_in.weight"), self.place("project_out.weight"));
        self.done.checkpoint.tensors.replace(&back, table.back(&back));
        self.done.checkpoint.tensors.replace(&ahead, table.ahead(&ahead));
        Ok(())
    }

    fn scale(&self, norm: &str) -> Result<Scale> {
        let weight = self.from.tensors.float_weight(norm)?;
        if weight.shape != [self.shape.hidden] {
            bail!("{norm}: {:?} does not fit {} channels", weight.shape, self.shape.hidden);
        }
        Ok(Scale { weight, plus: self.turns.plus })
    }

    fn weight(&mut self, name: &str, fold: &Fold) -> Result<()> {
        let weight = fold.weight(&self.from.tensors.float_weight(name)?).at(name)?;
        self.replace(name, weight);
        Ok(())
    }

    /// Has a rotated weight read.
    fn replace(&mut self, name: &str, weight: Weight) {
        self.done.checkpoint.tensors.replace(name, weight);
        self.done.weights += 1;
    }
}

/// Whether a name is of a pattern.
fn is(pattern: &str, name: &str) -> bool {
    let (mut pattern, mut name) = (pattern.split('.'), name.split('.'));
    loop {
        match (pattern.next(), name.next()) {
            (None, None) => return true,
            (Some(p), Some(n)) if p == n || (p == "*" && n.parse::<usize>().is_ok()) => {}
            _ => return false,
        }
    }
}
