//! ModernBERT: norms before each part, rotary positions with two bases, and windows of attention on both
//! sides in most layers.

use candle_core::{D, Device, Tensor};

use super::{
    model::{Model, activation, attention, split_heads},
    scope::Scope,
};
use crate::{bail, error::Result};

/// The last hidden states.
pub(super) fn hidden(model: &Model<'_>) -> Result<Tensor> {
    if model.inputs.token_type_ids.iter().flatten().flatten().any(|id| *id != 0) {
        bail!("token_type_ids: the model has no token types");
    }
    let longest = model.config.usize_or(&["max_position_embeddings"], 8192)?;
    if model.sequence > longest {
        bail!("input_ids: {} tokens, the model takes at most {longest}", model.sequence);
    }
    let (base, epsilon) = (&model.base, model.layer_norm_eps()?);
    let words = base.embedding("embeddings.tok_embeddings", &model.inputs.input_ids)?;
    let mut x = base.layer_norm("embeddings.norm", &words, epsilon)?;
    let width = x.dim(D::Minus1)? / model.heads()?;
    let [full, local] = [Layer::new(model, true, width)?, Layer::new(model, false, width)?];
    for (i, is_full) in full_layers(model)?.into_iter().enumerate() {
        let layer = if is_full { &full } else { &local };
        x = layer.run(&base.join(format!("layers.{i}")), &x, i == 0)?;
    }
    base.layer_norm("final_norm", &x, epsilon)
}

/// Which layers see the whole sequence.
fn full_layers(model: &Model<'_>) -> Result<Vec<bool>> {
    let config = model.config;
    let count = model.layer_count()?;
    let types = config.strings("layer_types");
    if types.len() == count {
        return Ok(types.into_iter().map(|t| t == "full_attention").collect());
    }
    let every = config.usize_or(&["global_attn_every_n_layers"], 3)?;
    if every == 0 {
        return Err(config.wrong("global_attn_every_n_layers", "at least 1"));
    }
    Ok((0..count).map(|i| i % every == 0).collect())
}

/// What the layers of one kind share.
struct Layer<'a> {
    heads: usize,
    epsilon: f64,
    act: &'a str,
    mask: Tensor,
    cos: Tensor,
    sin: Tensor,
}

impl<'a> Layer<'a> {
    fn new(model: &Model<'a>, full: bool, width: usize) -> Result<Layer<'a>> {
        let config = model.config;
        let window = config.usize_or(&["local_attention"], 128)? / 2;
        let (cos, sin) = rotary(theta(model, full)?, width, model.sequence)?;
        Ok(Layer {
            heads: model.heads()?,
            epsilon: model.layer_norm_eps()?,
            act: model.act()?,
            mask: model.mask((!full).then_some(window))?,
            cos,
            sin,
        })
    }

    fn run(&self, scope: &Scope<'_>, x: &Tensor, first: bool) -> Result<Tensor> {
        let normal = if first { x.clone() } else { scope.layer_norm("attn_norm", x, self.epsilon)? };
        let qkv = scope.linear("attn.Wqkv", &normal)?.chunk(3, D::Minus1)?;
        let [q, k, v] = qkv.as_slice() else { bail!("attn.Wqkv: it cannot be split into three") };
        let turned = |x: &Tensor| self.rotate(&split_heads(x, self.heads)?);
        let mixed = attention(&turned(q)?, &turned(k)?, &split_heads(v, self.heads)?, &self.mask)?;
        let x = (x + scope.linear("attn.Wo", &mixed)?)?;
        let normal = scope.layer_norm("mlp_norm", &x, self.epsilon)?;
        let halves = scope.linear("mlp.Wi", &normal)?.chunk(2, D::Minus1)?;
        let [input, gate] = halves.as_slice() else { bail!("mlp.Wi: it cannot be split in two") };
        let wide = (activation(self.act, input)? * gate)?;
        Ok((x + scope.linear("mlp.Wo", &wide)?)?)
    }

    /// `x · cos + (−second half, first half) · sin`
    fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let halves = x.chunk(2, D::Minus1)?;
        let [a, b] = halves.as_slice() else { bail!("a head of one channel cannot be rotated") };
        let crossed = Tensor::cat(&[&b.neg()?, a], D::Minus1)?;
        Ok((x.broadcast_mul(&self.cos)? + crossed.broadcast_mul(&self.sin)?)?)
    }
}

/// The rotary base, in the form of version 4 of Transformers or of version 5.
fn theta(model: &Model<'_>, full: bool) -> Result<f64> {
    let config = model.config;
    let kind = if full { "full_attention" } else { "sliding_attention" };
    if let Some(parameters) = config.nested("rope_parameters").and_then(|p| p.nested(kind)) {
        return parameters.f64(&["rope_theta"]);
    }
    let global = config.f64_or(&["global_rope_theta"], 160_000.0)?;
    if full { Ok(global) } else { config.f64_or(&["local_rope_theta"], global) }
}

/// Cosines and sines, `[sequence, width]`, both halves alike.
fn rotary(theta: f64, width: usize, sequence: usize) -> Result<(Tensor, Tensor)> {
    if !width.is_multiple_of(2) {
        bail!("a head of {width} channels cannot be rotated");
    }
    #[expect(clippy::cast_precision_loss, reason = "positions and widths are small")]
    let angle = |position: usize, i: usize| {
        position as f64 * theta.powf(-2.0 * (i % (width / 2)) as f64 / width as f64)
    };
    let angles: Vec<f64> =
        (0..sequence).flat_map(|p| (0..width).map(move |i| (p, i))).map(|(p, i)| angle(p, i)).collect();
    #[expect(clippy::cast_possible_truncation, reason = "tables are computed in f64 and used in f32")]
    let table = |f: fn(f64) -> f64| {
        let values = angles.iter().map(|a| f(*a) as f32).collect();
        Tensor::from_vec(values, (sequence, width), &Device::Cpu)
    };
    Ok((table(f64::cos)?, table(f64::sin)?))
}
