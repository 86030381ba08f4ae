//! Tables of least squared error for a histogram: k-means in one dimension.
//!
//! A solution is where the sorted values are cut into segments; an entry is a segment's mean. Sums run
//! outwards from zero, so that small values keep their digits beside large ones. The cost of a segment
//! satisfies the quadrangle inequality, so cuts of best solutions never cross: that makes the exact search
//! divide and conquer, and the fast one the same search within bands around a good start.

use super::histogram::Histogram;

/// Sums before each value, and where zero is.
#[derive(Default)]
pub(super) struct Solver {
    sums: Sums,
    /// Those of some values only.
    few: Sums,
    /// How dense entries should be before each value.
    density: Vec<f64>,
    costs: [Vec<f64>; 2],
    cuts: Vec<u16>,
    bands: Vec<(usize, usize)>,
}

#[derive(Default)]
struct Sums {
    weight: Vec<f64>,
    first: Vec<f64>,
    second: Vec<f64>,
    /// The index of zero where its entry has to be zero.
    pinned: Option<usize>,
}

/// Entries that are spread over all values at once.
const FEW: usize = 16;

impl Solver {
    /// Entries for a histogram, sorted, at most so many; `pin` makes zero one of them.
    pub(super) fn solve(&mut self, h: &Histogram, entries: usize, pin: bool, exact: bool) -> Vec<f64> {
        let n = h.values.len();
        if n <= entries {
            return h.values.iter().map(|v| f64::from(*v)).collect();
        }
        self.sums.fill(h, pin);
        // Where the exact search takes no longer, or where few values make a start poor.
        let small = if entries > FEW { 1 << 15 } else { 1 << 12 };
        let cuts =
            if exact || n * entries <= small { self.exact(n, entries, false) } else { self.fast(h, entries) };
        cuts.windows(2).map(|c| self.sums.mean(c[0], c[1])).collect()
    }

    fn exact(&mut self, n: usize, entries: usize, few: bool) -> Vec<usize> {
        self.bands.clear();
        self.bands.extend((0..=entries).map(|c| match c {
            0 => (0, 0),
            c if c == entries => (n, n),
            c => (c, n - (entries - c)),
        }));
        self.within_bands(few)
    }

    /// The best cuts of which each is within its band; each band starts and ends after the one before.
    fn within_bands(&mut self, few: bool) -> Vec<usize> {
        let (mut before, mut now) = (std::mem::take(&mut self.costs[0]), std::mem::take(&mut self.costs[1]));
        let mut cuts = std::mem::take(&mut self.cuts);
        let sums = if few { &self.few } else { &self.sums };
        cuts.clear();
        let last = self.bands.len() - 1;
        let mut starts = vec![0; last + 1];
        before.clear();
        before.push(0.0);
        for layer in 1..=last {
            let ((low, high), under) = (self.bands[layer], self.bands[layer - 1]);
            now.clear();
            now.resize(high - low + 1, f64::INFINITY);
            starts[layer] = cuts.len();
            cuts.resize(cuts.len() + high - low + 1, 0);
            let chosen = &mut cuts[starts[layer]..];
            sums.layer((low, low, high), under, under, &before, &mut now, chosen);
            std::mem::swap(&mut before, &mut now);
        }
        let mut found = vec![0; last + 1];
        found[last] = self.bands[last].1;
        for layer in (1..=last).rev() {
            found[layer - 1] = usize::from(cuts[starts[layer] + found[layer] - self.bands[layer].0]);
        }
        (self.costs, self.cuts) = ([before, now], cuts);
        found
    }

