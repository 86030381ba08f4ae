//! Scales and zero points of least squared error.
//!
//! A scale is tried by rounding all elements with it, which also tells the scale that fits those codes best.
//! The largest element's scale, as others take it, is always among the candidates, so the result is never
//! worse; candidates for the result are rounded to fp16 before they are compared.

use super::{fp16, histogram::Counter, layout::Weights, scheme::Linear};

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
    weights: Option<Weights<'_>>,
    linear: Linear,
) -> (f32, i32) {
    let weights = weights.filter(|w| w.any());
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
        relative.clear();
        match w {
            Weights::Each(w) => {
                // Sums of squares in fp32 have no room for weights of any size.
                let unit = w.iter().copied().fold(0f32, f32::max);
                relative.extend(w.iter().map(|w| w / unit));
            }
            Weights::Kept(k) => relative.extend(k.iter().map(|k| f32::from(u8::from(*k)))),
        }
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

/// A rounding.
#[derive(Clone, Copy)]
struct Trial {
    scale: f64,
    zero: i32,
    /// The squared error with this scale, and with the best one for the same codes.
    error: f64,
    least: f64,
    best: f64,
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
        let whole = (top / high).max(bottom / low) * if self.linear.bits < 8 { 0.97 } else { 0.985 };
        let step = if self.linear.bits < 8 { 0.94 } else { 0.965 };
        let plain = self.trial(f64::from(positive(top.max(-bottom) / high)), zero);
        let mut best = plain;
        let mut worse = 0;
        let mut scale = whole;
        for _ in 0..40 {
            let trial = self.trial(scale, zero);
            worse = if trial.least < best.least { 0 } else { worse + 1 };
            if trial.least < best.least {
                best = trial;
            }
            scale *= step;
            // What is cut off the largest element is an error by itself.
            let cut = (top - high * scale).max(low * scale - bottom).max(0.0);
            if worse > 2 || self.weights.is_none() && cut * cut > best.least {
                break;
            }
        }
        self.choose(best, plain)
    }

    fn affine(&self) -> (f32, i32) {
        let (low, high) = (f64::from(self.low), f64::from(self.high));
        let (scale, zero) = self.span(low, high);
        let plain = self.trial(f64::from(positive(scale)), zero);
        let mut best = ((low, high), plain);
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
                if trial.least < best.1.least {
                    (best, worse) = (((a, b), trial), 0);
                }
            }
        }
        self.choose(best.1, plain)
    }

    /// The scale and the zero point that spread the codes over a range that has zero in it.
    fn span(&self, low: f64, high: f64) -> (f64, i32) {
        let (first, last) = self.linear.range();
        let scale = ((high - low) / f64::from(last - first)).max(f64::from(fp16::SMALLEST));
        let zero = (f64::from(first) - low / scale).round_ties_even();
        (scale, (zero as i32).clamp(first, last))
    }

    /// The best of the fp16 numbers around the scale that fits the codes of a trial, once more with the codes
    /// of that scale, and of the one that others take.
    fn choose(&self, best: Trial, plain: Trial) -> (f32, i32) {
        let zero = best.zero;
        let refit = if self.values.len() > 64 { self.trial(best.best, zero) } else { best };
        let best = if refit.least < best.least { refit } else { best };
        let (below, above) = fp16::around(best.best as f32);
        // Products of few bits are all but exact.
        let exact = self.linear.bits < 8;
        let error = |scale, zero| {
            if exact { self.trial(f64::from(scale), zero).error } else { self.error(scale, zero) }
        };
        let mut chosen = (plain.scale as f32, plain.zero);
        let mut least = if exact { plain.error } else { error(chosen.0, chosen.1) };
        for candidate in [(below, zero), (above, zero)] {
            if candidate != chosen {
                let error = error(candidate.0, candidate.1);
                if error < least {
                    (chosen, least) = (candidate, error);
                }
            }
        }
        chosen
    }

    fn trial(&self, scale: f64, zero: i32) -> Trial {
        let scale = scale.max(f64::from(fp16::SMALLEST));
        let step = Step::new(self.linear, scale as f32, zero);
        let [mut error, mut lean, mut power] = [0f64; 3];
        self.blocks(|values, weights| {
            let mut sums = [[0f32; LANES]; 3];
            match weights {
                None => step.trial(values, &mut sums),
                Some(weights) => step.heavy_trial(values, weights, &mut sums),
            }
            let [e, l, p] = sums_of(&sums);
            (error, lean, power) = (error + e, lean + l, power + p);
        });
        let ratio = if power > 0.0 { lean / power } else { 0.0 };
        let square = scale * scale;
        let least = square * (error - ratio * lean).max(0.0);
        Trial { scale, zero, error: square * error, least, best: scale * (1.0 + ratio) }
    }

    /// The squared error of decoded values.
    fn error(&self, scale: f32, zero: i32) -> f64 {
        let step = Step::new(self.linear, scale, zero);
        let mut total = 0.0;
        self.blocks(|values, weights| {
            let mut error = [0f32; LANES];
            match weights {
                None => step.error(values, &mut error),
                Some(weights) => step.heavy_error(values, weights, &mut error),
            }
            total += sums_of(&[error])[0];
        });
        total
    }

    /// Stretches that fp32 adds up well, in whole registers, the last filled up with zeros, which are no error;
    /// the order depends on the number of elements only.
    fn blocks(&self, mut each: impl FnMut(&[Lanes], Option<&[Lanes]>)) {
        const BLOCK: usize = 1 << 8;
        let (whole, rest) = self.values.as_chunks::<LANES>();
        let weights = self.weights.map(|w| w.as_chunks::<LANES>());
        for (i, values) in whole.chunks(BLOCK).enumerate() {
            each(values, weights.map(|w| &w.0[i * BLOCK..i * BLOCK + values.len()]));
        }
        if !rest.is_empty() {
            let fill = |rest: &[f32]| {
                let mut full = [0f32; LANES];
                full[..rest.len()].copy_from_slice(rest);
                [full]
            };
            each(&fill(rest), weights.map(|w| fill(w.1)).as_ref().map(|w| w.as_slice()));
        }
    }
}

