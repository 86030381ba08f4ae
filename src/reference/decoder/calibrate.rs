//! Learning from a text what a model's linear layers are given, and trying other weights.

use std::{collections::BTreeMap, sync::Arc};

use candle_core::{D, Device, Tensor};
use rayon::prelude::*;

use super::{Decoder, Entry, Exit, Layer, Linear, Places, Plan, base, head_weight};
use crate::{
    bail,
    checkpoint::Checkpoint,
    error::{Context, Result},
    reference::{
        Inputs,
        model::check,
        scope::Scope,
        watch::{Divisors, Observed, Wanted, Watch},
    },
};

/// Makes what shall be tried in the place of a weight: from its name, its values `[out, in]`, and whether it is the
/// table of words.
pub(super) type Other<'a> = dyn FnMut(&str, &[f32], [usize; 2], bool) -> Result<Vec<f32>> + 'a;

/// Runs rows of a text through a language model and gives what was learnt of every linear layer, of inputs that are
/// divided by something where divisors say so; what the model computes is not.
pub fn observe(
    checkpoint: &Checkpoint,
    rows: &[Vec<u32>],
    wanted: Wanted,
    divisors: &Divisors,
) -> Result<Observed> {
    let mut all = Observed::default();
    observe_by_layer(checkpoint, rows, wanted, divisors, |_, _, observed| {
        all.given.extend(observed.given);
        Ok(())
    })?;
    Ok(all)
}

/// The same, layer by layer, of which one is in memory at a time: `each` is given how many are done, how many there
/// are, and what was learnt of the last one.
pub fn observe_by_layer(
    checkpoint: &Checkpoint,
    rows: &[Vec<u32>],
    wanted: Wanted,
    divisors: &Divisors,
    mut each: impl FnMut(usize, usize, Observed) -> Result<()>,
) -> Result<()> {
    let plan = Plan::read(&checkpoint.config)?;
    let root = Scope::root(&checkpoint.tensors);
    let base = base(&plan, &root)?;
    let texts: Vec<Inputs> = rows.iter().map(|row| all_of(row)).collect();
    texts.iter().try_for_each(|text| check(text).map(|_| ()))?;
    let places = texts.iter().map(|text| Places::new(&plan, text)).collect::<Result<Vec<_>>>()?;
    let steps = plan.layers.len() + 2;
    let mut step = |done: usize, run: &mut dyn FnMut(&Arc<Watch>) -> Result<()>| {
        let watch = Watch::new(wanted, divisors);
        run(&watch).within(|| "while calibrating".into())?;
        each(done, steps, watch.finish()?)
    };
    let mut states = Vec::with_capacity(rows.len());
    step(1, &mut |watch| {
        let mut entry = Entry::open(&plan, &base)?;
        entry.project.iter_mut().for_each(|l| l.watch = Some(watch.clone()));
        for (text, places) in texts.iter().zip(&places) {
            states.push(entry.run(&plan, text, places)?);
        }
        Ok(())
    })?;
    for (i, numbers) in plan.layers.iter().enumerate() {
        step(i + 2, &mut |watch| {
            let mut layer = Layer::open(&plan, numbers, &base.join(format!("{}.{i}", plan.family.layers)))?;
            layer.linears().for_each(|l| l.watch = Some(watch.clone()));
            for ((x, text), places) in states.iter_mut().zip(&texts).zip(&places) {
                let bias = places.bias(&plan, text, numbers)?;
                let attend = |x: &Tensor| layer.attention.run(&plan, numbers, places, &bias, x);
                *x = layer.run(&plan, x, attend)?;
            }
            Ok(())
        })?;
    }
    step(steps, &mut |watch| {
        let mut exit = Exit::open(&plan, &base)?;
        exit.linears().for_each(|l| l.watch = Some(watch.clone()));
        // What the head makes of its inputs is of no interest.
        let (head, _) = head_weight(&plan, &root, &base);
        states.iter().try_for_each(|x| watch.see(&head, &exit.run(x)?))
    })
}

