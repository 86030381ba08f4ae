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
    sums: Vec<Sums>,
    /// The index of zero where its entry has to be zero.
    pinned: Option<usize>,
    /// How dense entries should be before each value.
    density: Vec<f64>,
    costs: [Vec<f64>; 2],
    cuts: Vec<u16>,
    bands: Vec<(usize, usize)>,
}

#[derive(Clone, Copy, Default)]
struct Sums {
    weight: f64,
    first: f64,
    second: f64,
}

impl Solver {
    /// Entries for a histogram, sorted, at most so many; `pin` makes zero one of them.
    pub(super) fn solve(&mut self, h: &Histogram, entries: usize, pin: bool, exact: bool) -> Vec<f64> {
        let n = h.values.len();
        if n <= entries {
            return h.values.iter().map(|v| f64::from(*v)).collect();
        }
        self.sum(h, pin);
        let cuts =
            if exact || n * entries <= 1 << 11 { self.exact(n, entries) } else { self.fast(h, entries) };
        cuts.windows(2).map(|c| self.mean(c[0], c[1])).collect()
    }

    fn sum(&mut self, h: &Histogram, pin: bool) {
        let n = h.values.len();
        let zero = h.values.partition_point(|v| *v < 0.0);
        self.pinned = (pin && h.values.get(zero) == Some(&0.0)).then_some(zero);
        self.sums.clear();
        self.sums.resize(n + 1, Sums::default());
        let add = |to: Sums, i: usize, sign: f64| {
            let (v, w) = (f64::from(h.values[i]), sign * h.weights[i]);
            Sums { weight: to.weight + w, first: to.first + w * v, second: to.second + w * v * v }
        };
        for i in zero..n {
            self.sums[i + 1] = add(self.sums[i], i, 1.0);
        }
        for i in (0..zero).rev() {
            self.sums[i] = add(self.sums[i + 1], i, -1.0);
        }
    }

    fn holds_pin(&self, from: usize, to: usize) -> bool {
        self.pinned.is_some_and(|zero| from <= zero && zero < to)
    }

    fn mean(&self, from: usize, to: usize) -> f64 {
        let (a, b) = (self.sums[from], self.sums[to]);
        if self.holds_pin(from, to) {
            return 0.0;
        }
        let weight = b.weight - a.weight;
        if weight > 0.0 { (b.first - a.first) / weight } else { 0.0 }
    }

    /// The squared error of a segment that has one entry.
    fn cost(&self, from: usize, to: usize) -> f64 {
        let (a, b) = (self.sums[from], self.sums[to]);
        let (weight, first, second) = (b.weight - a.weight, b.first - a.first, b.second - a.second);
        if weight <= 0.0 || self.holds_pin(from, to) { second } else { second - first * first / weight }
    }

    fn exact(&mut self, n: usize, entries: usize) -> Vec<usize> {
        self.bands.clear();
        self.bands.extend((0..=entries).map(|c| match c {
            0 => (0, 0),
            c if c == entries => (n, n),
            c => (c, n - (entries - c)),
        }));
        self.within_bands()
    }

    /// The best cuts of which each is within its band; bands start and end in rising order.
    fn within_bands(&mut self) -> Vec<usize> {
        let (mut before, mut now) = (std::mem::take(&mut self.costs[0]), std::mem::take(&mut self.costs[1]));
        let mut cuts = std::mem::take(&mut self.cuts);
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
            self.layer((low, low, high), under, under, &before, &mut now, chosen);
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
        let middle = low.midpoint(high);
        let (mut best, mut at) = (f64::INFINITY, from.0);
        for i in from.0..=from.1.min(middle - 1) {
            let cost = before[i - band.0] + self.cost(i, middle);
            if cost < best {
                (best, at) = (cost, i);
            }
        }
        now[middle - base] = best;
        cuts[middle - base] = at as u16;
        if low < middle {
            self.layer((base, low, middle - 1), band, (from.0, at), before, now, cuts);
        }
        if middle < high {
            self.layer((base, middle + 1, high), band, (at, from.1), before, now, cuts);
        }
    }

