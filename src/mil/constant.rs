//! Constants: literals as the wire has them, and weights as promises of bytes.

use std::{fmt, ops::Range, sync::Arc};

use half::{bf16, f16, slice::HalfFloatSliceExt};
use rayon::prelude::*;

use super::{DType, TensorType, Type};
use crate::{bail, error::Result};

#[derive(Debug, Clone, PartialEq)]
pub struct Const {
    pub ty: Type,
    pub data: Data,
    pub doc: String,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Data {
    Literal(Literal),
    Weight(Weight),
}

/// A literal in the field of the wire format that holds it.
#[derive(Debug, Clone, PartialEq)]
pub enum Literal {
    Bools(Vec<bool>),
    /// int32, int16 and uint16
    Ints(Vec<i32>),
    Longs(Vec<i64>),
    /// fp32
    Floats(Vec<f32>),
    Doubles(Vec<f64>),
    Strings(Vec<String>),
    /// fp16, 8-bit, uint32 and bit-packed types, little-endian
    Bytes(Vec<u8>),
    Tuple(Vec<Const>),
    List(Vec<Const>),
    Dict(Vec<(Const, Const)>),
    /// A tensor literal with none of the wire's alternatives set.
    Empty,
    /// A value with no payload at all.
    Missing,
}

/// A tensor that is produced only when it is needed. Equal keys are stored once.
#[derive(Clone)]
pub struct Weight {
    pub key: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
    produce: Arc<dyn Fn() -> Result<Bytes> + Send + Sync>,
    /// Makes some rows alone, where each is made from one row.
    rows: Option<Arc<dyn Fn(Range<usize>) -> Weight + Send + Sync>>,
}

/// Bytes in memory or in a mapped file.
pub enum Bytes {
    Owned(Vec<u8>),
    Mapped(Mapped),
}

/// A part of a mapped file; its pages are given back when it is dropped, so that a file that is read once
/// does not stay in memory.
pub struct Mapped {
    map: Arc<memmap2::Mmap>,
    range: Range<usize>,
}

/// Elements, decoded: floats in 32 bits, integers in 64.
#[derive(Debug, Clone, PartialEq)]
pub enum Numbers {
    Floats(Vec<f32>),
    Ints(Vec<i64>),
    Bools(Vec<bool>),
}

/// What makes elements from others.
type Change = dyn Fn(Vec<f32>) -> Result<Vec<f32>> + Send + Sync;

impl Weight {
    /// `produce` gives exactly the packed bytes of `shape` elements of `dtype`, row-major and little-endian.
    pub fn new(
        key: impl Into<String>,
        dtype: DType,
        shape: impl Into<Vec<usize>>,
        produce: impl Fn() -> Result<Bytes> + Send + Sync + 'static,
    ) -> Self {
        Self { key: key.into(), dtype, shape: shape.into(), produce: Arc::new(produce), rows: None }
    }

    pub fn ty(&self) -> TensorType {
        TensorType::new(self.dtype, self.shape.iter().copied())
    }

    pub fn count(&self) -> usize {
        self.shape.iter().fold(1, |n: usize, d| n.saturating_mul(*d))
    }

    /// The packed bytes, of the promised length.
    pub fn bytes(&self) -> Result<Bytes> {
        let bytes = (self.produce)()?;
        let Some(want) = self.dtype.packed_len(self.count()) else {
            bail!("weight `{}`: {} cannot be stored", self.key, self.ty());
        };
        if bytes.len() != want {
            bail!("weight `{}`: {} takes {want} bytes, {} were produced", self.key, self.ty(), bytes.len());
        }
        Ok(bytes)
    }

    pub fn numbers(&self) -> Result<Numbers> {
        Numbers::decode(self.dtype, &self.bytes()?, self.count())
    }

    /// The elements as 32-bit floats, whatever the stored type is.
    pub fn floats(&self) -> Result<Vec<f32>> {
        Ok(self.numbers()?.into_floats())
    }

    /// Some rows of the first axis, of which the others are not read.
    #[must_use]
    pub fn rows(&self, rows: Range<usize>) -> Weight {
        let mut shape = self.shape.clone();
        let (all, width) = (shape.first().copied().unwrap_or(1), shape.iter().skip(1).product::<usize>());
        let rows = rows.start.min(all)..rows.end.min(all);
        let bits = self.dtype.bits().unwrap_or(8);
        if rows == (0..all) || !(width * bits).is_multiple_of(8) || shape.is_empty() {
            return self.clone();
        }
        if let Some(made) = &self.rows {
            return made(rows);
        }
        shape[0] = rows.len();
        let (source, row) = (self.clone(), width * bits / 8);
        Weight::new(format!("{} | rows {rows:?}", self.key), self.dtype, shape, move || {
            Ok(source.bytes()?.part(rows.start * row..rows.end * row))
        })
    }

