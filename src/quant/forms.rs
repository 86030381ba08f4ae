//! The constexpr ops that say what a compressed weight is, in both of their generations.
//!
//! Up to iOS 17 parameters are attributes and indices and masks are packed bytes; there are 8-bit integers
//! with a scale per tensor or channel, one table for a tensor, and zeros. From iOS 18 on all schemes exist.

use std::collections::{BTreeMap, HashSet};

use super::{
    cell::{Cell, Part},
    layout::Layout,
    scheme::{Axis, Effort, Granularity, Group, INT8, Linear, Palette, Scheme, Then},
    sparse,
    uses::Role,
};
use crate::{
    bail,
    error::{Error, Result},
    mil::{Arg, Const, DType, Function, Literal, Op, TensorType, Type, ValueId, Weight},
    ops::Opset,
};

/// One stored tensor of a compressed weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) part: Part,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
}

/// A weight's sizes and axes, its element type, and what it is compressed to.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Plan {
    pub(super) scheme: Scheme,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) output: usize,
    pub(super) input: usize,
    pub(super) opset: Opset,
    /// Elements that a sparse scheme keeps.
    pub(super) kept: usize,
}

/// Refuses a scheme that the opset has no form for, and names one that has.
pub(super) fn possible(scheme: &Scheme, opset: Opset) -> Result<()> {
    let needs = match scheme {
        Scheme::Dense => return Ok(()),
        Scheme::W8A8 => Opset::Ios17,
        Scheme::Linear(Linear {
            bits: 8, granularity: Granularity::Tensor | Granularity::Channel, ..
        }) => Opset::Ios16,
        Scheme::Palette(Palette { bits, group: Group::Tensor, vector: 1, int8: false, .. }) if *bits != 3 => {
            Opset::Ios16
        }
        Scheme::Sparse(_, Then::Nothing) => Opset::Ios16,
        _ => Opset::Ios18,
    };
    if opset >= needs {
        return Ok(());
    }
    let has = match opset {
        Opset::Ios15 => "none of the compressed forms".to_string(),
        _ => "`int8`, `uint8`, `lut1`, `lut2`, `lut4`, `lut6`, `lut8` and `sparseN`".to_string(),
    };
    Err(Error::new(format!("`{scheme}` needs {needs}, the program is for {opset}, which has {has}"))
        .hint(format!("`--minimum-os {}` raises the program", os_flag(needs))))
}

fn os_flag(opset: Opset) -> &'static str {
    ["ios15", "ios16", "ios17", "ios18", "ios26"][opset as usize]
}

/// The scheme as this weight can have it: sizes of groups and blocks that divide its channels.
pub(super) fn fitted(
    scheme: &Scheme,
    shape: &[usize],
    output: usize,
    input: usize,
) -> (Scheme, Option<String>) {
    let mut fitted = *scheme;
    let mut note = None;
    let linear = |l: &mut Linear, note: &mut Option<String>| {
        if let Granularity::Block(size) = l.granularity {
            let (n, best) = (shape[input], divisor(shape[input], size));
            if best != size {
                *note = Some(format!("blocks of {size} do not divide {n} inputs"));
            }
            l.granularity = if best == n { Granularity::Channel } else { Granularity::Block(best) };
        }
    };
    let palette = |p: &mut Palette, note: &mut Option<String>| {
        if p.vector > 1 && !shape[output].is_multiple_of(p.vector) {
            *note = Some(format!("vectors of {} do not divide {} outputs", p.vector, shape[output]));
            p.vector = 1;
        }
        if let Group::Channels { size, axis } = p.group {
            let (n, unit) = match axis {
                Axis::Output => (shape[output], p.vector),
                Axis::Input => (shape[input], 1),
            };
            let best = unit * divisor(n / unit, size.div_ceil(unit));
            if best != size {
                let what = if axis == Axis::Output { "outputs" } else { "inputs" };
                *note = Some(format!("groups of {size} do not divide {n} {what}"));
            }
            p.group = if best == n { Group::Tensor } else { Group::Channels { size: best, axis } };
        }
        if p.vector > 1 {
            p.effort = Effort::Fast;
        }
    };
    match &mut fitted {
        Scheme::Linear(l) | Scheme::Sparse(_, Then::Linear(l)) => linear(l, &mut note),
        Scheme::Palette(p) | Scheme::Sparse(_, Then::Palette(p)) => palette(p, &mut note),
        Scheme::Dense | Scheme::W8A8 | Scheme::Sparse(_, Then::Nothing) => {}
    }
    (fitted, note)
}

