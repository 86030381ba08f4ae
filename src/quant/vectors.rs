//! Tables of vectors: k-means in two or four dimensions.
//!
//! Vectors are neighbours along the output axis, and count by the mean importance of their elements. Starts are
//! drawn in proportion to the error so far, by numbers that are the same each time.

use std::{array, cmp::Ordering, collections::BTreeSet};

use super::{
    fp16,
    layout::{Elements, Grouping, Importance, Weights, join},
    palette::{Entries, int8},
    scheme::Palette,
};

/// Vectors that a table is first fitted to.
const SAMPLE: usize = 1 << 13;
const ROUNDS: usize = 40;
/// Rounds over all vectors where there are more.
const FINAL_ROUNDS: usize = 3;

/// The table of each group of vectors.
pub(super) fn tables(
    values: &[f32],
    palette: Palette,
    grouping: &Grouping,
    importance: Importance<'_>,
) -> Vec<Entries> {
    grouping.map(
        values,
        importance,
        || (),
        |(), _, of| match palette.vector {
            2 => table::<2>(of, palette),
            _ => table::<4>(of, palette),
        },
    )
}

fn table<const V: usize>(of: Elements<'_>, palette: Palette) -> Entries {
    let weights = match of.weights {
        Some(Weights::Each(w)) => Some(w),
        Some(Weights::Kept(_)) | None => None,
    };
    let points = Points::<V>::new(of.values, of.apart, weights);
    let mut entries = points.table(palette.entries());
    entries.resize(palette.entries(), entries.last().copied().unwrap_or([0.0; V]));
    let flat = entries.as_flattened();
    if palette.int8 {
        let flat: Vec<f64> = flat.iter().map(|e| f64::from(*e)).collect();
        return int8(&flat, flat.len());
    }
    Entries { values: flat.iter().map(|e| fp16::round(*e)).collect(), ..Entries::default() }
}

struct Points<'a, const V: usize> {
    values: &'a [f32],
    /// Elements between neighbours of a vector.
    apart: usize,
    /// One number for each vector or for each of its elements, of which the mean counts.
    weights: Option<&'a [f32]>,
    /// Numbers of importance of a vector.
    each: usize,
}

/// Kept apart from the loops that ask for it, which mostly have no weights.
#[inline(never)]
fn mean_of(weights: &[f32], i: usize, each: usize) -> f64 {
    weights[i * each..(i + 1) * each].iter().map(|w| f64::from(*w)).sum::<f64>() / each as f64
}

