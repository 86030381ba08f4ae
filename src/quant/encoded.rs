//! Compressed weights as Core ML's `constexpr_` ops take them, and what they decode to.
//!
//! Decoding does what those ops do in fp16: one product or look-up, rounded once.

use half::{f16, slice::HalfFloatSliceExt};
use rayon::prelude::*;

use super::{
    fp16,
    grid::Grid,
    layout::{Grouping, Importance, Layout},
    scheme::{Linear, Palette, Scheme},
    sparse,
};
use crate::{bail, error::Result, mil::types::shape_text};

/// A compressed weight.
#[derive(Debug, Clone, PartialEq)]
pub enum Encoded {
    /// The values themselves, rounded to fp16.
    Dense { values: Vec<f16> },
    Linear {
        /// One byte a code, two's complement where signed, in the order of the weight.
        codes: Vec<u8>,
        /// fp16 numbers above zero, row-major in `scale_shape`.
        scale: Vec<f32>,
        /// A zero point beside each scale, within the range of the codes.
        offset: Option<Vec<i32>>,
        /// Of the weight's rank, 1 along axes that share a scale.
        scale_shape: Vec<usize>,
        linear: Linear,
    },
    Palette {
        /// One byte an index, in the order of the weight; of vectors, the output axis is shorter by as much.
        indices: Vec<u8>,
        lut: Table,
        /// Tables along each axis of the indices, entries, elements of an entry.
        lut_shape: Vec<usize>,
        /// Where entries are vectors, the axis along which they lie.
        vector_axis: Option<usize>,
        palette: Palette,
    },
    /// What the mask keeps, in the order of the weight; `inner` is any of the others, with scales and tables
    /// that refer to the whole weight.
    Sparse { mask: Vec<bool>, inner: Box<Encoded> },
}

/// The entries of all tables.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    /// fp16 numbers, row-major in `lut_shape`; the products where entries are int8.
    pub values: Vec<f32>,
    pub int8: Option<Int8Table>,
}

/// Entries as int8 times one fp16 number a table.
#[derive(Debug, Clone, PartialEq)]
pub struct Int8Table {
    pub codes: Vec<i8>,
    pub scale: Vec<f32>,
}

/// What a compression costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stats {
    /// Power of the weight over that of the error, infinite where there is no error.
    pub sqnr_db: f64,
    pub max_error: f64,
    pub squared_error: f64,
    /// Codes, scales, tables and mask.
    pub bits_per_weight: f64,
}

impl Stats {
    /// Power of the error over that of the weight.
    pub fn relative(&self) -> f64 {
        10f64.powf(-self.sqnr_db / 10.0)
    }
}

/// Compresses a weight; every value must be a finite fp16 once rounded.
///
/// `importance` is one non-negative number for each element or for each input channel, by which squared
/// errors count; the result is the same for any number of threads.
pub fn encode(
    values: &[f32],
    layout: Layout<'_>,
    scheme: &Scheme,
    importance: Option<&[f32]>,
) -> Result<Encoded> {
    scheme.check()?;
    match *scheme {
        Scheme::Dense => {
            check_values(values, layout)?;
            let mut halves = vec![f16::ZERO; values.len()];
            let pieces = halves.par_chunks_mut(PIECE).zip(values.par_chunks(PIECE));
            pieces.for_each(|(to, from)| to.convert_from_f32_slice(from));
            Ok(Encoded::Dense { values: halves })
        }
        Scheme::Sparse(sparse, _) => {
            check_values(values, layout)?;
            sparse::encode(values, layout, sparse, &scheme.inner(), importance)
        }
        Scheme::W8A8 => encode(values, layout, &scheme.weights(), importance),
        Scheme::Linear(_) | Scheme::Palette(_) => {
            Grid::fit(values, layout, scheme, importance)?.encode(values)
        }
    }
}

/// Values that are looked at together.
const PIECE: usize = 1 << 14;