    /// A coarse solution, improved by cutting at ever more values, each time until it is the best within bands
    /// around it.
    fn fast(&mut self, h: &Histogram, entries: usize) -> Vec<usize> {
        const FINER: usize = 4;
        let n = h.values.len();
        // Few entries have solutions that are far apart and all but as good. In single values, bands are a share of
        // the segments beside a cut: where values are dense, the better cut may be many away.
        let reach = |at: &[usize], cut: usize, last: bool| match (entries > FEW, last) {
            (true, _) => 64,
            (false, true) => ((at[cut + 1] - at[cut - 1]) / 20).max(8),
            (false, false) => (n / 256).clamp(8, 32),
        };
        let (mut cuts, mut edges) = self.start(h, entries);
        // At its own edges a start of few entries is the best.
        let mut begun = entries > FEW;
        if entries > FEW {
            (0..16).any(|_| !self.lloyd(h, &mut cuts));
        }
        loop {
            let bins = edges.len() - 1;
            if begun && (bins == n || bins >= FINER * entries) {
                let few = bins < n;
                if few {
                    self.few.pick(&self.sums, &edges);
                }
                let mut at: Vec<usize> = Vec::with_capacity(cuts.len());
                for (c, cut) in cuts.iter().enumerate() {
                    let edge = if few { edges.partition_point(|e| e < cut) } else { *cut };
                    let least = at.last().map_or(0, |before| before + 1);
                    at.push(edge.clamp(least, bins - (entries - c)));
                }
                for _ in 0..24 {
                    self.bands.clear();
                    self.bands.extend(at.iter().enumerate().map(|(c, cut)| match c {
                        0 => (0, 0),
                        c if c == entries => (bins, bins),
                        c => {
                            let reach = reach(&at, c, !few);
                            (cut.saturating_sub(reach).max(c), (cut + reach).min(bins - (entries - c)))
                        }
                    }));
                    // Where segments are of very different lengths, bands could pass each other.
                    for c in 1..entries {
                        let back = entries - c;
                        self.bands[c].0 = self.bands[c].0.max(self.bands[c - 1].0 + 1);
                        self.bands[back].1 = self.bands[back].1.min(self.bands[back + 1].1 - 1);
                    }
                    let better = self.within_bands(few);
                    let near = (1..entries).all(|c| 2 * better[c].abs_diff(at[c]) <= reach(&at, c, !few));
                    at = better;
                    // Bands need no moving where all cuts are well within them.
                    if near {
                        break;
                    }
                }
                cuts = at.into_iter().map(|at| edges[at]).collect();
            }
            if bins == n {
                return cuts;
            }
            begun = true;
            if FINER * bins >= n {
                edges = (0..=n).collect();
                continue;
            }
            let mut finer = Vec::with_capacity(FINER * bins + 1);
            for ends in edges.windows(2) {
                let (from, size) = (ends[0], ends[1] - ends[0]);
                let parts = FINER.min(size);
                finer.extend((0..parts).map(|i| from + size * i / parts));
            }
            finer.push(n);
            edges = finer;
        }
    }

    /// Moves each cut to the middle of the means beside it, and keeps segments from being empty; whether any
    /// moved.
    fn lloyd(&self, h: &Histogram, cuts: &mut [usize]) -> bool {
        let (n, last) = (h.values.len(), cuts.len() - 1);
        let mut moved = false;
        let mut mean = self.sums.mean(cuts[0], cuts[1]);
        for c in 1..last {
            let next = self.sums.mean(cuts[c], cuts[c + 1]);
            let middle = mean.midpoint(next) as f32;
            let at = near(&h.values, cuts[c], middle).clamp(cuts[c - 1] + 1, n - (last - c));
            moved |= at != cuts[c];
            cuts[c] = at;
            mean = next;
        }
        moved
    }

