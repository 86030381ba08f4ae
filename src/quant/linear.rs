//! Scales and zero points of least squared error.
//!
//! A scale is tried by rounding all elements with it, which also tells the scale that fits those codes best.
//! The largest element's scale, as others take it, is always among the candidates, so the result is never
//! worse; candidates for the result are rounded to fp16 before they are compared.

use super::{fp16, histogram::Counter, scheme::Linear};

/// Elements of a group above which only the distinct fp16 values and their numbers are searched.
const MANY: usize = 1 << 16;

/// Buffers that searches share.
#[derive(Default)]
pub(super) struct Scratch {
    counter: Counter,
    values: Vec<f32>,
    weights: Vec<f32>,
}

/// The scale and the zero point of a group; elements without importance do not count.
pub(super) fn fit(
    scratch: &mut Scratch,
    values: &[f32],
    weights: Option<&[f32]>,
    linear: Linear,
) -> (f32, i32) {
    let weights = weights.filter(|w| w.iter().any(|w| *w > 0.0));
    let Scratch { counter, values: distinct, weights: relative } = scratch;
    if values.len() > MANY {
        let histogram = counter.count(values, weights);
        distinct.clear();
        distinct.extend(&histogram.values);
        relative.clear();
        relative.extend(histogram.weights.iter().map(|w| *w as f32));
        return Group::new(distinct, Some(relative), linear).fit();
    }
    let weights = weights.map(|w| {
        // Sums of squares in fp32 have no room for weights of any size.
        let unit = w.iter().copied().fold(0f32, f32::max);
        relative.clear();
        relative.extend(w.iter().map(|w| w / unit));
        &**relative
    });
    Group::new(values, weights, linear).fit()
}

struct Group<'a> {
    values: &'a [f32],
    weights: Option<&'a [f32]>,
    low: f32,
    high: f32,
    linear: Linear,
}

/// A rounding: the scale, what the codes are within, and sums over the elements in units of the scale.
#[derive(Clone, Copy)]
struct Trial {
    scale: f64,
    zero: i32,
    /// Squared differences from the codes.
    error: f64,
    /// Differences times codes, and squared codes.
    lean: f64,
    power: f64,
}

impl Trial {
    /// The scale that fits the codes best.
    fn best(&self) -> f64 {
        if self.power > 0.0 { self.scale * (1.0 + self.lean / self.power) } else { self.scale }
    }

    /// The squared error with that scale.
    fn least(&self) -> f64 {
        let gain = if self.power > 0.0 { self.lean * self.lean / self.power } else { 0.0 };
        self.scale * self.scale * (self.error - gain).max(0.0)
    }
}

