//! The values that a compressed weight can have: scales or tables, group by group, before any element has
//! its code. Rounding that feeds errors back asks for the nearest value of one element at a time.

use rayon::prelude::*;

use super::{
    encoded::{Encoded, Int8Table, Table, check_values, product},
    fp16,
    layout::{Grouping, Importance, Layout, join},
    linear,
    palette::{self, Entries},
    scheme::{Linear, Palette, Scheme},
    vectors::{self, Lookup},
};
use crate::{bail, error::Result};

/// Scales or tables of all groups of a weight.
#[derive(Debug, Clone, PartialEq)]
pub struct Grid {
    /// Groups of codes, which of vectors are fewer than elements.
    grouping: Grouping,
    kind: Kind,
    codes: usize,
    output: usize,
    /// Elements between neighbours along the output axis.
    apart: usize,
}

#[derive(Debug, Clone, PartialEq)]
enum Kind {
    Linear { linear: Linear, scale: Vec<f32>, zero: Vec<i32> },
    Palette { palette: Palette, lut: Table, between: Vec<f32> },
}

impl Grid {
    /// Searches scales or tables of least squared error, weighted by importance, for a linear scheme or a
    /// palette.
    pub fn fit(
        values: &[f32],
        layout: Layout<'_>,
        scheme: &Scheme,
        importance: Option<&[f32]>,
    ) -> Result<Grid> {
        scheme.check()?;
        check_values(values, layout)?;
        scheme.fits(layout)?;
        Grid::search(values, layout, scheme, Importance::new(importance, layout)?)
    }

    /// The same of values and a scheme that were checked.
    pub(super) fn search(
        values: &[f32],
        layout: Layout<'_>,
        scheme: &Scheme,
        importance: Importance<'_>,
    ) -> Result<Grid> {
        let (grouping, kind) = match *scheme {
            Scheme::Linear(l) => {
                let grouping = Grouping::linear(layout, l.granularity)?;
                let size = grouping.size();
                let found =
                    grouping.map_together(values, importance, linear::Scratch::default, |s, _, of, out| {
                        linear::fit(s, of.values, of.weights, size, l, out);
                    });
                let (scale, zero) = found.into_iter().unzip();
                (grouping, Kind::Linear { linear: l, scale, zero })
            }
            Scheme::Palette(p) => {
                let grouping = Grouping::palette(layout, p.group, p.vector)?;
                let tables = match p.vector {
                    1 => palette::tables(values, layout, p, &grouping, importance),
                    _ => vectors::tables(values, p, &grouping, importance),
                };
                (grouping, Kind::palette(p, tables))
            }
            Scheme::Dense | Scheme::W8A8 | Scheme::Sparse(..) => {
                bail!("`{scheme}` has no grid"; hint: "give the scheme of the elements that are kept")
            }
        };
        let codes = values.len() / kind.vector();
        Ok(Grid { grouping, kind, codes, output: layout.output, apart: layout.after_output() })
    }

    /// The group of a code.
    pub fn group(&self, code: usize) -> usize {
        self.grouping.of(code)
    }

    /// Elements that a code stands for: where more than one, they lie along the output axis.
    pub fn vector(&self) -> usize {
        self.kind.vector()
    }

    /// The code whose value is nearest to an element, or to a vector.
    pub fn nearest(&self, group: usize, element: &[f32]) -> u8 {
        match &self.kind {
            Kind::Linear { linear, scale, zero } => {
                let x = element.first().copied().unwrap_or_default();
                Rounding::new(*linear, scale[group], zero[group]).code(x)
            }
            Kind::Palette { palette, lut, between } => match element {
                [x] => palette::nearest(table(between, group, palette.entries() - 1), *x),
                _ => {
                    let table = table(&lut.values, group, palette.entries() * palette.vector);
                    let off =
                        |entry: &[f32]| entry.iter().zip(element).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
                    let entries = table.chunks(palette.vector).map(off).enumerate();
                    entries.min_by(|a, b| a.1.total_cmp(&b.1)).map_or(0, |(i, _)| i as u8)
                }
            },
        }
    }

    /// The value of a code, or the vector.
    pub fn value(&self, group: usize, code: u8, to: &mut [f32]) {
        match &self.kind {
            Kind::Linear { linear, scale, zero } => {
                to.fill(product(*linear, scale[group], zero[group], code));
            }
            Kind::Palette { palette, lut, .. } => {
                let at = group * palette.entries() + usize::from(code);
                to.copy_from_slice(table(&lut.values, at, palette.vector));
            }
        }
    }

