//! Where the elements of a group lie in a tensor.
//!
//! A tensor is seen as rows: all axes up to the later of its two channel axes make the row's number, this
//! axis and those after it make the row. A group is a range of either channel axis, or of both.

use std::ops::Range;

use rayon::prelude::*;

use super::scheme::{Axis, Granularity, Group, Scheme};
use crate::{
    bail,
    error::{Context, Result},
    mil::types::shape_text,
};

/// A weight's shape, row-major, and its channel axes: 0 and 1 of a conv or linear weight, 1 and 0 of a
/// matmul operand `[in, out]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout<'a> {
    pub shape: &'a [usize],
    pub output: usize,
    pub input: usize,
}

impl Layout<'_> {
    /// The number of elements; refuses sizes that overflow, empty tensors and axes that are none.
    pub fn count(&self) -> Result<usize> {
        let rank = self.shape.len();
        if self.output >= rank || self.input >= rank || self.output == self.input {
            bail!(
                "axes {} and {} are no output and input axis of {}",
                self.output,
                self.input,
                shape_text(self.shape)
            );
        }
        match self.shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)) {
            Some(n) if n > 0 => Ok(n),
            _ => bail!("a weight {} cannot be compressed", shape_text(self.shape)),
        }
    }

    /// Elements a step of an axis.
    pub(super) fn after(&self, axis: usize) -> usize {
        self.shape.iter().skip(axis + 1).product()
    }

    /// Elements after the output axis, which is how far neighbours along it are apart.
    pub(super) fn after_output(&self) -> usize {
        self.after(self.output)
    }

    /// The shape of the indices of a palette, whose entries are vectors along the output axis.
    pub(super) fn indices(&self, vector: usize) -> Result<Vec<usize>> {
        let mut shape = self.shape.to_vec();
        let outputs = shape[self.output];
        if !outputs.is_multiple_of(vector) {
            bail!("{outputs} outputs are no whole number of vectors of {vector}"; hint: "use single entries");
        }
        shape[self.output] = outputs / vector;
        Ok(shape)
    }
}

impl Scheme {
    /// Refuses a weight that the scheme does not fit, which is one whose channels are no whole number of
    /// groups: Core ML has no ragged ones. A group that is larger than the axis is one group.
    pub fn fits(&self, layout: Layout<'_>) -> Result<()> {
        layout.count()?;
        match self.inner() {
            Scheme::Linear(l) => Grouping::linear(layout, l.granularity).map(|_| ()),
            Scheme::Palette(p) => Grouping::palette(layout, p.group, p.vector).map(|_| ()),
            Scheme::Dense | Scheme::W8A8 | Scheme::Sparse(..) => Ok(()),
        }
        .within(|| format!("fitting `{self}` to a weight {}", shape_text(layout.shape)))
    }
}

/// Elements that belong together, and where they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Grouping {
    /// Groups along each axis.
    pub(super) counts: Vec<usize>,
    /// Steps of the earlier channel axis, and how many of them a group has.
    steps: usize,
    step: usize,
    /// Rows a step of the earlier axis.
    mid: usize,
    rows: usize,
    /// Elements of a row, and of a group's part of it.
    pub(super) width: usize,
    pub(super) run: usize,
    /// Elements a step of the input axis, and whether this is the axis of rows.
    post: usize,
    input_first: bool,
    /// Elements that a code stands for, and how far these are apart. All else is in codes.
    vector: usize,
    apart: usize,
}

/// One non-negative number for each element, for each input channel, or none.
#[derive(Debug, Clone, Copy)]
pub(super) enum Importance<'a> {
    Equal,
    Inputs(&'a [f32]),
    Each(&'a [f32]),
    /// One for each element that is kept, nothing for the others.
    Kept(&'a [bool]),
}

/// The elements of a group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Elements<'a> {
    pub(super) values: &'a [f32],
    /// Elements between neighbours of a vector.
    pub(super) apart: usize,
    pub(super) weights: Option<Weights<'a>>,
}

/// Importance of a group's elements; of vectors, one number for each or for each of their elements, side by side.
#[derive(Debug, Clone, Copy)]
pub(super) enum Weights<'a> {
    Each(&'a [f32]),
    Kept(&'a [bool]),
}

impl<'a> Elements<'a> {
    /// Those of one of some groups.
    fn group(self, at: usize, groups: usize) -> Elements<'a> {
        let part = |len: usize| at * (len / groups)..(at + 1) * (len / groups);
        let weights = self.weights.map(|w| w.part(part(w.len())));
        Elements { values: &self.values[part(self.values.len())], apart: self.apart, weights }
    }
}

impl<'a> Weights<'a> {
    /// Those of some elements.
    pub(super) fn part(self, range: Range<usize>) -> Weights<'a> {
        match self {
            Weights::Each(w) => Weights::Each(&w[range]),
            Weights::Kept(k) => Weights::Kept(&k[range]),
        }
    }

    pub(super) fn any(self) -> bool {
        match self {
            Weights::Each(w) => w.iter().any(|w| *w > 0.0),
            Weights::Kept(k) => k.contains(&true),
        }
    }

    fn len(self) -> usize {
        match self {
            Weights::Each(w) => w.len(),
            Weights::Kept(k) => k.len(),
        }
    }
}

