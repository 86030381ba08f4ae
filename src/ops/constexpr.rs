//! Compressed weights, made dense when the program is loaded.
//!
//! Two generations: up to iOS 17 parameters are attributes and indices and masks are packed bytes beside a
//! `shape`; from iOS 18 on parameters are inputs with narrow types. `constexpr_lut_to_dense` and
//! `constexpr_sparse_to_dense` exist in both, told apart by `shape`.

use candle_core::{Tensor, WithDType};

use super::{
    Call, DTypes, Eval, INDEX, INT, Opset, STRING, Spec, Tolerance, Val, args, fixed, from, one, option,
    shape::{free, result, sizes, typed},
};
use crate::{
    bail,
    error::{Context, Result},
    mil::{DType, Dim, Numbers, Type, types::shape_text},
    ops::{Args, FLOAT},
};

pub static SPECS: &[&Spec] = &[
    &AFFINE_DEQUANTIZE,
    &CAST,
    &BLOCKWISE_SHIFT_SCALE,
    &LUT_TO_DENSE,
    &SPARSE_TO_DENSE,
    &LUT_TO_SPARSE,
    &SPARSE_BLOCKWISE_SHIFT_SCALE,
];

const DATA: DTypes = DTypes::of(&[DType::I4, DType::U4, DType::I8, DType::U8, DType::F16, DType::F32]);
const CODES: DTypes = DTypes::of(&[DType::U1, DType::U2, DType::U3, DType::U4, DType::U6, DType::U8]);
const MASK: DTypes = DTypes::of(&[DType::U1, DType::U8]);

/// `scale · (quantized_data − zero_point)`, scale and zero point one for all or one for each step of `axis`.
static AFFINE_DEQUANTIZE: Spec = Spec {
    name: "constexpr_affine_dequantize",
    since: Opset::Ios16,
    params: &[
        fixed("quantized_data", DATA),
        fixed("zero_point", DATA),
        fixed("scale", FLOAT),
        fixed("axis", INT),
    ],
    infer: |a| {
        let dims = a.dims("quantized_data")?;
        let axis = a.axis("axis", "quantized_data", 0)?;
        for name in ["scale", "zero_point"] {
            match a.dims(name)? {
                [] => {}
                [n] if n.agrees(dims[axis]) => {}
                other => {
                    bail!("{name} {} does not fit axis {axis} of {}", shape_text(other), shape_text(dims))
                }
            }
        }
        result(a.dtype("scale")?, dims.to_vec())
    },
    eval: Eval::Call(|c| {
        let data = c.tensor("quantized_data")?;
        let axis = c.axis("axis", data, 0)?;
        let along = |t: &Tensor| {
            let mut dims = vec![1; data.rank()];
            if t.rank() == 1 {
                dims[axis] = t.elem_count();
            }
            t.to_dtype(candle_core::DType::F32)?.reshape(dims)
        };
        let (zero, scale) = (along(c.tensor("zero_point")?)?, along(c.tensor("scale")?)?);
        one(data.to_dtype(candle_core::DType::F32)?.broadcast_sub(&zero)?.broadcast_mul(&scale)?)
    }),
    flops: |a| 2 * a.out_count(),
    tolerance: Tolerance::Rounding,
};

