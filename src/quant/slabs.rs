//! A compressed weight made dense some rows at a time, so that what its ops make in between stays small.
//!
//! Rows are steps of the first axis of more than one. Every slab is made by the ops themselves, from the parts
//! of their arguments that belong to its rows; what has no such parts is made whole elsewhere.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use candle_core::Tensor;
use rayon::prelude::*;

use super::dense::Maker;
use crate::{
    bail,
    error::Result,
    mil::{Arg, Bytes, Const, DType, Data, Literal, Numbers, Type, constant::encode_floats},
    ops::Val,
};

/// Elements of a slab, about.
pub(super) const ELEMENTS: usize = 1 << 16;

/// The bytes of a result, made so many elements at a time; `None` where it has to be made whole.
pub(super) fn bytes(maker: &Maker, at: usize, elements: usize) -> Result<Option<Vec<u8>>> {
    let Some((dtype, shape)) = type_of(maker, at) else { return Ok(None) };
    let Some(axis) = shape.iter().position(|n| *n > 1) else { return Ok(None) };
    let mut plan = Plan { axis, rows: shape[axis], ..Plan::default() };
    if plan.step(maker, 1)?.is_none() {
        return Ok(None);
    }
    let width: usize = shape[axis + 1..].iter().product();
    let rows = plan.divide(elements / width.max(1));
    if !plan.count(rows) {
        return Ok(None);
    }
    let Some(size) = dtype.packed_len(rows * width) else { return Ok(None) };
    let mut out = vec![0; dtype.packed_len(shape.iter().product()).unwrap_or(0)];
    let slab = |(i, to): (usize, &mut [u8])| -> Result<()> {
        let range = i * rows..plan.rows.min((i + 1) * rows);
        let Some(value) = plan.run(i, range)?.into_iter().nth(at) else { bail!("there is no result {at}") };
        let made = encode_floats(dtype, &value.to_floats()?)?;
        if made.len() != to.len() {
            bail!("{} bytes were made of a slab of {}", made.len(), to.len());
        }
        to.copy_from_slice(&made);
        Ok(())
    };
    let done: Vec<Result<()>> = out.par_chunks_mut(size).enumerate().map(slab).collect();
    done.into_iter().collect::<Result<()>>()?;
    Ok(Some(out))
}

fn type_of(maker: &Maker, at: usize) -> Option<(DType, Vec<usize>)> {
    let Some(Type::Tensor(t)) = maker.types.get(at) else { return None };
    Some((t.dtype, t.shape()?))
}

/// The ops that make a weight, those that others read first.
#[derive(Default)]
struct Plan<'a> {
    axis: usize,
    /// Rows of the result; all numbers of rows are in these.
    rows: usize,
    steps: Vec<Step<'a>>,
    /// Rows that stay together.
    together: Vec<usize>,
    /// Rows that share an element: slabs hold some of these whole, or are a part of one.
    blocks: Vec<usize>,
}

struct Step<'a> {
    maker: &'a Maker,
    /// Rows of the plan for each of the op's results.
    each: usize,
    args: Vec<(&'a str, Given)>,
}

/// How a slab's part of an argument is found.
enum Given {
    Whole(Val),
    /// One step along an axis for so many rows.
    Rows {
        stored: Stored,
        shape: Vec<usize>,
        axis: usize,
        each: usize,
    },
    /// Bytes that hold codes of so many bits a row.
    Packed {
        stored: Stored,
        bits: usize,
    },
    /// What the mask of the same op keeps, by slab.
    Kept {
        stored: Stored,
        starts: Vec<usize>,
    },
    /// The sizes of the result.
    Shape(Vec<i64>),
    /// A result of an earlier step.
    Made {
        step: usize,
        at: usize,
    },
}

/// A constant whose elements are decoded when they are needed.
enum Stored {
    Bytes { bytes: Bytes, dtype: DType, count: usize },
    Decoded(Tensor),
}

/// What an argument is to its op.
enum Role {
    Whole,
    /// As many rows as the result, or as there are vectors.
    Rows,
    /// One element for a block of rows.
    Blocks,
    /// One element for a row where the op's `axis` is that of rows.
    Along,
    /// Codes in bytes, of so many bits.
    Packed(usize),
    Shape,
    Kept,
}

