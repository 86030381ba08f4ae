//! Rounding that makes up for its own errors: a column's error is known once it is rounded, and columns that
//! come after it, whose inputs go together with its own, take what they can of it back.
//!
//! With H the products of inputs and H = (1 + U) D (1 + U)ᵀ, U strictly upper, column k is rounded as
//! w + (errors so far) · U; the squared error of the outputs is then Σ D · (rounding)², so what a grid is
//! to be fitted to is known too. All of it is the same for any number of threads.

use std::ops::Range;

use candle_core::{Device, Tensor};
use rayon::prelude::*;

use super::{
    encoded::Encoded,
    grid::Grid,
    layout::Layout,
    scheme::{Palette, Scheme},
};
use crate::{bail, error::Result};

/// Outputs that are rounded side by side.
const PANEL: usize = 16;
/// What is added to the mean square of each input, as a share of the mean.
const DAMPING: f64 = 0.01;
/// Columns that are rounded, and rows of a factor that are made, before those that come after are changed.
const BLOCK: usize = 32;
/// Outputs whose targets are held at once.
const SLAB: usize = 4096;

/// Whether a scheme and a weight can be rounded so: one code an element, nothing left out, and a matrix.
pub(super) fn takes(scheme: &Scheme, layout: Layout<'_>) -> bool {
    let single = match scheme {
        Scheme::Linear(_) | Scheme::W8A8 => true,
        Scheme::Palette(Palette { vector, .. }) => *vector == 1,
        Scheme::Dense | Scheme::Sparse(..) => false,
    };
    let size = layout.shape[layout.output] * layout.shape[layout.input];
    single && layout.shape.iter().product::<usize>() == size
}

/// Compresses a matrix so that its outputs are near, for inputs with these products.
pub(super) fn encode(
    values: &[f32],
    layout: Layout<'_>,
    scheme: &Scheme,
    importance: &[f32],
    hessian: &[f32],
) -> Result<Encoded> {
    let factor = Factor::new(hessian, layout.shape[layout.input])?;
    let first = Grid::fit(values, layout, scheme, Some(importance))?;
    let once = factor.round(&first, values, layout)?;
    // What was rounded is not what the grid was fitted to.
    let second = Grid::fit(&once.targets, layout, scheme, Some(&factor.importance()))?;
    let twice = factor.round(&second, values, layout)?;
    if twice.error < once.error { second.finish(twice.codes) } else { first.finish(once.codes) }
}

/// The mean square of each output of a matrix.
pub(super) fn powers(values: &[f32], layout: Layout<'_>, hessian: &[f32]) -> Result<Vec<f64>> {
    let matrix = Matrix::new(layout);
    let n = matrix.inputs;
    let order: Vec<usize> = (0..n).collect();
    let hessian = Tensor::from_slice(hessian, (n, n), &Device::Cpu)?;
    let mut powers = Vec::with_capacity(matrix.outputs);
    for outputs in matrix.slabs() {
        let m = outputs.len();
        let columns = matrix.columns(outputs, values, &order);
        let met = hessian.matmul(&Tensor::from_slice(&columns, (n, m), &Device::Cpu)?)?;
        let met = met.flatten_all()?.to_vec1::<f32>()?;
        let mut sums = vec![0f64; m];
        for (met, column) in met.chunks(m).zip(columns.chunks(m)) {
            sums.iter_mut().zip(met.iter().zip(column)).for_each(|(s, (a, b))| *s += f64::from(a * b));
        }
        powers.extend(sums.into_iter().map(|s| s.max(0.0)));
    }
    Ok(powers)
}

/// Where the elements of a matrix are.
struct Matrix {
    outputs: usize,
    inputs: usize,
    output_step: usize,
    input_step: usize,
}

impl Matrix {
    fn new(layout: Layout<'_>) -> Matrix {
        Matrix {
            outputs: layout.shape[layout.output],
            inputs: layout.shape[layout.input],
            output_step: layout.after(layout.output),
            input_step: layout.after(layout.input),
        }
    }

    fn at(&self, output: usize, input: usize) -> usize {
        output * self.output_step + input * self.input_step
    }

    /// Outputs that are held at once.
    fn slabs(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let outputs = self.outputs;
        (0..outputs).step_by(SLAB).map(move |start| start..outputs.min(start + SLAB))
    }

