//! Scales and zero points of least squared error.
//!
//! A scale is tried by rounding all elements with it, which also tells the scale that fits those codes best.
//! The largest element's scale, as others take it, is always among the candidates, so the result is never
//! worse; candidates for the result are rounded to fp16 before they are compared.

use super::{fp16, histogram::Counter, layout::Weights, scheme::Linear};

/// Elements of a group above which only the distinct fp16 values and their numbers are searched.
const MANY: usize = 1 << 16;
/// Elements of a group up to which several groups are searched side by side.
const SHORT: usize = 1 << 8;

/// Buffers that searches share.
#[derive(Default)]
pub(super) struct Scratch {
    counter: Counter,
    values: Vec<f32>,
    weights: Vec<f32>,
    beside: Vec<Beside>,
    beside_weights: Vec<Beside>,
}

/// The scales and the zero points of groups of `size` elements each, which follow one another; elements without
/// importance do not count.
pub(super) fn fit(
    scratch: &mut Scratch,
    values: &[f32],
    weights: Option<Weights<'_>>,
    size: usize,
    linear: Linear,
    out: &mut [(f32, i32)],
) {
    let part = |i: usize, n: usize| i * size..(i + n) * size;
    if size > SHORT {
        for (i, out) in out.iter_mut().enumerate() {
            *out = fit_one(scratch, &values[part(i, 1)], weights.map(|w| w.part(part(i, 1))), linear);
        }
        return;
    }
    let Scratch { beside, beside_weights, .. } = scratch;
    for (i, out) in out.chunks_mut(BESIDE).enumerate() {
        let part = part(i * BESIDE, out.len());
        turn(&values[part.clone()], size, beside);
        let weights = weights.map(|w| {
            match w.part(part) {
                Weights::Each(w) => turn(w, size, beside_weights),
                Weights::Kept(k) => turn(&ones(k).collect::<Vec<f32>>(), size, beside_weights),
            }
            relative(beside_weights);
            &**beside_weights
        });
        let found = Search::new(Short { values: beside, weights }, linear).fit();
        out.copy_from_slice(&found[..out.len()]);
    }
}

fn fit_one(
    scratch: &mut Scratch,
    values: &[f32],
    weights: Option<Weights<'_>>,
    linear: Linear,
) -> (f32, i32) {
    let weights = weights.filter(|w| w.any());
    let Scratch { counter, values: distinct, weights: relative, .. } = scratch;
    let whole = if values.len() > MANY {
        let histogram = counter.count(values, weights);
        distinct.clear();
        distinct.extend(&histogram.values);
        relative.clear();
        relative.extend(histogram.weights.iter().map(|w| *w as f32));
        Whole { values: distinct, weights: Some(relative) }
    } else {
        let weights = weights.map(|w| {
            relative.clear();
            match w {
                Weights::Each(w) => {
                    // Sums of squares in fp32 have no room for weights of any size.
                    let unit = w.iter().copied().fold(0f32, f32::max);
                    relative.extend(w.iter().map(|w| w / unit));
                }
                Weights::Kept(k) => relative.extend(ones(k)),
            }
            &**relative
        });
        Whole { values, weights }
    };
    Search::new(whole, linear).fit()[0]
}

/// One for what is kept, nothing for the rest.
fn ones(kept: &[bool]) -> impl Iterator<Item = f32> {
    kept.iter().map(|k| f32::from(u8::from(*k)))
}

/// Elements of groups that are `size` long, side by side; where there are fewer groups, the others are zero.
fn turn(groups: &[f32], size: usize, to: &mut Vec<Beside>) {
    to.clear();
    to.resize(size, [0.0; BESIDE]);
    for (lane, group) in groups.chunks(size).enumerate() {
        to.iter_mut().zip(group).for_each(|(to, x)| to[lane] = *x);
    }
}

/// Divides weights by the largest of their group; a group without any has all alike.
fn relative(weights: &mut [Beside]) {
    let mut unit = [0f32; BESIDE];
    for w in weights.iter() {
        (0..BESIDE).for_each(|n| unit[n] = unit[n].max(w[n]));
    }
    for w in weights {
        (0..BESIDE).for_each(|n| w[n] = if unit[n] > 0.0 { w[n] / unit[n] } else { 1.0 });
    }
}