    /// A weight made from this one's elements when it is needed; `how` joins the key, so that the same
    /// change to the same weight is stored once.
    #[must_use]
    pub fn map(
        &self,
        how: &str,
        dtype: DType,
        shape: impl Into<Vec<usize>>,
        f: impl Fn(Vec<f32>) -> Result<Vec<f32>> + Send + Sync + 'static,
    ) -> Weight {
        let (source, key) = (self.clone(), format!("{} | {how}", self.key));
        let place = key.clone();
        Weight::new(key, dtype, shape, move || {
            let bytes = encode_floats(dtype, &f(source.floats()?)?);
            Ok(Bytes::Owned(bytes.map_err(|e| e.at(&place))?))
        })
    }

    /// The same, of rows of the first axis that are each made by themselves and stay as long, so that some can be
    /// had without the others.
    #[must_use]
    pub fn map_rows(
        &self,
        how: &str,
        dtype: DType,
        f: impl Fn(Vec<f32>) -> Result<Vec<f32>> + Send + Sync + 'static,
    ) -> Weight {
        self.map_each(how.into(), dtype, Arc::new(f))
    }

    fn map_each(&self, how: Arc<str>, dtype: DType, f: Arc<Change>) -> Weight {
        let change = f.clone();
        let mut made = self.map(&how, dtype, self.shape.clone(), move |values| change(values));
        let source = self.clone();
        made.rows = Some(Arc::new(move |rows| source.rows(rows).map_each(how.clone(), dtype, f.clone())));
        made
    }
}

impl fmt::Debug for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Weight({} {})", self.key, self.ty())
    }
}

impl PartialEq for Weight {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key && self.dtype == other.dtype && self.shape == other.shape
    }
}

impl std::ops::Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Owned(v) => v,
            Bytes::Mapped(part) => part.map.get(part.range.clone()).unwrap_or(&[]),
        }
    }
}

impl Bytes {
    /// A range of a mapped file, cut to its end.
    pub fn mapped(map: Arc<memmap2::Mmap>, range: Range<usize>) -> Bytes {
        Bytes::Mapped(Mapped { map, range })
    }

    /// Only some of the bytes.
    fn part(self, range: Range<usize>) -> Bytes {
        match self {
            Bytes::Owned(v) => Bytes::Owned(v.get(range).unwrap_or(&[]).to_vec()),
            Bytes::Mapped(m) => {
                let start = m.range.start + range.start;
                Bytes::mapped(m.map.clone(), start..(start + range.len()).min(m.range.end))
            }
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        #[cfg(unix)]
        {
            let length = self.range.len();
            #[expect(
                unsafe_code,
                reason = "the map is of a file and only read: pages come back from the file"
            )]
            // An error means that the pages stay, which is only a matter of memory.
            let _ = unsafe {
                self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, self.range.start, length)
            };
        }
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(v: Vec<u8>) -> Self {
        Bytes::Owned(v)
    }
}

/// Packs floats as `dtype`, rounding to nearest; only float types. What fp16 cannot hold is refused.
pub fn encode_floats(dtype: DType, values: &[f32]) -> Result<Vec<u8>> {
    Ok(match dtype {
        DType::F16 => {
            fits_f16(values)?;
            in_pieces(values, |from, to| {
                let mut halves = vec![f16::ZERO; from.len()];
                halves.convert_from_f32_slice(from);
                each(&halves, to, |v| v.to_le_bytes());
            })
        }
        DType::BF16 => in_pieces(values, |from, to| each(from, to, |v| bf16::from_f32(v).to_le_bytes())),
        DType::F32 => in_pieces(values, |from, to| each(from, to, f32::to_le_bytes)),
        DType::F64 => values.iter().flat_map(|v| f64::from(*v).to_le_bytes()).collect(),
        other => bail!("floats cannot be stored as {other}"),
    })
}

/// Packs fp16 numbers.
pub fn encode_halves(values: &[f16]) -> Vec<u8> {
    in_pieces(values, |from, to| each(from, to, |v| v.to_le_bytes()))
}