    /// Some outputs side by side, for inputs in an order.
    fn columns(&self, outputs: Range<usize>, values: &[f32], order: &[usize]) -> Vec<f32> {
        let mut columns = vec![0f32; order.len() * outputs.len()];
        columns.par_chunks_mut(outputs.len()).zip(order).for_each(|(column, input)| {
            column
                .iter_mut()
                .zip(outputs.clone())
                .for_each(|(v, output)| *v = values[self.at(output, *input)]);
        });
        columns
    }
}

/// How errors are passed on.
struct Factor {
    /// Inputs from the first to be rounded to the last.
    order: Vec<usize>,
    /// For each place in the order, the shares that it takes of the errors before it.
    shares: Vec<Vec<f32>>,
    /// What a squared rounding error costs at each place.
    costs: Vec<f64>,
}

/// A matrix that was rounded.
struct Rounded {
    codes: Vec<u8>,
    /// What was rounded, in the order of the weight.
    targets: Vec<f32>,
    error: f64,
}

/// Some outputs of a block of columns: codes, what was rounded, errors, and what they cost together.
#[derive(Default)]
struct Piece {
    codes: Vec<[u8; PANEL]>,
    targets: Vec<[f32; PANEL]>,
    errors: Vec<[f32; PANEL]>,
    cost: f64,
}

impl Factor {
    fn new(hessian: &[f32], n: usize) -> Result<Factor> {
        if hessian.len() != n * n {
            bail!("{} products of inputs, there are {n} inputs", hessian.len());
        }
        let square = |i: usize| hessian[i * n + i];
        // Inputs that matter most come first, while all others can still make up for them.
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|a, b| square(*b).total_cmp(&square(*a)).then(a.cmp(b)));
        let mean = (0..n).map(|i| f64::from(square(i))).sum::<f64>() / n.max(1) as f64;
        let mut damping = if mean > 0.0 { DAMPING * mean } else { 1.0 };
        for _ in 0..6 {
            // The last in the order is the first row of the factor.
            let get = |i: usize, j: usize| {
                let (a, b) = (order[n - 1 - i], order[n - 1 - j]);
                f64::from(hessian[a * n + b]) + if i == j { damping } else { 0.0 }
            };
            let rows: Vec<Vec<f64>> =
                (0..n).into_par_iter().map(|i| (i..n).map(|j| get(i, j)).collect()).collect();
            if let Some((costs, rows)) = factored(rows) {
                let share = |k: usize| rows[n - 1 - k].iter().skip(1).rev().map(|v| *v as f32).collect();
                let costs = costs.into_iter().rev().collect();
                return Ok(Factor { shares: (0..n).into_par_iter().map(share).collect(), order, costs });
            }
            damping *= 10.0;
        }
        bail!("the products of inputs are no products"; hint: "calibrate on a longer text")
    }

    /// What a rounding error of each input costs.
    fn importance(&self) -> Vec<f32> {
        let mut all = vec![0f32; self.order.len()];
        self.order.iter().zip(&self.costs).for_each(|(input, cost)| all[*input] = *cost as f32);
        all
    }

    fn round(&self, grid: &Grid, values: &[f32], layout: Layout<'_>) -> Result<Rounded> {
        let matrix = Matrix::new(layout);
        let n = self.order.len();
        let mut rounded =
            Rounded { codes: vec![0; values.len()], targets: vec![0.0; values.len()], error: 0.0 };
        for outputs in matrix.slabs() {
            let (first, m) = (outputs.start, outputs.len());
            let originals = matrix.columns(outputs, values, &self.order);
            let mut targets = originals.clone();
            for start in (0..n).step_by(BLOCK) {
                let end = n.min(start + BLOCK);
                let pieces: Vec<Piece> = (0..m.div_ceil(PANEL))
                    .into_par_iter()
                    .map(|panel| {
                        let lanes = panel * PANEL..m.min((panel + 1) * PANEL);
                        let block = Block { start, end, first, width: m, lanes };
                        self.round_block(grid, &matrix, &originals, &targets, &block)
                    })
                    .collect();
                let mut errors = vec![0f32; (end - start) * m];
                for (panel, piece) in pieces.iter().enumerate() {
                    rounded.error += piece.cost;
                    for (i, k) in (start..end).enumerate() {
                        for lane in 0..PANEL.min(m - panel * PANEL) {
                            let at = matrix.at(first + panel * PANEL + lane, self.order[k]);
                            rounded.codes[at] = piece.codes[i][lane];
                            rounded.targets[at] = piece.targets[i][lane];
                            errors[i * m + panel * PANEL + lane] = piece.errors[i][lane];
                        }
                    }
                }
                self.pass_on(&errors, start..end, &mut targets[end * m..], m)?;
            }
        }
        Ok(rounded)
    }

    /// Lets the columns after a block make up for its errors.
    fn pass_on(&self, errors: &[f32], block: Range<usize>, targets: &mut [f32], m: usize) -> Result<()> {
        let (rest, size) = (self.order.len() - block.end, block.len());
        if rest == 0 {
            return Ok(());
        }
        let shares: Vec<f32> =
            self.shares[block.end..].iter().flat_map(|s| &s[block.clone()]).copied().collect();
        let shares = Tensor::from_vec(shares, (rest, size), &Device::Cpu)?;
        let passed = shares.matmul(&Tensor::from_slice(errors, (size, m), &Device::Cpu)?)?;
        let passed = passed.flatten_all()?.to_vec1::<f32>()?;
        targets.par_chunks_mut(m).zip(passed.par_chunks(m)).for_each(|(targets, passed)| {
            targets.iter_mut().zip(passed).for_each(|(t, p)| *t += p);
        });
        Ok(())
    }

    fn round_block(
        &self,
        grid: &Grid,
        matrix: &Matrix,
        originals: &[f32],
        targets: &[f32],
        block: &Block,
    ) -> Piece {
        let mut piece = Piece::default();
        for k in block.start..block.end {
            let (mut target, mut error, mut codes) = ([0f32; PANEL], [0f32; PANEL], [0u8; PANEL]);
            for (t, lane) in target.iter_mut().zip(block.lanes.clone()) {
                *t = targets[k * block.width + lane];
            }
            for (share, error) in self.shares[k][block.start..].iter().zip(&piece.errors) {
                target.iter_mut().zip(error).for_each(|(t, e)| *t += share * e);
            }
            for (i, lane) in block.lanes.clone().enumerate() {
                // fp16 has no more than this, and neither has any grid.
                let x = target[i].clamp(-65504.0, 65504.0);
                let group = grid.group(matrix.at(block.first + lane, self.order[k]));
                let code = grid.nearest(group, &[x]);
                let mut value = [0f32];
                grid.value(group, code, &mut value);
                (codes[i], error[i]) = (code, originals[k * block.width + lane] - value[0]);
                piece.cost += self.costs[k] * f64::from(target[i] - value[0]).powi(2);
                target[i] = x;
            }
            piece.codes.push(codes);
            piece.targets.push(target);
            piece.errors.push(error);
        }
        piece
    }
}