/// G groups, and what rounding them costs.
trait Elements<const G: usize> {
    /// The least and the largest elements that count, or zero.
    fn extremes(&self) -> [[f32; G]; 2];
    /// In units of each scale: sums of squared differences, of differences times codes, of squared codes.
    fn trial(&self, steps: &Steps<G>) -> [[f64; G]; 3];
    /// The squared error of decoded values.
    fn error(&self, steps: &Steps<G>) -> [f64; G];
    /// Whether some elements count more than others.
    fn weighted(&self) -> bool;
    fn len(&self) -> usize;
}

/// Groups that are searched together; each of them by itself is searched in the same way.
struct Search<E, const G: usize> {
    elements: E,
    low: [f32; G],
    high: [f32; G],
    linear: Linear,
}

/// Roundings of some groups.
#[derive(Clone, Copy)]
struct Trials<const G: usize> {
    scale: [f64; G],
    zero: [i32; G],
    /// The squared errors with these scales, and with the best ones for the same codes.
    error: [f64; G],
    least: [f64; G],
    best: [f64; G],
}

impl<const G: usize> Trials<G> {
    /// Takes one of them from others.
    #[inline(always)]
    fn take(&mut self, n: usize, from: &Trials<G>) {
        self.scale[n] = from.scale[n];
        self.zero[n] = from.zero[n];
        self.error[n] = from.error[n];
        self.least[n] = from.least[n];
        self.best[n] = from.best[n];
    }
}

// Loops over groups are spelt out: closures over arrays are calls.
impl<E: Elements<G>, const G: usize> Search<E, G> {
    fn new(elements: E, linear: Linear) -> Search<E, G> {
        let [low, high] = elements.extremes();
        Search { elements, low, high, linear }
    }

    fn fit(&self) -> [(f32, i32); G] {
        let mut found = if self.linear.offset { self.affine() } else { self.symmetric() };
        for (found, empty) in found.iter_mut().zip(self.empty()) {
            if empty {
                *found = (1.0, self.linear.middle());
            }
        }
        found
    }

    fn empty(&self) -> [bool; G] {
        let mut empty = [false; G];
        for (empty, ends) in empty.iter_mut().zip(self.low.iter().zip(&self.high)) {
            *empty = ends == (&0.0, &0.0);
        }
        empty
    }

    fn symmetric(&self) -> [(f32, i32); G] {
        let zero = [self.linear.middle(); G];
        let (low, high) = self.linear.range();
        let (low, high) = (f64::from(low - zero[0]), f64::from(high - zero[0]));
        let (first, step) = if self.linear.bits < 8 { (0.97, 0.94) } else { (0.985, 0.965) };
        let [mut top, mut bottom, mut scale, mut whole] = [[0f64; G]; 4];
        for n in 0..G {
            (top[n], bottom[n]) = (f64::from(self.high[n]), f64::from(self.low[n]));
            // Near the least scale that clips nothing.
            scale[n] = (top[n] / high).max(bottom[n] / low) * first;
            whole[n] = f64::from(positive(top[n].max(-bottom[n]) / high));
        }
        let plain = self.trial(&whole, &zero);
        let mut best = plain;
        let mut worse = [0u8; G];
        let mut done = self.empty();
        for _ in 0..40 {
            let trial = self.trial(&scale, &zero);
            for n in 0..G {
                if done[n] {
                    continue;
                }
                worse[n] += 1;
                if trial.least[n] < best.least[n] {
                    best.take(n, &trial);
                    worse[n] = 0;
                }
                scale[n] *= step;
                // What is cut off the largest element is an error by itself.
                let cut = (top[n] - high * scale[n]).max(low * scale[n] - bottom[n]).max(0.0);
                done[n] = worse[n] > 2 || !self.elements.weighted() && cut * cut > best.least[n];
            }
            if done == [true; G] {
                break;
            }
        }
        self.choose(best, &plain)
    }