const LANES: usize = 8;
type Lanes = [f32; LANES];

#[inline(never)]
fn sums_of<const N: usize>(lanes: &[Lanes; N]) -> [f64; N] {
    let mut sums = [0f64; N];
    for n in 0..N {
        let mut halves = [0f32; LANES / 2];
        for i in 0..LANES / 2 {
            halves[i] = lanes[n][i] + lanes[n][i + LANES / 2];
        }
        sums[n] = f64::from((halves[0] + halves[2]) + (halves[1] + halves[3]));
    }
    sums
}

/// What rounding with a scale needs. Its passes are functions of their own, of one operation a loop: together
/// with what is around them they would not be kept in whole registers.
struct Step {
    scale: f32,
    inverse: f32,
    low: f32,
    high: f32,
}

impl Step {
    fn new(linear: Linear, scale: f32, zero: i32) -> Step {
        let (low, high) = reach(linear, scale, zero);
        Step { scale, inverse: scale.recip(), low, high }
    }

    /// Elements in units of the scale, less their codes, and the codes.
    #[inline(always)]
    fn round(&self, x: &Lanes) -> (Lanes, Lanes) {
        let [mut off, mut code] = [[0f32; LANES]; 2];
        for n in 0..LANES {
            off[n] = x[n] * self.inverse;
        }
        for n in 0..LANES {
            code[n] = fp16::integer(fp16::bound(off[n], self.low, self.high));
        }
        for n in 0..LANES {
            off[n] -= code[n];
        }
        (off, code)
    }

    /// Squared differences, differences times codes, squared codes.
    #[inline(never)]
    fn trial(&self, values: &[Lanes], sums: &mut [Lanes; 3]) {
        let [mut e, mut l, mut p] = [[0f32; LANES]; 3];
        for x in values {
            let (off, code) = self.round(x);
            for n in 0..LANES {
                e[n] += off[n] * off[n];
            }
            for n in 0..LANES {
                l[n] += off[n] * code[n];
            }
            for n in 0..LANES {
                p[n] += code[n] * code[n];
            }
        }
        *sums = [e, l, p];
    }

    #[inline(never)]
    fn heavy_trial(&self, values: &[Lanes], weights: &[Lanes], sums: &mut [Lanes; 3]) {
        let [mut e, mut l, mut p] = [[0f32; LANES]; 3];
        for (x, w) in values.iter().zip(weights) {
            let (off, code) = self.round(x);
            for n in 0..LANES {
                e[n] += w[n] * off[n] * off[n];
            }
            for n in 0..LANES {
                l[n] += w[n] * off[n] * code[n];
            }
            for n in 0..LANES {
                p[n] += w[n] * code[n] * code[n];
            }
        }
        *sums = [e, l, p];
    }

    /// Decoded values less the elements.
    #[inline(always)]
    fn off(&self, x: &Lanes) -> Lanes {
        let (_, mut code) = self.round(x);
        for code in &mut code {
            *code = fp16::round_normal(*code * self.scale);
        }
        for n in 0..LANES {
            code[n] -= x[n];
        }
        code
    }

    #[inline(never)]
    fn error(&self, values: &[Lanes], error: &mut Lanes) {
        let mut e = [0f32; LANES];
        for x in values {
            let off = self.off(x);
            for n in 0..LANES {
                e[n] += off[n] * off[n];
            }
        }
        *error = e;
    }

    #[inline(never)]
    fn heavy_error(&self, values: &[Lanes], weights: &[Lanes], error: &mut Lanes) {
        let mut e = [0f32; LANES];
        for (x, w) in values.iter().zip(weights) {
            let off = self.off(x);
            for n in 0..LANES {
                e[n] += w[n] * off[n] * off[n];
            }
        }
        *error = e;
    }
}

/// A scale as fp16, above zero.
fn positive(scale: f64) -> f32 {
    fp16::round(scale as f32).max(fp16::SMALLEST)
}

/// How far codes reach below and above a zero point, with nothing that would overflow fp16.
pub(super) fn reach(linear: Linear, scale: f32, zero: i32) -> (f32, f32) {
    let (low, high) = linear.range();
    let (low, high) = ((low - zero) as f32, (high - zero) as f32);
    if scale < 256.0 {
        return (low, high);
    }
    let most = (65519.0 / scale).floor();
    (low.max(-most), high.min(most))
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
    let (mut least, mut most) = (0f32, 0f32);
    for x in low.iter().chain(rest) {
        least = if *x < least { *x } else { least };
    }
    for x in high.iter().chain(rest) {
        most = if *x > most { *x } else { most };
    }
    (least, most)
}
