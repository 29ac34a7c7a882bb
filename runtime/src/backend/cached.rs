//! How K and V are rounded to the types of the cache that no crate has (8-bit floats are `weights::format`'s): the one definition, which the reference and the CPU
//! backend call and kernels on other devices repeat bit by bit.
//!
//! Invariant: every rounding is to the nearest, ties to even, and depends on nothing but the value (and, for integers, on the
//! largest value of its token and head); what is not finite stays so, since a broken row must be seen at the end.
//! Sources: Micikevicius et al. 2022, FP8 Formats for Deep Learning (E4M3); vLLM's `int8_per_token_head` (absmax / 127).

pub(super) use crate::weights::format::{E4M3_FROM_HALF, E4m3};

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