    fn affine(&self) -> [(f32, i32); G] {
        let [mut low, mut high] = [[0f64; G]; 2];
        for n in 0..G {
            (low[n], high[n]) = (f64::from(self.low[n]), f64::from(self.high[n]));
        }
        let (mut scale, zero) = self.spans(&low, &high);
        for scale in &mut scale {
            *scale = f64::from(positive(*scale));
        }
        let plain = self.trial(&scale, &zero);
        let (mut best, mut ends) = (plain, (low, high));
        let step = if self.linear.bits < 8 { 0.95 } else { 0.975 };
        let back = 1.0 / step;
        // Both ends inwards, then each by itself, and outwards again.
        for (by_low, by_high) in [(step, step), (step, 1.0), (1.0, step), (back, 1.0), (1.0, back)] {
            let (mut a, mut b) = ends;
            let mut worse = [0u8; G];
            let mut done = self.empty();
            for _ in 0..24 {
                for n in 0..G {
                    if done[n] {
                        continue;
                    }
                    (a[n], b[n]) = (a[n] * by_low, b[n] * by_high);
                    done[n] = worse[n] > 1
                        || (a[n], b[n]) == (ends.0[n], ends.1[n])
                        || b[n] - a[n] < (high[n] - low[n]) * 0.05;
                }
                if done == [true; G] {
                    break;
                }
                let (scale, zero) = self.spans(&a, &b);
                let trial = self.trial(&scale, &zero);
                for n in 0..G {
                    worse[n] += u8::from(!done[n]);
                    if !done[n] && trial.least[n] < best.least[n] {
                        best.take(n, &trial);
                        worse[n] = 0;
                        (ends.0[n], ends.1[n]) = (a[n], b[n]);
                    }
                }
            }
        }
        self.choose(best, &plain)
    }

    /// The scales and the zero points that spread the codes over ranges that have zero in them.
    fn spans(&self, low: &[f64; G], high: &[f64; G]) -> ([f64; G], [i32; G]) {
        let (first, last) = self.linear.range();
        let (mut scale, mut zero) = ([0f64; G], [0i32; G]);
        for n in 0..G {
            scale[n] = ((high[n] - low[n]) / f64::from(last - first)).max(f64::from(fp16::SMALLEST));
            let at = (f64::from(first) - low[n] / scale[n]).round_ties_even();
            zero[n] = (at as i32).clamp(first, last);
        }
        (scale, zero)
    }

    /// The best of the fp16 numbers around the scales that fit the codes of some trials, once more with the
    /// codes of those scales, and of the ones that others take.
    fn choose(&self, mut best: Trials<G>, plain: &Trials<G>) -> [(f32, i32); G] {
        if self.elements.len() > 64 {
            let refit = self.trial(&best.best, &best.zero);
            for n in 0..G {
                if refit.least[n] < best.least[n] {
                    best.take(n, &refit);
                }
            }
        }
        let [mut below, mut above] = [[0f64; G]; 2];
        for n in 0..G {
            let around = fp16::around(best.best[n] as f32);
            (below[n], above[n]) = (f64::from(around.0), f64::from(around.1));
        }
        let (mut scale, mut zero) = (plain.scale, plain.zero);
        // Products of few bits are all but exact, and then the trial has told.
        let few = self.linear.bits < 8;
        let mut least = if few { plain.error } else { self.error(&scale, &zero) };
        for candidate in [&below, &above] {
            if *candidate == scale && best.zero == zero {
                continue;
            }
            let error = self.error(candidate, &best.zero);
            for n in 0..G {
                if error[n] < least[n] {
                    (scale[n], zero[n], least[n]) = (candidate[n], best.zero[n], error[n]);
                }
            }
        }
        let mut chosen = [(0f32, 0i32); G];
        for n in 0..G {
            chosen[n] = (scale[n] as f32, zero[n]);
        }
        chosen
    }

    /// The squared errors of scales that fp16 has.
    fn error(&self, scale: &[f64; G], zero: &[i32; G]) -> [f64; G] {
        if self.linear.bits < 8 {
            return self.trial(scale, zero).error;
        }
        self.elements.error(&Steps::new(self.linear, scale, zero))
    }

