//! The numbers that a group of weights is rounded to: a scale, a zero point, and the nearest code. The one arithmetic of weights
//! that are rounded when a model is loaded (`quantise`) and of those that are written to a file (`pack`).
//!
//! Invariant: scales are what compressed-tensors' schemes have (symmetric: the largest magnitude over half of the codes' range;
//! else the range over the number of steps), rounded to their stored type before codes are chosen.

use half::{bf16, f16};

use super::WeightFormat;

/// The values `(code - zero) * scale` of one group; codes are 0 to `top`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Grid {
    pub(crate) scale: f32,
    /// 0 where the scale is.
    inverse: f32,
    /// A whole number.
    zero: f32,
    top: f32,
}

/// The largest magnitude.
pub(crate) fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |largest, x| x.abs().max(largest))
}

/// A scale as the type `stored` has it. F32 holds what F16 does: only such scales keep 4-bit codes in 4 bits in memory.
fn rounded(scale: f32, stored: WeightFormat) -> f32 {
    match stored {
        WeightFormat::Bf16 => bf16::from_f32(scale.min(bf16::MAX.to_f32())).to_f32(),
        _ => f16::from_f32(scale.min(f16::MAX.to_f32())).to_f32(),
    }
}

impl Grid {
    /// The grid of a group: codes of `bits` bits around the middle one, or from a zero point of their own.
    pub(crate) fn of(values: &[f32], bits: u32, symmetric: bool, stored: WeightFormat) -> Self {
        let top = ((1u32 << bits) - 1) as f32;
        let inverse = |scale: f32| if scale == 0.0 { 0.0 } else { 1.0 / scale };
        if symmetric {
            let scale = rounded(largest(values) / (top / 2.0), stored);
            return Self { scale, inverse: inverse(scale), zero: (top + 1.0) / 2.0, top };
        }
        // 0 is always a value, so that what is exactly zero stays so.
        let (low, high) = values.iter().fold((0.0f32, 0.0f32), |(low, high), &x| (low.min(x), high.max(x)));
        let scale = rounded((high - low) / top, stored);
        let zero = (-low * inverse(scale)).round_ties_even().clamp(0.0, top);
        Self { scale, inverse: inverse(scale), zero, top }
    }

    /// The nearest code.
    pub(crate) fn code(&self, x: f32) -> u8 {
        ((x * self.inverse).round_ties_even() + self.zero).clamp(0.0, self.top) as u8
    }

    /// What a code means.
    pub(crate) fn value(&self, code: u8) -> f32 {
        (f32::from(code) - self.zero) * self.scale
    }

    /// The code of 0.
    pub(crate) fn zero(&self) -> u8 {
        self.zero as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_of_its_own_zero_has_smaller_steps_where_values_lie_on_one_side() {
        let values: Vec<f32> = (0..32).map(|i| 1.0 + i as f32 / 32.0).collect();
        let error = |grid: Grid| values.iter().map(|&x| (grid.value(grid.code(x)) - x).abs()).fold(0.0, f32::max);
        let [symmetric, own] = [true, false].map(|symmetric| Grid::of(&values, 4, symmetric, WeightFormat::F16));
        assert_eq!((symmetric.zero(), own.zero()), (8, 0));
        // The topmost code of the symmetric grid is cut off by half a step more.
        assert!(error(symmetric) <= symmetric.scale * 0.51 && error(own) <= own.scale * 0.51);
        assert!(error(own) < 0.6 * error(symmetric), "{} {}", error(own), error(symmetric));
    }

    #[test]
    fn zero_stays_zero_and_zeros_are_no_division() {
        for symmetric in [true, false] {
            let grid = Grid::of(&[0.0; 32], 4, symmetric, WeightFormat::Bf16);
            assert_eq!(grid.value(grid.code(0.0)), 0.0);
            let grid = Grid::of(&[-0.3, 0.0, 0.9], 4, symmetric, WeightFormat::Bf16);
            assert_eq!(grid.value(grid.code(0.0)), 0.0);
            assert_eq!(bf16::from_f32(grid.scale).to_f32(), grid.scale);
        }
    }
}