    /// Cuts of the best solution of few entries over few bins, each segment of which is given its share of
    /// the others; and the ends of the bins.
    fn start(&mut self, h: &Histogram, entries: usize) -> (Vec<usize>, Vec<usize>) {
        // So many at most, and fewer where each would have fewer values.
        const BINS: usize = 8 * FEW;
        const VALUES: usize = 60;
        const TAIL: usize = 16;
        let n = h.values.len();
        let few = entries.min(FEW);
        self.density(h);
        let bins = (n / VALUES).clamp(BINS / 2, BINS).min(n);
        // The outermost values are bins by themselves: which of them have their own entry decides much.
        let tail = TAIL.min((n - bins) / 2);
        let mut edges: Vec<usize> = (0..tail).collect();
        edges.extend(spread(tail, n - tail, bins, |at| self.density[at]));
        edges.extend(n - tail + 1..=n);
        self.few.pick(&self.sums, &edges);
        let coarse = self.exact(edges.len() - 1, few.min(edges.len() - 1), true);
        let coarse: Vec<usize> = coarse.into_iter().map(|c| edges[c]).collect();
        if few == entries {
            return (coarse, edges);
        }
        // Even parts of a segment are off by their number squared less: the best numbers go with the cube root.
        let wants: Vec<f64> = coarse.windows(2).map(|c| self.sums.cost(c[0], c[1]).max(0.0).cbrt()).collect();
        let (mut cuts, mut left, mut wanted) = (vec![0], entries, wants.iter().sum::<f64>());
        for (i, (ends, want)) in coarse.windows(2).zip(&wants).enumerate() {
            let (from, to) = (ends[0], ends[1]);
            let fair = left as f64 * want / wanted.max(f64::MIN_POSITIVE);
            let (later, room) = (wants.len() - 1 - i, n - to);
            // Each later segment needs one, and takes no more than its values.
            let parts = ((fair.round() as usize).clamp(left.saturating_sub(room).max(1), left - later))
                .min(to - from);
            let value = |at: usize| f64::from(h.values[at] - h.values[from]);
            let width = value(to - 1).max(f64::MIN_POSITIVE);
            let measure =
                |at: usize| (at - from) as f64 / (to - from) as f64 + 8.0 * value(at.min(to - 1)) / width;
            cuts.extend(spread(from, to, parts, measure).into_iter().skip(1));
            left -= parts;
            wanted -= want;
        }
        (cuts, edges)
    }

    /// Sums of the density that entries of a good table have: the cube root of that of the values, of which
    /// some are taken together.
    fn density(&mut self, h: &Histogram) {
        const TOGETHER: usize = 8;
        let n = h.values.len();
        self.density.clear();
        self.density.push(0.0);
        // Gaps count as at most what most of the weight lies within.
        let before = &self.sums.weight;
        let quantile = |part: f64| {
            let want = before[0] + (before[n] - before[0]) * part;
            f64::from(h.values[before.partition_point(|w| *w < want).clamp(1, n) - 1])
        };
        let usual = (quantile(0.9) - quantile(0.1)).max(f64::MIN_POSITIVE);
        let mut sum = 0.0;
        for start in (0..n).step_by(TOGETHER) {
            let end = (start + TOGETHER).min(n);
            let width = f64::from(h.values[end.min(n - 1)] - h.values[start]).min(usual);
            let weight = self.sums.weight[end] - self.sums.weight[start];
            let part = (weight.max(1e-30) * width * width).cbrt() / (end - start) as f64;
            for _ in start..end {
                sum += part;
                self.density.push(sum);
            }
        }
    }
}

/// Cuts that spread a rising measure evenly over so many parts, none of them empty.
fn spread(from: usize, to: usize, parts: usize, measure: impl Fn(usize) -> f64) -> Vec<usize> {
    let (start, end) = (measure(from), measure(to));
    let mut cuts = vec![from];
    let mut at = from;
    for part in 1..parts {
        let want = start + (end - start) * part as f64 / parts as f64;
        while at < to && measure(at) < want {
            at += 1;
        }
        at = at.clamp(cuts[part - 1] + 1, to - (parts - part));
        cuts.push(at);
    }
    cuts.push(to);
    cuts
}