    fn trial(&self, scale: &[f64; G], zero: &[i32; G]) -> Trials<G> {
        let mut scale = *scale;
        for scale in &mut scale {
            *scale = scale.max(f64::from(fp16::SMALLEST));
        }
        let [error, lean, power] = self.elements.trial(&Steps::new(self.linear, &scale, zero));
        let [mut all, mut least, mut best] = [[0f64; G]; 3];
        for n in 0..G {
            let ratio = if power[n] > 0.0 { lean[n] / power[n] } else { 0.0 };
            let square = scale[n] * scale[n];
            all[n] = square * error[n];
            least[n] = square * (error[n] - ratio * lean[n]).max(0.0);
            best[n] = scale[n] * (1.0 + ratio);
        }
        Trials { scale, zero: *zero, error: all, least, best }
    }
}

/// What rounding with scales needs.
struct Steps<const G: usize> {
    scale: [f32; G],
    inverse: [f32; G],
    low: [f32; G],
    high: [f32; G],
}

impl<const G: usize> Steps<G> {
    fn new(linear: Linear, scales: &[f64; G], zero: &[i32; G]) -> Steps<G> {
        let [mut scale, mut inverse, mut low, mut high] = [[0f32; G]; 4];
        for n in 0..G {
            scale[n] = scales[n] as f32;
            inverse[n] = scale[n].recip();
            (low[n], high[n]) = reach(linear, scale[n], zero[n]);
        }
        Steps { scale, inverse, low, high }
    }
}

impl Steps<1> {
    /// The same scale for elements side by side.
    fn spread(&self) -> Steps<LANES> {
        let [scale, inverse, low, high] =
            [self.scale, self.inverse, self.low, self.high].map(|x| [x[0]; LANES]);
        Steps { scale, inverse, low, high }
    }
}

// The passes over elements are functions of their own, of one operation a loop: together with what is around them
// they would not be kept in whole registers.
impl<const N: usize> Steps<N> {
    /// Elements in units of the scale, less their codes, and the codes.
    #[inline(always)]
    fn round(&self, x: &[f32; N]) -> ([f32; N], [f32; N]) {
        let [mut off, mut code] = [[0f32; N]; 2];
        for n in 0..N {
            off[n] = x[n] * self.inverse[n];
        }
        for n in 0..N {
            code[n] = fp16::integer(fp16::bound(off[n], self.low[n], self.high[n]));
        }
        for n in 0..N {
            off[n] -= code[n];
        }
        (off, code)
    }

    #[inline(never)]
    fn trial(&self, values: &[[f32; N]]) -> [[f32; N]; 3] {
        let [mut e, mut l, mut p] = [[0f32; N]; 3];
        for x in values {
            let (off, code) = self.round(x);
            for n in 0..N {
                e[n] += off[n] * off[n];
            }
            for n in 0..N {
                l[n] += off[n] * code[n];
            }
            for n in 0..N {
                p[n] += code[n] * code[n];
            }
        }
        [e, l, p]
    }

    #[inline(never)]
    fn heavy_trial(&self, values: &[[f32; N]], weights: &[[f32; N]]) -> [[f32; N]; 3] {
        let [mut e, mut l, mut p] = [[0f32; N]; 3];
        for (x, w) in values.iter().zip(weights) {
            let (off, code) = self.round(x);
            for n in 0..N {
                e[n] += w[n] * off[n] * off[n];
            }
            for n in 0..N {
                l[n] += w[n] * off[n] * code[n];
            }
            for n in 0..N {
                p[n] += w[n] * code[n] * code[n];
            }
        }
        [e, l, p]
    }

    /// Decoded values less the elements.
    #[inline(always)]
    fn off(&self, x: &[f32; N]) -> [f32; N] {
        let (_, mut code) = self.round(x);
        for n in 0..N {
            code[n] = fp16::round_normal(code[n] * self.scale[n]) - x[n];
        }
        code
    }