impl Decoder {
    /// Names and shapes `[out, in]` of the weights that are multiplied, and of the words where they are a
    /// table of their own.
    pub fn weights(&mut self) -> Vec<(String, [usize; 2])> {
        let mut found = vec![(self.entry.path.clone(), self.entry.words.clone())];
        found.extend(self.linears().into_iter().map(|l| (l.path.clone(), l.weight.clone())));
        let mut all: Vec<(String, [usize; 2])> = Vec::new();
        for (name, weight) in found {
            if let (&[out, channels], true) = (weight.dims(), all.iter().all(|(n, _)| *n != name)) {
                all.push((name, [out, channels]));
            }
        }
        all
    }

    /// The values of a weight, `[out, in]`.
    pub fn weight(&mut self, name: &str) -> Result<Vec<f32>> {
        let found = self.linears().into_iter().find(|l| l.path == name).map(|l| l.weight.clone());
        let words = (self.entry.path == name).then(|| self.entry.words.clone());
        let Some(weight) = found.or(words) else { bail!("the model has no weight `{name}`") };
        Ok(weight.contiguous()?.flatten_all()?.to_vec1()?)
    }

    /// Puts other values in the place of a weight, `[out, in]`.
    pub fn replace(&mut self, name: &str, values: Vec<f32>) -> Result<()> {
        let mut tensor: Option<Tensor> = None;
        let count = values.len();
        let mut put = |weight: &mut Tensor, values: &mut Vec<f32>| -> Result<()> {
            if weight.elem_count() != count {
                bail!("{name}: {count} values for a weight {:?}", weight.dims());
            }
            let new = match tensor.take() {
                Some(known) => known,
                None => Tensor::from_vec(std::mem::take(values), weight.dims(), &Device::Cpu)?,
            };
            *weight = new.clone();
            tensor = Some(new);
            Ok(())
        };
        let mut values = values;
        if self.entry.path == name {
            put(&mut self.entry.words, &mut values)?;
        }
        for linear in self.linears().into_iter().filter(|l| l.path == name) {
            put(&mut linear.weight, &mut values)?;
        }
        if tensor.is_none() {
            bail!("the model has no weight `{name}`");
        }
        Ok(())
    }

    /// How far the predictions for a row diverge, in nats a token, with another in the place of each weight by
    /// itself. Predictions are looked at in every so many places.
    pub fn costs(
        &mut self,
        row: &[u32],
        every: usize,
        other: &mut Other<'_>,
    ) -> Result<BTreeMap<String, f64>> {
        let inputs = all_of(row);
        let places = Places::new(&self.plan, &inputs)?;
        let (x, plain) = self.layers_from(0, self.embed(&inputs, &places)?, &inputs, &places)?;
        let before = self.predictions_of(&x, every)?;
        let mut costs = BTreeMap::new();
        for (name, shape) in self.weights() {
            let values = self.weight(&name)?;
            let words = self.looks_up(&name);
            let tried = other(&name, &values, shape, words).within(|| format!("weight `{name}`"))?;
            let layer = self.layer_of(&name);
            self.replace(&name, tried)?;
            // What comes before the weight is as it was.
            let given = layer.map_or_else(|| self.embed(&inputs, &places), |layer| Ok(plain[layer].clone()));
            let after = given
                .and_then(|x| self.layers_from(layer.unwrap_or(0), x, &inputs, &places))
                .and_then(|(x, _)| self.predictions_of(&x, every));
            self.replace(&name, values)?;
            costs.insert(name, before.divergence(&after?));
        }
        Ok(costs)
    }

    /// How far another model's predictions for rows diverge from those of this one, in nats a token.
    pub fn divergence(&self, other: &Decoder, rows: &[Vec<u32>], every: usize) -> Result<f64> {
        let (mut sum, mut places) = (0.0, 0);
        for row in rows {
            let own = self.predictions(row, every)?;
            sum += own.divergence(&other.predictions(row, every)?) * own.places.len() as f64;
            places += own.places.len();
        }
        Ok(sum / places.max(1) as f64)
    }

    /// Whether a weight's rows are looked up: that of the table of words.
    pub fn looks_up(&self, name: &str) -> bool {
        self.entry.path == name
    }

