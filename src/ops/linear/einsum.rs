//! Sums over shared letters of two operands.

use candle_core::Tensor;

use super::product;
use crate::{
    bail,
    error::Result,
    mil::{Dim, TensorType},
    ops::args::named,
};

/// `bchq,bkhc->bkhq`
pub(super) struct Equation {
    x: Vec<char>,
    y: Vec<char>,
    out: Vec<char>,
}

impl Equation {
    pub(super) fn parse(text: &str) -> Result<Equation> {
        let sides = text.split_once("->").and_then(|(ins, out)| Some((ins.split_once(',')?, out)));
        let Some(((x, y), out)) = sides else {
            bail!("`equation` is `{text}`, two operands and a result are expected"; hint: "as in `nchw,nwhu->nchu`");
        };
        let letters = |s: &str| s.trim().chars().collect::<Vec<char>>();
        let equation = Equation { x: letters(x), y: letters(y), out: letters(out) };
        for side in [&equation.x, &equation.y, &equation.out] {
            if side.iter().any(|c| !c.is_ascii_alphabetic()) {
                bail!("`equation` is `{text}`, letters are expected");
            }
            if let Some(twice) = side.iter().enumerate().find(|(i, c)| side[..*i].contains(c)) {
                bail!("`equation` is `{text}`, which has `{}` twice on one side", twice.1);
            }
        }
        if let Some(odd) = equation.out.iter().find(|c| !equation.x.contains(c) && !equation.y.contains(c)) {
            bail!("`equation` is `{text}`, whose `{odd}` is in no operand");
        }
        Ok(equation)
    }

    pub(super) fn infer(&self, x: &TensorType, y: &TensorType) -> Result<Vec<Dim>> {
        for (t, letters) in [(x, &self.x), (y, &self.y)] {
            if t.rank() != letters.len() {
                let text: String = letters.iter().collect();
                bail!("{} has rank {}, `{text}` has {} letters", named("values", t), t.rank(), letters.len());
            }
        }
        for (i, letter) in self.x.iter().enumerate() {
            if let Some(j) = self.y.iter().position(|c| c == letter) {
                let (a, b) = (x.dims[i], y.dims[j]);
                if !a.agrees(b) && a != Dim::Fixed(1) && b != Dim::Fixed(1) {
                    bail!("`{letter}` is {a} in {}, {b} in {}", named("x", x), named("y", y));
                }
            }
        }
        Ok(self.out.iter().map(|c| self.size(*c, &x.dims, &y.dims)).collect())
    }

    /// Multiplications and additions; unknown sizes count as one.
    pub(super) fn work(&self, x: &TensorType, y: &TensorType) -> u64 {
        let summed = self.x.iter().filter(|c| !self.out.contains(c));
        let each = |c: &char| self.size(*c, &x.dims, &y.dims).fixed().unwrap_or(1) as u64;
        self.out.iter().chain(summed).map(each).fold(2, u64::saturating_mul)
    }

    /// The size of a letter: of two, the one that is not 1.
    fn size(&self, letter: char, x: &[Dim], y: &[Dim]) -> Dim {
        let find = |letters: &[char], dims: &[Dim]| {
            letters.iter().position(|c| *c == letter).and_then(|i| dims.get(i).copied())
        };
        match (find(&self.x, x), find(&self.y, y)) {
            (Some(Dim::Fixed(1)) | None, Some(d)) | (Some(d), None | Some(Dim::Fixed(1))) => d,
            (Some(Dim::Unknown { .. }), Some(d)) | (Some(d), _) => d,
            (None, None) => Dim::Fixed(1),
        }
    }

    /// One matrix product: letters of size 1 are left out, those of one operand alone are summed first.
    pub(super) fn eval(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        let fixed = |t: &Tensor| t.dims().iter().map(|d| Dim::Fixed(*d)).collect::<Vec<_>>();
        let (xd, yd) = (fixed(x), fixed(y));
        if x.rank() != self.x.len() || y.rank() != self.y.len() {
            bail!("operands of rank {} and {} do not fit the equation", x.rank(), y.rank());
        }
        let shape: Vec<usize> = self.out.iter().filter_map(|c| self.size(*c, &xd, &yd).fixed()).collect();
        let (x, xl) = self.slim(x, &self.x, &self.y)?;
        let (y, yl) = self.slim(y, &self.y, &self.x)?;
        let out: Vec<char> = self.out.iter().copied().filter(|c| xl.contains(c) || yl.contains(c)).collect();
        let batch: Vec<char> = out.iter().copied().filter(|c| xl.contains(c) && yl.contains(c)).collect();
        let summed: Vec<char> = xl.iter().copied().filter(|c| !out.contains(c) && yl.contains(c)).collect();
        let alone = |l: &[char]| {
            l.iter().copied().filter(|c| out.contains(c) && !batch.contains(c)).collect::<Vec<_>>()
        };
        let (rows, columns) = (alone(&xl), alone(&yl));
        // The operand whose letters come first in the result goes on the left, so that nothing is moved.
        let swap = out.iter().find(|c| !batch.contains(c)).is_some_and(|c| columns.contains(c));
        let ((a, al, m), (b, bl, n)) =
            if swap { ((y, yl, columns), (x, xl, rows)) } else { ((x, xl, rows), (y, yl, columns)) };
        let z =
            product(&matrices(&a, &al, [&batch, &m, &summed])?, &matrices(&b, &bl, [&batch, &summed, &n])?)?;
        let made: Vec<char> = batch.iter().chain(&m).chain(&n).copied().collect();
        let sizes: Vec<usize> = made
            .iter()
            .map(|c| al.iter().position(|l| l == c).map_or_else(|| at(&b, &bl, *c), |i| a.dims()[i]))
            .collect();
        let order: Vec<usize> = out.iter().filter_map(|c| made.iter().position(|l| l == c)).collect();
        let z = z.contiguous()?.reshape(sizes)?;
        let z = if order.is_sorted() { z } else { z.permute(order)?.contiguous()? };
        Ok(z.reshape(shape)?)
    }

    /// Without its axes of size 1, and summed over letters that nothing else has.
    fn slim(&self, t: &Tensor, letters: &[char], other: &[char]) -> Result<(Tensor, Vec<char>)> {
        let (mut t, mut kept) = (t.clone(), letters.to_vec());
        for letter in letters.iter().rev() {
            let Some(i) = kept.iter().position(|c| c == letter) else { continue };
            if t.dims()[i] == 1 {
                t = t.squeeze(i)?;
            } else if !self.out.contains(letter) && !other.contains(letter) {
                t = t.sum(i)?;
            } else {
                continue;
            }
            kept.remove(i);
        }
        Ok((t, kept))
    }
}

fn at(t: &Tensor, letters: &[char], letter: char) -> usize {
    letters.iter().position(|l| *l == letter).map_or(1, |i| t.dims()[i])
}

/// `[batch, rows, columns]`, or `[rows, columns]` without a batch; a view where that is possible.
fn matrices(t: &Tensor, letters: &[char], groups: [&[char]; 3]) -> Result<Tensor> {
    let order: Vec<usize> =
        groups.iter().flat_map(|g| g.iter().filter_map(|c| letters.iter().position(|l| l == c))).collect();
    let [batch, rows, columns] = groups.map(|g| g.iter().map(|c| at(t, letters, *c)).product::<usize>());
    let t = t.permute(order)?;
    if groups[0].is_empty() {
        return Ok(if t.dims() == [rows, columns] { t } else { t.contiguous()?.reshape((rows, columns))? });
    }
    Ok(t.contiguous()?.reshape((batch, rows, columns))?)
}
