//! Tables of numbers, and the nearest entry of a value.

use super::{
    fp16,
    histogram::{Counter, Histogram},
    kmeans::Solver,
    layout::{Grouping, Importance, Layout},
    scheme::{Effort, Palette},
};

/// One table.
#[derive(Debug, Default, Clone)]
pub(super) struct Entries {
    /// Sorted where entries are single numbers.
    pub(super) values: Vec<f32>,
    /// Their codes and scale where they are int8.
    pub(super) codes: Vec<i8>,
    pub(super) scale: f32,
}

/// The table of each group. Where an output channel is all zero, so is an entry.
pub(super) fn tables(
    values: &[f32],
    layout: Layout<'_>,
    palette: Palette,
    grouping: &Grouping,
    importance: Importance<'_>,
) -> Vec<Entries> {
    let empty = groups_with_empty_channels(values, layout, grouping);
    grouping.map(values, importance, Scratch::default, |scratch, group, of| {
        let Scratch { counter, solver } = scratch;
        table(counter.count(of.values, of.weights), solver, palette, empty[group])
    })
}

#[derive(Default)]
struct Scratch {
    counter: Counter,
    solver: Solver,
}

/// Which groups have elements of an output channel that is zero everywhere.
fn groups_with_empty_channels(values: &[f32], layout: Layout<'_>, grouping: &Grouping) -> Vec<bool> {
    let (outputs, after) = (layout.shape[layout.output], layout.after_output());
    let parts = values.len() / (outputs * after);
    let zero = |channel: usize| {
        let part = |p: usize| &values[(p * outputs + channel) * after..][..after];
        (0..parts).all(|p| part(p).iter().all(|x| *x == 0.0))
    };
    let groups = grouping.counts[layout.output];
    let any: Vec<bool> =
        (0..groups).map(|g| (g * outputs / groups..(g + 1) * outputs / groups).any(zero)).collect();
    // Only one axis is grouped.
    if groups > 1 { any } else { vec![any[0]; grouping.count()] }
}

fn table(h: &Histogram, solver: &mut Solver, palette: Palette, empty_channel: bool) -> Entries {
    let entries = palette.entries();
    let zero = h.values.partition_point(|v| *v < 0.0);
    let zeros = if h.values.get(zero) == Some(&0.0) { h.weights[zero] } else { 0.0 };
    // A pruned weight stays pruned.
    let pin = empty_channel || zeros * entries as f64 >= h.weights.iter().sum::<f64>();
    let best = solver.solve(h, entries, pin, false);
    if palette.int8 {
        return int8(&best, entries);
    }
    let mut values = rounded(&best);
    if palette.effort == Effort::Exact {
        let exact = rounded(&solver.solve(h, entries, pin, true));
        if error(h, &exact) < error(h, &values) {
            values = exact;
        }
    }
    pad(&mut values, entries);
    Entries { values, ..Entries::default() }
}

fn rounded(entries: &[f64]) -> Vec<f32> {
    entries.iter().map(|e| fp16::round(*e as f32)).collect()
}

/// Entries that no value needs are those of the last.
fn pad<T: Copy + Default>(entries: &mut Vec<T>, to: usize) {
    let last = entries.last().copied().unwrap_or_default();
    entries.resize(to, last);
}

/// The squared error of a table over a histogram.
fn error(h: &Histogram, table: &[f32]) -> f64 {
    let between = between(table);
    let mut at = 0;
    let each = |(x, w): (&f32, &f64)| {
        while between.get(at).is_some_and(|m| x > m) {
            at += 1;
        }
        let off = f64::from(*x) - f64::from(table[at]);
        w * off * off
    };
    h.values.iter().zip(&h.weights).map(each).sum()
}

/// Entries as int8 codes: the scale is the best of some that use most of the range.
pub(super) fn int8(entries: &[f64], to: usize) -> Entries {
    /// Beyond which the lowest code is no fp16.
    const LARGEST: f32 = 511.75;
    let largest = entries.iter().fold(0f64, |m, e| m.max(e.abs()));
    let code = |e: f64, scale: f32| (e / f64::from(scale)).round_ties_even().clamp(-128.0, 127.0);
    let (mut scale, mut least) = (1.0, f64::INFINITY);
    for range in (96..=127).rev() {
        let (below, above) = fp16::around((largest / f64::from(range)) as f32);
        for s in [below.min(LARGEST), above.min(LARGEST)] {
            let off = |e: &f64| (e - code(*e, s) * f64::from(s)).powi(2);
            let error = entries.iter().map(off).sum::<f64>();
            if error < least {
                (scale, least) = (s, error);
            }
        }
    }
    let mut codes: Vec<i8> = entries.iter().map(|e| code(*e, scale) as i8).collect();
    pad(&mut codes, to);
    let values = codes.iter().map(|c| fp16::round(f32::from(*c) * scale)).collect();
    Entries { values, codes, scale }
}

/// What lies in the middle of each entry and the next.
pub(super) fn between(sorted: &[f32]) -> Vec<f32> {
    sorted.windows(2).map(|e| e[0].midpoint(e[1])).collect()
}

/// The nearest entry, the lower of two.
pub(super) fn nearest(between: &[f32], x: f32) -> u8 {
    between.partition_point(|m| x > *m) as u8
}

/// That of each value, without branches.
pub(super) fn assign(between: &[f32], values: &[f32], codes: &mut [u8]) {
    if between.len() < 16 {
        return count(between, values, codes);
    }
    for (x, code) in values.iter().zip(codes) {
        let mut at = 0;
        let mut step = between.len().div_ceil(2);
        while step > 0 {
            at += if *x > between[at + step - 1] { step } else { 0 };
            step /= 2;
        }
        *code = at as u8;
    }
}

/// Few entries: the number of middles that a value is above.
fn count(between: &[f32], values: &[f32], codes: &mut [u8]) {
    const LANES: usize = 16;
    let ((whole, rest), (to, left)) = (values.as_chunks::<LANES>(), codes.as_chunks_mut::<LANES>());
    for (x, to) in whole.iter().zip(to) {
        let mut above = [0u32; LANES];
        for m in between {
            for lane in 0..LANES {
                above[lane] += u32::from(x[lane] > *m);
            }
        }
        *to = above.map(|n| n as u8);
    }
    rest.iter().zip(left).for_each(|(x, code)| *code = nearest(between, *x));
}
