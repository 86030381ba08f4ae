//! Orthogonal matrices that are folded into weights, so that what a few channels hold is spread over all of them and
//! rounding loses less of it, while the model stays what it is (QuaRot, arXiv:2404.00456).
//!
//! The matrix R of n = p·q channels, p the largest power of two in n, is diag(±1) · (H ⊗ Cᵀ): signs, the Hadamard
//! matrix H of p divided by √p, and the cosine transform C (DCT-II, orthonormal) of q. A vector x turns into x·R.
//! Where R stays a matrix of the model ([`Table`]) it is H alone, for each p channels, times a power of two.

use std::{f64::consts::PI, ops::Range};

use rayon::prelude::*;

use crate::{
    bail,
    error::Result,
    mil::{DType, Weight, constant::encode_floats},
};

/// What a rotation changes in a linear layer `[out, in]`, with its bias.
#[derive(Debug, Clone, Default)]
pub struct Fold {
    /// A norm's scale, which multiplies the input channels first.
    pub scale: Option<Scale>,
    /// Inputs come rotated, in groups of so many channels.
    pub inputs: Option<usize>,
    /// Outputs are to be rotated, in groups of so many channels, from one on.
    pub outputs: Option<(usize, usize)>,
}

/// A norm's weight, and what is added to it.
#[derive(Debug, Clone)]
pub struct Scale {
    pub weight: Weight,
    pub plus: f32,
}

impl Scale {
    fn floats(&self) -> Result<Vec<f32>> {
        Ok(self.weight.floats()?.iter().map(|w| w + self.plus).collect())
    }

    /// The norm's weight once its scale is folded into what reads it.
    pub fn folded(&self) -> Weight {
        let one = 1.0 - self.plus;
        self.weight.map("folded", DType::F32, self.weight.shape.clone(), move |w| Ok(vec![one; w.len()]))
    }

    /// The norm's weight where its scale's mean stays, and the rest is made up for by [`Scale::rest`].
    pub fn level(&self) -> Weight {
        let scale = self.clone();
        self.weight.map("mean", DType::F32, self.weight.shape.clone(), move |w| {
            Ok(vec![mean(&scale.floats()?) - scale.plus; w.len()])
        })
    }

    /// `Rᵀ · diag(scale / mean − 1) · R` as the tensor `name`: what is to be added to a rotated vector that was scaled
    /// by the mean alone. Its diagonal is next to nothing, so that it can be rounded as other weights are.
    pub fn rest(&self, name: &str) -> Weight {
        let (scale, n) = (self.clone(), self.weight.count());
        Weight::new(format!("ckpt:{name} of {}", self.weight.key), DType::F32, [n, n], move || {
            let scale = scale.floats()?;
            let mean = mean(&scale);
            let mut matrix = diagonal(&scale.iter().map(|s| s / mean - 1.0).collect::<Vec<_>>());
            let rotation = Rotation::of(n);
            rotation.rows(&mut matrix);
            rotation.turn(&mut matrix, n);
            Ok(encode_floats(DType::F32, &matrix)?.into())
        })
    }
}

impl Fold {
    /// The weight of the layer, `[out, in]`.
    pub fn weight(&self, weight: &Weight) -> Result<Weight> {
        let [out, width] = weight.shape[..] else {
            bail!("{}: {:?} is no linear layer's [out, in]", weight.key, weight.shape);
        };
        if let Some(scale) = &self.scale
            && scale.weight.shape != [width]
        {
            bail!("{}: {:?} does not read a norm of {:?}", weight.key, weight.shape, scale.weight.shape);
        }
        if let Some(n) = self.inputs.filter(|n| *n == 0 || !width.is_multiple_of(*n)) {
            bail!("{}: {width} inputs are no multiple of {n}, which are rotated together", weight.key);
        }
        self.refuse_outputs(weight, out)?;
        let (how, fold) = (self.how(), self.clone());
        let input = move |mut values: Vec<f32>| {
            if let Some(scale) = &fold.scale {
                let scale = scale.floats()?;
                values.par_chunks_mut(width.max(1)).for_each(|row| {
                    row.iter_mut().zip(&scale).for_each(|(v, s)| *v *= s);
                });
            }
            if let Some(n) = fold.inputs {
                Rotation::of(n).rows(&mut values);
            }
            Ok(values)
        };
        let Some((n, from)) = self.outputs else { return Ok(weight.map_rows(&how, DType::F32, input)) };
        Ok(weight.map(&how, DType::F32, [out, width], move |values| {
            let mut values = input(values)?;
            Rotation::of(n).columns(&mut values[from * width..], width);
            Ok(values)
        }))
    }

