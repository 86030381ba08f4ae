//! Watching linear layers while a text runs through them: what they are given.
//!
//! Sums are added in the order of the text; layers that are given the same tensor share what is known of it.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use candle_core::{Tensor, TensorId};
use half::{f16, slice::HalfFloatSliceExt};

use super::scope::project;
use crate::{bail, error::Result};

/// What is to be learnt of linear layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Mean squares of each input channel.
    Moments,
    /// Mean products of every two input channels.
    Hessians,
}

/// What all layers were given that were given the same.
#[derive(Debug, Clone, PartialEq)]
pub struct Given {
    pub tokens: u64,
    /// The mean square of each input channel.
    pub moments: Vec<f32>,
    /// The largest magnitude of each input channel.
    pub largest: Vec<f32>,
    /// The mean product of every two input channels, row-major.
    pub hessian: Option<Vec<f32>>,
    /// Magnitudes of inputs, rounded to fp16, and how often each of them occurs.
    pub magnitudes: Vec<(f32, u64)>,
}

/// By the checkpoint's name of a layer's weight.
#[derive(Debug, Clone, Default)]
pub struct Observed {
    pub given: BTreeMap<String, Arc<Given>>,
}

/// What inputs are divided by before they are looked at, by the checkpoint's name of a layer's weight.
pub type Divisors = BTreeMap<String, Arc<Vec<f32>>>;

#[derive(Debug)]
pub(super) struct Watch {
    wanted: Wanted,
    divisors: Divisors,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    groups: Vec<Group>,
    layers: BTreeMap<String, usize>,
    last: Option<(TensorId, usize)>,
}

#[derive(Debug)]
struct Group {
    tokens: u64,
    moments: Vec<f64>,
    largest: Vec<f32>,
    hessian: Option<Tensor>,
    /// By the bits of the magnitude in fp16.
    magnitudes: Vec<u64>,
    divisor: Option<Arc<Vec<f32>>>,
    last: TensorId,
}

impl Group {
    /// Counts magnitudes, and keeps the largest; what fp16 cannot hold counts as the largest that it holds.
    fn count(&mut self, x: &Tensor, width: usize) -> Result<()> {
        let top = f16::MAX.to_bits();
        self.magnitudes.resize(usize::from(top) + 1, 0);
        self.largest.resize(width, 0.0);
        let values = x.contiguous()?.flatten_all()?.to_vec1::<f32>()?;
        let mut halves = vec![f16::ZERO; width];
        for row in values.chunks(width.max(1)) {
            halves.convert_from_f32_slice(row);
            for half in &halves {
                self.magnitudes[usize::from((half.to_bits() & 0x7fff).min(top))] += 1;
            }
            self.largest.iter_mut().zip(row).for_each(|(most, v)| *most = most.max(v.abs()));
        }
        Ok(())
    }
}

impl Watch {
    pub(super) fn new(wanted: Wanted, divisors: &Divisors) -> Arc<Watch> {
        Arc::new(Watch { wanted, divisors: divisors.clone(), state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `x · weightᵀ`, as it is without being watched.
    pub(super) fn project(&self, path: &str, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        self.see(path, x)?;
        project(x, weight, None)
    }

    /// Looks at what the layer of a weight is given.
    pub(super) fn see(&self, path: &str, x: &Tensor) -> Result<()> {
        let mut state = self.state();
        let divisor = self.divisors.get(path);
        let alike = |group: &Group| match (&group.divisor, divisor) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            (None, None) => true,
            _ => false,
        };
        let same = state.last.filter(|(id, group)| *id == x.id() && alike(&state.groups[*group]));
        let group = match (state.layers.get(path), same) {
            (Some(group), _) if state.groups[*group].last == x.id() => return Ok(()),
            (Some(group), _) => *group,
            (None, Some((_, group))) => {
                state.layers.insert(path.into(), group);
                return Ok(());
            }
            (None, None) => {
                let group = state.groups.len();
                state.groups.push(Group {
                    tokens: 0,
                    moments: Vec::new(),
                    largest: Vec::new(),
                    hessian: None,
                    magnitudes: Vec::new(),
                    divisor: divisor.cloned(),
                    last: x.id(),
                });
                state.layers.insert(path.into(), group);
                group
            }
        };
        state.last = Some((x.id(), group));
        let known = &mut state.groups[group];
        known.last = x.id();
        let x = match divisor {
            Some(d) => x.broadcast_div(&Tensor::from_slice(d, d.len(), x.device())?)?,
            None => x.clone(),
        };
        let (sums, rows) = squares(&x)?;
        known.tokens += rows;
        add(&mut known.moments, &sums);
        known.count(&x, sums.len())?;
        if self.wanted == Wanted::Hessians {
            let x = x.reshape(((), sums.len()))?;
            let products = x.t()?.matmul(&x)?;
            known.hessian = Some(match known.hessian.take() {
                Some(sum) => (sum + products)?,
                None => products,
            });
        }
        Ok(())
    }

    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "means, kept in f32")]
    pub(super) fn finish(&self) -> Result<Observed> {
        let mut state = self.state();
        let State { groups, layers, .. } = std::mem::take(&mut *state);
        let mut known = Vec::with_capacity(groups.len());
        for g in groups {
            let n = g.tokens.max(1) as f64;
            let hessian = match g.hessian {
                Some(sum) => {
                    let mut all = sum.flatten_all()?.to_vec1::<f32>()?;
                    all.iter_mut().for_each(|v| *v = (f64::from(*v) / n) as f32);
                    Some(all)
                }
                None => None,
            };
            let moments = g.moments.iter().map(|m| (m / n) as f32).collect();
            let magnitude =
                |(bits, n): (usize, &u64)| (*n > 0).then(|| (f16::from_bits(bits as u16).to_f32(), *n));
            let magnitudes = g.magnitudes.iter().enumerate().filter_map(magnitude).collect();
            known.push(Arc::new(Given {
                tokens: g.tokens,
                moments,
                largest: g.largest,
                hessian,
                magnitudes,
            }));
        }
        let given = layers.into_iter().map(|(name, group)| (name, Arc::clone(&known[group]))).collect();
        Ok(Observed { given })
    }
}

/// Sums of squares along the last axis, over all rows.
fn squares(x: &Tensor) -> Result<(Vec<f64>, u64)> {
    let Some(&width) = x.dims().last() else { bail!("a scalar has no channels") };
    let values = x.contiguous()?.flatten_all()?.to_vec1::<f32>()?;
    let mut sums = vec![0f64; width];
    for row in values.chunks(width.max(1)) {
        sums.iter_mut().zip(row).for_each(|(s, v)| *s += f64::from(*v).powi(2));
    }
    Ok((sums, (values.len() / width.max(1)) as u64))
}

fn add(to: &mut Vec<f64>, sums: &[f64]) {
    to.resize(sums.len(), 0.0);
    to.iter_mut().zip(sums).for_each(|(a, b)| *a += b);
}
