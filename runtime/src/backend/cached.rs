//! How K and V are rounded to the types of the cache that no crate has: the one definition, which the reference and the CPU
//! backend call and kernels on other devices repeat bit by bit.
//!
//! Invariant: every rounding is to the nearest, ties to even, and depends on nothing but the value (and, for integers, on the
//! largest value of its token and head); what is not finite stays so, since a broken row must be seen at the end.
//! Sources: Micikevicius et al. 2022, FP8 Formats for Deep Learning (E4M3); vLLM's `int8_per_token_head` (absmax / 127).

use bytemuck::{Pod, Zeroable};

/// An 8-bit float of 1 + 4 + 3 bits with bias 7: no infinities, one NaN per sign, ±448 at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub(super) struct E4m3(pub(super) u8);

const E4M3_NAN: u8 = 0x7f;
const E4M3_LARGEST: u32 = 0x7e;
/// 2^-6, from where on numbers are normal.
const E4M3_NORMAL: f32 = 0.015_625;

impl E4m3 {
    /// Finite values beyond ±448 become ±448; infinities, which 8 bits do not have, become NaN like NaN itself.
    pub(super) fn from_f32(x: f32) -> Self {
        let magnitude = x.abs();
        let code = if !magnitude.is_finite() {
            u32::from(E4M3_NAN)
        } else if magnitude < E4M3_NORMAL {
            // The sum's unit in the last place is 2^-9, the smallest subnormal.
            const SHIFT: f32 = 16_384.0;
            (magnitude + SHIFT).to_bits() - SHIFT.to_bits()
        } else {
            // Rebias the exponent by 127 - 7 and round away 20 bits; a carry moves into the exponent.
            let bits = magnitude.to_bits() - (120 << 23);
            ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20).min(E4M3_LARGEST)
        };
        Self(code as u8 | ((x.to_bits() >> 24) & 0x80) as u8)
    }

    /// Exact.
    pub(super) fn to_f32(self) -> f32 {
        // 2^8 apart: the bits of a 16-bit float whose exponent is biased by 15 instead of 7.
        half::f16::from_bits(self.half_bits()).to_f32() * E4M3_FROM_HALF
    }

    /// The bits of a 16-bit float that is the value divided by `E4M3_FROM_HALF`.
    #[inline(always)]
    pub(super) fn half_bits(self) -> u16 {
        let (magnitude, sign) = (u16::from(self.0 & 0x7f), u16::from(self.0 & 0x80) << 8);
        let half = if magnitude == u16::from(E4M3_NAN) { 0x7e00 } else { magnitude << 7 };
        half | sign
    }
}

/// What a 16-bit float of the same bits must be multiplied with.
pub(super) const E4M3_FROM_HALF: f32 = 256.0;

/// Rounding of one token's K or V of one head to integers: `code = round(x * inverse)`, which means `code * scale`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Int8Scale {
    /// What a code is multiplied with.
    pub(super) scale: f32,
    /// What a value is multiplied with.
    pub(super) inverse: f32,
}

/// 2^-100. Rows below it are zero: the inverse of their scale would overflow, and GPUs flush what is smaller still.
const INT8_LEAST: f32 = 7.888_609e-31;

impl Int8Scale {
    /// Where elements have no scale.
    pub(super) const NONE: Self = Self { scale: 1.0, inverse: 1.0 };

    /// `scale = largest / 127` and `inverse = 127 / largest`, each rounded once; 0 and 0 for a row of zeros. The scale of a row
    /// that holds a NaN or an infinity is NaN.
    pub(super) fn of(values: &[f32]) -> Self {
        // As integers, magnitudes order like their values, a NaN above all.
        let largest = f32::from_bits(values.iter().map(|x| x.to_bits() & 0x7fff_ffff).max().unwrap_or(0));
        if !largest.is_finite() {
            return Self { scale: f32::NAN, inverse: 0.0 };
        }
        if largest < INT8_LEAST {
            return Self { scale: 0.0, inverse: 0.0 };
        }
        Self { scale: largest / 127.0, inverse: 127.0 / largest }
    }

