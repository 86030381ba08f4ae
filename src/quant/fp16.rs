//! Numbers as fp16 has them, in operations that the compiler can do many at a time.

/// The first magnitude that rounds to infinity.
pub(super) const OVERFLOW: f32 = 65520.0;

/// The smallest fp16 above zero, 2⁻²⁴.
pub(super) const SMALLEST: f32 = 5.960_464_5e-8;

/// The smallest fp16 with all its digits, 2⁻¹⁴.
pub(super) const SMALLEST_NORMAL: f32 = 6.103_515_6e-5;

/// The nearest fp16, ties to even.
pub(super) fn round(x: f32) -> f32 {
    let a = x.abs();
    // Near 0.75 floats are multiples of the smallest fp16.
    let subnormal = (a + 0.75) - 0.75;
    let bits = a.to_bits();
    let normal = f32::from_bits((bits.wrapping_add(0x0fff + ((bits >> 13) & 1))) & !0x1fff);
    let rounded = if a < SMALLEST_NORMAL { subnormal } else { normal };
    let rounded = if a >= OVERFLOW { f32::INFINITY } else { rounded };
    if x.is_nan() { x } else { rounded.copysign(x) }
}

/// The nearest fp16 where that is a normal number, and close to it where not.
pub(super) fn round_normal(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits.wrapping_add(0x0fff + ((bits >> 13) & 1))) & !0x1fff)
}

/// The nearest integer, ties to even, of a number below 2²² in magnitude.
pub(super) fn integer(x: f32) -> f32 {
    (x + MAGIC) - MAGIC
}

/// The low byte of that integer.
pub(super) fn byte(x: f32) -> u8 {
    (x + MAGIC).to_bits() as u8
}

/// 1.5 · 2²³: floats near it are integers, and their low bits are two's complement.
const MAGIC: f32 = 12_582_912.0;

/// Bounds a number; unlike `clamp` it says nothing of NaN, which spares instructions.
pub(super) fn bound(x: f32, low: f32, high: f32) -> f32 {
    let x = if x > low { x } else { low };
    if x < high { x } else { high }
}

/// The fp16 numbers on both sides of a positive number, the smallest at least; equal where it is one.
pub(super) fn around(x: f32) -> (f32, f32) {
    let near = round(x.clamp(SMALLEST, 65504.0));
    // fp16 numbers of a power of two are as far apart as their last digit tells.
    let apart = f32::from_bits((near.max(SMALLEST_NORMAL).to_bits() & 0x7f80_0000) - (10 << 23));
    if near > x && near > SMALLEST {
        let apart =
            if near.to_bits() & 0x7f_ffff == 0 && near > SMALLEST_NORMAL { apart / 2.0 } else { apart };
        (near - apart, near)
    } else if near < x && near < 65504.0 {
        (near, near + apart)
    } else {
        (near, near)
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    #[test]
    fn rounding_is_that_of_half() {
        // Every fp16, its neighbours in fp32, and what lies halfway to the next.
        for bits in 0..=u16::MAX {
            let x = f16::from_bits(bits).to_f32();
            let next = f16::from_bits(bits.wrapping_add(1)).to_f32();
            for y in [x, x.next_up(), x.next_down(), x / 2.0 + next / 2.0, (x / 2.0 + next / 2.0).next_up()] {
                let (want, got) = (f16::from_f32(y).to_f32(), round(y));
                assert!(
                    want.to_bits() == got.to_bits() || want.is_nan() && got.is_nan(),
                    "{y}: {got} {want}"
                );
            }
        }
    }

    #[test]
    fn neighbours_enclose() {
        let halves: Vec<f32> = (1..0x7c00).map(|bits| f16::from_bits(bits).to_f32()).collect();
        for pair in halves.windows(2) {
            let (low, high) = (pair[0], pair[1]);
            assert_eq!(around(low), (low, low));
            for x in [low.next_up(), low.midpoint(high), high.next_down()] {
                assert_eq!(around(x), (low, high), "{x}");
            }
        }
        assert_eq!((around(1e-9), around(7e4)), ((SMALLEST, SMALLEST), (65504.0, 65504.0)));
    }

    #[test]
    fn bytes_are_twos_complement() {
        for i in -128i16..=255 {
            assert_eq!(byte(f32::from(i) + 0.3), (i & 0xff) as u8);
        }
    }
}
