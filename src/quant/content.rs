//! What the values of a constant tell: whether they are numbers, and whether they are a table of rotary
//! factors rather than trained.

use half::f16;

use crate::{
    bail,
    error::Result,
    mil::{DType, Weight},
};

/// Whether a name is one that tables of rotary factors have.
pub(super) fn named_rotary(name: &str) -> bool {
    let words = ["rotary", "rope", "cos", "sin", "freqs"];
    name.split(|c: char| !c.is_ascii_alphanumeric()).any(|w| words.contains(&w.to_ascii_lowercase().as_str()))
}

/// Why a weight is to be left alone; not a number anywhere is an error. `table` is one that is looked up.
pub(super) fn examine(weight: &Weight, table: bool) -> Result<Option<String>> {
    let bytes = weight.bytes()?;
    let bad = match weight.dtype {
        DType::F16 => {
            let (halves, _) = bytes.as_chunks::<2>();
            let odd = |b: &&[u8; 2]| u16::from_le_bytes(**b) & 0x7c00 == 0x7c00;
            // A fast look first: most weights have none.
            let infinite = halves.iter().any(|b| odd(&b));
            if infinite { first(halves.iter().map(|b| f16::from_le_bytes(*b).to_f32())) } else { None }
        }
        _ => {
            let (floats, _) = bytes.as_chunks::<4>();
            first(floats.iter().map(|b| f32::from_le_bytes(*b)))
        }
    };
    match bad {
        Some((index, value)) if value.is_nan() => {
            bail!("element {index} of {} is no number", weight.ty(); hint: "the weight is damaged; a rule with `scheme = \"fp16\"` leaves it as it is")
        }
        Some((index, value)) => Ok(Some(format!("element {index} is {value}"))),
        None if table && is_rotary(weight, &bytes) => Ok(Some("a table of rotary factors".into())),
        None => Ok(None),
    }
}

/// The first that is no number, else the first that is infinite.
fn first(values: impl Iterator<Item = f32>) -> Option<(usize, f32)> {
    let mut infinite = None;
    for (i, value) in values.enumerate().filter(|(_, v)| !v.is_finite()) {
        if value.is_nan() {
            return Some((i, value));
        }
        infinite = infinite.or(Some((i, value)));
    }
    infinite
}

/// Whether the first three rows are cosines or sines of 0, a and 2a, column by column.
fn is_rotary(weight: &Weight, bytes: &[u8]) -> bool {
    let [rows, columns] = weight.shape[..] else { return false };
    let size = weight.dtype.bits().unwrap_or(8) / 8;
    let at = |row: usize, column: usize| -> f32 {
        let from = (row * columns + column) * size;
        match bytes.get(from..from + size) {
            Some(&[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
            Some(&[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            _ => f32::NAN,
        }
    };
    let turns = |c: usize| {
        let (zero, one, two) = (at(0, c), at(1, c), at(2, c));
        let cosine = (zero - 1.0).abs() < 0.01 && (two - (2.0 * one * one - 1.0)).abs() < 0.01;
        let sine = zero.abs() < 0.01
            && (two.abs() - 2.0 * one.abs() * (1.0 - one * one).max(0.0).sqrt()).abs() < 0.01;
        cosine || sine
    };
    // Rows of zeros would do, and are none.
    rows > 2 && (0..columns).all(turns) && (0..columns).any(|c| at(1, c).abs() > 0.5)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mil::constant::encode_floats;

    fn table(rows: usize, columns: usize, f: impl Fn(usize, usize) -> f32) -> Weight {
        let values: Vec<f32> = (0..rows * columns).map(|i| f(i / columns, i % columns)).collect();
        let bytes = encode_floats(DType::F32, &values).unwrap();
        Weight::new("t", DType::F32, [rows, columns], move || Ok(bytes.clone().into()))
    }

    #[test]
    fn rotary_tables_are_told_from_trained_ones() {
        let angle = |r: usize, c: usize| r as f32 * 10000f32.powf(-(c as f32) / 16.0);
        let rotary = Some("a table of rotary factors".to_string());
        for (what, weight, found) in [
            ("cosines", table(32, 16, |r, c| angle(r, c).cos()), rotary.clone()),
            ("sines", table(32, 16, |r, c| angle(r, c).sin()), rotary.clone()),
            (
                "both",
                table(32, 16, |r, c| if c < 8 { angle(r, c).cos() } else { -angle(r, c - 8).sin() }),
                rotary,
            ),
            ("zeros", table(32, 16, |_, _| 0.0), None),
            ("trained", table(32, 16, |r, c| ((r * 31 + c * 17) % 23) as f32 / 23.0 - 0.5), None),
            (
                "row of padding",
                table(32, 16, |r, c| if r == 0 { 0.0 } else { ((r + 3 * c) % 7) as f32 / 9.0 }),
                None,
            ),
        ] {
            assert_eq!(examine(&weight, true).unwrap(), found, "{what}");
            assert_eq!(examine(&weight, false).unwrap(), None, "{what}");
        }
        for (name, rotary) in [
            ("rotary_0_x", true),
            ("model.rope.cos", true),
            ("cos_table", true),
            ("cosine_head_weight", false),
            ("embeddings.word_embeddings.weight", false),
        ] {
            assert_eq!(named_rotary(name), rotary, "{name}");
        }
    }

    #[test]
    fn what_is_no_number_is_refused_with_its_index() {
        let infinite = table(4, 4, |r, c| if (r, c) == (2, 1) { f32::NEG_INFINITY } else { 0.5 });
        assert_eq!(examine(&infinite, false).unwrap().unwrap(), "element 9 is -inf");
        let mut worse = table(4, 4, |r, c| if (r, c) > (2, 1) { f32::NAN } else { f32::INFINITY });
        for dtype in [DType::F32, DType::F16] {
            let error = examine(&worse, false).unwrap_err();
            assert_eq!(error.message(), format!("element 10 of {dtype} [4, 4] is no number"));
            worse = Weight::new("h", DType::F16, [4, 4], || {
                let value = |i| if i > 9 { f16::NAN } else { f16::INFINITY };
                Ok((0..16).flat_map(|i| value(i).to_le_bytes()).collect::<Vec<u8>>().into())
            });
        }
    }
}
