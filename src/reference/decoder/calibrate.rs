//! Learning from a text what a model's linear layers are given, and trying other weights.

use std::{collections::BTreeMap, sync::Arc};

use candle_core::{D, Device, Tensor};
use rayon::prelude::*;

use super::{Decoder, Layer, Linear, Places};
use crate::{
    bail,
    error::{Context, Result},
    reference::{
        Inputs,
        watch::{Divisors, Observed, Wanted, Watch},
    },
};

/// Makes what shall be tried in the place of a weight: from its name, its values `[out, in]`, and whether it is the
/// table of words.
pub(super) type Other<'a> = dyn FnMut(&str, &[f32], [usize; 2], bool) -> Result<Vec<f32>> + 'a;

impl Decoder {
    /// Runs rows of a text one after the other and gives what was learnt of every linear layer.
    pub fn observe(&mut self, rows: &[Vec<u32>], wanted: Wanted) -> Result<Observed> {
        self.observe_divided(rows, wanted, &Divisors::new())
    }

    /// The same, of inputs that are divided by something, channel by channel; what the model computes is not.
    pub fn observe_divided(
        &mut self,
        rows: &[Vec<u32>],
        wanted: Wanted,
        divisors: &Divisors,
    ) -> Result<Observed> {
        let watch = Watch::new(wanted, divisors);
        self.watch(Some(&watch));
        let done = rows.iter().try_for_each(|row| self.forward(std::slice::from_ref(row), None).map(|_| ()));
        self.watch(None);
        done.within(|| "while calibrating".into())?;
        watch.finish()
    }

    /// Names and shapes `[out, in]` of the weights that are multiplied, and of the words where they are a
    /// table of their own.
    pub fn weights(&mut self) -> Vec<(String, [usize; 2])> {
        let mut found = vec![(self.words_path.clone(), self.words.clone())];
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
        let words = (self.words_path == name).then(|| self.words.clone());
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
        if self.words_path == name {
            put(&mut self.words, &mut values)?;
        }
        for linear in self.linears().into_iter().filter(|l| l.path == name) {
            put(&mut linear.weight, &mut values)?;
        }
        if tensor.is_none() {
            bail!("the model has no weight `{name}`");
        }
        Ok(())
    }

    /// The sum of negative log-likelihoods of a row's tokens, in nats, and how many were foreseen.
    pub fn surprise(&self, row: &[u32]) -> Result<(f64, usize)> {
        let logits = self.forward(&[row.to_vec()], None)?.logits.squeeze(0)?;
        let mut sum = 0.0;
        for (i, next) in row.iter().enumerate().skip(1) {
            let logits = logits.get(i - 1)?.to_vec1::<f32>()?;
            let Some(chosen) = logits.get(*next as usize) else {
                bail!("token {next} is not among {} logits", logits.len());
            };
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let all: f64 = logits.iter().map(|l| f64::from(l - largest).exp()).sum();
            sum += all.ln() - f64::from(chosen - largest);
        }
        Ok((sum, row.len().saturating_sub(1)))
    }

    /// How far the predictions for a row diverge, in nats a token, with another in the place of each weight by
    /// itself.
    pub fn costs(&mut self, row: &[u32], other: &mut Other<'_>) -> Result<BTreeMap<String, f64>> {
        let inputs = Inputs {
            input_ids: vec![row.to_vec()],
            attention_mask: vec![vec![1; row.len()]],
            token_type_ids: None,
        };
        let places = Places::new(&self.plan, &inputs)?;
        let plain = self.run(&inputs)?;
        let before = Likelihoods::of(&plain.logits)?;
        let mut costs = BTreeMap::new();
        for (name, shape) in self.weights() {
            let values = self.weight(&name)?;
            let words = self.words_path == name;
            let tried = other(&name, &values, shape, words).within(|| format!("weight `{name}`"))?;
            let first = self.first_layer_after(&name);
            self.replace(&name, tried)?;
            // What comes before the weight is as it was.
            let after = match first {
                None => self.run(&inputs),
                Some(layer) => self.run_from(layer, plain.taps[layer].clone(), &inputs, &places),
            };
            self.replace(&name, values)?;
            #[expect(clippy::cast_precision_loss, reason = "a row of tokens")]
            costs.insert(name, before.divergence(&Likelihoods::of(&after?.logits)?) / row.len() as f64);
        }
        Ok(costs)
    }

    /// The layer that a weight belongs to, one more than there are for what follows them all, and none for what
    /// comes before them.
    fn first_layer_after(&mut self, name: &str) -> Option<usize> {
        let before = self.project_in.as_ref().is_some_and(|l| l.path == name) || self.words_path == name;
        if before {
            return None;
        }
        let has = |layer: &mut Layer| {
            let mlp = layer.mlp.linears().into_iter().any(|l| l.path == name);
            mlp || layer.attention.linears().into_iter().any(|l| l.path == name)
        };
        Some(self.layers.iter_mut().position(has).unwrap_or(self.plan.layers.len()))
    }

    fn watch(&mut self, watch: Option<&Arc<Watch>>) {
        self.linears().into_iter().for_each(|l| l.watch = watch.cloned());
    }

    fn linears(&mut self) -> Vec<&mut Linear> {
        let mut all: Vec<&mut Linear> = self.project_in.iter_mut().collect();
        for layer in &mut self.layers {
            all.extend(layer.attention.linears());
            all.extend(layer.mlp.linears());
        }
        all.extend(self.project_out.as_mut());
        all.push(&mut self.head);
        all
    }
}

/// Logits at each place of a row, and what their exponentials add up to, as its logarithm.
struct Likelihoods {
    logits: Vec<f32>,
    width: usize,
    sums: Vec<f64>,
}

impl Likelihoods {
    fn of(logits: &Tensor) -> Result<Likelihoods> {
        let width = logits.dim(D::Minus1)?.max(1);
        let logits = logits.flatten_all()?.to_vec1::<f32>()?;
        let sum = |row: &[f32]| {
            let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            f64::from(top) + row.iter().map(|l| f64::from((l - top).exp())).sum::<f64>().ln()
        };
        let sums = logits.par_chunks(width).map(sum).collect();
        Ok(Likelihoods { logits, width, sums })
    }

    /// Σ p · (ln p − ln q) over all places, in nats.
    fn divergence(&self, other: &Likelihoods) -> f64 {
        let one = |place: usize| {
            let row = place * self.width..(place + 1) * self.width;
            let term = |(p, q): (&f32, &f32)| {
                let (p, q) = (f64::from(*p) - self.sums[place], f64::from(*q) - other.sums[place]);
                f64::from((p as f32).exp()) * (p - q)
            };
            self.logits[row.clone()].iter().zip(&other.logits[row]).map(term).sum::<f64>()
        };
        let off: Vec<f64> = (0..self.sums.len().min(other.sums.len())).into_par_iter().map(one).collect();
        off.into_iter().sum::<f64>().max(0.0)
    }
}