    /// The bias of the layer, `[out]`; nothing where it stays.
    pub fn bias(&self, bias: &Weight) -> Result<Option<Weight>> {
        let Some((n, from)) = self.outputs else { return Ok(None) };
        self.refuse_outputs(bias, bias.count())?;
        let how = self.how();
        Ok(Some(bias.map(&how, DType::F32, bias.shape.clone(), move |mut values| {
            Rotation::of(n).columns(&mut values[from..], 1);
            Ok(values)
        })))
    }

    fn refuse_outputs(&self, weight: &Weight, out: usize) -> Result<()> {
        match self.outputs {
            Some((n, from)) if n == 0 || from > out || !(out - from).is_multiple_of(n) => {
                bail!(
                    "{}: {out} outputs from {from} on are no multiple of {n}, which are rotated together",
                    weight.key
                )
            }
            _ => Ok(()),
        }
    }

    fn how(&self) -> String {
        let mut how = "rotated".to_string();
        if let Some(scale) = &self.scale {
            how += &format!(" × {}", scale.weight.key.trim_start_matches("ckpt:"));
        }
        if let Some(n) = self.inputs {
            how += &format!(" inputs by {n}");
        }
        if let Some((n, from)) = self.outputs {
            how += &format!(" outputs by {n} from {from}");
        }
        how
    }
}

/// A table of words, and a head, whose rows are rotated while the rest of the model is not: matrices turn what is looked
/// up back, and what the head is given ahead. Their elements are 0 and ± one power of two, which rounding keeps.
#[derive(Debug, Clone, Copy)]
pub struct Table {
    channels: usize,
    /// How many channels are rotated together, a power of two.
    power: usize,
}

impl Table {
    /// Of rows with so many channels; nothing where they are odd.
    pub fn of(channels: usize) -> Option<Table> {
        let power = 1 << channels.trailing_zeros().min(usize::BITS - 1);
        (power > 1 && channels > 0).then_some(Table { channels, power })
    }

    /// The rows of `[rows, channels]`, rotated.
    pub fn weight(self, weight: &Weight) -> Result<Weight> {
        if weight.shape.len() != 2 || weight.shape[1] != self.channels {
            bail!("{}: {:?} is no table of {} channels", weight.key, weight.shape, self.channels);
        }
        let half = self.power.ilog2() / 2;
        Ok(weight.map_rows(&format!("rotated by {}", self.power), DType::F32, move |mut values| {
            Rotation::signed(self.power, half).rows(&mut values);
            Ok(values)
        }))
    }

    /// The linear layer `name` that turns what is looked up back.
    pub fn back(self, name: &str) -> Weight {
        self.matrix(name, |matrix| matrix)
    }

    /// The linear layer `name` whose result a rotated head takes.
    pub fn ahead(self, name: &str) -> Weight {
        let n = self.channels;
        self.matrix(name, move |matrix| (0..n * n).map(|i| matrix[i % n * n + i / n]).collect())
    }

    fn matrix(self, name: &str, turned: impl Fn(Vec<f32>) -> Vec<f32> + Send + Sync + 'static) -> Weight {
        let n = self.channels;
        let other = self.power.ilog2().div_ceil(2);
        Weight::new(format!("ckpt:{name} by {}", self.power), DType::F32, [n, n], move || {
            let mut matrix = diagonal(&vec![1.0; n]);
            Rotation::signed(self.power, other).rows(&mut matrix);
            Ok(encode_floats(DType::F32, &turned(matrix))?.into())
        })
    }
}

fn diagonal(values: &[f32]) -> Vec<f32> {
    let n = values.len();
    let mut matrix = vec![0.0; n * n];
    values.iter().enumerate().for_each(|(i, v)| matrix[i * n + i] = *v);
    matrix
}

/// The mean of a norm's scale; 1 where that is no factor.
fn mean(scale: &[f32]) -> f32 {
    #[expect(clippy::cast_precision_loss, reason = "a number of channels")]
    let mean = scale.iter().sum::<f32>() / scale.len().max(1) as f32;
    if mean.is_normal() { mean } else { 1.0 }
}

/// Groups of channels that are rotated side by side.
const BESIDE: usize = 16;
/// Columns that are rotated side by side, and how many such strips are at once.
const STRIP: usize = 64;
const TOGETHER: usize = 16;