/// The divisor of `n` that is nearest below `size`, unless it is less than half of that; then the one
/// nearest above.
fn divisor(n: usize, size: usize) -> usize {
    let below = (1..=size.min(n)).rev().find(|d| n.is_multiple_of(*d)).unwrap_or(1);
    if 2 * below >= size {
        return below;
    }
    (size..=n).find(|d| n.is_multiple_of(*d)).unwrap_or(n)
}

impl Plan {
    /// What a sparse scheme keeps depends on the values, which are read for that.
    pub(super) fn new(scheme: Scheme, role: &Role, source: &Weight, opset: Opset) -> Result<Plan> {
        let (output, input) = (role.output, role.input);
        let layout = Layout { shape: &source.shape, output, input };
        scheme.fits(layout)?;
        let kept = match scheme {
            Scheme::Sparse(sparse, _) => {
                let mask = sparse::mask(&source.floats()?, layout, sparse, None)?;
                mask.iter().filter(|m| **m).count()
            }
            _ => 0,
        };
        Ok(Plan { scheme, dtype: source.dtype, shape: source.shape.clone(), output, input, opset, kept })
    }

    pub(super) fn layout(&self) -> Layout<'_> {
        Layout { shape: &self.shape, output: self.output, input: self.input }
    }

    /// The same for weights that become the same pieces. Ones at the end of the shape do not matter: a
    /// table and the convolution that is tied to it share their pieces.
    pub(super) fn key(&self, source: &Weight) -> String {
        let ones = self.shape.iter().rev().take_while(|n| **n == 1).count();
        let shape = &self.shape[..self.shape.len() - ones.min(self.shape.len().saturating_sub(2))];
        let Plan { scheme, dtype, output, input, .. } = self;
        format!("{} | {scheme} {dtype} {shape:?} {output} {input}", source.key)
    }

    fn count(&self) -> usize {
        self.shape.iter().product()
    }

    fn old(&self) -> bool {
        self.opset < Opset::Ios18
    }

    /// What is stored, in the order in which it is written.
    pub(super) fn pieces(&self) -> Vec<Piece> {
        let piece = |part, dtype, shape| Piece { part, dtype, shape };
        let kept = || vec![self.kept];
        let mask = || match self.old() {
            true => piece(Part::Mask, DType::U8, vec![self.count().div_ceil(8)]),
            false => piece(Part::Mask, DType::U1, self.shape.clone()),
        };
        match &self.scheme {
            Scheme::Dense => vec![piece(Part::Values, self.dtype, self.shape.clone())],
            Scheme::Linear(l) => self.linear(l, self.shape.clone()),
            Scheme::W8A8 => self.linear(&INT8, self.shape.clone()),
            Scheme::Palette(p) => self.palette(p, None),
            Scheme::Sparse(_, then) => {
                let mut pieces = vec![mask()];
                match then {
                    Then::Nothing => pieces.push(piece(Part::Values, self.dtype, kept())),
                    Then::Linear(l) => pieces.extend(self.linear(l, kept())),
                    Then::Palette(p) => pieces.extend(self.palette(p, Some(kept()))),
                }
                pieces
            }
        }
    }

    fn linear(&self, l: &Linear, codes: Vec<usize>) -> Vec<Piece> {
        let dtype = match (l.bits, l.signed) {
            (4, true) => DType::I4,
            (4, false) => DType::U4,
            (_, true) => DType::I8,
            (_, false) => DType::U8,
        };
        // The older form has one scale and one zero point for each step of an axis.
        let scales = if self.old() { vec![self.shape[self.output]] } else { self.scales(l.granularity) };
        let mut pieces = vec![
            Piece { part: Part::Codes, dtype, shape: codes },
            Piece { part: Part::Scale, dtype: self.dtype, shape: scales.clone() },
        ];
        if l.has_offset() || self.old() {
            pieces.push(Piece { part: Part::Offset, dtype, shape: scales });
        }
        pieces
    }

    fn scales(&self, granularity: Granularity) -> Vec<usize> {
        let mut scales = vec![1; self.shape.len()];
        if granularity != Granularity::Tensor {
            scales[self.output] = self.shape[self.output];
        }
        if let Granularity::Block(size) = granularity {
            scales[self.input] = self.shape[self.input] / size;
        }
        scales
    }

    fn palette(&self, p: &Palette, kept: Option<Vec<usize>>) -> Vec<Piece> {
        let dtype = match p.bits {
            1 => DType::U1,
            2 => DType::U2,
            3 => DType::U3,
            4 => DType::U4,
            6 => DType::U6,
            _ => DType::U8,
        };
        let entry = if p.int8 { DType::I8 } else { self.dtype };
        if self.old() {
            let bytes = dtype.packed_len(self.count()).unwrap_or(0);
            return vec![
                Piece { part: Part::Indices, dtype: DType::U8, shape: vec![bytes] },
                Piece { part: Part::Lut, dtype: entry, shape: vec![p.entries()] },
            ];
        }
        let mut indices = self.shape.clone();
        indices[self.output] /= p.vector;
        let groups = self.groups(p);
        let lut = [groups.as_slice(), &[p.entries(), p.vector]].concat();
        let mut pieces = vec![
            Piece { part: Part::Indices, dtype, shape: kept.unwrap_or(indices) },
            Piece { part: Part::Lut, dtype: entry, shape: lut },
        ];
        if p.int8 {
            let scales = if self.scales_result() { groups } else { [groups.as_slice(), &[1, 1]].concat() };
            pieces.push(Piece { part: Part::LutScale, dtype: self.dtype, shape: scales });
        }
        pieces
    }

    /// Tables along each axis.
    fn groups(&self, p: &Palette) -> Vec<usize> {
        let mut groups = vec![1; self.shape.len()];
        match p.group {
            Group::Tensor => {}
            Group::Channels { size, axis: Axis::Output } => {
                groups[self.output] = self.shape[self.output] / size;
            }
            Group::Channels { size, axis: Axis::Input } => groups[self.input] = self.shape[self.input] / size,
        }
        groups
    }

    /// Whether the scale of int8 tables is applied to what was looked up, as is done from iOS 26 on,
    /// rather than to the tables.
    fn scales_result(&self) -> bool {
        self.opset >= Opset::Ios26 && !matches!(self.scheme, Scheme::Sparse(..))
    }
}