impl Sums {
    fn fill(&mut self, h: &Histogram, pin: bool) {
        let n = h.values.len();
        let zero = h.values.partition_point(|v| *v < 0.0);
        self.pinned = (pin && h.values.get(zero) == Some(&0.0)).then_some(zero);
        let Sums { weight, first, second, .. } = self;
        for sums in [&mut *weight, &mut *first, &mut *second] {
            sums.clear();
            sums.resize(n + 1, 0.0);
        }
        let mut add = |from: usize, to: usize, i: usize, sign: f64| {
            let (v, w) = (f64::from(h.values[i]), sign * h.weights[i]);
            weight[to] = weight[from] + w;
            first[to] = first[from] + w * v;
            second[to] = second[from] + w * v * v;
        };
        (zero..n).for_each(|i| add(i, i + 1, i, 1.0));
        (0..zero).rev().for_each(|i| add(i + 1, i, i, -1.0));
    }

    /// Those before some of the values.
    fn pick(&mut self, all: &Sums, edges: &[usize]) {
        let pairs =
            [(&mut self.weight, &all.weight), (&mut self.first, &all.first), (&mut self.second, &all.second)];
        for (to, from) in pairs {
            to.clear();
            to.extend(edges.iter().map(|e| from[*e]));
        }
        // The part that holds zero.
        self.pinned = all.pinned.map(|zero| edges.partition_point(|e| *e <= zero) - 1);
    }

    /// The squared error of a segment that has one entry.
    fn cost(&self, from: usize, to: usize) -> f64 {
        let off = self.mean(from, to);
        let difference = |sums: &[f64]| sums[to] - sums[from];
        difference(&self.second) - off * (2.0 * difference(&self.first) - off * difference(&self.weight))
    }

    fn mean(&self, from: usize, to: usize) -> f64 {
        if self.pinned.is_some_and(|zero| from <= zero && zero < to) {
            return 0.0;
        }
        (self.first[to] - self.first[from]) / (self.weight[to] - self.weight[from]).max(f64::MIN_POSITIVE)
    }

    /// The best cut before each of `low..=high`, all of which are in `from`; `base` and `band` tell where
    /// this layer and the one before it start.
    fn layer(
        &self,
        (base, low, high): (usize, usize, usize),
        band: (usize, usize),
        from: (usize, usize),
        before: &[f64],
        now: &mut [f64],
        cuts: &mut [u16],
    ) {
        // One start is left for all of them.
        if from.0 == from.1 {
            for to in low..=high {
                now[to - base] = self.best(from.0, from.0 + 1, to, &before[from.0 - band.0..]).1;
                cuts[to - base] = from.0 as u16;
            }
            return;
        }
        let middle = low.midpoint(high);
        let (at, best) = self.best(from.0, from.1.min(middle - 1) + 1, middle, &before[from.0 - band.0..]);
        now[middle - base] = best;
        cuts[middle - base] = at as u16;
        if low < middle {
            self.layer((base, low, middle - 1), band, (from.0, at), before, now, cuts);
        }
        if middle < high {
            self.layer((base, middle + 1, high), band, (at, from.1), before, now, cuts);
        }
    }