/// Columns, by their places in the order, and outputs of a slab that begins with `first` and has `width`.
struct Block {
    start: usize,
    end: usize,
    first: usize,
    width: usize,
    lanes: Range<usize>,
}

/// D and R of A = Rᵀ D R, R upper with ones on the diagonal; rows begin at the diagonal. `None` where A has
/// no such form.
fn factored(mut rows: Vec<Vec<f64>>) -> Option<(Vec<f64>, Vec<Vec<f64>>)> {
    let n = rows.len();
    let mut pivots = vec![0f64; n];
    for start in (0..n).step_by(BLOCK) {
        let end = n.min(start + BLOCK);
        for k in start..end {
            let (above, below) = rows.split_at_mut(k + 1);
            let row = &mut above[k];
            pivots[k] = row[0];
            if !(row[0] > 0.0 && row[0].is_finite()) {
                return None;
            }
            row.iter_mut().for_each(|v| *v /= pivots[k]);
            for (i, to) in below.iter_mut().enumerate().take(end - k - 1) {
                eliminate(row, i + 1, pivots[k], to);
            }
        }
        let (done, below) = rows.split_at_mut(end);
        let pivots = &pivots;
        below.par_iter_mut().enumerate().for_each(|(i, to)| {
            for k in start..end {
                eliminate(&done[k], end - k + i, pivots[k], to);
            }
        });
    }
    Some((pivots, rows))
}

/// Takes a finished row out of one that is `down` below it.
fn eliminate(row: &[f64], down: usize, pivot: f64, to: &mut [f64]) {
    let by = row[down] * pivot;
    to.iter_mut().zip(&row[down..]).for_each(|(t, r)| *t -= by * r);
}
