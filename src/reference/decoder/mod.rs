//! Causal language models, the whole sequence at once and without a cache.
//!
//! The one rule: one loop for all families; what differs is data in `family`, or a number in `plan`.

mod attention;
mod calibrate;
mod ends;
mod family;
mod mlp;
mod parts;
mod plan;
mod rope;

use std::collections::{BTreeMap, btree_map};

use candle_core::Tensor;

pub use self::calibrate::{Predictions, observe, observe_by_layer};
use self::{
    attention::{Attention, Places, soft_cap},
    ends::{Entry, Exit, head_weight},
    family::Order,
    mlp::Mlp,
    parts::{Linear, Norm},
    plan::{LayerPlan, Plan},
};
use super::{Inputs, model::check, scope::Scope};
use crate::{
    checkpoint::Checkpoint,
    error::{Context, Error, Result},
};

/// A causal language model with its weights in f32, to be run many times. Clones share weights until one
/// replaces its own.
#[derive(Clone)]
pub struct Decoder {
    plan: Plan,
    entry: Entry,
    layers: Vec<Layer>,
    exit: Exit,
    head: Linear,
}

/// What a decoder computes for `[batch, sequence]` ids.
#[derive(Debug, Clone)]
pub struct DecoderOutput {
    /// `[batch, sequence, vocabulary]`
    pub logits: Tensor,
    /// What the head is applied to, `[batch, sequence, channels]`.
    pub last_hidden_state: Tensor,
    /// The hidden states before the first layer and after each, before the last norm.
    pub taps: Vec<Tensor>,
}

impl Decoder {
    pub fn open(checkpoint: &Checkpoint) -> Result<Decoder> {
        Decoder::read(checkpoint)
            .within(|| format!("while opening the reference for {}", checkpoint.dir.display()))
    }

    /// Refuses what is no causal language model that is known, without reading a weight.
    pub fn refuse_others(checkpoint: &Checkpoint) -> Result<()> {
        let plan = Plan::read(&checkpoint.config)?;
        base(&plan, &Scope::root(&checkpoint.tensors)).map(|_| ())
    }

    fn read(checkpoint: &Checkpoint) -> Result<Decoder> {
        let plan = Plan::read(&checkpoint.config)?;
        let root = Scope::root(&checkpoint.tensors);
        let base = base(&plan, &root)?;
        let entry = Entry::open(&plan, &base)?;
        let layer =
            |(i, numbers)| Layer::open(&plan, numbers, &base.join(format!("{}.{i}", plan.family.layers)));
        let layers = plan.layers.iter().enumerate().map(layer).collect::<Result<_>>()?;
        let head = root.join(plan.family.head);
        let (path, tied) = head_weight(&plan, &root, &base);
        let weight = if tied { entry.words.clone() } else { head.tensor("weight")? };
        let mut head = Linear::of(&head, weight)?;
        head.path = path;
        Ok(Decoder { exit: Exit::open(&plan, &base)?, entry, layers, head, plan })
    }

    /// Runs all tokens; without a mask, none is padding. Positions are counted over what is not padding.
    pub fn forward(&self, ids: &[Vec<u32>], attention_mask: Option<&[Vec<u32>]>) -> Result<DecoderOutput> {
        let ones = || ids.iter().map(|row| vec![1; row.len()]).collect();
        let inputs = Inputs {
            input_ids: ids.to_vec(),
            attention_mask: attention_mask.map_or_else(ones, <[_]>::to_vec),
            token_type_ids: None,
        };
        check(&inputs)?;
        self.run(&inputs).within(|| format!("while running the reference, a {}", self.plan.family.model_type))
    }

    fn run(&self, inputs: &Inputs) -> Result<DecoderOutput> {
        let places = Places::new(&self.plan, inputs)?;
        let (x, taps) = self.layers_from(0, self.embed(inputs, &places)?, inputs, &places)?;
        let (last_hidden_state, logits) = self.predict(&x)?;
        Ok(DecoderOutput { logits, last_hidden_state, taps })
    }