impl<'a> Group<'a> {
    fn new(values: &'a [f32], weights: Option<&'a [f32]>, linear: Linear) -> Group<'a> {
        let (low, high) = match weights {
            None => extremes(values),
            Some(w) => values
                .iter()
                .zip(w)
                .filter(|(_, w)| **w > 0.0)
                .fold((0f32, 0f32), |a, (x, _)| (a.0.min(*x), a.1.max(*x))),
        };
        Group { values, weights, low, high, linear }
    }

    fn fit(&self) -> (f32, i32) {
        if self.low == 0.0 && self.high == 0.0 {
            return (1.0, self.linear.middle());
        }
        if self.linear.offset { self.affine() } else { self.symmetric() }
    }

    fn symmetric(&self) -> (f32, i32) {
        let zero = self.linear.middle();
        let (low, high) = self.linear.range();
        let (low, high) = (f64::from(low - zero), f64::from(high - zero));
        let (top, bottom) = (f64::from(self.high), f64::from(self.low));
        // The least scale that clips nothing.
        let whole = (top / high).max(bottom / low);
        let step = if self.linear.bits < 8 { 0.94 } else { 0.965 };
        let mut best = self.trial(whole, zero);
        let mut worse = 0;
        let mut scale = whole;
        for _ in 0..40 {
            scale *= step;
            // What is cut off the largest element is an error by itself.
            let cut = (top - high * scale).max(low * scale - bottom).max(0.0);
            if worse > 2 || self.weights.is_none() && cut * cut > best.least() {
                break;
            }
            let trial = self.trial(scale, zero);
            worse = if trial.least() < best.least() { 0 } else { worse + 1 };
            if trial.least() < best.least() {
                best = trial;
            }
        }
        let refit = self.trial(best.best(), zero);
        let best = if refit.least() < best.least() { refit } else { best };
        let plain = half::f16::from_f64(top.max(-bottom) / high).to_f32().max(fp16::SMALLEST);
        self.choose(best.best(), zero, (plain, zero))
    }

    fn affine(&self) -> (f32, i32) {
        let (low, high) = (f64::from(self.low), f64::from(self.high));
        let plain = self.span(low, high);
        let mut best = ((low, high), self.trial(plain.0, plain.1));
        let step = if self.linear.bits < 8 { 0.95 } else { 0.975 };
        let back = 1.0 / step;
        // Both ends inwards, then each by itself, and outwards again.
        for (by_low, by_high) in [(step, step), (step, 1.0), (1.0, step), (back, 1.0), (1.0, back)] {
            let (mut a, mut b) = best.0;
            let mut worse = 0;
            for _ in 0..24 {
                (a, b) = (a * by_low, b * by_high);
                if worse > 1 || (a, b) == best.0 || b - a < (high - low) * 0.05 {
                    break;
                }
                let (scale, zero) = self.span(a, b);
                let trial = self.trial(scale, zero);
                worse += 1;
                if trial.least() < best.1.least() {
                    (best, worse) = (((a, b), trial), 0);
                }
            }
        }
        let zero = best.1.zero;
        let refit = self.trial(best.1.best(), zero);
        let best = if refit.least() < best.1.least() { refit } else { best.1 };
        let (scale, plain_zero) = plain;
        let plain = half::f16::from_f64(scale).to_f32().max(fp16::SMALLEST);
        self.choose(best.best(), zero, (plain, plain_zero))
    }

    /// The scale and the zero point that spread the codes over a range that has zero in it.
    fn span(&self, low: f64, high: f64) -> (f64, i32) {
        let (first, last) = self.linear.range();
        let scale = ((high - low) / f64::from(last - first)).max(f64::from(fp16::SMALLEST));
        let zero = (f64::from(first) - low / scale).round_ties_even();
        (scale, (zero as i32).clamp(first, last))
    }

    /// The best of the fp16 numbers around a scale and of the one that others take.
    fn choose(&self, scale: f64, zero: i32, plain: (f32, i32)) -> (f32, i32) {
        let (below, above) = fp16::around(scale as f32);
        let mut best = plain;
        let mut least = self.error(plain.0, plain.1);
        for scale in [below, above] {
            let error = if (scale, zero) == best { least } else { self.error(scale, zero) };
            if error < least {
                (best, least) = ((scale, zero), error);
            }
        }
        best
    }

    fn trial(&self, scale: f64, zero: i32) -> Trial {
        let scale = scale.max(f64::from(fp16::SMALLEST));
        let [error, lean, power] = self.sums(scale as f32, zero, |x, inverse, low, high| {
            let x = x * inverse;
            let code = fp16::integer(fp16::bound(x, low, high));
            let off = x - code;
            [off * off, off * code, code * code]
        });
        Trial { scale, zero, error, lean, power }
    }

    /// The squared error of decoded values.
    fn error(&self, scale: f32, zero: i32) -> f64 {
        if self.linear.bits < 8 {
            // Products of so few bits are all but exact.
            let trial = self.trial(f64::from(scale), zero);
            return trial.scale * trial.scale * trial.error;
        }
        let [error] = self.sums(scale, zero, |x, inverse, low, high| {
            let code = fp16::integer(fp16::bound(x * inverse, low, high));
            let off = x - fp16::round(code * scale);
            [off * off]
        });
        error
    }

    /// Sums of what is made of each element, in an order that depends on the number of elements only.
    fn sums<const N: usize>(
        &self,
        scale: f32,
        zero: i32,
        each: impl Fn(f32, f32, f32, f32) -> [f32; N],
    ) -> [f64; N] {
        const BLOCK: usize = 1 << 11;
        let (low, high) = reach(self.linear, scale, zero);
        let inverse = scale.recip();
        let mut sums = [0f64; N];
        let mut add = |part: [f32; N]| sums.iter_mut().zip(part).for_each(|(s, p)| *s += f64::from(p));
        match self.weights {
            None => {
                for values in self.values.chunks(BLOCK) {
                    add(lanes(values, |x| each(*x, inverse, low, high)));
                }
            }
            Some(weights) => {
                for (values, weights) in self.values.chunks(BLOCK).zip(weights.chunks(BLOCK)) {
                    add(weighted(values, weights, |x| each(x, inverse, low, high)));
                }
            }
        }
        sums
    }
}

/// How far codes reach below and above a zero point, with nothing that would overflow fp16.
pub(super) fn reach(linear: Linear, scale: f32, zero: i32) -> (f32, f32) {
    let (low, high) = linear.range();
    let most = (65519.0 / scale).floor();
    (((low - zero) as f32).max(-most), ((high - zero) as f32).min(most))
}

const LANES: usize = 8;

fn lanes<const N: usize>(values: &[f32], each: impl Fn(&f32) -> [f32; N]) -> [f32; N] {
    let mut sums = [[0f32; LANES]; N];
    let (whole, rest) = values.as_chunks::<LANES>();
    for x in whole {
        for lane in 0..LANES {
            let part = each(&x[lane]);
            for n in 0..N {
                sums[n][lane] += part[n];
            }
        }
    }
    let mut out = sums.map(|s| s.iter().sum::<f32>());
    for x in rest {
        out.iter_mut().zip(each(x)).for_each(|(s, p)| *s += p);
    }
    out
}

fn weighted<const N: usize>(values: &[f32], weights: &[f32], each: impl Fn(f32) -> [f32; N]) -> [f32; N] {
    let mut sums = [[0f32; LANES]; N];
    let ((whole, rest), (heavy, left)) = (values.as_chunks::<LANES>(), weights.as_chunks::<LANES>());
    for (x, w) in whole.iter().zip(heavy) {
        for lane in 0..LANES {
            let part = each(x[lane]);
            for n in 0..N {
                sums[n][lane] += w[lane] * part[n];
            }
        }
    }
    let mut out = sums.map(|s| s.iter().sum::<f32>());
    for (x, w) in rest.iter().zip(left) {
        out.iter_mut().zip(each(*x)).for_each(|(s, p)| *s += w * p);
    }
    out
}

/// The least and the largest of some values and zero.
fn extremes(values: &[f32]) -> (f32, f32) {
    let (mut low, mut high) = ([0f32; LANES], [0f32; LANES]);
    let (whole, rest) = values.as_chunks::<LANES>();
    for x in whole {
        for lane in 0..LANES {
            low[lane] = if x[lane] < low[lane] { x[lane] } else { low[lane] };
            high[lane] = if x[lane] > high[lane] { x[lane] } else { high[lane] };
        }
    }
    let all = |ends: [f32; LANES]| ends.into_iter().chain(rest.iter().copied());
    (all(low).fold(0.0, f32::min), all(high).fold(0.0, f32::max))
}