    /// What is predicted to follow a row's tokens, at every so many places of which the last is one.
    pub fn predictions(&self, row: &[u32], every: usize) -> Result<Predictions> {
        let inputs = all_of(row);
        check(&inputs)?;
        let places = Places::new(&self.plan, &inputs)?;
        let (x, _) = self.layers_from(0, self.embed(&inputs, &places)?, &inputs, &places)?;
        self.predictions_of(&x, every)
    }

    /// The same of what the last layer gives.
    fn predictions_of(&self, x: &Tensor, every: usize) -> Result<Predictions> {
        let places: Vec<u32> = (0..x.dim(1)? as u32).rev().step_by(every.max(1)).collect();
        let x = x.index_select(&Tensor::new(places.as_slice(), &Device::Cpu)?, 1)?;
        Predictions::of(&self.predict(&x)?.1, places)
    }

    /// The layer that a weight belongs to, one more than there are for what follows them all, and none for what
    /// comes before them.
    fn layer_of(&mut self, name: &str) -> Option<usize> {
        let before = self.entry.project.as_ref().is_some_and(|l| l.path == name) || self.entry.path == name;
        if before {
            return None;
        }
        let has = |layer: &mut Layer| layer.linears().any(|l| l.path == name);
        Some(self.layers.iter_mut().position(has).unwrap_or(self.plan.layers.len()))
    }

    fn linears(&mut self) -> Vec<&mut Linear> {
        let mut all: Vec<&mut Linear> = self.entry.project.iter_mut().collect();
        self.layers.iter_mut().for_each(|layer| all.extend(layer.linears()));
        all.extend(self.exit.linears());
        all.push(&mut self.head);
        all
    }
}

/// A row of tokens none of which is padding.
fn all_of(row: &[u32]) -> Inputs {
    let attention_mask = vec![vec![1; row.len()]];
    Inputs { input_ids: vec![row.to_vec()], attention_mask, token_type_ids: None }
}

/// Logits at some places of a row, and what their exponentials add up to, as its logarithm.
#[derive(Debug)]
pub struct Predictions {
    places: Vec<u32>,
    logits: Vec<f32>,
    width: usize,
    sums: Vec<f64>,
}

impl Predictions {
    fn of(logits: &Tensor, places: Vec<u32>) -> Result<Predictions> {
        let width = logits.dim(D::Minus1)?.max(1);
        let logits = logits.flatten_all()?.to_vec1::<f32>()?;
        let sum = |row: &[f32]| {
            let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            f64::from(top) + row.iter().map(|l| f64::from((l - top).exp())).sum::<f64>().ln()
        };
        let sums = logits.par_chunks(width).map(sum).collect();
        Ok(Predictions { places, logits, width, sums })
    }

    /// How far others of the same places diverge from these: the mean of Σ p · (ln p − ln q), in nats.
    pub fn divergence(&self, other: &Predictions) -> f64 {
        let one = |place: usize| {
            let row = place * self.width..(place + 1) * self.width;
            let term = |(p, q): (&f32, &f32)| {
                let (p, q) = (f64::from(*p) - self.sums[place], f64::from(*q) - other.sums[place]);
                f64::from((p as f32).exp()) * (p - q)
            };
            self.logits[row.clone()].iter().zip(&other.logits[row]).map(term).sum::<f64>()
        };
        let places = self.sums.len().min(other.sums.len());
        let off: Vec<f64> = (0..places).into_par_iter().map(one).collect();
        (off.into_iter().sum::<f64>() / places.max(1) as f64).max(0.0)
    }

    /// The sum of negative log-likelihoods of the tokens of a row that follow, in nats, and how many do.
    pub fn surprise(&self, row: &[u32]) -> Result<(f64, usize)> {
        let (mut sum, mut tokens) = (0.0, 0);
        for ((place, logits), all) in self.places.iter().zip(self.logits.chunks(self.width)).zip(&self.sums) {
            let Some(next) = row.get(*place as usize + 1) else { continue };
            let Some(logit) = logits.get(*next as usize) else {
                bail!("token {next} is not among {} logits", self.width);
            };
            sum += all - f64::from(*logit);
            tokens += 1;
        }
        Ok((sum, tokens))
    }
}
