//! 8-bit floats: E4M3 without infinities (Micikevicius et al. 2022, "FP8 Formats for Deep Learning").
//!
//! Invariant: the one definition of their values and of rounding to them, to the nearest, ties to even: weights in FP8 and a cache
//! in FP8 mean the same. Called by the format, by quantisation, and by backends that cache K and V.

use bytemuck::{Pod, Zeroable};

/// An 8-bit float of 1 + 4 + 3 bits with bias 7: no infinities, one NaN per sign, ±448 at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub(crate) struct E4m3(pub(crate) u8);

const E4M3_NAN: u8 = 0x7f;
const E4M3_LARGEST: u32 = 0x7e;
/// 2^-6, from where on numbers are normal.
const E4M3_NORMAL: f32 = 0.015_625;

impl E4m3 {
    /// Finite values beyond ±448 become ±448; infinities, which 8 bits do not have, become NaN like NaN itself.
    pub(crate) fn from_f32(x: f32) -> Self {
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
    pub(crate) fn to_f32(self) -> f32 {
        // 2^8 apart: the bits of a 16-bit float whose exponent is biased by 15 instead of 7.
        half::f16::from_bits(self.half_bits()).to_f32() * E4M3_FROM_HALF
    }

    /// The bits of a 16-bit float that is the value divided by `E4M3_FROM_HALF`.
    #[inline(always)]
    pub(crate) fn half_bits(self) -> u16 {
        let (magnitude, sign) = (u16::from(self.0 & 0x7f), u16::from(self.0 & 0x80) << 8);
        let half = if magnitude == u16::from(E4M3_NAN) { 0x7e00 } else { magnitude << 7 };
        half | sign
    }
}

/// What a 16-bit float of the same bits must be multiplied with.
pub(crate) const E4M3_FROM_HALF: f32 = 256.0;

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
}