/// R for some channels.
struct Rotation {
    /// The cosine transform of the odd part, row by row, with what the Hadamard matrix is multiplied by.
    cosines: Vec<f32>,
    odd: usize,
    signs: Vec<f32>,
}

impl Rotation {
    fn of(channels: usize) -> Rotation {
        let power = 1 << channels.trailing_zeros();
        let odd = channels / power;
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            reason = "numbers of channels, and entries of a matrix"
        )]
        let cosine = |i: usize| {
            let (k, m, q) = (i / odd, i % odd, odd as f64);
            let size = if k == 0 { 1.0 } else { 2.0 } / channels as f64;
            (size.sqrt() * (PI * (m as f64 + 0.5) * k as f64 / q).cos()) as f32
        };
        Rotation { cosines: (0..odd * odd).map(cosine).collect(), odd, signs: signs(channels) }
    }

    /// Of a power of two, 2⁻ⁿ for n halvings as what the Hadamard matrix is multiplied by.
    fn signed(power: usize, halvings: u32) -> Rotation {
        #[expect(clippy::cast_possible_wrap, reason = "a logarithm")]
        Rotation { cosines: vec![2f32.powi(-(halvings as i32))], odd: 1, signs: signs(power) }
    }

    /// x·R of each group of channels along rows that are whole groups, some of them side by side.
    fn rows(&self, values: &mut [f32]) {
        let n = self.signs.len();
        values.par_chunks_mut((n * BESIDE).max(1)).for_each(|groups| {
            let count = groups.len() / n;
            let mut beside = vec![0.0; groups.len()];
            for (g, group) in groups.chunks(n).enumerate() {
                group.iter().enumerate().for_each(|(i, v)| beside[i * count + g] = *v);
            }
            self.turn(&mut beside, count);
            for (g, group) in groups.chunks_mut(n).enumerate() {
                group.iter_mut().enumerate().for_each(|(i, v)| *v = beside[i * count + g]);
            }
        });
    }

    /// x·R of each group of channels along columns, `width` of which lie side by side.
    fn columns(&self, values: &mut [f32], width: usize) {
        let n = self.signs.len();
        let strips: Vec<Range<usize>> =
            (0..width).step_by(STRIP).map(|from| from..width.min(from + STRIP)).collect();
        for group in values.chunks_mut((n * width).max(1)) {
            for some in strips.chunks(TOGETHER) {
                let turned = |strip: &Range<usize>| {
                    let mut x: Vec<f32> =
                        group.chunks(width).flat_map(|row| &row[strip.clone()]).copied().collect();
                    self.turn(&mut x, strip.len());
                    x
                };
                let turned: Vec<Vec<f32>> = some.par_iter().map(turned).collect();
                for (strip, x) in some.iter().zip(&turned) {
                    for (row, x) in group.chunks_mut(width).zip(x.chunks(strip.len())) {
                        row[strip.clone()].copy_from_slice(x);
                    }
                }
            }
        }
    }

    /// x·R along the first axis of `[n, inner]`.
    fn turn(&self, x: &mut [f32], inner: usize) {
        for (row, sign) in x.chunks_mut(inner.max(1)).zip(&self.signs) {
            row.iter_mut().for_each(|v| *v *= sign);
        }
        let mut half = self.odd * inner;
        while half < x.len() {
            for pair in x.chunks_mut(2 * half) {
                let (a, b) = pair.split_at_mut(half);
                for (a, b) in a.iter_mut().zip(b) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        let mut old = vec![0.0; self.odd * inner];
        for block in x.chunks_mut((self.odd * inner).max(1)) {
            old.copy_from_slice(block);
            for (row, cosines) in block.chunks_mut(inner.max(1)).zip(self.cosines.chunks(self.odd)) {
                row.fill(0.0);
                for (from, c) in old.chunks(inner.max(1)).zip(cosines) {
                    row.iter_mut().zip(from).for_each(|(v, o)| *v += c * o);
                }
            }
        }
    }
}

fn signs(channels: usize) -> Vec<f32> {
    (0..channels as u64).map(|i| if mixed(i) & 1 == 1 { -1.0 } else { 1.0 }).collect()
}

/// SplitMix64's output for a counter (Steele, Lea, Flood 2014).
fn mixed(i: u64) -> u64 {
    let mut z = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rotated(n: usize) -> Vec<f32> {
        let mut matrix = vec![0.0; n * n];
        (0..n).for_each(|i| matrix[i * n + i] = 1.0);
        Rotation::of(n).rows(&mut matrix);
        matrix
    }

    #[test]
    fn rotations_are_orthogonal_and_spread_each_channel_over_all() {
        for n in [1, 2, 3, 8, 9, 12, 24, 40, 64, 576, 896] {
            let r = rotated(n);
            for i in 0..n {
                for j in 0..n {
                    let dot: f64 = (0..n).map(|k| f64::from(r[i * n + k]) * f64::from(r[j * n + k])).sum();
                    let want = if i == j { 1.0 } else { 0.0 };
                    assert!((dot - want).abs() < 1e-6, "{n}: rows {i} and {j}: {dot}");
                }
            }
            let most = if n.is_power_of_two() { 1.0 } else { 2.0f32 };
            assert!(r.iter().all(|v| v.abs() <= (most / n as f32).sqrt() * 1.000_01), "{n}");
        }
    }

    #[test]
    fn tables_are_turned_back_and_ahead_exactly() {
        for n in [2, 8, 12, 40, 128] {
            let table = Table::of(n).unwrap();
            let words: Vec<f32> = (0..3 * n).map(|i| (i * 37 % 101) as f32 - 50.0).collect();
            let given = words.clone();
            let weight = Weight::new("ckpt:t", DType::F32, [3, n], move || {
                Ok(encode_floats(DType::F32, &given)?.into())
            });
            let rotated = table.weight(&weight).unwrap().floats().unwrap();
            let (back, ahead) = (table.back("in").floats().unwrap(), table.ahead("out").floats().unwrap());
            let times = |m: &[f32], x: &[f32]| -> Vec<f32> {
                m.chunks(n).map(|row| row.iter().zip(x).map(|(m, x)| m * x).sum()).collect()
            };
            let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
            let x: Vec<f32> = (0..n).map(|i| (i * 13 % 17) as f32 - 8.0).collect();
            for (word, rotated) in words.chunks(n).zip(rotated.chunks(n)) {
                assert_eq!(times(&back, rotated), word, "{n}");
                assert_eq!(dot(rotated, &times(&ahead, &x)), dot(word, &x), "{n}");
            }
            let one = back.iter().fold(0f32, |a, v| a.max(v.abs()));
            assert!(one.log2().fract() == 0.0 && back.iter().all(|v| *v == 0.0 || v.abs() == one), "{n}");
        }
        assert!(Table::of(7).is_none());
    }

    #[test]
    fn columns_are_rotated_as_rows_are() {
        let (n, width) = (12, 2 * STRIP + 5);
        let value = |i: usize, j: usize| (i * 7 + j * 3) as f32 % 11.0 - 5.0;
        let mut columns: Vec<f32> = (0..n * width).map(|i| value(i / width, i % width)).collect();
        let mut rows: Vec<f32> = (0..n * width).map(|i| value(i % n, i / n)).collect();
        Rotation::of(n).columns(&mut columns, width);
        Rotation::of(n).rows(&mut rows);
        for i in 0..n {
            for j in 0..width {
                assert!((columns[i * width + j] - rows[j * n + i]).abs() < 1e-5, "{i} {j}");
            }
        }
    }

    #[test]
    fn some_rows_are_those_of_the_whole() {
        let floats = |values: Vec<f32>| encode_floats(DType::F32, &values);
        let source = Weight::new("ckpt:w", DType::F32, [6, 4], move || {
            Ok(floats((0..24u8).map(f32::from).collect())?.into())
        });
        let fold = Fold { inputs: Some(4), ..Fold::default() };
        let whole = fold.weight(&source).unwrap();
        let part = whole.rows(2..5);
        assert_eq!(
            (part.shape.as_slice(), part.key.as_str()),
            (&[3, 4][..], "ckpt:w | rows 2..5 | rotated inputs by 4")
        );
        assert_eq!(part.floats().unwrap(), whole.floats().unwrap()[8..20]);
        let odd = Fold { inputs: Some(3), ..Fold::default() }.weight(&source).unwrap_err().to_string();
        assert!(odd.contains("4 inputs are no multiple of 3"), "{odd}");
        let odd = Fold { outputs: Some((4, 0)), ..Fold::default() }.weight(&source).unwrap_err().to_string();
        assert!(odd.contains("6 outputs from 0 on are no multiple of 4"), "{odd}");
    }
}