    /// From -127 to 127 for values of the row that the scale is of; 0 where the scale is NaN.
    #[inline(always)]
    pub(super) fn code(self, x: f32) -> i8 {
        (x * self.inverse).round_ties_even() as i8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the definition: sign, exponent, fraction.
    fn e4m3(code: u8) -> f64 {
        let (exponent, fraction) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        let magnitude = match exponent {
            0 => fraction * 2f64.powi(-9),
            _ if code & 0x7f == 0x7f => f64::NAN,
            _ => (1.0 + fraction / 8.0) * 2f64.powi(exponent - 7),
        };
        if code & 0x80 == 0 { magnitude } else { -magnitude }
    }

    #[test]
    fn every_code_of_e4m3_means_what_it_should() {
        for code in 0..=u8::MAX {
            let (got, want) = (f64::from(E4m3(code).to_f32()), e4m3(code));
            assert!(got == want || got.is_nan() && want.is_nan(), "{code:#x}: {got}, not {want}");
            let back = E4m3::from_f32(E4m3(code).to_f32());
            assert_eq!(back.0, code, "a value that exists is kept");
        }
    }

    #[test]
    fn e4m3_rounds_to_the_nearest_and_ties_to_even() {
        // Each midpoint of neighbours, and the floats on both sides of it.
        for code in 0..0x7e_u8 {
            let middle = ((e4m3(code) + e4m3(code + 1)) / 2.0) as f32;
            let even = code + code % 2;
            for (x, want) in [(middle.next_down(), code), (middle, even), (middle.next_up(), code + 1)] {
                assert_eq!(E4m3::from_f32(x).0, want, "{x}");
                assert_eq!(E4m3::from_f32(-x).0, want | 0x80, "-{x}");
            }
        }
        for (x, want) in [(448.0, 0x7e), (464.0, 0x7e), (1e30, 0x7e), (f32::MAX, 0x7e), (1e-40, 0), (-0.0, 0x80)] {
            assert_eq!(E4m3::from_f32(x).0, want, "{x}");
        }
        for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(E4m3::from_f32(x).to_f32().is_nan(), "{x} must not become a number");
        }
    }

    #[test]
    fn integers_keep_the_largest_and_round_ties_to_even() {
        let row = [0.5, -127.0, 1.5, 2.5, 126.5, 0.0];
        let scale = Int8Scale::of(&row);
        assert_eq!((scale.scale, scale.inverse), (1.0, 1.0));
        assert_eq!(row.map(|x| scale.code(x)), [0, -127, 2, 2, 126, 0]);
        // No code leaves the range whatever the largest value: 127 / x * x may be the float above 127.
        for i in 1..100_000_u32 {
            let largest = f32::from_bits(0x3f00_0000 + i * 77);
            let scale = Int8Scale::of(&[largest]);
            assert_eq!((scale.code(largest), scale.code(-largest)), (127, -127), "{largest}");
        }
    }

    #[test]
    fn rows_of_zeros_and_broken_rows() {
        for zero in [[0.0; 3], [-0.0; 3], [1e-40; 3], [INT8_LEAST.next_down(); 3]] {
            let scale = Int8Scale::of(&zero);
            assert_eq!((scale.scale, scale.code(zero[0])), (0.0, 0));
        }
        for least in [INT8_LEAST, f32::MAX] {
            let scale = Int8Scale::of(&[least]);
            assert!(scale.scale.is_normal() && scale.inverse.is_normal());
            assert_eq!(scale.code(least), 127);
        }
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let scale = Int8Scale::of(&[1.0, bad, -2.0]);
            assert!(scale.scale.is_nan());
            assert_eq!([1.0, bad, -2.0].map(|x| scale.code(x)), [0; 3]);
        }
    }
}