static CAST: Spec = Spec {
    name: "constexpr_cast",
    since: Opset::Ios16,
    params: &[fixed("source_val", FLOAT), fixed("output_dtype", STRING)],
    infer: |a| match DType::from_name(a.str_or("output_dtype", "fp32")) {
        Some(dtype) => result(dtype, a.dims("source_val")?.to_vec()),
        None => bail!("`output_dtype` `{}` is no element type", a.str_or("output_dtype", "")),
    },
    eval: Eval::Call(|c| one(c.tensor("source_val")?.clone())),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// `scale · (data − offset)`, one scale and offset for each block.
static BLOCKWISE_SHIFT_SCALE: Spec = Spec {
    name: "constexpr_blockwise_shift_scale",
    since: Opset::Ios18,
    params: &[fixed("data", DATA), fixed("scale", FLOAT), option("offset", DATA)],
    infer: |a| {
        let dims = a.dims("data")?;
        blocks_of(a, dims)?;
        result(a.dtype("scale")?, dims.to_vec())
    },
    eval: Eval::Call(|c| one(shift_scale(c.tensor("data")?, c)?)),
    flops: |a| 2 * a.out_count(),
    tolerance: Tolerance::Rounding,
};

/// Indices looked up in tables, one for each group of them; an entry may be a vector along `vector_axis`.
static LUT_TO_DENSE: Spec = Spec {
    name: "constexpr_lut_to_dense",
    since: Opset::Ios16,
    params: &[
        fixed("indices", CODES),
        fixed("lut", DATA),
        option("shape", INDEX),
        from(Opset::Ios18, option("vector_axis", INT)),
    ],
    infer: |a| {
        let lut = a.tensor("lut")?;
        if a.has("shape") {
            let shape = shape_of(a)?;
            let bits = code_bits(lut.count().unwrap_or(0))?;
            packed(a.dims("indices")?, bits, &shape)?;
            return result(lut.dtype, dims(&shape));
        }
        let vector_axis = a.int("vector_axis")?;
        let (indices, lut_shape) = (sizes(a.dims("indices")?)?, sizes(&lut.dims)?);
        let palette = Palette::new(&indices, &lut_shape, vector_axis)?;
        result(lut.dtype, dims(&palette.dense))
    },
    eval: Eval::Call(|c| {
        let (indices, lut) = (c.tensor("indices")?, c.tensor("lut")?);
        if !c.has("shape") {
            return one(look_up(indices, lut, vector_axis(c)?)?);
        }
        let shape = shape_of_call(c)?;
        let bits = code_bits(lut.elem_count())?;
        packed(&dims(indices.dims()), bits, &shape)?;
        let narrow = [DType::U1, DType::U2, DType::U4, DType::U6];
        let dtype = narrow.into_iter().find(|d| d.bits() == Some(bits)).unwrap_or(DType::U8);
        let codes = unpack(c, "indices", dtype, elements(&shape)?)?;
        one(super::shape::take(lut, codes, &shape)?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// Zeros except where the mask is set; the elements that are not zero follow row-major.
static SPARSE_TO_DENSE: Spec = Spec {
    name: "constexpr_sparse_to_dense",
    since: Opset::Ios16,
    params: &[fixed("nonzero_data", DATA), fixed("mask", MASK), option("shape", INDEX)],
    infer: |a| {
        let data = a.tensor("nonzero_data")?;
        if a.has("shape") {
            let shape = shape_of(a)?;
            packed(a.dims("mask")?, 1, &shape)?;
            return result(data.dtype, dims(&shape));
        }
        result(data.dtype, a.dims("mask")?.to_vec())
    },
    eval: Eval::Call(|c| {
        let data = c.tensor("nonzero_data")?;
        if !c.has("shape") {
            let mask = c.tensor("mask")?;
            return one(typed!(data, spread(data, &c.ints("mask")?, mask.dims()))?);
        }
        let shape = shape_of_call(c)?;
        packed(&dims(c.tensor("mask")?.dims()), 1, &shape)?;
        let mask = unpack(c, "mask", DType::U1, elements(&shape)?)?;
        one(typed!(data, spread(data, &mask, &shape))?)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// The look-up of sparse indices; the results are a mask and the elements under it.
static LUT_TO_SPARSE: Spec = Spec {
    name: "constexpr_lut_to_sparse",
    since: Opset::Ios18,
    params: &[
        fixed("indices_mask", MASK),
        fixed("indices_nonzero_data", CODES),
        fixed("lut", DATA),
        option("vector_axis", INT),
    ],
    infer: |a| {
        let lut = a.tensor("lut")?;
        let mask = sizes(a.dims("indices_mask")?)?;
        let palette = Palette::new(&mask, &sizes(&lut.dims)?, a.int("vector_axis")?)?;
        let count = match a.dims("indices_nonzero_data")? {
            [Dim::Fixed(n)] => n.checked_mul(palette.vector).map_or(Dim::ANY, Dim::Fixed),
            _ => Dim::ANY,
        };
        Ok(vec![
            Type::tensor(a.dtype("indices_mask")?, dims(&palette.dense)),
            Type::tensor(lut.dtype, [count]),
        ])
    },
    eval: Eval::Call(|c| {
        let (mask, data) = (c.tensor("indices_mask")?, c.tensor("indices_nonzero_data")?);
        let (lut, axis) = (c.tensor("lut")?, vector_axis(c)?);
        let indices = typed!(data, spread(data, &c.ints("indices_mask")?, mask.dims()))?;
        let dense = look_up(&indices, lut, axis)?;
        let mut mask = mask.clone();
        if let (Some(axis), Some(vector)) = (axis, lut.dims().last().filter(|n| **n > 1)) {
            let axis = args::axis(axis, mask.rank()).at("vector_axis")?;
            let mut shape = mask.dims().to_vec();
            shape.insert(axis + 1, *vector);
            mask = mask.unsqueeze(axis + 1)?.broadcast_as(shape)?.reshape(dense.dims())?;
        }
        masked(mask, &dense)
    }),
    flops: free,
    tolerance: Tolerance::Exact,
};

/// The dequantisation of sparse elements; the results are the mask and the elements under it.
static SPARSE_BLOCKWISE_SHIFT_SCALE: Spec = Spec {
    name: "constexpr_sparse_blockwise_shift_scale",
    since: Opset::Ios18,
    params: &[
        fixed("data_mask", MASK),
        fixed("nonzero_data", DATA),
        fixed("scale", FLOAT),
        option("offset", DATA),
    ],
    infer: |a| {
        let mask = a.tensor("data_mask")?;
        blocks_of(a, &mask.dims)?;
        let data = Type::tensor(a.dtype("scale")?, a.dims("nonzero_data")?.iter().copied());
        Ok(vec![mask.clone().into(), data])
    },
    eval: Eval::Call(|c| {
        let (mask, data) = (c.tensor("data_mask")?, c.tensor("nonzero_data")?);
        let dense = typed!(data, spread(data, &c.ints("data_mask")?, mask.dims()))?;
        masked(mask.clone(), &shift_scale(&dense, c)?)
    }),
    flops: |a| 2 * a.out_count(),
    tolerance: Tolerance::Rounding,
};

fn dims(shape: &[usize]) -> Vec<Dim> {
    shape.iter().copied().map(Dim::Fixed).collect()
}

/// The block sizes of `data` along each axis, from the sizes of `scale`.
fn blocks(data: &[usize], scale: &[usize]) -> Result<Vec<usize>> {
    if data.len() != scale.len() || data.iter().zip(scale).any(|(d, s)| *s == 0 || d % s != 0) {
        bail!("scale {} does not divide data {}", shape_text(scale), shape_text(data));
    }
    Ok(data.iter().zip(scale).map(|(d, s)| d / s).collect())
}

fn blocks_of(a: &Args<'_>, data: &[Dim]) -> Result<()> {
    let scale = a.dims("scale")?;
    blocks(&sizes(data)?, &sizes(scale)?)?;
    if a.has("offset") && a.dims("offset")? != scale {
        bail!("scale {} and offset {} differ", shape_text(scale), shape_text(a.dims("offset")?));
    }
    Ok(())
}

fn shift_scale(data: &Tensor, c: &Call<'_>) -> Result<Tensor> {
    let scale = c.tensor("scale")?;
    let blocks = blocks(data.dims(), scale.dims())?;
    let (all, one_each) = interleaved(scale.dims(), &blocks)?;
    let mut t = data.to_dtype(candle_core::DType::F32)?.reshape(all)?;
    if c.has("offset") {
        let offset = c.tensor("offset")?.to_dtype(candle_core::DType::F32)?;
        t = t.broadcast_sub(&offset.reshape(one_each.as_slice())?)?;
    }
    Ok(t.broadcast_mul(&scale.reshape(one_each)?)?.reshape(data.dims())?)
}

/// The sizes of a tensor with groups and the elements of a group apart, and those sizes with one element a
/// group. Neighbours of a kind are joined, since tensors have eight axes at most.
fn interleaved(groups: &[usize], sizes: &[usize]) -> Result<(Vec<usize>, Vec<usize>)> {
    let mut axes: Vec<(usize, bool)> = Vec::new();
    for (size, group) in groups.iter().zip(sizes).flat_map(|(g, s)| [(*g, true), (*s, false)]) {
        match axes.last_mut() {
            Some((last, kind)) if *kind == group => *last *= size,
            _ if size == 1 => {}
            _ => axes.push((size, group)),
        }
    }
    if axes.len() > 8 {
        bail!("groups {} on so many axes cannot be computed here", shape_text(groups));
    }
    Ok(axes.into_iter().map(|(size, group)| (size, if group { size } else { 1 })).unzip())
}

/// How a look-up table fits its indices.
struct Palette {
    /// Tables along each axis.
    groups: Vec<usize>,
    entries: usize,
    vector: usize,
    /// Sizes of the result.
    dense: Vec<usize>,
}

impl Palette {
    fn new(indices: &[usize], lut: &[usize], vector_axis: Option<i64>) -> Result<Palette> {
        let [groups @ .., entries, vector] = lut else { bail!("lut {} has no entries", shape_text(lut)) };
        let divides = |(i, g): (&usize, &usize)| *g > 0 && i % g == 0;
        if groups.len() != indices.len() || !indices.iter().zip(groups).all(divides) {
            bail!("lut {} does not fit indices {}", shape_text(lut), shape_text(indices));
        }
        let mut dense = indices.to_vec();
        if *vector != 1 {
            let Some(axis) = vector_axis else { bail!("a lut of vectors of {vector} wants `vector_axis`") };
            dense[args::axis(axis, indices.len()).at("vector_axis")?] *= vector;
        }
        elements(&dense)?;
        Ok(Palette { groups: groups.to_vec(), entries: *entries, vector: *vector, dense })
    }
}

fn look_up(indices: &Tensor, lut: &Tensor, vector_axis: Option<i64>) -> Result<Tensor> {
    let palette = Palette::new(indices.dims(), lut.dims(), vector_axis)?;
    let entries = i64::try_from(palette.entries).unwrap_or(i64::MAX);
    let codes = indices.to_dtype(candle_core::DType::I64)?;
    if let Some(bad) = codes.flatten_all()?.to_vec1::<i64>()?.iter().find(|i| !(0..entries).contains(*i)) {
        bail!("index {bad} is outside a lut of {entries} entries");
    }
    let tables: usize = palette.groups.iter().product();
    let starts: Vec<i64> = (0..tables).filter_map(|t| i64::try_from(t * palette.entries).ok()).collect();
    let sizes: Vec<usize> = indices.dims().iter().zip(&palette.groups).map(|(i, g)| i / g).collect();
    let (all, one_each) = interleaved(&palette.groups, &sizes)?;
    let starts = Tensor::from_vec(starts, one_each, lut.device())?;
    let ids = codes.reshape(all)?.broadcast_add(&starts)?.flatten_all()?;
    let found =
        lut.reshape((tables * palette.entries, palette.vector))?.contiguous()?.index_select(&ids, 0)?;
    if palette.vector == 1 {
        return Ok(found.reshape(palette.dense)?);
    }
    let axis = args::axis(vector_axis.unwrap_or(0), indices.rank()).at("vector_axis")?;
    let mut order: Vec<usize> = (0..indices.rank()).collect();
    order.insert(axis + 1, indices.rank());
    let found = found.reshape([indices.dims(), &[palette.vector]].concat())?;
    Ok(found.permute(order)?.reshape(palette.dense)?)
}

fn vector_axis(c: &Call<'_>) -> Result<Option<i64>> {
    if c.has("vector_axis") { Ok(Some(c.int_or("vector_axis", 0)?)) } else { Ok(None) }
}

fn shape_of(a: &Args<'_>) -> Result<Vec<usize>> {
    match a.ints("shape")? {
        Some(shape) => lengths(&shape),
        None => bail!("`shape` must be known when the program is compiled"),
    }
}

fn shape_of_call(c: &Call<'_>) -> Result<Vec<usize>> {
    lengths(&c.ints("shape")?)
}

fn lengths(shape: &[i64]) -> Result<Vec<usize>> {
    let Some(shape) = shape.iter().map(|d| usize::try_from(*d).ok()).collect::<Option<Vec<usize>>>() else {
        bail!("`shape` {} has a negative size", shape_text(shape));
    };
    elements(&shape)?;
    Ok(shape)
}

/// The number of elements, which the packed ones must match before anything is made.
fn elements(shape: &[usize]) -> Result<usize> {
    match shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)) {
        Some(n) => Ok(n),
        None => bail!("the sizes {} overflow", shape_text(shape)),
    }
}

/// Bits of an index into a table of this many entries.
fn code_bits(entries: usize) -> Result<usize> {
    match entries {
        2 | 4 | 16 | 64 | 256 => Ok(entries.ilog2() as usize),
        _ => bail!("lut of {entries} entries"; hint: "2, 4, 16, 64 or 256 before iOS 18"),
    }
}

/// Refuses packed codes of another length than the shape takes.
fn packed(bytes: &[Dim], bits: usize, shape: &[usize]) -> Result<()> {
    let Some(want) = elements(shape)?.checked_mul(bits).map(|n| n.div_ceil(8)) else {
        bail!("{} codes of {bits} bits overflow", shape_text(shape));
    };
    match bytes {
        [n] if n.agrees(Dim::Fixed(want)) => Ok(()),
        other => bail!(
            "{} codes of {bits} bits take {want} bytes, there are {}",
            shape_text(shape),
            shape_text(other)
        ),
    }
}

fn unpack(c: &Call<'_>, name: &str, dtype: DType, count: usize) -> Result<Vec<i64>> {
    let bytes: Vec<u8> = c.ints(name)?.into_iter().filter_map(|b| u8::try_from(b).ok()).collect();
    Ok(Numbers::decode(dtype, &bytes, count)?.into_ints())
}

fn spread<T: WithDType>(data: &Tensor, mask: &[i64], shape: &[usize]) -> Result<Tensor> {
    let data = data.flatten_all()?.to_vec1::<T>()?;
    let set = mask.iter().filter(|m| **m != 0).count();
    if set != data.len() {
        bail!("the mask keeps {set} elements, {} are given", data.len());
    }
    let mut rest = data.into_iter();
    let pick = |m: &i64| if *m == 0 { T::zero() } else { rest.next().unwrap_or(T::zero()) };
    let dense: Vec<T> = mask.iter().map(pick).collect();
    Ok(Tensor::from_vec(dense, shape, &candle_core::Device::Cpu)?)
}

/// The mask and the elements under it.
fn masked(mask: Tensor, dense: &Tensor) -> Result<Vec<Val>> {
    let kept = mask.flatten_all()?.to_dtype(candle_core::DType::I64)?.to_vec1::<i64>()?;
    let kept: Vec<i64> = (0i64..).zip(kept).filter(|(_, m)| *m != 0).map(|(i, _)| i).collect();
    let count = kept.len();
    Ok(vec![mask.into(), super::shape::take(dense, kept, &[count])?.into()])
}
