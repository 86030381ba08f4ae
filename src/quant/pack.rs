//! The pieces of an encoding as bytes of a weight file.

use super::{
    cell::Part,
    encoded::{Encoded, pack},
    forms::{Piece, Plan},
};
use crate::{
    bail,
    error::Result,
    mil::{
        DType,
        constant::{encode_floats, encode_halves},
    },
};

/// The bytes of one piece.
pub(super) fn bytes_of(encoded: &Encoded, plan: &Plan, piece: &Piece) -> Result<Vec<u8>> {
    let (mask, inner) = match encoded {
        Encoded::Sparse { mask, inner } => (Some(mask), &**inner),
        other => (None, other),
    };
    let bits = u8::try_from(piece.dtype.bits().unwrap_or(8)).unwrap_or(8);
    let count: usize = piece.shape.iter().product();
    let bytes = match (piece.part, inner) {
        (Part::Mask, _) => {
            let Some(mask) = mask else { bail!("there is no mask") };
            let kept = mask.iter().filter(|m| **m).count();
            if kept != plan.kept {
                bail!("the mask keeps {kept} elements, {} are expected", plan.kept);
            }
            pack(&mask.iter().map(|m| u8::from(*m)).collect::<Vec<u8>>(), 1)
        }
        (Part::Values, Encoded::Dense { values }) if piece.dtype == DType::F16 => encode_halves(values),
        (Part::Values, Encoded::Dense { values }) => {
            encode_floats(piece.dtype, &values.iter().map(|v| v.to_f32()).collect::<Vec<f32>>())?
        }
        (Part::Codes, Encoded::Linear { codes, .. }) => pack(codes, bits),
        (Part::Scale, Encoded::Linear { scale, .. }) => encode_floats(piece.dtype, &for_all(scale, count))?,
        (Part::Offset, Encoded::Linear { offset, scale, .. }) => {
            // The older form writes zero points that are zero.
            let offset = offset.clone().unwrap_or_else(|| vec![0; scale.len()]);
            let low = |o: &i32| o.to_le_bytes()[0];
            pack(&for_all(&offset, count).iter().map(low).collect::<Vec<u8>>(), bits)
        }
        // Of the older form the indices are packed bytes already.
        (Part::Indices, Encoded::Palette { indices, palette, .. }) => pack(indices, palette.bits),
        (Part::Lut, Encoded::Palette { lut, .. }) => match &lut.int8 {
            Some(table) => table.codes.iter().flat_map(|c| c.to_le_bytes()).collect(),
            None => encode_floats(piece.dtype, &lut.values)?,
        },
        (Part::LutScale, Encoded::Palette { lut, .. }) => match &lut.int8 {
            Some(table) => encode_floats(piece.dtype, &table.scale)?,
            None => bail!("the table has no scale"),
        },
        (part, _) => bail!("`{}` has no {part:?}", plan.scheme),
    };
    Ok(bytes)
}

/// One for each, where one stands for all.
fn for_all<T: Copy>(values: &[T], count: usize) -> Vec<T> {
    match values {
        [one] => vec![*one; count],
        many => many.to_vec(),
    }
}
