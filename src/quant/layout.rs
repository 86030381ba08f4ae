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
}

/// One non-negative number for each element, for each input channel, or none.
#[derive(Debug, Clone, Copy)]
pub(super) enum Importance<'a> {
    Equal,
    Inputs(&'a [f32]),
    Each(&'a [f32]),
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
        Grouping::new(layout, &shape, output, input)
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
        })
    }

    /// The same groups of a tensor that has a further axis, last.
    pub(super) fn deepened(&self, by: usize) -> Grouping {
        let mut deep = self.clone();
        deep.width *= by;
        deep.run *= by;
        deep.post *= by;
        deep
    }

    pub(super) fn count(&self) -> usize {
        self.counts.iter().product()
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

    /// Makes something of each group's elements and their importance, on all cores, in order.
    pub(super) fn map<T: Send + Default + Clone, S>(
        &self,
        values: &[f32],
        importance: Importance<'_>,
        scratch: impl Fn() -> S + Sync + Send,
        make: impl Fn(&mut S, usize, &[f32], Option<&[f32]>) -> T + Sync + Send,
    ) -> Vec<T> {
        let size = self.size();
        self.map_together(values, importance, scratch, |scratch, first, values, weights, out: &mut [T]| {
            for (i, out) in out.iter_mut().enumerate() {
                let part = i * size..(i + 1) * size;
                *out = make(scratch, first + i, &values[part.clone()], weights.map(|w| &w[part]));
            }
        })
    }

    /// The same of some groups at a time, of which the first is told, and whose elements follow one another.
    pub(super) fn map_together<T: Send + Default + Clone, S>(
        &self,
        values: &[f32],
        importance: Importance<'_>,
        scratch: impl Fn() -> S + Sync + Send,
        make: impl Fn(&mut S, usize, &[f32], Option<&[f32]>, &mut [T]) + Sync + Send,
    ) -> Vec<T> {
        /// Elements that are copied together where groups lie side by side, to use whole cache lines.
        const PANEL: usize = 16;
        /// Elements of groups that are handed out together.
        const TOGETHER: usize = 1 << 13;
        let across = self.across();
        let panel = if across > 1 { PANEL.div_ceil(self.run).min(across) } else { 1 };
        let mut out = vec![T::default(); self.count()];
        let start = || (scratch(), Gathered::default(), Gathered::default());
        let some = |state: &mut (S, Gathered, Gathered), first: usize, out: &mut [T]| {
            let (scratch, elements, weights) = state;
            let elements = elements.values(self, values, first, out.len());
            let weights = weights.importance(self, importance, first, out.len());
            make(scratch, first, elements, weights, out);
        };
        if self.follow() || panel == 1 {
            let together = TOGETHER.div_ceil(self.size());
            let once = if self.follow() { together } else { 1 };
            out.par_chunks_mut(together).enumerate().for_each_init(start, |state, (i, out)| {
                for (j, out) in out.chunks_mut(once).enumerate() {
                    some(state, i * together + j * once, out);
                }
            });
        } else {
            for (step, out) in out.chunks_mut(across).enumerate() {
                out.par_chunks_mut(panel)
                    .enumerate()
                    .for_each_init(start, |state, (i, out)| some(state, step * across + i * panel, out));
            }
        }
        out
    }

    /// Whether the elements of a group follow one another, and those of the next group follow them.
    fn follow(&self) -> bool {
        let whole_rows = self.across() == 1 && self.rows == self.steps * self.mid;
        whole_rows || self.step * self.mid == 1 && self.rows == self.steps
    }
}

/// Elements of some groups side by side, group after group.
#[derive(Default)]
struct Gathered(Vec<f32>);

impl Gathered {
    fn values<'a>(&'a mut self, g: &Grouping, values: &'a [f32], first: usize, groups: usize) -> &'a [f32] {
        if g.follow() {
            let size = g.size();
            return &values[first * size..(first + groups) * size];
        }
        self.fill(g, first, groups, |row, columns, to| {
            let start = row * g.width;
            to.copy_from_slice(&values[start + columns.start..start + columns.end]);
        });
        &self.0
    }

    fn importance<'a>(
        &'a mut self,
        g: &Grouping,
        importance: Importance<'a>,
        first: usize,
        groups: usize,
    ) -> Option<&'a [f32]> {
        match importance {
            Importance::Equal => return None,
            Importance::Each(each) => return Some(self.values(g, each, first, groups)),
            Importance::Inputs(inputs) => self.fill(g, first, groups, |row, columns, to| {
                if g.input_first {
                    to.fill(inputs[row / g.mid % g.steps]);
                } else {
                    to.iter_mut().zip(columns).for_each(|(to, c)| *to = inputs[c / g.post]);
                }
            }),
        }
        Some(&self.0)
    }

    fn fill(
        &mut self,
        g: &Grouping,
        first: usize,
        groups: usize,
        mut copy: impl FnMut(usize, Range<usize>, &mut [f32]),
    ) {
        let (size, across) = (g.size(), g.across());
        self.0.resize(size * groups, 0.0);
        let mut done = 0;
        while done < groups {
            // Those of one step lie side by side.
            let (step, skipped) = ((first + done) / across, (first + done) % across);
            let beside = (across - skipped).min(groups - done);
            for (i, row) in g.rows_of(step).flatten().enumerate() {
                for group in 0..beside {
                    let column = (skipped + group) * g.run;
                    let at = (done + group) * size + i * g.run;
                    copy(row, column..column + g.run, &mut self.0[at..at + g.run]);
                }
            }
            done += beside;
        }
    }
}