/// The ops that make a weight, in place of its const op.
pub(super) fn ops(
    cell: &Cell,
    constant: &Op,
    function: &mut Function,
    names: &mut HashSet<String>,
) -> Result<Vec<Op>> {
    let plan = cell.plan();
    let [id] = constant.outputs[..] else { bail!("a const has {} results", constant.outputs.len()) };
    let mut ops = Ops { cell, function, names, name: constant.name().to_string(), id, done: Vec::new() };
    if plan.old() {
        ops.old(plan)?;
    } else {
        ops.new_forms(plan)?;
    }
    Ok(ops.done)
}

struct Ops<'a> {
    cell: &'a Cell,
    function: &'a mut Function,
    names: &'a mut HashSet<String>,
    /// Of the const op.
    name: String,
    /// The weight itself.
    id: ValueId,
    done: Vec<Op>,
}

impl Ops<'_> {
    fn old(&mut self, plan: &Plan) -> Result<()> {
        let shape: Vec<u8> =
            plan.shape.iter().flat_map(|n| u32::try_from(*n).unwrap_or(u32::MAX).to_le_bytes()).collect();
        let shape = Const::literal(TensorType::new(DType::U32, [plan.shape.len()]), Literal::Bytes(shape));
        let axis = Const::int(i32::try_from(plan.output).unwrap_or(0));
        let (kind, parts, other) = match &plan.scheme {
            Scheme::Linear(_) => (
                "constexpr_affine_dequantize",
                vec![("quantized_data", Part::Codes), ("scale", Part::Scale), ("zero_point", Part::Offset)],
                ("axis", axis),
            ),
            Scheme::Palette(_) => (
                "constexpr_lut_to_dense",
                vec![("indices", Part::Indices), ("lut", Part::Lut)],
                ("shape", shape),
            ),
            Scheme::Sparse(_, Then::Nothing) => (
                "constexpr_sparse_to_dense",
                vec![("nonzero_data", Part::Values), ("mask", Part::Mask)],
                ("shape", shape),
            ),
            scheme => bail!("`{scheme}` has no form before iOS 18"),
        };
        let mut attrs = BTreeMap::from([("name".to_string(), Const::string(&self.name))]);
        attrs.insert(other.0.into(), other.1);
        for (name, part) in parts {
            attrs.insert(name.into(), Const::weight(self.cell.piece(part)?));
        }
        self.done.push(Op { kind: kind.into(), outputs: vec![self.id], attrs, ..Op::default() });
        Ok(())
    }

    fn new_forms(&mut self, plan: &Plan) -> Result<()> {
        match &plan.scheme {
            Scheme::Dense | Scheme::W8A8 => bail!("`{}` is no form of a weight", plan.scheme),
            Scheme::Linear(l) => {
                let mut params = vec![("data", self.part(Part::Codes)?), ("scale", self.part(Part::Scale)?)];
                if l.has_offset() {
                    params.push(("offset", self.part(Part::Offset)?));
                }
                self.last("constexpr_blockwise_shift_scale", params);
            }
            Scheme::Palette(p) => self.palette(plan, p)?,
            Scheme::Sparse(_, then) => {
                let (mask, values) = match then {
                    Then::Nothing => (self.part(Part::Mask)?, self.part(Part::Values)?),
                    Then::Linear(l) => {
                        let mut params = vec![
                            ("data_mask", self.part(Part::Mask)?),
                            ("nonzero_data", self.part(Part::Codes)?),
                            ("scale", self.part(Part::Scale)?),
                        ];
                        if l.has_offset() {
                            params.push(("offset", self.part(Part::Offset)?));
                        }
                        self.sparse("constexpr_sparse_blockwise_shift_scale", plan, params)
                    }
                    Then::Palette(p) => {
                        let params = vec![
                            ("indices_mask", self.part(Part::Mask)?),
                            ("indices_nonzero_data", self.part(Part::Indices)?),
                            ("lut", self.table(plan, p)?),
                        ];
                        self.sparse("constexpr_lut_to_sparse", plan, params)
                    }
                };
                self.last("constexpr_sparse_to_dense", vec![("nonzero_data", values), ("mask", mask)]);
            }
        }
        Ok(())
    }

    fn palette(&mut self, plan: &Plan, p: &Palette) -> Result<()> {
        let late = p.int8 && plan.scales_result();
        let lut = if late { self.part(Part::Lut)? } else { self.table(plan, p)? };
        let mut params = vec![("indices", self.part(Part::Indices)?), ("lut", lut)];
        if p.vector > 1 {
            let axis = i32::try_from(plan.output).unwrap_or(0);
            params.push(("vector_axis", Arg::Const(Const::int(axis))));
        }
        if !late {
            self.last("constexpr_lut_to_dense", params);
            return Ok(());
        }
        let codes = Type::tensor(DType::I8, plan.shape.iter().copied());
        let codes = self.before("constexpr_lut_to_dense", params, &[("codes", codes)]);
        let scale = self.part(Part::LutScale)?;
        self.last("constexpr_blockwise_shift_scale", vec![("data", Arg::Value(codes[0])), ("scale", scale)]);
        Ok(())
    }

    /// The table, of int8 entries times their scale where it is so.
    fn table(&mut self, plan: &Plan, p: &Palette) -> Result<Arg> {
        let lut = self.part(Part::Lut)?;
        if !p.int8 {
            return Ok(lut);
        }
        let shape = [plan.groups(p).as_slice(), &[p.entries(), p.vector]].concat();
        let params = vec![("data", lut), ("scale", self.part(Part::LutScale)?)];
        let table = self.before(
            "constexpr_blockwise_shift_scale",
            params,
            &[("lut", Type::tensor(plan.dtype, shape))],
        );
        Ok(Arg::Value(table[0]))
    }

    /// An op whose results are the mask and the values under it.
    fn sparse(&mut self, kind: &str, plan: &Plan, params: Vec<(&str, Arg)>) -> (Arg, Arg) {
        let mask = Type::tensor(DType::U1, plan.shape.iter().copied());
        let values = Type::tensor(plan.dtype, [plan.kept]);
        let both = self.before(kind, params, &[("mask", mask), ("values", values)]);
        (Arg::Value(both[0]), Arg::Value(both[1]))
    }

    fn part(&self, part: Part) -> Result<Arg> {
        Ok(Arg::Const(Const::weight(self.cell.piece(part)?)))
    }

    /// An op whose results, named after the weight, only the next one reads.
    fn before(&mut self, kind: &str, params: Vec<(&str, Arg)>, results: &[(&str, Type)]) -> Vec<ValueId> {
        let mut outputs = Vec::new();
        let mut first = String::new();
        for (what, ty) in results {
            let base = format!("{}_{what}", self.function.name(self.id));
            let mut name = base.clone();
            let mut n = 0;
            while !self.names.insert(name.clone()) {
                n += 1;
                name = format!("{base}_{n}");
            }
            outputs.push(self.function.add(name.clone(), ty.clone()));
            if first.is_empty() {
                first = name;
            }
        }
        self.push(kind, params, outputs.clone(), &first);
        outputs
    }

    /// The op whose result is the weight.
    fn last(&mut self, kind: &str, params: Vec<(&str, Arg)>) {
        let name = self.name.clone();
        self.push(kind, params, vec![self.id], &name);
    }

    fn push(&mut self, kind: &str, params: Vec<(&str, Arg)>, outputs: Vec<ValueId>, name: &str) {
        let params = params.into_iter().map(|(n, a)| (n.to_string(), vec![a])).collect();
        let attrs = BTreeMap::from([("name".to_string(), Const::string(name))]);
        self.done.push(Op { kind: kind.into(), params, outputs, attrs, ..Op::default() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_and_blocks_are_made_to_divide() {
        for (scheme, shape, becomes, says) in [
            ("lut4:g16", [120, 64], "lut4:g15", "groups of 16 do not divide 120 outputs"),
            ("lut4:g16", [30522, 64], "lut4:g5087", "groups of 16 do not divide 30522 outputs"),
            ("lut4:g16", [7, 64], "lut4", "groups of 16 do not divide 7 outputs"),
            ("lut4:g16i", [8, 100], "lut4:g10i", "groups of 16 do not divide 100 inputs"),
            ("lut4:g16", [16, 64], "lut4", ""),
            ("int4:b32", [8, 100], "int4:b25", "blocks of 32 do not divide 100 inputs"),
            ("int4:b32", [8, 32], "int4", ""),
            ("int4:b32", [8, 1], "int4", "blocks of 32 do not divide 1 inputs"),
            ("lut2:v2", [7, 64], "lut2", "vectors of 2 do not divide 7 outputs"),
            ("lut4:g16:v2", [120, 64], "lut4:g12:v2", "groups of 16 do not divide 120 outputs"),
            ("sparse50+lut4:g16", [32, 64], "sparse50+lut4:g16", ""),
            ("int8", [1, 64], "int8", ""),
        ] {
            let (fitted, note) = fitted(&scheme.parse().unwrap(), &shape, 0, 1);
            assert_eq!(
                (fitted.to_string().as_str(), note.as_deref().unwrap_or("")),
                (becomes, says),
                "{scheme}"
            );
        }
    }

    #[test]
    fn older_systems_have_some_schemes() {
        for (scheme, needs) in [
            ("fp16", Opset::Ios15),
            ("int8", Opset::Ios16),
            ("uint8:t", Opset::Ios16),
            ("lut6", Opset::Ios16),
            ("sparse50", Opset::Ios16),
            ("2:4", Opset::Ios16),
            ("lut3", Opset::Ios18),
            ("int4", Opset::Ios18),
            ("int8:b32", Opset::Ios18),
            ("lut4:g16", Opset::Ios18),
            ("lut4:v2", Opset::Ios18),
            ("lut4:i8", Opset::Ios18),
            ("sparse50+lut4", Opset::Ios18),
        ] {
            for opset in Opset::ALL {
                let held = possible(&scheme.parse().unwrap(), opset);
                assert_eq!(held.is_ok(), opset >= needs, "{scheme} {opset}");
                if let Err(e) = held {
                    let text = e.to_string();
                    assert!(text.contains(&needs.to_string()) && text.contains(&opset.to_string()), "{text}");
                }
            }
        }
    }
}