    /// A coarse solution, improved until it is the best within bands around it.
    fn fast(&mut self, h: &Histogram, entries: usize) -> Vec<usize> {
        let n = h.values.len();
        let mut cuts = self.start(h, entries);
        for _ in 0..32 {
            if !self.lloyd(h, &mut cuts) {
                break;
            }
        }
        let reach = (n / entries / 8).clamp(4, 64);
        for _ in 0..8 {
            self.bands.clear();
            self.bands.extend(cuts.iter().enumerate().map(|(c, cut)| match c {
                0 => (0, 0),
                c if c == entries => (n, n),
                c => (cut.saturating_sub(reach).max(c), (cut + reach).min(n - (entries - c))),
            }));
            let better = self.within_bands();
            if better == cuts {
                break;
            }
            cuts = better;
        }
        cuts
    }

    /// Moves each cut to the middle of the means beside it, and keeps segments from being empty; whether any
    /// moved.
    fn lloyd(&self, h: &Histogram, cuts: &mut [usize]) -> bool {
        let (n, last) = (h.values.len(), cuts.len() - 1);
        let mut moved = false;
        let mut mean = self.mean(cuts[0], cuts[1]);
        for c in 1..last {
            let next = self.mean(cuts[c], cuts[c + 1]);
            let middle = mean.midpoint(next) as f32;
            let at = near(&h.values, cuts[c], middle).clamp(cuts[c - 1] + 1, n - (last - c));
            moved |= at != cuts[c];
            cuts[c] = at;
            mean = next;
        }
        moved
    }

    /// Cuts of the best solution of few entries over few bins, each segment of which is given its share of
    /// the others.
    fn start(&mut self, h: &Histogram, entries: usize) -> Vec<usize> {
        const FEW: usize = 16;
        const BINS: usize = 6;
        let n = h.values.len();
        let few = entries.min(FEW);
        self.density(h);
        let bins = (BINS * few).min(n);
        let edges = self.spread(0, n, bins);
        let all = std::mem::take(&mut self.sums);
        self.sums.extend(edges.iter().map(|e| all[*e]));
        let pinned = self.pinned.take();
        let coarse = self.exact(edges.len() - 1, few.min(edges.len() - 1));
        (self.sums, self.pinned) = (all, pinned);
        let coarse: Vec<usize> = coarse.into_iter().map(|c| edges[c]).collect();
        if few == entries && coarse.len() == entries + 1 {
            return coarse;
        }
        let mut cuts = vec![0];
        let mut left = entries;
        for (i, ends) in coarse.windows(2).enumerate() {
            let (from, to) = (ends[0], ends[1]);
            let share = |from: usize| self.density[n] - self.density[from];
            let fair = (self.density[to] - self.density[from]) / share(from).max(f64::MIN_POSITIVE);
            let (later, room) = (coarse.len() - 2 - i, n - to);
            // Each later segment needs one, and takes no more than its values.
            let parts = ((fair * left as f64).round() as usize)
                .clamp(left.saturating_sub(room).max(1), left - later)
                .min(to - from);
            cuts.extend(self.spread(from, to, parts).into_iter().skip(1));
            left -= parts;
        }
        cuts
    }

    /// Sums of the density that entries of a good table have: the cube root of that of the values. Gaps
    /// count as at most some of the usual ones.
    fn density(&mut self, h: &Histogram) {
        let n = h.values.len();
        self.density.clear();
        self.density.push(0.0);
        let usual = 64.0 * (h.values[n - 1] - h.values[0]) / n as f32;
        let mut sum = 0f64;
        for i in 0..n {
            let gap = (h.values[(i + 1).min(n - 1)] - h.values[i.saturating_sub(1)]) / 2.0;
            let gap = f64::from(gap.min(usual));
            sum += (h.weights[i].max(1e-12) * gap * gap).cbrt();
            self.density.push(sum);
        }
    }

    /// Cuts that spread the density evenly over so many parts, none of them empty.
    fn spread(&self, from: usize, to: usize, parts: usize) -> Vec<usize> {
        let (start, end) = (self.density[from], self.density[to]);
        let mut cuts = vec![from];
        let mut at = from;
        for part in 1..parts {
            let want = start + (end - start) * part as f64 / parts as f64;
            at += self.density[at..=to].partition_point(|d| *d < want);
            at = at.clamp(cuts[part - 1] + 1, to - (parts - part));
            cuts.push(at);
        }
        cuts.push(to);
        cuts
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