impl<'a> Importance<'a> {
    pub(super) fn new(given: Option<&'a [f32]>, layout: Layout<'_>) -> Result<Importance<'a>> {
        let Some(given) = given else { return Ok(Importance::Equal) };
        if let Some((i, bad)) = given.iter().enumerate().find(|(_, w)| !(w.is_finite() && **w >= 0.0)) {
            bail!("importance {i} is {bad}"; hint: "importance is finite and not negative");
        }
        let (inputs, count) = (layout.shape[layout.input], layout.count()?);
        match given.len() {
            n if n == inputs && n != count => Ok(Importance::Inputs(given)),
            n if n == count => Ok(Importance::Each(given)),
            n => bail!(
                "{n} numbers of importance for a weight {}",
                shape_text(layout.shape);
                hint: "one an element, {count}, or one an input channel, {inputs}"
            ),
        }
    }
}

impl Importance<'_> {
    /// That of an element.
    pub(super) fn of(&self, element: usize, layout: Layout<'_>) -> f32 {
        match self {
            Importance::Equal => 1.0,
            Importance::Each(w) => w[element],
            Importance::Kept(k) => f32::from(u8::from(k[element])),
            Importance::Inputs(w) => {
                let after: usize = layout.shape[layout.input + 1..].iter().product();
                w[element / after % w.len()]
            }
        }
    }
}

/// The group's size along an axis, and the number of groups.
fn split(dim: usize, size: usize, what: &str) -> Result<(usize, usize)> {
    let size = size.min(dim).max(1);
    if !dim.is_multiple_of(size) {
        let below = (1..size).rev().find(|s| dim.is_multiple_of(*s)).unwrap_or(1);
        let above = (size..=dim).find(|s| dim.is_multiple_of(*s)).unwrap_or(dim);
        bail!("groups of {size} do not divide {dim} {what}"; hint: "the nearest that do are {below} and {above}");
    }
    Ok((size, dim / size))
}

impl Grouping {
    pub(super) fn linear(layout: Layout<'_>, granularity: Granularity) -> Result<Grouping> {
        let (outputs, inputs) = (layout.shape[layout.output], layout.shape[layout.input]);
        let (output, input) = match granularity {
            Granularity::Tensor => (outputs, inputs),
            Granularity::Channel => (1, inputs),
            Granularity::Block(size) => (1, size),
        };
        Grouping::new(layout, layout.shape, output, input)
    }

    /// Groups of indices; an index of a vector counts as one element.
    pub(super) fn palette(layout: Layout<'_>, group: Group, vector: usize) -> Result<Grouping> {
        let shape = layout.indices(vector)?;
        let (mut output, mut input) = (shape[layout.output], shape[layout.input]);
        match group {
            Group::Tensor => {}
            Group::Channels { size, axis: Axis::Output } => {
                split(layout.shape[layout.output], size, "output channels")?;
                output = (size / vector).max(1);
            }
            Group::Channels { size, axis: Axis::Input } => input = size,
        }
        let grouping = Grouping::new(layout, &shape, output, input)?;
        Ok(if vector > 1 { Grouping { vector, apart: layout.after_output(), ..grouping } } else { grouping })
    }

    /// Groups of so many outputs and inputs.
    fn new(layout: Layout<'_>, shape: &[usize], output: usize, input: usize) -> Result<Grouping> {
        let (output, outputs) = split(shape[layout.output], output, "output channels")?;
        let (input, inputs) = split(shape[layout.input], input, "input channels")?;
        let mut counts = vec![1; shape.len()];
        counts[layout.output] = outputs;
        counts[layout.input] = inputs;
        let input_first = layout.input < layout.output;
        let (first, second) =
            if input_first { (layout.input, layout.output) } else { (layout.output, layout.input) };
        let (step, part) = if input_first { (input, output) } else { (output, input) };
        let post: usize = shape[second + 1..].iter().product();
        let mid: usize = shape[first + 1..second].iter().product();
        Ok(Grouping {
            counts,
            steps: shape[first],
            step,
            mid,
            rows: shape[..second].iter().product(),
            width: shape[second] * post,
            run: part * post,
            post,
            input_first,
            vector: 1,
            apart: 1,
        })
    }