/// Refuses values that are too many or too few, and those that fp16 cannot hold.
pub(super) fn check_values(values: &[f32], layout: Layout<'_>) -> Result<()> {
    let count = layout.count()?;
    if values.len() != count {
        bail!("{} values for a weight {}, it has {count}", values.len(), shape_text(layout.shape));
    }
    let fits = |v: &f32| v.abs() < fp16::OVERFLOW;
    let fine = |values: &[f32]| values.iter().fold(true, |fine, v| fine & fits(v));
    if values.par_chunks(PIECE).all(fine) {
        return Ok(());
    }
    match values.iter().position(|v| !fits(v)) {
        Some(i) => {
            bail!("value {i} is {}, fp16 reaches 65504", values[i]; hint: "leave this weight as it is")
        }
        None => Ok(()),
    }
}

impl Encoded {
    /// The weight that Core ML makes of this, for the layout it was made with.
    pub fn decode(&self, layout: Layout<'_>) -> Result<Vec<f32>> {
        let decoder = Decoder::new(self, layout)?;
        let mut out = vec![0.0; layout.count()?];
        let cursors = decoder.cursors();
        out.par_chunks_mut(decoder.chunk).zip(cursors).enumerate().for_each(|(i, (out, cursor))| {
            decoder.decode(i * decoder.chunk, cursor, out);
        });
        Ok(out)
    }

    /// The error against the weight that this was made of.
    pub fn stats(&self, values: &[f32], layout: Layout<'_>) -> Result<Stats> {
        let (error, power, max_error) = self.compare(values, layout, Importance::Equal)?;
        let sqnr_db = if error == 0.0 { f64::INFINITY } else { 10.0 * (power / error).log10() };
        let bits_per_weight = self.bits() as f64 / values.len() as f64;
        Ok(Stats { sqnr_db, max_error, squared_error: error, bits_per_weight })
    }

    /// The squared error, each element's times its importance.
    pub fn weighted_error(
        &self,
        values: &[f32],
        layout: Layout<'_>,
        importance: Option<&[f32]>,
    ) -> Result<f64> {
        Ok(self.compare(values, layout, Importance::new(importance, layout)?)?.0)
    }

    /// Squared error and power, both weighted, and the largest error.
    fn compare(
        &self,
        values: &[f32],
        layout: Layout<'_>,
        importance: Importance<'_>,
    ) -> Result<(f64, f64, f64)> {
        check_values(values, layout)?;
        let decoder = Decoder::new(self, layout)?;
        let cursors = decoder.cursors();
        let parts: Vec<(f64, f64, f64)> = values
            .par_chunks(decoder.chunk)
            .zip(cursors)
            .enumerate()
            .map_init(Vec::new, |buffer: &mut Vec<f32>, (i, (values, cursor))| {
                buffer.resize(values.len(), 0.0);
                let start = i * decoder.chunk;
                decoder.decode(start, cursor, buffer);
                let mut sums = (0.0, 0.0, 0f64);
                for (j, (x, y)) in values.iter().zip(buffer.iter()).enumerate() {
                    let weight = f64::from(importance.of(start + j, layout));
                    let (x, e) = (f64::from(*x), f64::from(*x) - f64::from(*y));
                    sums = (sums.0 + weight * e * e, sums.1 + weight * x * x, sums.2.max(e.abs()));
                }
                sums
            })
            .collect();
        Ok(parts.into_iter().fold((0.0, 0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1, f64::max(a.2, b.2))))
    }

    /// Bits that this takes in the weight file, without padding.
    pub fn bits(&self) -> usize {
        match self {
            Encoded::Dense { values } => 16 * values.len(),
            Encoded::Linear { codes, scale, offset, linear, .. } => {
                let bits = usize::from(linear.bits);
                bits * (codes.len() + offset.as_ref().map_or(0, Vec::len)) + 16 * scale.len()
            }
            Encoded::Palette { indices, lut, palette, .. } => {
                let table = match &lut.int8 {
                    Some(t) => 8 * t.codes.len() + 16 * t.scale.len(),
                    None => 16 * lut.values.len(),
                };
                usize::from(palette.bits) * indices.len() + table
            }
            Encoded::Sparse { mask, inner } => mask.len() + inner.bits(),
        }
    }
}