/// Packs elements of so many bytes on all cores.
fn in_pieces<T: Sync, const N: usize>(
    values: &[T],
    pack: impl Fn(&[T], &mut [[u8; N]]) + Sync + Send,
) -> Vec<u8> {
    const PIECE: usize = 1 << 16;
    let mut out = vec![0; values.len() * N];
    let (to, _) = out.as_chunks_mut();
    if values.len() <= PIECE {
        pack(values, to);
    } else {
        to.par_chunks_mut(PIECE).zip(values.par_chunks(PIECE)).for_each(|(to, from)| pack(from, to));
    }
    out
}

fn each<T: Copy, const N: usize>(from: &[T], to: &mut [[u8; N]], pack: impl Fn(T) -> [u8; N]) {
    to.iter_mut().zip(from).for_each(|(to, v)| *to = pack(*v));
}

/// Refuses values that would turn into infinities, and those that are no numbers already.
fn fits_f16(values: &[f32]) -> Result<()> {
    // 65520 is the first value that rounds to infinity.
    let bad = |v: &&f32| v.abs() >= 65520.0 || v.is_nan();
    let count = values.iter().filter(bad).count();
    if count == 0 {
        return Ok(());
    }
    let nan = values.iter().filter(|v| v.is_nan()).count();
    let largest =
        values.iter().filter(|v| !v.is_nan()).fold(0f32, |a, v| if v.abs() > a.abs() { *v } else { a });
    bail!("{count} of {} values do not fit fp16: largest {largest}, {nan} not a number", values.len(); hint: "fp16 reaches 65504; scale the weight or convert with `--precision fp32`");
}

/// Packs integers as `dtype`: whole bytes little-endian, narrower ones as a bit stream, low bits first.
pub fn encode_ints(dtype: DType, values: &[i64]) -> Result<Vec<u8>> {
    let Some((bits, (low, high))) = dtype.bits().zip(dtype.int_range()) else {
        bail!("integers cannot be stored as {dtype}");
    };
    if let Some(bad) = values.iter().find(|v| !(low..=high).contains(*v)) {
        bail!("{bad} is outside {dtype}, {low} to {high}");
    }
    if bits >= 8 {
        return Ok(values.iter().flat_map(|v| v.to_le_bytes().into_iter().take(bits / 8)).collect());
    }
    let mut out = vec![0u8; (values.len() * bits).div_ceil(8)];
    for (i, v) in values.iter().enumerate() {
        for b in 0..bits {
            if (v >> b) & 1 == 1 {
                out[(i * bits + b) / 8] |= 1 << ((i * bits + b) % 8);
            }
        }
    }
    Ok(out)
}

