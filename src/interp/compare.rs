//! How far two tensors are apart.
//!
//! All sums are in 64 bits. Only places where both are finite enter the distances; a place where one is
//! not, and the other is something else, is a bad one.

use crate::{bail, error::Result};

/// How far seen values are from expected ones.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    pub count: usize,
    /// The largest difference.
    pub max: f64,
    /// Largest minus smallest expected value; where all are equal their magnitude, and 1 for zeros.
    pub spread: f64,
    /// The cosine of the angle between the two, 1 for two zero vectors.
    pub cosine: f64,
    /// `20·log10(spread / root mean square difference)` in decibels, infinite without a difference.
    pub psnr: f64,
    /// Values that are infinite or no number.
    pub seen_non_finite: usize,
    pub expected_non_finite: usize,
    /// The first place that is off by more than the tolerance.
    pub first_bad: Option<Bad>,
}

/// A place where the two disagree.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bad {
    pub index: usize,
    pub seen: f32,
    pub expected: f32,
}

impl Comparison {
    /// The largest difference as a share of the spread.
    pub fn relative(&self) -> f64 {
        self.max / self.spread
    }
}

/// Compares element by element; `tolerance` is a share of the spread.
pub fn compare(seen: &[f32], expected: &[f32], tolerance: f64) -> Result<Comparison> {
    compare_over(seen, expected, tolerance, spread(expected))
}

/// Compares a choice of elements, as a share of the spread of all.
pub fn compare_over(seen: &[f32], expected: &[f32], tolerance: f64, spread: f64) -> Result<Comparison> {
    same_length(seen, expected)?;
    let pairs = || seen.iter().zip(expected).map(|(s, e)| (f64::from(*s), f64::from(*e)));
    let finite = || pairs().filter(|(s, e)| s.is_finite() && e.is_finite());
    let squares = finite().map(|(s, e)| (s - e).powi(2)).sum::<f64>();
    let (ss, ee, se) =
        finite().fold((0.0, 0.0, 0.0), |(ss, ee, se), (s, e)| (ss + s * s, ee + e * e, se + s * e));
    let bad = |(s, e): (f64, f64)| match s.is_finite() && e.is_finite() {
        true => (s - e).abs() > tolerance * spread,
        false => s != e && !(s.is_nan() && e.is_nan()),
    };
    #[expect(clippy::cast_precision_loss, reason = "a count of elements in memory")]
    let rms = (squares / finite().count().max(1) as f64).sqrt();
    Ok(Comparison {
        count: seen.len(),
        max: finite().map(|(s, e)| (s - e).abs()).fold(0.0, f64::max),
        spread,
        cosine: match (ss == 0.0, ee == 0.0) {
            (true, true) => 1.0,
            (false, false) => se / (ss.sqrt() * ee.sqrt()),
            _ => 0.0,
        },
        psnr: if rms == 0.0 { f64::INFINITY } else { 20.0 * (spread / rms).log10() },
        seen_non_finite: seen.iter().filter(|v| !v.is_finite()).count(),
        expected_non_finite: expected.iter().filter(|v| !v.is_finite()).count(),
        first_bad: pairs().position(bad).map(|index| Bad {
            index,
            seen: seen[index],
            expected: expected[index],
        }),
    })
}

/// The Kullback-Leibler divergence of the softmax of what was seen from that of what was expected, in
/// nats, averaged over rows of `classes` logits.
pub fn divergence(seen: &[f32], expected: &[f32], classes: usize) -> Result<f64> {
    let rows = rows(seen, expected, classes)?;
    let one = |(seen, expected): (&[f32], &[f32])| -> f64 {
        let (seen, expected) = (log_softmax(seen), log_softmax(expected));
        expected
            .iter()
            .zip(&seen)
            .filter(|(e, _)| **e > f64::NEG_INFINITY)
            .map(|(e, s)| e.exp() * (e - s))
            .sum()
    };
    Ok(mean(rows.into_iter().map(one)))
}

/// The share of the `k` largest expected logits of a row that are among the `k` largest seen ones,
/// averaged over rows of `classes` logits.
pub fn top_k(seen: &[f32], expected: &[f32], classes: usize, k: usize) -> Result<f64> {
    let rows = rows(seen, expected, classes)?;
    if k == 0 || k > classes {
        bail!("the {k} largest of {classes} classes are asked for");
    }
    let one = |(seen, expected): (&[f32], &[f32])| {
        let (seen, expected) = (largest(seen, k), largest(expected, k));
        mean(expected.iter().map(|i| if seen.contains(i) { 1.0 } else { 0.0 }))
    };
    Ok(mean(rows.into_iter().map(one)))
}

/// The rows of `width` values whose mask is not zero.
pub fn kept_rows(values: &[f32], mask: &[i64], width: usize) -> Result<Vec<f32>> {
    if mask.len().checked_mul(width) != Some(values.len()) {
        bail!("{} values are not {} rows of {width}", values.len(), mask.len());
    }
    let rows = values.chunks(width.max(1)).zip(mask).filter(|(_, m)| **m != 0);
    Ok(rows.flat_map(|(row, _)| row).copied().collect())
}

fn same_length(seen: &[f32], expected: &[f32]) -> Result<()> {
    if seen.len() != expected.len() {
        bail!("{} values are seen, {} are expected", seen.len(), expected.len());
    }
    Ok(())
}

/// Largest minus smallest value; where all are equal their magnitude, and 1 for zeros.
pub fn spread(expected: &[f32]) -> f64 {
    let finite = || expected.iter().filter(|v| v.is_finite()).map(|v| f64::from(*v));
    let high = finite().fold(f64::NEG_INFINITY, f64::max);
    let low = finite().fold(f64::INFINITY, f64::min);
    match (high > low, high.abs() > 0.0 && high.is_finite()) {
        (true, _) => high - low,
        (false, true) => high.abs(),
        (false, false) => 1.0,
    }
}

fn rows<'a>(seen: &'a [f32], expected: &'a [f32], classes: usize) -> Result<Vec<(&'a [f32], &'a [f32])>> {
    same_length(seen, expected)?;
    if classes == 0 || !seen.len().is_multiple_of(classes) {
        bail!("{} values are no rows of {classes} classes", seen.len());
    }
    Ok(seen.chunks(classes).zip(expected.chunks(classes)).collect())
}

fn log_softmax(row: &[f32]) -> Vec<f64> {
    let high = row.iter().map(|v| f64::from(*v)).fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = row.iter().map(|v| (f64::from(*v) - high).exp()).sum();
    row.iter().map(|v| f64::from(*v) - high - sum.ln()).collect()
}

/// Indices of the largest; of equals the first.
fn largest(row: &[f32], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
    order.truncate(k);
    order
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), v| (sum + v, count + 1.0));
    if count == 0.0 { 0.0 } else { sum / count }
}
