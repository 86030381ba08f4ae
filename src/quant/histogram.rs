//! The distinct fp16 values of a group, sorted, and how much each of them counts.

use half::{f16, slice::HalfFloatSliceExt};
use rayon::prelude::*;

use super::layout::Weights;

/// Distinct values, sorted, with weights above zero.
#[derive(Debug, Default, Clone)]
pub(super) struct Histogram {
    pub(super) values: Vec<f32>,
    pub(super) weights: Vec<f64>,
}

/// Counts values by their fp16 bits; kept between groups, since it is as large as all of fp16.
#[derive(Default)]
pub(super) struct Counter {
    bins: Bins,
    histogram: Histogram,
    halves: Vec<f16>,
}

#[derive(Default)]
struct Bins {
    /// How often each key occurs.
    counts: Vec<u32>,
    /// Its importance, where there is any.
    mass: Vec<f64>,
}

/// Elements that are counted at a time; the order of adding is that of these pieces.
const PIECE: usize = 1 << 20;
const CONVERTED: usize = 1 << 10;
const KEYS: usize = 1 << 16;

/// A key in the order of the numbers; both zeros have that of the positive one.
fn key(x: f16) -> u16 {
    let bits = x.to_bits();
    if bits & 0x8000 == 0 { bits | 0x8000 } else { (!bits).wrapping_add(u16::from(bits == 0x8000)) }
}

/// The number of a key.
fn half(key: usize) -> f16 {
    let key = key as u16;
    f16::from_bits(if key & 0x8000 == 0 { !key } else { key & 0x7fff })
}

impl Counter {
    /// The histogram of some values, rounded to fp16; without weights each counts as one.
    pub(super) fn count(&mut self, values: &[f32], weights: Option<Weights<'_>>) -> &Histogram {
        let weights = weights.filter(|w| w.any());
        if values.len() <= PIECE {
            self.bins.add(values, weights, &mut self.halves);
        } else {
            let piece = |(i, values): (usize, &[f32])| {
                let mut bins = Bins::default();
                let weights = weights.map(|w| w.part(i * PIECE..i * PIECE + values.len()));
                bins.add(values, weights, &mut Vec::new());
                bins
            };
            // Two pieces a thread at once, so that memory does not follow the tensor.
            for (i, values) in values.chunks(8 * PIECE).enumerate() {
                let parts: Vec<Bins> =
                    values.par_chunks(PIECE).enumerate().map(|(j, v)| piece((8 * i + j, v))).collect();
                parts.iter().for_each(|part| self.bins.join(part));
            }
        }
        self.bins.take(&mut self.histogram, weights.is_some(), &mut self.halves);
        &self.histogram
    }
}

impl Bins {
    fn add(&mut self, values: &[f32], weights: Option<Weights<'_>>, halves: &mut Vec<f16>) {
        self.counts.resize(KEYS, 0);
        if weights.is_some() {
            self.mass.resize(KEYS, 0.0);
        }
        halves.resize(CONVERTED, f16::ZERO);
        for (i, values) in values.chunks(CONVERTED).enumerate() {
            let halves = &mut halves[..values.len()];
            halves.convert_from_f32_slice(values);
            match weights {
                None => halves.iter().for_each(|x| self.counts[usize::from(key(*x))] += 1),
                Some(Weights::Each(w)) => {
                    for (x, w) in halves.iter().zip(&w[i * CONVERTED..]) {
                        let key = usize::from(key(*x));
                        self.counts[key] += 1;
                        self.mass[key] += f64::from(*w);
                    }
                }
                Some(Weights::Kept(k)) => {
                    for (x, k) in halves.iter().zip(&k[i * CONVERTED..]) {
                        let key = usize::from(key(*x));
                        self.counts[key] += 1;
                        self.mass[key] += f64::from(u8::from(*k));
                    }
                }
            }
        }
    }

    fn join(&mut self, other: &Bins) {
        self.counts.resize(KEYS, 0);
        self.counts.iter_mut().zip(&other.counts).for_each(|(a, b)| *a = a.saturating_add(*b));
        if !other.mass.is_empty() {
            self.mass.resize(KEYS, 0.0);
            self.mass.iter_mut().zip(&other.mass).for_each(|(a, b)| *a += b);
        }
    }

    /// Moves what was counted into a histogram, and is empty again; `halves` is a buffer.
    fn take(&mut self, to: &mut Histogram, weighted: bool, halves: &mut Vec<f16>) {
        const BLOCK: usize = 16;
        to.weights.clear();
        halves.clear();
        let mut len = 0;
        for (block, counts) in self.counts.chunks_mut(BLOCK).enumerate() {
            if counts.iter().fold(0, |any, c| any | *c) == 0 {
                continue;
            }
            // Each is written, and the next over it where it counts for nothing: no branch to guess.
            halves.resize(len + BLOCK, f16::ZERO);
            to.weights.resize(len + BLOCK, 0.0);
            for (i, count) in counts.iter_mut().enumerate() {
                let key = block * BLOCK + i;
                let count = f64::from(std::mem::take(count));
                let weight = if weighted { std::mem::take(&mut self.mass[key]) } else { count };
                (halves[len], to.weights[len]) = (half(key), weight);
                len += usize::from(weight > 0.0);
            }
        }
        halves.truncate(len);
        to.weights.truncate(len);
        to.values.resize(len, 0.0);
        halves.convert_to_f32_slice(&mut to.values);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_in_the_order_of_the_numbers() {
        let mut finite: Vec<f16> =
            (0..=u16::MAX).map(f16::from_bits).filter(|x| x.is_finite() && x.to_bits() != 0x8000).collect();
        finite.sort_by(|a, b| a.total_cmp(b));
        let keys: Vec<u16> = finite.iter().map(|x| key(*x)).collect();
        assert!(keys.is_sorted_by(|a, b| a < b));
        assert!(finite.iter().zip(&keys).all(|(x, k)| half(usize::from(*k)) == *x));
        assert_eq!(key(f16::NEG_ZERO), key(f16::ZERO));
    }

    #[test]
    fn a_counter_forgets() {
        let mut counter = Counter::default();
        counter.count(&[1.0, -2.0, 1.0, -0.0, 0.0], None);
        assert_eq!(counter.histogram.values, [-2.0, 0.0, 1.0]);
        assert_eq!(counter.histogram.weights, [1.0, 2.0, 2.0]);
        let weighted = counter.count(&[1.0, 3.0, 1.0], Some(Weights::Each(&[0.5, 0.0, 2.0])));
        assert_eq!((&*weighted.values, &*weighted.weights), (&[1.0][..], &[2.5][..]));
        let kept = counter.count(&[1.0, 3.0, 1.0, 2.0], Some(Weights::Kept(&[true, false, true, true])));
        assert_eq!((&*kept.values, &*kept.weights), (&[1.0, 2.0][..], &[2.0, 1.0][..]));
        assert_eq!(counter.count(&[5.0], None).values, [5.0]);
    }
}