    #[inline(never)]
    fn error(&self, values: &[[f32; N]]) -> [f32; N] {
        let mut e = [0f32; N];
        for x in values {
            let off = self.off(x);
            for n in 0..N {
                e[n] += off[n] * off[n];
            }
        }
        e
    }

    #[inline(never)]
    fn heavy_error(&self, values: &[[f32; N]], weights: &[[f32; N]]) -> [f32; N] {
        let mut e = [0f32; N];
        for (x, w) in values.iter().zip(weights) {
            let off = self.off(x);
            for n in 0..N {
                e[n] += w[n] * off[n] * off[n];
            }
        }
        e
    }
}

/// Groups side by side.
const BESIDE: usize = 4;
type Beside = [f32; BESIDE];

struct Short<'a> {
    values: &'a [Beside],
    weights: Option<&'a [Beside]>,
}

impl Elements<BESIDE> for Short<'_> {
    fn extremes(&self) -> [Beside; 2] {
        let [mut low, mut high] = [[0f32; BESIDE]; 2];
        for (i, x) in self.values.iter().enumerate() {
            for n in 0..BESIDE {
                let x = if self.weights.is_none_or(|w| w[i][n] > 0.0) { x[n] } else { 0.0 };
                low[n] = if x < low[n] { x } else { low[n] };
                high[n] = if x > high[n] { x } else { high[n] };
            }
        }
        [low, high]
    }

    fn trial(&self, steps: &Steps<BESIDE>) -> [[f64; BESIDE]; 3] {
        let sums = match self.weights {
            None => steps.trial(self.values),
            Some(weights) => steps.heavy_trial(self.values, weights),
        };
        let mut wide = [[0f64; BESIDE]; 3];
        for (wide, sum) in wide.iter_mut().zip(&sums) {
            (0..BESIDE).for_each(|n| wide[n] = f64::from(sum[n]));
        }
        wide
    }

    fn error(&self, steps: &Steps<BESIDE>) -> [f64; BESIDE] {
        let error = match self.weights {
            None => steps.error(self.values),
            Some(weights) => steps.heavy_error(self.values, weights),
        };
        error.map(f64::from)
    }

    fn weighted(&self) -> bool {
        self.weights.is_some()
    }

    fn len(&self) -> usize {
        self.values.len()
    }
}

const LANES: usize = 8;
type Lanes = [f32; LANES];

struct Whole<'a> {
    values: &'a [f32],
    weights: Option<&'a [f32]>,
}

impl Whole<'_> {
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

impl Elements<1> for Whole<'_> {
    fn extremes(&self) -> [[f32; 1]; 2] {
        let (low, high) = match self.weights {
            None => extremes(self.values),
            Some(w) => self
                .values
                .iter()
                .zip(w)
                .filter(|(_, w)| **w > 0.0)
                .fold((0f32, 0f32), |a, (x, _)| (a.0.min(*x), a.1.max(*x))),
        };
        [[low], [high]]
    }

    fn trial(&self, steps: &Steps<1>) -> [[f64; 1]; 3] {
        let steps = steps.spread();
        let mut total = [0f64; 3];
        self.blocks(|values, weights| {
            let sums = match weights {
                None => steps.trial(values),
                Some(weights) => steps.heavy_trial(values, weights),
            };
            total.iter_mut().zip(sums_of(&sums)).for_each(|(t, s)| *t += s);
        });
        total.map(|t| [t])
    }

    fn error(&self, steps: &Steps<1>) -> [f64; 1] {
        let steps = steps.spread();
        let mut total = 0.0;
        self.blocks(|values, weights| {
            let error = match weights {
                None => steps.error(values),
                Some(weights) => steps.heavy_error(values, weights),
            };
            total += sums_of(&[error])[0];
        });
        [total]
    }

    fn weighted(&self) -> bool {
        self.weights.is_some()
    }

    fn len(&self) -> usize {
        self.values.len()
    }
}

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

/// A scale as fp16, above zero.
fn positive(scale: f64) -> f32 {
    fp16::round(scale as f32).max(fp16::SMALLEST)
}

/// How far codes reach below and above a zero point, with nothing that would overflow fp16.
#[inline]
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