/// Where an argument comes from.
enum Origin<'a> {
    Const(&'a Const),
    Made(&'a Arc<Maker>, usize),
}

impl Origin<'_> {
    fn shape(&self) -> Option<Vec<usize>> {
        match self {
            Origin::Const(Const { ty: Type::Tensor(t), .. }) => t.shape(),
            Origin::Const(_) => None,
            Origin::Made(maker, at) => type_of(maker, *at).map(|(_, shape)| shape),
        }
    }

    fn whole(&self) -> Result<Option<Val>> {
        match self {
            Origin::Const(c) => Val::constant(c).map(Some),
            Origin::Made(maker, at) => Ok(maker.run()?.into_iter().nth(*at)),
        }
    }

    fn stored(&self) -> Result<Option<Stored>> {
        if let Origin::Const(Const { ty: Type::Tensor(t), data, .. }) = self {
            let count = t.count().unwrap_or(0);
            match data {
                Data::Weight(w) => {
                    return Ok(Some(Stored::Bytes { bytes: w.bytes()?, dtype: w.dtype, count }));
                }
                Data::Literal(Literal::Bytes(b)) if t.dtype.packed_len(count) == Some(b.len()) => {
                    let bytes = Bytes::Owned(b.clone());
                    return Ok(Some(Stored::Bytes { bytes, dtype: t.dtype, count }));
                }
                Data::Literal(_) => {}
            }
        }
        let Some(Val::Tensor(t)) = self.whole()? else { return Ok(None) };
        Ok(Some(Stored::Decoded(t.flatten_all()?.contiguous()?)))
    }
}

impl Stored {
    fn count(&self) -> usize {
        match self {
            Stored::Bytes { count, .. } => *count,
            Stored::Decoded(t) => t.elem_count(),
        }
    }

    fn part(&self, range: Range<usize>, shape: &[usize]) -> Result<Val> {
        let t = match self {
            Stored::Decoded(t) => t.narrow(0, range.start, range.len())?,
            Stored::Bytes { bytes, dtype, .. } => {
                // Eight codes of any width end on a whole byte.
                let (start, bits) = (range.start / 8 * 8, dtype.bits().unwrap_or(8));
                let part = bytes.get(start * bits / 8..(range.end * bits).div_ceil(8)).unwrap_or(&[]);
                let numbers = Numbers::decode(*dtype, part, range.end - start)?;
                let count = numbers.len();
                match Val::numbers(numbers, &[count])? {
                    Val::Tensor(t) => t.narrow(0, range.start - start, range.len())?,
                    _ => bail!("{dtype} is no tensor"),
                }
            }
        };
        Ok(Val::Tensor(t.reshape(shape)?))
    }

    /// How many elements of a mask are set among some, the first of which begins a byte.
    fn set(&self, range: Range<usize>) -> Option<usize> {
        let Stored::Bytes { bytes, dtype, .. } = self else { return None };
        match dtype {
            DType::U1 => bits_set(bytes, range),
            DType::U8 => Some(bytes.get(range)?.iter().filter(|b| **b != 0).count()),
            _ => None,
        }
    }
}

fn bits_set(bytes: &[u8], range: Range<usize>) -> Option<usize> {
    let whole = bytes.get(range.start / 8..range.end / 8)?;
    let rest = match range.end % 8 {
        0 => 0,
        n => bytes.get(range.end / 8)? & ((1 << n) - 1),
    };
    Some(whole.iter().map(|b| b.count_ones() as usize).sum::<usize>() + rest.count_ones() as usize)
}

impl<'a> Plan<'a> {
    /// The step of an op each of whose results' rows is so many; `None` where there are no slabs of it.
    fn step(&mut self, maker: &'a Maker, each: usize) -> Result<Option<usize>> {
        if let Some(known) = self.steps.iter().position(|s| std::ptr::eq(s.maker, maker)) {
            return Ok((self.steps[known].each == each).then_some(known));
        }
        let Some(given) = arguments(maker) else { return Ok(None) };
        let Some(vector) = self.vector(maker, &given) else { return Ok(None) };
        self.together.push(each * vector);
        let mut args = Vec::new();
        for (name, origin) in &given {
            let Some(role) = self.role(maker, name, &given) else { return Ok(None) };
            let Some(one) = self.given(role, origin, each * vector)? else { return Ok(None) };
            args.push((*name, one));
        }
        self.steps.push(Step { maker, each, args });
        Ok(Some(self.steps.len() - 1))
    }