impl Numbers {
    pub fn len(&self) -> usize {
        match self {
            Numbers::Floats(v) => v.len(),
            Numbers::Ints(v) => v.len(),
            Numbers::Bools(v) => v.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Decodes `count` packed elements.
    pub fn decode(dtype: DType, bytes: &[u8], count: usize) -> Result<Numbers> {
        let Some(want) = dtype.packed_len(count) else {
            bail!("{count} elements of {dtype} have no packed form");
        };
        if bytes.len() != want {
            bail!("{count} elements of {dtype} take {want} bytes, there are {}", bytes.len());
        }
        fn each<const N: usize, T: Send>(bytes: &[u8], f: impl Fn([u8; N]) -> T + Sync) -> Vec<T> {
            const PIECE: usize = 1 << 16;
            let chunks = bytes.as_chunks::<N>().0;
            if chunks.len() <= PIECE {
                return chunks.iter().map(|c| f(*c)).collect();
            }
            chunks.par_iter().with_min_len(PIECE).map(|c| f(*c)).collect()
        }
        Ok(match dtype {
            DType::F16 => Numbers::Floats(each(bytes, |b| f16::from_le_bytes(b).to_f32())),
            DType::BF16 => Numbers::Floats(each(bytes, |b| bf16::from_le_bytes(b).to_f32())),
            DType::F32 => Numbers::Floats(each(bytes, f32::from_le_bytes)),
            #[expect(clippy::cast_possible_truncation, reason = "floats are computed in 32 bits")]
            DType::F64 => Numbers::Floats(each(bytes, |b| f64::from_le_bytes(b) as f32)),
            DType::F8E4M3 => Numbers::Floats(bytes.iter().map(|b| f8_e4m3(*b)).collect()),
            // E5M2 is the upper byte of fp16.
            DType::F8E5M2 => {
                Numbers::Floats(bytes.iter().map(|b| f16::from_le_bytes([0, *b]).to_f32()).collect())
            }
            DType::Bool => Numbers::Bools(bytes.iter().map(|b| *b != 0).collect()),
            DType::I8 => Numbers::Ints(each(bytes, |b: [u8; 1]| i64::from(i8::from_le_bytes(b)))),
            DType::U8 => Numbers::Ints(bytes.iter().map(|b| i64::from(*b)).collect()),
            DType::I16 => Numbers::Ints(each(bytes, |b| i64::from(i16::from_le_bytes(b)))),
            DType::U16 => Numbers::Ints(each(bytes, |b| i64::from(u16::from_le_bytes(b)))),
            DType::I32 => Numbers::Ints(each(bytes, |b| i64::from(i32::from_le_bytes(b)))),
            DType::U32 => Numbers::Ints(each(bytes, |b| i64::from(u32::from_le_bytes(b)))),
            DType::I64 | DType::U64 => Numbers::Ints(each(bytes, i64::from_le_bytes)),
            DType::I4 | DType::U1 | DType::U2 | DType::U3 | DType::U4 | DType::U6 => {
                let bits = dtype.bits().unwrap_or(8);
                let sign = if dtype == DType::I4 { 8 } else { 0 };
                let get = |i: usize| {
                    let (at, mask) = (i * bits, (1u16 << bits) - 1);
                    let word =
                        u16::from(bytes[at / 8]) | (u16::from(*bytes.get(at / 8 + 1).unwrap_or(&0)) << 8);
                    let code = i64::from((word >> (at % 8)) & mask);
                    (code ^ sign) - sign
                };
                Numbers::Ints((0..count).map(get).collect())
            }
            DType::String => bail!("strings have no packed form"),
        })
    }

    pub fn into_floats(self) -> Vec<f32> {
        match self {
            Numbers::Floats(v) => v,
            #[expect(clippy::cast_precision_loss, reason = "floats are computed in 32 bits")]
            Numbers::Ints(v) => v.into_iter().map(|i| i as f32).collect(),
            Numbers::Bools(v) => v.into_iter().map(|b| f32::from(u8::from(b))).collect(),
        }
    }

    pub fn into_ints(self) -> Vec<i64> {
        match self {
            Numbers::Ints(v) => v,
            #[expect(
                clippy::cast_possible_truncation,
                reason = "integers from floats truncate, as `cast` does"
            )]
            Numbers::Floats(v) => v.into_iter().map(|f| f as i64).collect(),
            Numbers::Bools(v) => v.into_iter().map(i64::from).collect(),
        }
    }
}

/// FP8 with 4 exponent and 3 mantissa bits, bias 7, no infinity; 0x7f and 0xff are NaN.
fn f8_e4m3(b: u8) -> f32 {
    let sign = if b & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from((b >> 3) & 15), f32::from(b & 7));
    match (exponent, b & 7) {
        (15, 7) => f32::NAN,
        (0, _) => sign * mantissa / 8.0 * (-6f32).exp2(),
        #[expect(clippy::cast_precision_loss, reason = "an exponent of at most 8")]
        _ => sign * (1.0 + mantissa / 8.0) * ((exponent - 7) as f32).exp2(),
    }
}

impl Const {
    pub fn literal(ty: impl Into<Type>, literal: Literal) -> Self {
        Self { ty: ty.into(), data: Data::Literal(literal), doc: String::new() }
    }

    pub fn weight(weight: Weight) -> Self {
        Self { ty: weight.ty().into(), data: Data::Weight(weight), doc: String::new() }
    }

    pub fn string(s: impl Into<String>) -> Self {
        Self::literal(TensorType::scalar(DType::String), Literal::Strings(vec![s.into()]))
    }

    pub fn bool(b: bool) -> Self {
        Self::literal(TensorType::scalar(DType::Bool), Literal::Bools(vec![b]))
    }

    pub fn bools(v: &[bool]) -> Self {
        Self::literal(TensorType::new(DType::Bool, [v.len()]), Literal::Bools(v.to_vec()))
    }

    pub fn int(i: i32) -> Self {
        Self::literal(TensorType::scalar(DType::I32), Literal::Ints(vec![i]))
    }

    pub fn ints(v: &[i32]) -> Self {
        Self::literal(TensorType::new(DType::I32, [v.len()]), Literal::Ints(v.to_vec()))
    }

    /// A scalar of a float type: fp16 and fp32.
    pub fn float(dtype: DType, v: f32) -> Self {
        Self::literal(TensorType::scalar(dtype), float_literal(dtype, &[v]))
    }