    pub(super) fn count(&self) -> usize {
        self.counts.iter().product()
    }

    /// The number of rows, a multiple of which holds whole vectors.
    pub(super) fn whole_rows(&self) -> usize {
        self.apart.div_ceil(self.width)
    }

    /// Elements of a group.
    pub(super) fn size(&self) -> usize {
        self.rows / self.steps * self.step * self.run
    }

    /// Groups side by side in a row.
    fn across(&self) -> usize {
        self.width / self.run
    }

    /// The group of a row's first element; each further run of the row is the next group.
    pub(super) fn first_of(&self, row: usize) -> usize {
        row / self.mid % self.steps / self.step * self.across()
    }

    /// The group of an element.
    pub(super) fn of(&self, element: usize) -> usize {
        self.first_of(element / self.width) + element % self.width / self.run
    }

    /// The rows of the groups that start at this step.
    fn rows_of(&self, step: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let (block, stride, start) =
            (self.step * self.mid, self.steps * self.mid, step * self.step * self.mid);
        (0..self.rows / stride).map(move |p| p * stride + start..p * stride + start + block)
    }

    /// Whether the elements of a group follow one another, and those of the next group follow them.
    fn follow(&self) -> bool {
        let whole_rows = self.across() == 1 && self.rows == self.steps * self.mid;
        let in_row =
            self.step * self.mid == 1 && self.rows == self.steps && self.run.is_multiple_of(self.apart);
        whole_rows || in_row
    }

    /// Groups that are looked at together: of ones so large that threads would copy most of the weight at once,
    /// no more than half of it.
    fn at_once(&self, all: usize, importance: Importance<'_>) -> usize {
        let size = self.size() * self.vector;
        let copied = !self.follow() || matches!(importance, Importance::Inputs(_));
        if copied && size * rayon::current_num_threads() > all / 2 {
            (all / 2 / size).max(1)
        } else {
            self.count()
        }
    }

