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

/// The nearest whole number, ties to even, of a magnitude below 2^22 (larger ones stay whole and large): such a sum has no room
/// for fractions. x86-64 has no instruction for it that every processor knows, and a call for each value takes most of the time.
fn nearest_whole(x: f32) -> f32 {
    const NO_FRACTIONS: f32 = 1.5 * (1 << 23) as f32;
    (x + NO_FRACTIONS) - NO_FRACTIONS
}

impl Grid {
    /// The grid of a group: codes of `bits` bits around the middle one, or from a zero point of their own.
    pub(crate) fn of(values: &[f32], bits: u32, symmetric: bool, stored: WeightFormat) -> Self {
        Self::within(values, (bits, symmetric, stored), 1.0)
    }

    /// As `of`, but of some wider and narrower grids the one with the least sum of squared errors, each times what it counts
    /// (one for each value, or none: all the same). A wider one has the largest value on a code, where the plain one has it half
    /// a step off: that counts after scaling, which makes what matters large. A narrower one cuts off a value that is far from
    /// all others and does not count.
    pub(crate) fn closest(
        values: &[f32],
        counts: Option<&[f32]>,
        (bits, symmetric): (u32, bool),
        stored: WeightFormat,
    ) -> Self {
        let whole = ((1u32 << bits) - 1) as f32 / ((1u32 << bits) - 2) as f32;
        let ranges: &[f32] = if symmetric { &[whole, 1.0, 0.95, 0.9, 0.85, 0.8] } else { &[1.0, 0.95, 0.9, 0.85, 0.8] };
        let grids = ranges.iter().map(|&part| Self::within(values, (bits, symmetric, stored), part));
        let measured = grids.map(|grid| (grid.squares(values, counts), grid));
        let least = measured.min_by(|a, b| a.0.total_cmp(&b.0));
        least.map_or_else(|| Self::of(values, bits, symmetric, stored), |(_, grid)| grid)
    }

    /// A grid of a part of the range.
    fn within(values: &[f32], (bits, symmetric, stored): (u32, bool, WeightFormat), part: f32) -> Self {
        let top = ((1u32 << bits) - 1) as f32;
        let inverse = |scale: f32| if scale == 0.0 { 0.0 } else { 1.0 / scale };
        if symmetric {
            let scale = rounded(part * largest(values) / (top / 2.0), stored);
            return Self { scale, inverse: inverse(scale), zero: (top + 1.0) / 2.0, top };
        }
        // 0 is always a value, so that what is exactly zero stays so.
        let (low, high) = values.iter().fold((0.0f32, 0.0f32), |(low, high), &x| (low.min(x), high.max(x)));
        let scale = rounded(part * (high - low) / top, stored);
        let zero = (-part * low * inverse(scale)).round_ties_even().clamp(0.0, top);
        Self { scale, inverse: inverse(scale), zero, top }
    }

    /// The sum of squared errors, each times what it counts. Eight sums, so that the compiler takes eight values at a time.
    fn squares(&self, values: &[f32], counts: Option<&[f32]>) -> f32 {
        let square = |x: f32| {
            let error = (self.place(x) - self.zero) * self.scale - x;
            error * error
        };
        let mut sums = [0.0; 8];
        let (whole, rest) = values.as_chunks::<8>();
        match counts {
            None => {
                whole.iter().for_each(|eight| sums.iter_mut().zip(eight).for_each(|(sum, &x)| *sum += square(x)));
                sums.iter_mut().zip(rest).for_each(|(sum, &x)| *sum += square(x));
            }
            Some(counts) => {
                let (whole_counts, rest_counts) = counts.as_chunks::<8>();
                for (eight, counts) in whole.iter().zip(whole_counts) {
                    sums.iter_mut().zip(eight).zip(counts).for_each(|((sum, &x), count)| *sum += count * square(x));
                }
                sums.iter_mut().zip(rest).zip(rest_counts).for_each(|((sum, &x), count)| *sum += count * square(x));
            }
        }
        sums.iter().sum()
    }

    /// The nearest code, as a float.
    fn place(&self, x: f32) -> f32 {
        (nearest_whole(x * self.inverse) + self.zero).clamp(0.0, self.top)
    }

    /// The nearest code.
    pub(crate) fn code(&self, x: f32) -> u8 {
        self.place(x) as u8
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
    fn the_closest_grid_holds_the_largest_value_or_cuts_it_off() {
        let both = |values: &[f32], counts: Option<&[f32]>| {
            let plain = Grid::of(values, 4, true, WeightFormat::F16);
            [plain, Grid::closest(values, counts, (4, true), WeightFormat::F16)]
        };
        let error = |x: f32, grid: Grid| (grid.value(grid.code(x)) - x).abs();
        // One large value and nothing else: half a step off where the range is all codes.
        let alone: Vec<f32> = (0..32).map(|i| if i == 9 { 1.0 } else { 0.0 }).collect();
        let [plain, closest] = both(&alone, None);
        assert!(error(1.0, plain) > 0.06 && error(1.0, closest) < 1e-3, "{plain:?} {closest:?}");
        // Many smaller ones beside it, which count as much as it does.
        let many: Vec<f32> = (0..512).map(|i| if i == 9 { 1.0 } else { 0.5 * (i as f32).sin() }).collect();
        let squares = |grid: Grid| many.iter().map(|&x| error(x, grid).powi(2)).sum::<f32>();
        let [plain, closest] = both(&many, None);
        assert!(closest.scale < plain.scale && error(1.0, closest) > error(1.0, plain), "{plain:?} {closest:?}");
        assert!(squares(closest) < 0.8 * squares(plain));
        // It counts for more than all others.
        let counts: Vec<f32> = (0..512).map(|i| if i == 9 { 1e5 } else { 1.0 }).collect();
        let [_, closest] = both(&many, Some(&counts));
        assert!(error(1.0, closest) < 1e-3, "{closest:?}");
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