    /// The best start from `from` up to `end` of a segment that ends at `to`, given the costs of what is before
    /// each start, and the cost; the first of equal ones.
    fn best(&self, from: usize, end: usize, to: usize, before: &[f64]) -> (usize, f64) {
        const LANES: usize = 4;
        let (weight, first, second) = (self.weight[to], self.first[to], self.second[to]);
        let (mut at, mut best) = (from, f64::INFINITY);
        let mut start = from;
        if let Some(zero) = self.pinned.filter(|zero| *zero < to) {
            // The segment holds zero, whose entry is zero.
            start = (zero + 1).clamp(from, end);
            for i in from..start {
                let cost = before[i - from] + (second - self.second[i]);
                (at, best) = if cost < best { (i, cost) } else { (at, best) };
            }
        }
        let cost = |b: f64, w: f64, f: f64, s: f64| {
            let (w, f) = (weight - w, first - f);
            let spread = (second - s) - f * f / if w > f64::MIN_POSITIVE { w } else { f64::MIN_POSITIVE };
            b + if spread > 0.0 { spread } else { 0.0 }
        };
        let (b, rest_b) = before[start - from..end - from].as_chunks::<LANES>();
        let (w, rest_w) = self.weight[start..end].as_chunks::<LANES>();
        let (f, rest_f) = self.first[start..end].as_chunks::<LANES>();
        let (s, rest_s) = self.second[start..end].as_chunks::<LANES>();
        // Most searches are among a few.
        if !b.is_empty() {
            let (mut least, mut which) = ([f64::INFINITY; LANES], [0f64; LANES]);
            let mut count = 0.0;
            // Four slices of one length; zipped iterators are not inlined here.
            for i in 0..b.len().min(w.len()).min(f.len()).min(s.len()) {
                let (b, w, f, s) = (&b[i], &w[i], &f[i], &s[i]);
                for lane in 0..LANES {
                    let cost = cost(b[lane], w[lane], f[lane], s[lane]);
                    let better = cost < least[lane];
                    least[lane] = if better { cost } else { least[lane] };
                    which[lane] = if better { count } else { which[lane] };
                }
                count += 1.0;
            }
            for lane in 0..LANES {
                let i = start + which[lane] as usize * LANES + lane;
                if least[lane] < best || least[lane] == best && i < at {
                    (at, best) = (i, least[lane]);
                }
            }
        }
        for i in 0..rest_b.len() {
            let cost = cost(rest_b[i], rest_w[i], rest_f[i], rest_s[i]);
            if cost < best {
                (at, best) = (end - rest_b.len() + i, cost);
            }
        }
        (at, best)
    }
}