/// Bytes of codes of fewer bits, as a stream, low bits first.
pub fn pack(codes: &[u8], bits: u8) -> Vec<u8> {
    /// Codes that end on a whole byte for every width.
    const WHOLE: usize = 1 << 12;
    let bits = usize::from(bits.clamp(1, 8));
    if bits == 8 {
        return codes.to_vec();
    }
    let mut out = vec![0u8; (codes.len() * bits).div_ceil(8)];
    out.par_chunks_mut(WHOLE * bits / 8).zip(codes.par_chunks(WHOLE)).for_each(|(out, codes)| {
        let (mut held, mut have, mut at) = (0u32, 0, 0);
        for code in codes {
            held |= (u32::from(*code) & ((1 << bits) - 1)) << have;
            have += bits;
            if have >= 8 {
                out[at] = held as u8;
                (held, have, at) = (held >> 8, have - 8, at + 1);
            }
        }
        if have > 0 {
            out[at] = held as u8;
        }
    });
    out
}

/// Decodes any stretch of a weight.
struct Decoder<'a> {
    mask: Option<&'a [bool]>,
    codes: &'a [u8],
    rule: Rule<'a>,
    grouping: Grouping,
    /// Elements of a stretch.
    chunk: usize,
}

enum Rule<'a> {
    Values(&'a [f16]),
    Scale(Linear, &'a [f32], Option<&'a [i32]>),
    /// Entries of a table, elements of an entry, elements between two of a vector.
    Table(&'a [f32], usize, usize, usize),
}

impl<'a> Decoder<'a> {
    fn new(encoded: &'a Encoded, layout: Layout<'_>) -> Result<Decoder<'a>> {
        let count = layout.count()?;
        let (mask, encoded) = match encoded {
            Encoded::Sparse { mask, inner } => (Some(mask.as_slice()), &**inner),
            other => (None, other),
        };
        let kept = mask.map_or(count, |m| m.iter().filter(|m| **m).count());
        let all = Grouping::linear(layout, super::scheme::Granularity::Tensor)?;
        let (codes, rule, grouping, wanted): (&[u8], _, _, _) = match encoded {
            Encoded::Dense { values } => (&[], Rule::Values(values), all, (kept, values.len())),
            Encoded::Linear { codes, scale, offset, linear, .. } => {
                let grouping = Grouping::linear(layout, linear.granularity)?;
                if scale.len() != grouping.count() || offset.as_ref().is_some_and(|o| o.len() != scale.len())
                {
                    bail!("{} scales, the weight has {} groups", scale.len(), grouping.count());
                }
                let rule = Rule::Scale(*linear, scale, offset.as_deref());
                (codes, rule, grouping, (kept, codes.len()))
            }
            Encoded::Palette { indices, lut, palette, .. } => {
                let grouping = Grouping::palette(layout, palette.group, palette.vector)?;
                let (entries, vector) = (palette.entries(), palette.vector);
                if lut.values.len() != grouping.count() * entries * vector {
                    bail!("{} entries for {} tables of {entries}", lut.values.len(), grouping.count());
                }
                if let Some(bad) = indices.iter().find(|i| usize::from(**i) >= entries) {
                    bail!("index {bad} is outside a table of {entries} entries");
                }
                let rule = Rule::Table(&lut.values, entries, vector, layout.after_output());
                (indices, rule, grouping, (kept / vector, indices.len()))
            }
            Encoded::Sparse { .. } => bail!("a sparse weight of a sparse weight"),
        };
        if mask.is_some_and(|m| m.len() != count) || wanted.0 != wanted.1 {
            bail!("{} codes, a weight {} keeps {}", wanted.1, shape_text(layout.shape), wanted.0);
        }
        // Whole rows of vectors.
        let unit = match rule {
            Rule::Table(_, _, vector, apart) if vector > 1 => vector * apart,
            _ => grouping.width,
        };
        let chunk = unit * (1usize << 16).div_ceil(unit);
        Ok(Decoder { mask, codes, rule, grouping, chunk })
    }

    /// Kept elements before each stretch.
    fn cursors(&self) -> Vec<usize> {
        match self.mask {
            None => (0..).step_by(self.chunk).take(self.count().div_ceil(self.chunk)).collect(),
            Some(mask) => {
                let counts = mask.chunks(self.chunk).map(|m| m.iter().filter(|m| **m).count());
                let before = |kept: &mut usize, n| Some(std::mem::replace(kept, *kept + n));
                counts.scan(0, before).collect()
            }
        }
    }

    fn count(&self) -> usize {
        match self.rule {
            Rule::Values(values) => values.len(),
            Rule::Table(_, _, vector, _) => self.codes.len() * vector,
            Rule::Scale(..) => self.codes.len(),
        }
    }

    /// Elements from `start` on, of which `cursor` kept ones come before.
    fn decode(&self, start: usize, cursor: usize, out: &mut [f32]) {
        match self.mask {
            Some(mask) => {
                let mask = &mask[start..start + out.len()];
                let mut next = cursor;
                for (i, (out, kept)) in out.iter_mut().zip(mask).enumerate() {
                    *out = 0.0;
                    if *kept {
                        *out = self.one(start + i, next);
                        next += 1;
                    }
                }
            }
            None => self.dense(start, out),
        }
    }

    /// The value of an element whose code is the `at`th.
    fn one(&self, element: usize, at: usize) -> f32 {
        match self.rule {
            Rule::Values(values) => values[at].to_f32(),
            Rule::Scale(linear, scale, offset) => {
                let group = self.grouping.of(element);
                let zero = offset.map_or(0, |o| o[group]);
                product(linear, scale[group], zero, self.codes[at])
            }
            Rule::Table(table, entries, ..) => {
                table[self.grouping.of(element) * entries + usize::from(self.codes[at])]
            }
        }
    }

    fn dense(&self, start: usize, out: &mut [f32]) {
        let g = &self.grouping;
        match self.rule {
            Rule::Values(values) => values[start..start + out.len()].convert_to_f32_slice(out),
            Rule::Table(table, entries, vector, apart) if vector > 1 => {
                let first = start / vector;
                for (i, code) in self.codes[first..first + out.len() / vector].iter().enumerate() {
                    let entry = (g.of(first + i) * entries + usize::from(*code)) * vector;
                    let at = i / apart * vector * apart + i % apart;
                    for (j, value) in table[entry..entry + vector].iter().enumerate() {
                        out[at + j * apart] = *value;
                    }
                }
            }
            Rule::Scale(linear, scale, offset) => self.runs(start, out, |group, codes, out| {
                let zero = offset.map_or(0, |o| o[group]);
                let scale = scale[group];
                out.iter_mut().zip(codes).for_each(|(out, c)| *out = product(linear, scale, zero, *c));
            }),
            Rule::Table(table, entries, ..) => self.runs(start, out, |group, codes, out| {
                let table = &table[group * entries..(group + 1) * entries];
                out.iter_mut().zip(codes).for_each(|(out, c)| *out = table[usize::from(*c)]);
            }),
        }
    }

    /// Whole rows from `start` on, by the parts of a row that belong to one group.
    fn runs(&self, start: usize, out: &mut [f32], mut each: impl FnMut(usize, &[u8], &mut [f32])) {
        let g = &self.grouping;
        let codes = &self.codes[start..start + out.len()];
        for (i, (out, codes)) in out.chunks_mut(g.width).zip(codes.chunks(g.width)).enumerate() {
            let first = g.first_of(start / g.width + i);
            for (j, (out, codes)) in out.chunks_mut(g.run).zip(codes.chunks(g.run)).enumerate() {
                each(first + j, codes, out);
            }
        }
    }
}

/// `scale · (code − offset)` in fp16.
pub(super) fn product(linear: Linear, scale: f32, zero: i32, code: u8) -> f32 {
    let code = if linear.signed { i32::from(code.cast_signed()) } else { i32::from(code) };
    fp16::round(scale * (code - zero) as f32)
}