    /// A float tensor as a literal; for weights use [`Const::weight`].
    pub fn floats(dtype: DType, shape: &[usize], v: &[f32]) -> Self {
        Self::literal(TensorType::new(dtype, shape.iter().copied()), float_literal(dtype, v))
    }

    /// The one string of a string constant.
    pub fn str(&self) -> Option<&str> {
        match &self.data {
            Data::Literal(Literal::Strings(v)) => v.first().map(String::as_str),
            _ => None,
        }
    }

    /// The elements of a tensor constant. A literal of one element stands for all, as Core ML reads it.
    pub fn numbers(&self) -> Result<Numbers> {
        let Type::Tensor(t) = &self.ty else { bail!("a constant of type {} has no elements", self.ty) };
        let literal = match &self.data {
            Data::Weight(w) => return w.numbers(),
            Data::Literal(l) => l,
        };
        let Some(count) = t.count() else { bail!("constant {t} has a size that is not fixed") };
        let numbers = match literal {
            Literal::Bools(v) => Numbers::Bools(v.clone()),
            Literal::Ints(v) => Numbers::Ints(v.iter().map(|i| i64::from(*i)).collect()),
            Literal::Longs(v) => Numbers::Ints(v.clone()),
            Literal::Floats(v) => Numbers::Floats(v.clone()),
            #[expect(clippy::cast_possible_truncation, reason = "floats are computed in 32 bits")]
            Literal::Doubles(v) => Numbers::Floats(v.iter().map(|d| *d as f32).collect()),
            Literal::Bytes(v) => return Numbers::decode(t.dtype, v, count),
            Literal::Empty if count == 0 => Numbers::Ints(Vec::new()),
            _ => bail!("constant {t} holds no numbers"),
        };
        if numbers.len() == count {
            return Ok(numbers);
        }
        // Counts come from headers: never allocate far beyond what the file itself holds.
        if numbers.len() == 1 && count <= 1 << 28 {
            return Ok(match numbers {
                Numbers::Bools(v) => Numbers::Bools(vec![v[0]; count]),
                Numbers::Ints(v) => Numbers::Ints(vec![v[0]; count]),
                Numbers::Floats(v) => Numbers::Floats(vec![v[0]; count]),
            });
        }
        bail!("constant {t} holds {} elements, its type says {count}", numbers.len());
    }
}

fn float_literal(dtype: DType, v: &[f32]) -> Literal {
    match dtype {
        DType::F32 => Literal::Floats(v.to_vec()),
        _ => Literal::Bytes(v.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The byte vectors of the storage format, and the way back.
    #[test]
    fn narrow_integers_pack_low_bits_first() {
        for (dtype, values, bytes) in [
            (DType::U6, vec![1, 2, 63], vec![0x81, 0xf0, 0x03]),
            (DType::U3, vec![1, 2, 7], vec![0xd1, 0x01]),
            (DType::U4, vec![1, 2, 15], vec![0x21, 0x0f]),
            (DType::U2, vec![1, 2, 3], vec![0x39]),
            (DType::U1, vec![1, 0, 1], vec![0x05]),
            (DType::I4, vec![-8, 7, 3, 1, -1, 2], vec![0x78, 0x13, 0x2f]),
        ] {
            assert_eq!(encode_ints(dtype, &values).unwrap(), bytes, "{dtype}");
            assert_eq!(
                Numbers::decode(dtype, &bytes, values.len()).unwrap(),
                Numbers::Ints(values),
                "{dtype}"
            );
        }
        assert!(encode_ints(DType::U3, &[8]).is_err());
    }

    #[test]
    fn eight_bit_floats_decode() {
        for (bits, value) in
            [(0x38, 1.0), (0x7e, 448.0), (0x01, 2f32.powi(-9)), (0xb8, -1.0), (0x08, 2f32.powi(-6))]
        {
            assert_eq!(f8_e4m3(bits), value);
        }
        assert!(f8_e4m3(0x7f).is_nan());
        assert_eq!(
            Numbers::decode(DType::F8E5M2, &[0x3c, 0x7b], 2).unwrap(),
            Numbers::Floats(vec![1.0, 57344.0])
        );
    }

    #[test]
    fn one_element_stands_for_all() {
        let c = Const::literal(TensorType::new(DType::I32, [3usize]), Literal::Ints(vec![7]));
        assert_eq!(c.numbers().unwrap(), Numbers::Ints(vec![7, 7, 7]));
        let c = Const::literal(TensorType::new(DType::I32, [3usize]), Literal::Ints(vec![7, 8]));
        assert!(c.numbers().is_err());
    }
}