/// The number of values up to some limit, looked for from a guess outwards.
fn near(values: &[f32], guess: usize, limit: f32) -> usize {
    let mut step = 8;
    let (mut low, mut high) = (guess, guess);
    while low > 0 && values[low - 1] > limit {
        low = low.saturating_sub(step);
        step *= 2;
    }
    while high < values.len() && values[high] <= limit {
        high = (high + step).min(values.len());
        step *= 2;
    }
    low + values[low..high].partition_point(|v| *v <= limit)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The squared error of entries over a histogram.
    fn error(h: &Histogram, entries: &[f64]) -> f64 {
        let off = |v: f32| entries.iter().map(|e| (f64::from(v) - e).powi(2)).fold(f64::INFINITY, f64::min);
        h.values.iter().zip(&h.weights).map(|(v, w)| w * off(*v)).sum()
    }

    /// The least error of any segments, of which the one with zero has a zero entry where it is pinned.
    fn brute(h: &Histogram, entries: usize, pin: bool) -> f64 {
        let n = h.values.len();
        let cost = |from: usize, to: usize| {
            let part = || h.values[from..to].iter().map(|v| f64::from(*v)).zip(&h.weights[from..to]);
            let (sum, weight) = part().fold((0.0, 0.0), |a, (v, w)| (a.0 + v * w, a.1 + w));
            let zero = pin && h.values[from..to].contains(&0.0);
            let mean = if zero { 0.0 } else { sum / weight };
            part().map(|(v, w)| w * (v - mean).powi(2)).sum::<f64>()
        };
        let mut best = vec![f64::INFINITY; n + 1];
        best[0] = 0.0;
        for _ in 0..entries.min(n) {
            best = (0..=n)
                .map(|to| (0..to).map(|from| best[from] + cost(from, to)).fold(f64::INFINITY, f64::min))
                .collect();
        }
        best[n]
    }

    fn histogram(values: &[f32], weights: &[f64]) -> Histogram {
        let mut pairs: Vec<(f32, f64)> = values.iter().copied().zip(weights.iter().copied()).collect();
        pairs.sort_by(|a, b| a.0.total_cmp(&b.0));
        pairs.dedup_by(|a, b| a.0 == b.0);
        Histogram {
            values: pairs.iter().map(|p| p.0).collect(),
            weights: pairs.iter().map(|p| p.1).collect(),
        }
    }

    proptest! {
        #[test]
        fn exact_is_what_trying_all_gives(
            pairs in prop::collection::vec((-40i16..40, 1u8..200), 1..40),
            entries in 1usize..9,
            pin: bool,
        ) {
            let values: Vec<f32> = pairs.iter().map(|p| f32::from(p.0) / 8.0).collect();
            let weights: Vec<f64> = pairs.iter().map(|p| f64::from(p.1) / 16.0).collect();
            let h = histogram(&values, &weights);
            let found = Solver::default().solve(&h, entries, pin, true);
            let (seen, least) = (error(&h, &found), brute(&h, entries, pin));
            // A value may be nearer to the entry of another segment where zero is pinned.
            prop_assert!(seen <= least * (1.0 + 1e-9) + 1e-9, "{seen} {least}");
            if !pin {
                prop_assert!(seen >= least * (1.0 - 1e-9) - 1e-9, "{seen} {least}");
            } else if h.values.contains(&0.0) {
                prop_assert!(found.contains(&0.0), "{found:?}");
            }
        }
    }

    /// Distributions of weights, and others that a start could miss.
    fn samples() -> Vec<(&'static str, Histogram)> {
        let mut state = 1u64;
        let mut uniform = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
        };
        let mut draw = |count: usize, make: &mut dyn FnMut(f64, f64) -> f64| -> Histogram {
            let values: Vec<f32> = (0..count)
                .map(|_| {
                    let normal = (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
                    make(normal, uniform()) as f32
                })
                .collect();
            super::super::histogram::Counter::default().count(&values, None).clone()
        };
        let mut weighted = draw(4000, &mut |normal, _| normal * 0.03);
        let count = weighted.weights.len();
        weighted.weights.iter_mut().enumerate().for_each(|(i, w)| *w *= ((i * 7) % count) as f64 + 1e-3);
        vec![
            ("normal", draw(7168, &mut |normal, _| normal * 0.02)),
            ("few", draw(300, &mut |normal, _| normal * 0.02)),
            ("uniform", draw(7168, &mut |_, u| u - 0.5)),
            ("sharp", draw(7168, &mut |normal, u| normal * normal * normal * u * 0.01)),
            ("outliers", draw(7168, &mut |normal, u| if u < 5e-4 { normal } else { normal * 0.02 })),
            ("one outlier", draw(2000, &mut |normal, u| if u < 6e-4 { 6e4 } else { normal * 1e-3 })),
            ("two heaps", draw(5000, &mut |normal, u| normal * 0.01 + if u < 0.3 { -1.0 } else { 2.0 })),
            (
                "many heaps",
                draw(5000, &mut |normal, u| normal * 1e-3 + (u * 24.0).floor() * (u * 24.0).floor()),
            ),
            ("large", draw(200_000, &mut |normal, u| normal * if u < 2e-4 { 0.2 } else { 0.01 + 0.02 * u })),
            ("dead rows", draw(3000, &mut |normal, u| if u < 0.7 { normal * 1e-6 } else { normal * 0.3 })),
            ("positive", draw(5000, &mut |normal, _| normal.abs() * 0.1)),
            ("tiny", draw(5000, &mut |normal, _| normal * 1e-6)),
            ("weighted", weighted),
        ]
    }

    #[test]
    fn fast_is_within_a_hundredth_of_exact() {
        let mut solver = Solver::default();
        for (name, h) in samples() {
            for entries in [2, 4, 8, 16, 64, 256] {
                for pin in [false, true] {
                    let exact = error(&h, &solver.solve(&h, entries, pin, true));
                    let fast = error(&h, &solver.solve(&h, entries, pin, false));
                    let place = format!("{name} {entries} {pin}: {fast:e} {exact:e}");
                    let most = if entries <= 64 { 1.003 } else { 1.01 };
                    assert!(fast <= most * exact + 1e-300, "{place}");
                    assert!(pin || exact <= fast * (1.0 + 1e-9), "{place}");
                }
            }
        }
    }
}