    /// Rows of the result for each row of indices.
    fn vector(&self, maker: &Maker, given: &[(&str, Origin<'_>)]) -> Option<usize> {
        let Some((_, axis)) = given.iter().find(|(name, _)| *name == "vector_axis") else { return Some(1) };
        let (_, lut) = given.iter().find(|(name, _)| *name == "lut")?;
        let (vector, rank) = (*lut.shape()?.last()?, type_of(maker, 0)?.1.len());
        let along = axis_of(axis, rank)?;
        match maker.op.kind.as_str() {
            _ if vector == 1 || along != self.axis && along > self.axis => Some(1),
            "constexpr_lut_to_dense" if along == self.axis => Some(vector),
            _ => None,
        }
    }

    fn role(&self, maker: &Maker, name: &str, given: &[(&str, Origin<'_>)]) -> Option<Role> {
        let old = given.iter().any(|(name, _)| *name == "shape");
        Some(match (maker.op.kind.as_str(), name) {
            (_, "axis" | "vector_axis" | "output_dtype") => Role::Whole,
            (_, "shape") => Role::Shape,
            ("constexpr_affine_dequantize", "quantized_data") => Role::Rows,
            ("constexpr_affine_dequantize", "scale" | "zero_point") => {
                let (_, axis) = given.iter().find(|(name, _)| *name == "axis")?;
                let along = axis_of(axis, type_of(maker, 0)?.1.len())? == self.axis;
                if along { Role::Along } else { Role::Whole }
            }
            ("constexpr_cast", "source_val") => Role::Rows,
            ("constexpr_lut_to_dense", "indices") if old => {
                let (_, lut) = given.iter().find(|(name, _)| *name == "lut")?;
                let entries: usize = lut.shape()?.iter().product();
                matches!(entries, 2 | 4 | 16 | 64 | 256).then(|| Role::Packed(entries.ilog2() as usize))?
            }
            ("constexpr_lut_to_dense", "lut") if old => Role::Whole,
            ("constexpr_sparse_to_dense", "mask") if old => Role::Packed(1),
            ("constexpr_sparse_to_dense", "nonzero_data") => Role::Kept,
            ("constexpr_lut_to_sparse", "indices_nonzero_data") => Role::Kept,
            ("constexpr_sparse_blockwise_shift_scale", "nonzero_data") => Role::Kept,
            ("constexpr_blockwise_shift_scale", "data")
            | ("constexpr_lut_to_dense", "indices")
            | ("constexpr_sparse_to_dense", "mask")
            | ("constexpr_lut_to_sparse", "indices_mask")
            | ("constexpr_sparse_blockwise_shift_scale", "data_mask") => Role::Rows,
            (
                "constexpr_blockwise_shift_scale" | "constexpr_sparse_blockwise_shift_scale",
                "scale" | "offset",
            )
            | ("constexpr_lut_to_dense" | "constexpr_lut_to_sparse", "lut") => Role::Blocks,
            _ => return None,
        })
    }

    /// An argument each of whose rows is so many.
    fn given(&mut self, role: Role, origin: &Origin<'a>, each: usize) -> Result<Option<Given>> {
        let Some(shape) = origin.shape() else {
            return Ok(if let Role::Whole = role { origin.whole()?.map(Given::Whole) } else { None });
        };
        let (axis, stored) = match role {
            Role::Whole => return Ok(origin.whole()?.map(Given::Whole)),
            Role::Shape => {
                let Some(shape) = origin.whole()? else { return Ok(None) };
                let shape = shape.to_ints()?;
                let fits = shape.get(self.axis).is_some_and(|n| usize::try_from(*n) == Ok(self.rows));
                return Ok((fits && each == 1).then_some(Given::Shape(shape)));
            }
            Role::Kept | Role::Rows if matches!(origin, Origin::Made(..)) => {
                let Origin::Made(maker, at) = origin else { return Ok(None) };
                let step = self.step(maker, each)?;
                return Ok(step.map(|step| Given::Made { step, at: *at }));
            }
            Role::Kept => {
                let stored = origin.stored()?;
                return Ok(stored.map(|stored| Given::Kept { stored, starts: Vec::new() }));
            }
            Role::Packed(bits) => {
                let Some(stored @ Stored::Bytes { dtype: DType::U8, .. }) = origin.stored()? else {
                    return Ok(None);
                };
                let total = stored.count() * 8 / bits;
                let width = total / self.rows;
                let fits = (self.rows * width * bits).div_ceil(8) == stored.count();
                return Ok(fits.then_some(Given::Packed { stored, bits: width * bits }));
            }
            Role::Along if shape.len() != 1 || shape[0] == 1 => {
                return Ok(origin.whole()?.map(Given::Whole));
            }
            Role::Along => (0, origin.stored()?),
            Role::Blocks if shape.get(self.axis) == Some(&1) => {
                return Ok(origin.whole()?.map(Given::Whole));
            }
            Role::Blocks | Role::Rows => (self.axis, origin.stored()?),
        };
        let Some(stored) = stored else { return Ok(None) };
        let steps = shape.get(axis).copied().unwrap_or(0);
        let first = shape.iter().take(axis).all(|n| *n == 1);
        if !first || steps == 0 || !self.rows.is_multiple_of(steps) {
            return Ok(None);
        }
        let block = self.rows / steps;
        if let Role::Blocks = role {
            self.blocks.push(block);
        } else if block != each {
            return Ok(None);
        }
        Ok(Some(Given::Rows { stored, shape, axis, each: block }))
    }

    /// Rows of a slab of about so many: whole bytes of any codes.
    fn divide(&self, about: usize) -> usize {
        let fits = |rows: &usize| {
            self.together.iter().all(|n| rows.is_multiple_of(*n))
                && self.blocks.iter().all(|n| rows.is_multiple_of(*n) || n.is_multiple_of(*rows))
        };
        let about = (about / 8 * 8).max(8);
        let below = (8..=about.min(self.rows)).step_by(8).filter(fits).last();
        below.or_else(|| (about..self.rows).step_by(8).find(fits)).unwrap_or(self.rows)
    }

    /// Counts what masks keep before each slab; whether they can be counted and keep all that there is.
    fn count(&mut self, rows: usize) -> bool {
        let (axis, all) = (self.axis, self.rows);
        self.steps.iter_mut().all(|step| step.count(axis, all, rows).is_some())
    }

    /// The results of the last op for a slab.
    fn run(&self, slab: usize, rows: Range<usize>) -> Result<Vec<Val>> {
        let mut made: Vec<Vec<Val>> = Vec::with_capacity(self.steps.len());
        for step in &self.steps {
            let mut args: BTreeMap<&str, Vec<Val>> = BTreeMap::new();
            for (name, given) in &step.args {
                args.insert(name, vec![given.part(slab, &rows, self.axis, &made)?]);
            }
            made.push(step.maker.call(args)?);
        }
        Ok(made.pop().unwrap_or_default())
    }
}

impl Step<'_> {
    fn count(&mut self, axis: usize, all: usize, rows: usize) -> Option<()> {
        if !self.args.iter().any(|(_, given)| matches!(given, Given::Kept { .. })) {
            return Some(());
        }
        let mask = self.args.iter().find(|(name, _)| name.ends_with("mask"))?;
        let set = |range: Range<usize>| match &mask.1 {
            Given::Packed { stored: Stored::Bytes { bytes, .. }, bits } => {
                bits_set(bytes, range.start * bits..range.end * bits)
            }
            Given::Rows { stored, shape, each: 1, .. } => {
                let width: usize = shape[axis + 1..].iter().product();
                stored.set(range.start * width..range.end * width)
            }
            _ => None,
        };
        let mut before = vec![0];
        for start in (0..all).step_by(rows) {
            before.push(before.last()? + set(start..all.min(start + rows))?);
        }
        for (_, given) in &mut self.args {
            if let Given::Kept { stored, starts } = given {
                if *before.last()? != stored.count() {
                    return None;
                }
                starts.clone_from(&before);
            }
        }
        Some(())
    }
}

impl Given {
    fn part(&self, slab: usize, rows: &Range<usize>, axis: usize, made: &[Vec<Val>]) -> Result<Val> {
        match self {
            Given::Whole(value) => Ok(value.clone()),
            Given::Rows { stored, shape, axis, each } => {
                let range = rows.start / each..rows.end.div_ceil(*each);
                let width: usize = shape[axis + 1..].iter().product();
                let mut shape = shape.clone();
                shape[*axis] = range.len();
                stored.part(range.start * width..range.end * width, &shape)
            }
            Given::Packed { stored, bits } => {
                let range = rows.start * bits / 8..(rows.end * bits).div_ceil(8);
                stored.part(range.clone(), &[range.len()])
            }
            Given::Kept { stored, starts } => match starts.get(slab..slab + 2) {
                Some([start, end]) => stored.part(*start..*end, &[end - start]),
                _ => bail!("there is no slab {slab}"),
            },
            Given::Shape(shape) => {
                let mut shape = shape.clone();
                let rank = shape.len();
                shape[axis] = i64::try_from(rows.len()).unwrap_or(i64::MAX);
                Val::ints(shape, &[rank])
            }
            Given::Made { step, at } => match made.get(*step).and_then(|results| results.get(*at)) {
                Some(value) => Ok(value.clone()),
                None => bail!("there is no result {at}"),
            },
        }
    }
}

/// An `axis` that is known.
fn axis_of(origin: &Origin<'_>, rank: usize) -> Option<usize> {
    let Origin::Const(c) = origin else { return None };
    let axis = *Val::constant(c).ok()?.to_ints().ok()?.first()?;
    let rank = i64::try_from(rank).ok()?;
    usize::try_from(if axis < 0 { axis + rank } else { axis }).ok()
}

/// Attributes and parameters of an op, each of one value that is known.
fn arguments(maker: &Maker) -> Option<Vec<(&str, Origin<'_>)>> {
    let attrs = maker.op.attrs.iter().filter(|(name, _)| *name != "name");
    let mut all: Vec<(&str, Origin<'_>)> = attrs.map(|(n, c)| (n.as_str(), Origin::Const(c))).collect();
    for (name, given) in &maker.op.params {
        let [one] = given.as_slice() else { return None };
        let origin = match one {
            Arg::Const(c) => Origin::Const(c),
            Arg::Value(id) => {
                let (source, at) = maker.sources.get(id)?;
                source.op.constant().map_or(Origin::Made(source, *at), Origin::Const)
            }
        };
        all.push((name, origin));
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        graph::Builder,
        mil::{Program, Weight},
        ops::Opset,
        quant::{Options, Policy, apply, dense::makers},
    };

    /// A convolution and a product whose outputs are the second axis.
    fn program(opset: Opset, dtype: DType) -> Program {
        let mut b = Builder::new(opset);
        let weight = |key: &'static str, shape: &[usize]| {
            let count = shape.iter().product::<usize>();
            let values: Vec<f32> = (0..count).map(|i| ((i * 7919 + 13) % 251) as f32 / 97.0 - 1.3).collect();
            Weight::new(key, dtype, shape, move || Ok(encode_floats(dtype, &values)?.into()))
        };
        let x = b.input("x", Type::tensor(dtype, [1, 24, 1, 3])).unwrap();
        let conv = [
            ("x", x.into()),
            ("weight", weight("conv", &[40, 24, 1, 1]).into()),
            ("strides", [1, 1].into()),
            ("pad_type", "valid".into()),
            ("pad", [0, 0, 0, 0].into()),
            ("dilations", [1, 1].into()),
            ("groups", 1.into()),
        ];
        let y = b.op("conv", "conv", conv).unwrap();
        let flat = b.op("reshape", "flat", [("x", y.into()), ("shape", [3, 40].into())]).unwrap();
        let matmul = [("x", flat.into()), ("y", weight("matmul", &[40, 44]).into())];
        let y = b.op("matmul", "matmul", matmul).unwrap();
        let functions = BTreeMap::from([("main".to_string(), b.finish(vec![y]))]);
        Program { functions, ..Program::default() }
    }

    #[test]
    fn slabs_are_what_the_whole_is() {
        const OLD: &[&str] = &["int8", "uint8", "int8:t", "lut1", "lut4", "lut6", "lut8", "sparse50", "2:4"];
        const NEW: &[&str] = &[
            "int8:o",
            "int8:b8",
            "int4:b4",
            "uint4:b20",
            "lut3",
            "lut4:g4",
            "lut4:g20",
            "lut4:g12i",
            "lut2:v2",
            "lut4:g4:v2",
            "lut2:v4:i8",
            "lut4:g4:i8",
            "sparse25+int8",
            "sparse50+int4:b4",
            "sparse50+lut4",
            "sparse75+lut3:g4",
            "sparse50+lut4:g12i",
            "2:4+lut4:i8",
        ];
        let mut slabs = 0;
        for opset in [Opset::Ios16, Opset::Ios18, Opset::Ios26] {
            for text in OLD.iter().chain(NEW.iter().filter(|_| opset > Opset::Ios16)) {
                for dtype in [DType::F16, DType::F32] {
                    let mut p = program(opset, dtype);
                    let policy = Policy { smallest: 0, ..Policy::uniform(text.parse().unwrap()) };
                    let options = Options { allow_slow: true, ..Options::default() };
                    assert_eq!(apply(&mut p, &policy, options).unwrap().tensors.len(), 2, "{text}");
                    let (made, read) = makers(&p.functions["main"]);
                    for (maker, at) in read.iter().filter_map(|id| made.get(id)) {
                        if maker.op.kind == "const" {
                            continue;
                        }
                        let whole = maker.run().unwrap()[*at].to_floats().unwrap();
                        let whole = encode_floats(dtype, &whole).unwrap();
                        for elements in [1, 1000, ELEMENTS] {
                            let found = bytes(maker, *at, elements).unwrap();
                            assert_eq!(found.as_ref(), Some(&whole), "{opset} {text} {dtype} {elements}");
                            slabs += 1;
                        }
                    }
                }
            }
        }
        assert_eq!(slabs, (2 * 2 * 3) * (3 * OLD.len() + 2 * NEW.len()));
    }

    #[test]
    fn a_mask_that_keeps_something_else_is_left_to_the_whole() {
        let mut p = program(Opset::Ios18, DType::F16);
        let policy = Policy { smallest: 0, ..Policy::uniform("sparse50".parse().unwrap()) };
        let options = Options { allow_slow: true, ..Options::default() };
        apply(&mut p, &policy, options).unwrap();
        let function = p.functions.get_mut("main").unwrap();
        function.body.walk_blocks(&mut |block| {
            for op in &mut block.ops {
                if let Some([Arg::Const(c)]) = op.params.get_mut("nonzero_data").map(Vec::as_mut_slice)
                    && let Data::Weight(w) = &c.data
                {
                    let less = w.count() - 1;
                    *c = Const::weight(w.rows(0..less));
                }
            }
        });
        let (made, read) = makers(function);
        let mut seen = 0;
        for (maker, at) in read.iter().filter_map(|id| made.get(id)).filter(|(m, _)| m.op.kind != "const") {
            assert_eq!(bytes(maker, *at, 1).unwrap(), None);
            assert!(maker.run().is_err());
            seen += 1;
        }
        assert_eq!(seen, 2);
    }

    #[test]
    fn slabs_hold_blocks_or_are_parts_of_them() {
        let rows = |rows, together: &[usize], blocks: &[usize], about| {
            Plan { rows, together: together.to_vec(), blocks: blocks.to_vec(), ..Plan::default() }
                .divide(about)
        };
        for (given, together, blocks, about, want) in [
            (4096, vec![1], vec![], 16, 16),
            (4096, vec![1], vec![16], 20, 16),
            (4096, vec![2], vec![2048], 20, 16),
            (4096, vec![1], vec![64, 8], 40, 32),
            (120, vec![1], vec![5], 8, 40),
            (36, vec![1], vec![12], 8, 24),
            (6, vec![1], vec![3], 1, 6),
            (4095, vec![3], vec![], 1 << 20, 4080),
        ] {
            assert_eq!(rows(given, &together, &blocks, about), want, "{given} {together:?} {blocks:?}");
        }
    }
}