    /// Makes something of each group's elements and their importance, on all cores, in order.
    pub(super) fn map<T: Send + Default + Clone, S>(
        &self,
        values: &[f32],
        importance: Importance<'_>,
        scratch: impl Fn() -> S + Sync + Send,
        make: impl Fn(&mut S, usize, Elements<'_>) -> T + Sync + Send,
    ) -> Vec<T> {
        self.map_together(values, importance, scratch, |scratch, first, of, out: &mut [T]| {
            let groups = out.len();
            for (i, out) in out.iter_mut().enumerate() {
                *out = make(scratch, first + i, of.group(i, groups));
            }
        })
    }

    /// The same of some groups at a time, of which the first is told, and whose elements follow one another.
    pub(super) fn map_together<T: Send + Default + Clone, S>(
        &self,
        values: &[f32],
        importance: Importance<'_>,
        scratch: impl Fn() -> S + Sync + Send,
        make: impl Fn(&mut S, usize, Elements<'_>, &mut [T]) + Sync + Send,
    ) -> Vec<T> {
        /// Elements that are copied together where groups lie side by side, to use whole cache lines.
        const PANEL: usize = 16;
        /// Elements of groups that are handed out together.
        const TOGETHER: usize = 1 << 13;
        type State<S> = (S, Gathered<f32>, Gathered<f32>, Gathered<bool>);
        let across = self.across();
        let panel = if across > 1 { PANEL.div_ceil(self.run * self.vector).min(across) } else { 1 };
        let mut out = vec![T::default(); self.count()];
        let start = || (scratch(), Gathered::default(), Gathered::default(), Gathered::default());
        let some = |state: &mut State<S>, first: usize, out: &mut [T]| {
            let (scratch, elements, numbers, kept) = state;
            let groups = out.len();
            let (values, apart) = elements.elements(self, values, first, groups);
            let weights = match importance {
                Importance::Equal => None,
                Importance::Inputs(inputs) => {
                    Some(Weights::Each(numbers.inputs(self, inputs, first, groups)))
                }
                Importance::Each(each) if self.vector > 1 => {
                    Some(Weights::Each(numbers.joined(self, each, first, groups)))
                }
                Importance::Each(each) => Some(Weights::Each(numbers.elements(self, each, first, groups).0)),
                Importance::Kept(mask) => Some(Weights::Kept(kept.elements(self, mask, first, groups).0)),
            };
            make(scratch, first, Elements { values, apart, weights }, out);
        };
        if self.follow() || panel == 1 {
            let together = TOGETHER.div_ceil(self.size() * self.vector);
            let most = self.at_once(values.len(), importance);
            let once = if self.follow() { together } else { 1 };
            for (first, out) in (0..).step_by(most).zip(out.chunks_mut(most)) {
                out.par_chunks_mut(together).enumerate().for_each_init(start, |state, (i, out)| {
                    for (j, out) in out.chunks_mut(once).enumerate() {
                        some(state, first + i * together + j * once, out);
                    }
                });
            }
        } else {
            for (step, out) in out.chunks_mut(across).enumerate() {
                out.par_chunks_mut(panel)
                    .enumerate()
                    .for_each_init(start, |state, (i, out)| some(state, step * across + i * panel, out));
            }
        }
        out
    }
}

/// Elements of some groups side by side, group after group.
#[derive(Default)]
struct Gathered<T>(Vec<T>);

impl<T: Copy + Default> Gathered<T> {
    /// The elements, and how far those of a vector are apart; they are copied only where groups are scattered.
    fn elements<'a>(
        &'a mut self,
        g: &Grouping,
        all: &'a [T],
        first: usize,
        groups: usize,
    ) -> (&'a [T], usize) {
        if g.follow() {
            let size = g.size() * g.vector;
            return (&all[first * size..(first + groups) * size], g.apart);
        }
        (self.joined(g, all, first, groups), 1)
    }

    /// A copy in which the elements of a vector are side by side.
    fn joined(&mut self, g: &Grouping, all: &[T], first: usize, groups: usize) -> &[T] {
        if g.vector == 1 {
            self.fill(g, first, groups, 1, |row, columns, to| {
                let start = row * g.width;
                to.copy_from_slice(&all[start + columns.start..start + columns.end]);
            });
            return &self.0;
        }
        self.fill(g, first, groups, g.vector, |row, columns, to| {
            join(all, row * g.width + columns.start, g.vector, g.apart, to);
        });
        &self.0
    }

    /// `copy` gives so many for each code of a row's columns.
    fn fill(
        &mut self,
        g: &Grouping,
        first: usize,
        groups: usize,
        each: usize,
        mut copy: impl FnMut(usize, Range<usize>, &mut [T]),
    ) {
        let (size, across) = (g.size() * each, g.across());
        self.0.resize(size * groups, T::default());
        let mut done = 0;
        while done < groups {
            // Those of one step lie side by side.
            let (step, skipped) = ((first + done) / across, (first + done) % across);
            let beside = (across - skipped).min(groups - done);
            for (i, row) in g.rows_of(step).flatten().enumerate() {
                for group in 0..beside {
                    let column = (skipped + group) * g.run;
                    let at = (done + group) * size + i * g.run * each;
                    copy(row, column..column + g.run, &mut self.0[at..at + g.run * each]);
                }
            }
            done += beside;
        }
    }
}

impl Gathered<f32> {
    /// The importance of each code's input.
    fn inputs(&mut self, g: &Grouping, inputs: &[f32], first: usize, groups: usize) -> &[f32] {
        self.fill(g, first, groups, 1, |row, columns, to| {
            if g.input_first {
                to.fill(inputs[row / g.mid % g.steps]);
            } else {
                to.iter_mut().zip(columns).for_each(|(to, c)| *to = inputs[c / g.post]);
            }
        });
        &self.0
    }
}

/// Copies vectors from one on, whose elements are `apart`, so that these are side by side.
pub(super) fn join<T: Copy>(from: &[T], first: usize, vector: usize, apart: usize, mut to: &mut [T]) {
    if vector == 1 || apart == 1 {
        let start = first * vector;
        return to.copy_from_slice(&from[start..start + to.len()]);
    }
    let mut next = first;
    while !to.is_empty() {
        let (block, at) = (next / apart * vector, next % apart);
        let count = (apart - at).min(to.len() / vector);
        let (now, rest) = to.split_at_mut(count * vector);
        for i in 0..vector {
            let start = (block + i) * apart + at;
            let from = &from[start..start + count];
            now.iter_mut().skip(i).step_by(vector).zip(from).for_each(|(to, x)| *to = *x);
        }
        (next, to) = (next + count, rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_joined_from_any_one_on() {
        for (outputs, apart, vector) in [(8, 3, 2), (8, 3, 4), (4, 1, 2), (6, 5, 1)] {
            let all: Vec<usize> = (0..2 * outputs * apart).collect();
            let codes = all.len() / vector;
            let element = |code: usize, i: usize| (code / apart * vector + i) * apart + code % apart;
            for first in 0..codes {
                for count in 0..=codes - first {
                    let want: Vec<usize> = (first..first + count)
                        .flat_map(|c| (0..vector).map(move |i| element(c, i)))
                        .collect();
                    let mut to = vec![0; count * vector];
                    join(&all, first, vector, apart, &mut to);
                    assert_eq!(to, want, "{outputs} {apart} {vector} {first}");
                }
            }
        }
    }
}