impl<'a, const V: usize> Points<'a, V> {
    fn new(values: &'a [f32], apart: usize, weights: Option<&'a [f32]>) -> Points<'a, V> {
        let weights = weights.filter(|w| w.iter().any(|w| *w > 0.0));
        Points { values, apart, weights, each: weights.map_or(1, |w| w.len() * V / values.len()) }
    }

    fn table(&self, entries: usize) -> Vec<[f32; V]> {
        if let Some(distinct) = self.distinct(entries) {
            return distinct;
        }
        let every = self.len().div_ceil(SAMPLE);
        if every == 1 {
            return self.improved(self.start(entries), ROUNDS);
        }
        let vectors: Vec<[f32; V]> = (0..self.len()).step_by(every).map(|i| self.vector(i)).collect();
        let weights: Option<Vec<f32>> =
            self.weights.map(|w| w.chunks(self.each).step_by(every).flatten().copied().collect());
        let sample = Points::new(vectors.as_flattened(), 1, weights.as_deref());
        self.improved(sample.improved(sample.start(entries), ROUNDS), FINAL_ROUNDS)
    }

    fn len(&self) -> usize {
        self.values.len() / V
    }

    fn vector(&self, i: usize) -> [f32; V] {
        let first = i / self.apart * self.apart * V + i % self.apart;
        array::from_fn(|v| self.values[first + v * self.apart])
    }

    /// All of them in order, some at a time, after how many come before.
    fn pieces(&self, mut each: impl FnMut(usize, &[[f32; V]])) {
        const PIECE: usize = 1 << 9;
        if self.apart == 1 {
            return each(0, self.values.as_chunks().0);
        }
        let mut piece = vec![[0.0; V]; PIECE.min(self.len())];
        for first in (0..self.len()).step_by(PIECE) {
            let vectors = &mut piece[..PIECE.min(self.len() - first)];
            join(self.values, first, V, self.apart, vectors.as_flattened_mut());
            each(first, vectors);
        }
    }

    fn weight(&self, i: usize) -> f64 {
        self.weights.map_or(1.0, |w| mean_of(w, i, self.each))
    }

    /// The vectors themselves where they are few.
    fn distinct(&self, most: usize) -> Option<Vec<[f32; V]>> {
        let mut seen = BTreeSet::new();
        for vector in (0..self.len()).map(|i| self.vector(i)) {
            seen.insert(vector.map(|x| Ordered(x + 0.0)));
            if seen.len() > most {
                return None;
            }
        }
        Some(seen.into_iter().map(|v| v.map(|x| x.0)).collect())
    }

    /// Vectors drawn one by one, each in proportion to its error so far.
    fn start(&self, entries: usize) -> Vec<[f32; V]> {
        let mut draw = Draw(0x5eed);
        let mut least = vec![f64::INFINITY; self.len()];
        let mut found: Vec<[f32; V]> = Vec::with_capacity(entries);
        while found.len() < entries {
            let error = |i: usize, least: f64| self.weight(i) * if least.is_finite() { least } else { 1.0 };
            let total: f64 = least.iter().enumerate().map(|(i, l)| error(i, *l)).sum();
            let mut left = draw.next() * total;
            let drawn = least.iter().enumerate().position(|(i, l)| {
                left -= error(i, *l);
                left < 0.0
            });
            let centre = self.vector(drawn.unwrap_or(self.len() - 1));
            found.push(centre);
            self.pieces(|first, vectors| {
                for (least, vector) in least[first..].iter_mut().zip(vectors) {
                    *least = least.min(f64::from(distance(vector, &centre)));
                }
            });
        }
        found
    }

    /// Means of the vectors nearest to each entry, until they stay.
    fn improved(&self, mut entries: Vec<[f32; V]>, rounds: usize) -> Vec<[f32; V]> {
        let mut last = f64::INFINITY;
        for _ in 0..rounds {
            let lookup = Lookup::new(&entries);
            let mut sums = vec![([0f64; V], 0f64); entries.len()];
            let (mut total, mut worst) = (0.0, (0.0, 0));
            self.pieces(|first, vectors| {
                // What is added to in every round stays in registers.
                let (mut error_so_far, mut largest) = (total, worst);
                for (i, vector) in (first..).zip(vectors) {
                    let (weight, at) = (self.weight(i), lookup.nearest(vector));
                    let error = weight * f64::from(distance(vector, &entries[at]));
                    error_so_far += error;
                    if error > largest.0 {
                        largest = (error, i);
                    }
                    sums[at].1 += weight;
                    sums[at].0.iter_mut().zip(vector).for_each(|(s, x)| *s += weight * f64::from(*x));
                }
                (total, worst) = (error_so_far, largest);
            });
            if total >= last * (1.0 - 1e-4) {
                break;
            }
            last = total;
            let mut moved = false;
            for (entry, (sum, weight)) in entries.iter_mut().zip(sums) {
                if weight > 0.0 {
                    *entry = sum.map(|s| (s / weight) as f32);
                } else if !std::mem::replace(&mut moved, true) {
                    // An entry that nothing needs goes where the error is largest.
                    *entry = self.vector(worst.1);
                }
            }
        }
        entries
    }
}

fn distance<const V: usize>(a: &[f32; V], b: &[f32; V]) -> f32 {
    let mut sum = 0.0;
    for i in 0..V {
        sum += (a[i] - b[i]) * (a[i] - b[i]);
    }
    sum
}

const LANES: usize = 8;

/// Entries by component, some at a time.
pub(super) struct Lookup<const V: usize> {
    entries: Vec<[[f32; LANES]; V]>,
}

impl<const V: usize> Lookup<V> {
    pub(super) fn new(entries: &[[f32; V]]) -> Lookup<V> {
        let group = |e: &[[f32; V]]| {
            // What fills the last group up is never the first of the nearest.
            let one = |lane: usize| e[lane.min(e.len() - 1)];
            array::from_fn(|v| array::from_fn(|lane| one(lane)[v]))
        };
        Lookup { entries: entries.chunks(LANES).map(group).collect() }
    }

    /// The index of the nearest entry, the first of equal ones.
    pub(super) fn nearest(&self, vector: &[f32; V]) -> usize {
        let (mut least, mut at) = ([f32::INFINITY; LANES], [0u32; LANES]);
        for (i, entries) in (0u32..).zip(&self.entries) {
            let mut sum = [0f32; LANES];
            for (x, entries) in vector.iter().zip(entries) {
                for lane in 0..LANES {
                    let off = x - entries[lane];
                    sum[lane] += off * off;
                }
            }
            for lane in 0..LANES {
                let nearer = sum[lane] < least[lane];
                least[lane] = if nearer { sum[lane] } else { least[lane] };
                at[lane] = if nearer { i } else { at[lane] };
            }
        }
        let index = |lane: usize| at[lane] as usize * LANES + lane;
        let order = |a: &usize, b: &usize| least[*a].total_cmp(&least[*b]).then(index(*a).cmp(&index(*b)));
        (0..LANES).min_by(order).map_or(0, index)
    }
}

/// Floats in their order.
#[derive(PartialEq)]
struct Ordered(f32);

impl Eq for Ordered {}

impl PartialOrd for Ordered {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ordered {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// Numbers from 0 up to 1 that look random.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }
}
