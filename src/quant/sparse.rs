//! Which elements a sparse weight keeps.

use half::f16;
use rayon::prelude::*;

use super::{
    encoded::Encoded,
    grid::Grid,
    layout::{Importance, Layout},
    scheme::{Scheme, Sparse},
};
use crate::error::Result;

/// Keeps what the scheme says, and compresses it as `inner` says.
pub(super) fn encode(
    values: &[f32],
    layout: Layout<'_>,
    sparse: Sparse,
    inner: &Scheme,
    importance: Option<&[f32]>,
) -> Result<Encoded> {
    let mask = mask(values, layout, sparse, importance)?;
    if let Scheme::Dense = inner {
        let mut kept = Vec::with_capacity(mask.iter().filter(|k| **k).count());
        kept.extend(values.iter().zip(&mask).filter(|(_, k)| **k).map(|(v, _)| f16::from_f32(*v)));
        return Ok(Encoded::Sparse { mask, inner: Box::new(Encoded::Dense { values: kept }) });
    }
    inner.fits(layout)?;
    let grid = match Importance::new(importance, layout)? {
        Importance::Equal => Grid::search(values, layout, inner, Importance::Kept(&mask))?,
        importance => {
            let weights: Vec<f32> = (0..values.len())
                .into_par_iter()
                .map(|i| if mask[i] { importance.of(i, layout).max(f32::MIN_POSITIVE) } else { 0.0 })
                .collect();
            Grid::search(values, layout, inner, Importance::Each(&weights))?
        }
    };
    let mut encoded = grid.encode(values)?;
    if let Encoded::Linear { codes, .. } | Encoded::Palette { indices: codes, .. } = &mut encoded {
        let mut mask = mask.iter();
        codes.retain(|_| mask.next().is_some_and(|k| *k));
    }
    Ok(Encoded::Sparse { mask, inner: Box::new(encoded) })
}

/// The elements to keep: those of the largest square times importance, the first of equal ones. Zeros are not
/// kept, except that one element always is.
pub fn mask(
    values: &[f32],
    layout: Layout<'_>,
    sparse: Sparse,
    importance: Option<&[f32]>,
) -> Result<Vec<bool>> {
    let importance = Importance::new(importance, layout)?;
    let score = |i: usize| match importance {
        Importance::Equal => values[i].abs(),
        _ => values[i].abs() * importance.of(i, layout).sqrt(),
    };
    let mut mask = match sparse {
        Sparse::Percent(percent) => {
            let drop = (values.len() as f64 * f64::from(percent) / 100.0).round() as usize;
            largest(values.len(), values.len() - drop.min(values.len()), score)
        }
        Sparse::Pattern { n, m } => pattern(layout, n, m, values.len(), score),
    };
    mask.par_iter_mut().zip(values).for_each(|(keep, x)| *keep &= *x != 0.0);
    // A weight file holds no empty array.
    if !mask.contains(&true)
        && let Some(first) = mask.first_mut()
    {
        *first = true;
    }
    Ok(mask)
}

/// So many of the largest scores, the first of equal ones.
fn largest(count: usize, keep: usize, score: impl Fn(usize) -> f32 + Sync) -> Vec<bool> {
    // Floats that are not negative are in the order of their bits: the threshold is found 16 bits at a time.
    let tally = |within: Option<u32>| {
        let piece = |from: usize| {
            let mut counts = vec![0u32; 1 << 16];
            for bits in (from..count.min(from + PIECE)).map(|i| score(i).to_bits()) {
                match within {
                    None => counts[(bits >> 16) as usize] += 1,
                    Some(high) if bits >> 16 == high => counts[(bits & 0xffff) as usize] += 1,
                    Some(_) => {}
                }
            }
            counts
        };
        const PIECE: usize = 1 << 20;
        let pieces = (0..count.div_ceil(PIECE)).into_par_iter().map(|i| piece(i * PIECE));
        pieces.reduce(
            || vec![0; 1 << 16],
            |mut a, b| {
                a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
                a
            },
        )
    };
    // The digit that holds the last one kept, and how many of it are.
    let digit = |counts: Vec<u32>, mut left: usize| {
        for (digit, n) in counts.into_iter().enumerate().rev() {
            let n = n as usize;
            if left <= n {
                return (digit as u32, left);
            }
            left -= n;
        }
        (0, 0)
    };
    if keep == 0 {
        return vec![false; count];
    }
    let (high, left) = digit(tally(None), keep);
    let (low, mut equal) = digit(tally(Some(high)), left);
    let threshold = (high << 16) | low;
    (0..count)
        .map(|i| {
            let bits = score(i).to_bits();
            let keep = bits > threshold || bits == threshold && equal > 0;
            equal -= usize::from(keep && bits == threshold);
            keep
        })
        .collect()
}

/// `n` of each `m` neighbours along the input axis; of fewer at the end, as many.
fn pattern(
    layout: Layout<'_>,
    n: usize,
    m: usize,
    count: usize,
    score: impl Fn(usize) -> f32 + Sync,
) -> Vec<bool> {
    let inputs = layout.shape[layout.input];
    let after: usize = layout.shape[layout.input + 1..].iter().product();
    let mut mask = vec![false; count];
    let slab = inputs * after;
    mask.par_chunks_mut(slab).enumerate().for_each_init(Vec::new, |order: &mut Vec<usize>, (i, mask)| {
        for column in 0..after {
            for first in (0..inputs).step_by(m) {
                order.clear();
                order.extend((first..inputs.min(first + m)).map(|input| input * after + column));
                order.sort_by(|a, b| score(i * slab + b).total_cmp(&score(i * slab + a)));
                order.iter().take(n).for_each(|at| mask[*at] = true);
            }
        }
    });
    mask
}