    /// Runs the layers from one on: what the last gives, and what that one is given and each gives.
    fn layers_from(
        &self,
        first: usize,
        x: Tensor,
        inputs: &Inputs,
        places: &Places,
    ) -> Result<(Tensor, Vec<Tensor>)> {
        let (plan, mut x) = (&self.plan, x);
        let mut taps = vec![x.clone()];
        let mut biases = BTreeMap::new();
        for (layer, numbers) in self.layers.iter().zip(&plan.layers).skip(first) {
            // ALiBi is scaled with the scores, and those of its families have one scale.
            let bias = match biases.entry(numbers.window) {
                btree_map::Entry::Occupied(known) => known.into_mut(),
                btree_map::Entry::Vacant(new) => new.insert(places.bias(plan, inputs, numbers)?),
            };
            let attend = |x: &Tensor| layer.attention.run(plan, numbers, places, bias, x);
            x = layer.run(plan, &x, attend)?;
            taps.push(x.clone());
        }
        Ok((x, taps))
    }

    /// What the head is applied to, and logits, of what the last layer gives.
    fn predict(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let (plan, x) = (&self.plan, self.exit.run(x)?);
        let logits = (self.head.run(&x)? * plan.logits_scale)?;
        let logits = plan.logit_cap.map_or(Ok(logits.clone()), |cap| soft_cap(&logits, cap))?;
        Ok((x, logits))
    }

    fn embed(&self, inputs: &Inputs, places: &Places) -> Result<Tensor> {
        self.entry.run(&self.plan, inputs, places)
    }
}

/// Where the bare model is.
fn base<'a>(plan: &Plan, root: &Scope<'a>) -> Result<Scope<'a>> {
    let words = format!("{}.weight", plan.family.words);
    let places = plan.family.bases.iter().map(|b| if b.is_empty() { root.clone() } else { root.join(*b) });
    let mut places = places.filter(|scope| scope.has(&words));
    let first = plan.family.bases.first().copied().unwrap_or_default();
    places.next().ok_or_else(|| root.missing(&format!("{first}.{words}")))
}

#[derive(Clone)]
struct Layer {
    attention: Attention,
    mlp: Mlp,
    before_attention: Option<Norm>,
    after_attention: Option<Norm>,
    before_mlp: Option<Norm>,
    after_mlp: Option<Norm>,
}

impl Layer {
    fn open(plan: &Plan, layer: &LayerPlan, scope: &Scope<'_>) -> Result<Layer> {
        let norm = |name: Option<&str>| name.map(|name| Norm::open(plan, scope, name)).transpose();
        let names = plan.family.norms;
        Ok(Layer {
            attention: Attention::open(plan, scope)?,
            mlp: Mlp::open(plan, scope, layer.sparse)?,
            before_attention: norm(names.before_attention)?,
            after_attention: norm(names.after_attention)?,
            before_mlp: norm(names.before_mlp)?,
            after_mlp: norm(names.after_mlp)?,
        })
    }

    fn linears(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.attention.linears().into_iter().chain(self.mlp.linears())
    }

    fn run(&self, plan: &Plan, x: &Tensor, attend: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let mlp = |x: &Tensor| self.mlp.run(&plan.act, x);
        let scaled = |x: Tensor| Ok::<_, Error>((x * plan.residual_scale)?);
        if plan.family.order == Order::NormedSums {
            let sum = normed(self.after_attention.as_ref(), &(x + attend(x)?)?)?;
            return normed(self.after_mlp.as_ref(), &(&sum + mlp(&sum)?)?);
        }
        let entered = normed(self.before_attention.as_ref(), x)?;
        let attended = scaled(normed(self.after_attention.as_ref(), &attend(&entered)?)?)?;
        let sum = (x + attended)?;
        let entered = match (plan.family.order, &self.before_mlp) {
            (Order::Parallel, None) => entered,
            (Order::Parallel, Some(norm)) => norm.run(x)?,
            (_, norm) => normed(norm.as_ref(), &sum)?,
        };
        Ok((sum + scaled(normed(self.after_mlp.as_ref(), &mlp(&entered)?)?)?)?)
    }
}

fn normed(norm: Option<&Norm>, x: &Tensor) -> Result<Tensor> {
    norm.map_or_else(|| Ok(x.clone()), |norm| norm.run(x))
}