    /// Gives each element of a weight the nearest code.
    pub fn encode(self, values: &[f32]) -> Result<Encoded> {
        if values.len() != self.codes * self.vector() {
            bail!("{} values, the grid is of {}", values.len(), self.codes * self.vector());
        }
        let mut codes = vec![0u8; self.codes];
        let vector = self.vector();
        let g = &self.grouping;
        let rows = (1usize << 15).div_ceil(g.width).next_multiple_of(g.whole_rows());
        let piece = |joined: &mut Vec<f32>, (i, (codes, mut values)): (usize, (&mut [u8], &[f32]))| {
            if vector > 1 {
                joined.resize(values.len(), 0.0);
                join(values, 0, vector, self.apart, joined);
                values = joined;
            }
            for (j, (codes, values)) in
                codes.chunks_mut(g.width).zip(values.chunks(g.width * vector)).enumerate()
            {
                let first = g.first_of(i * rows + j);
                for (k, (codes, values)) in
                    codes.chunks_mut(g.run).zip(values.chunks(g.run * vector)).enumerate()
                {
                    self.kind.assign(first + k, values, codes);
                }
            }
        };
        codes
            .par_chunks_mut(rows * g.width)
            .zip(values.par_chunks(rows * g.width * vector))
            .enumerate()
            .for_each_init(Vec::new, piece);
        self.finish(codes)
    }

    /// The weight of which these are the codes.
    pub fn finish(self, codes: Vec<u8>) -> Result<Encoded> {
        if codes.len() != self.codes {
            bail!("{} codes, the grid is of {}", codes.len(), self.codes);
        }
        let mut shape = self.grouping.counts;
        Ok(match self.kind {
            Kind::Linear { linear, scale, zero } => {
                let offset = linear.has_offset().then_some(zero);
                Encoded::Linear { codes, scale, offset, scale_shape: shape, linear }
            }
            Kind::Palette { palette, lut, .. } => {
                shape.extend([palette.entries(), palette.vector]);
                let vector_axis = (palette.vector > 1).then_some(self.output);
                Encoded::Palette { indices: codes, lut, lut_shape: shape, vector_axis, palette }
            }
        })
    }
}

/// The part of a group in an array that has as much for each.
fn table(all: &[f32], group: usize, size: usize) -> &[f32] {
    &all[group * size..(group + 1) * size]
}

impl Kind {
    fn palette(palette: Palette, tables: Vec<Entries>) -> Kind {
        let single = palette.vector == 1;
        let between = tables.iter().filter(|_| single).flat_map(|t| palette::between(&t.values)).collect();
        let int8 = palette.int8.then(|| Int8Table {
            codes: tables.iter().flat_map(|t| t.codes.iter().copied()).collect(),
            scale: tables.iter().map(|t| t.scale).collect(),
        });
        let values = tables.into_iter().flat_map(|t| t.values).collect();
        Kind::Palette { palette, lut: Table { values, int8 }, between }
    }

    fn vector(&self) -> usize {
        match self {
            Kind::Linear { .. } => 1,
            Kind::Palette { palette, .. } => palette.vector,
        }
    }

    /// The nearest codes of elements of one group.
    fn assign(&self, group: usize, values: &[f32], codes: &mut [u8]) {
        match self {
            Kind::Linear { linear, scale, zero } => {
                let rounding = Rounding::new(*linear, scale[group], zero[group]);
                values.iter().zip(codes).for_each(|(x, code)| *code = rounding.code(*x));
            }
            Kind::Palette { palette, between, .. } if palette.vector == 1 => {
                palette::assign(table(between, group, palette.entries() - 1), values, codes);
            }
            Kind::Palette { palette, lut, .. } => {
                let table = table(&lut.values, group, palette.entries() * palette.vector);
                match palette.vector {
                    2 => assign::<2>(table, values, codes),
                    _ => assign::<4>(table, values, codes),
                }
            }
        }
    }
}

fn assign<const V: usize>(table: &[f32], values: &[f32], codes: &mut [u8]) {
    let lookup = Lookup::<V>::new(table.as_chunks().0);
    let (vectors, _) = values.as_chunks::<V>();
    vectors.iter().zip(codes).for_each(|(v, code)| *code = lookup.nearest(v) as u8);
}

/// How an element becomes a code.
struct Rounding {
    inverse: f32,
    zero: f32,
    low: f32,
    high: f32,
}

impl Rounding {
    fn new(linear: Linear, scale: f32, zero: i32) -> Rounding {
        let (low, high) = linear::reach(linear, scale, zero);
        Rounding { inverse: scale.recip(), zero: zero as f32, low, high }
    }

    fn code(&self, x: f32) -> u8 {
        fp16::byte(fp16::integer(fp16::bound(x * self.inverse, self.low, self.high)) + self.zero)
    }
}
