//! Learning from a text what a model's linear layers are given, and trying other weights.

use std::sync::Arc;

use candle_core::{D, Device, Tensor};

use super::{Decoder, Linear};
use crate::{
    bail,
    error::{Context, Result},
    reference::watch::{Divisors, Observed, Wanted, Watch},
};

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
        let done = rows.iter().enumerate().try_for_each(|(i, row)| match wanted {
            Wanted::Sensitivity => self.lean(row, i as u64),
            _ => self.forward(std::slice::from_ref(row), None).map(|_| ()),
        });
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

    /// Slopes of the likelihood of what the model itself would say: their mean squares are the curvature of
    /// the divergence from it.
    fn lean(&self, row: &[u32], seed: u64) -> Result<()> {
        let logits = self.forward(&[row.to_vec()], None)?.logits.squeeze(0)?;
        let log = candle_nn::ops::log_softmax(&logits, D::Minus1)?;
        let mut chosen = Vec::with_capacity(row.len());
        let mut draws = Draws(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        for i in 0..row.len() {
            chosen.push(draws.token(&log.get(i)?.detach().to_vec1::<f32>()?));
        }
        let chosen = Tensor::from_vec(chosen, (row.len(), 1), &Device::Cpu)?;
        let sum = log.gather(&chosen, 1)?.sum_all()?;
        self.watch.as_ref().map_or(Ok(()), |watch| watch.follow(&sum))
    }

    fn watch(&mut self, watch: Option<&Arc<Watch>>) {
        self.watch = watch.cloned();
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

/// Numbers that are the same each time.
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        #[expect(clippy::cast_precision_loss, reason = "53 bits")]
        let unit = ((z ^ (z >> 31)) >> 11) as f64;
        unit / (1u64 << 53) as f64
    }

    /// A token, drawn by its log-likelihood.
    fn token(&mut self, log: &[f32]) -> u32 {
        let mut left = self.next();
        for (token, l) in (0u32..).zip(log) {
            left -= f64::from(*l).exp();
            if left < 0.0 {
                return token;
            }
        }
        u32::try_from(log.len()).unwrap_or(1).saturating_sub(1)
    }
}
