//! Rounding floats to fewer bits when a model is loaded: to the nearest code of symmetric groups.
//!
//! Invariant: rows are rounded when they are read, so that a model is never in memory twice; a row's codes depend on the row
//! only. Scales and codes are those of `grid`. Called by `model`; `pack` rounds for files.

use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

use half::f16;

use super::format::E4m3;
use super::grid::{Grid, largest};
use super::{HostTensor, RowSource, WeightFormat};

/// What floats are rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantisation {
    /// Not at all.
    None,
    /// 4 bits and an f16 scale for each 128 inputs (32 where rows are no multiple of 128): Q4_0 blocks.
    Int4,
    /// 8 bits and an f16 scale for each 32 inputs: Q8_0 blocks.
    Int8,
    /// E4M3 and an f32 scale for each output.
    Fp8,
}

impl Quantisation {
    /// Their names in flags.
    pub const NAMES: [(&'static str, Self); 4] =
        [("none", Self::None), ("int4", Self::Int4), ("int8", Self::Int8), ("fp8", Self::Fp8)];

    fn format(self) -> Option<WeightFormat> {
        match self {
            Self::None => None,
            Self::Int4 => Some(WeightFormat::Q4_0),
            Self::Int8 => Some(WeightFormat::Q8_0),
            Self::Fp8 => Some(WeightFormat::Fp8E4m3),
        }
    }
}

impl FromStr for Quantisation {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::NAMES.iter().find(|(known, _)| *known == name);
        let names = Self::NAMES.map(|(name, _)| name).join(", ");
        found.map(|(_, to)| *to).ok_or_else(|| format!("'{name}' is not one of {names}"))
    }
}

impl HostTensor {
    /// The matrix rounded to fewer bits; itself where it is quantised already, is a vector, or has rows that are no multiple of 32.
    pub fn quantised(self, to: Quantisation) -> Self {
        let Some(format) = to.format() else { return self };
        if self.format.block_len() != 1 || self.shape.len() < 2 || !self.row_len().is_multiple_of(format.block_len()) {
            return self;
        }
        let (name, shape) = (self.name.clone(), self.shape.clone());
        Self::computed(name, format, shape, Arc::new(Rounded { tensor: self, to }))
    }
}

#[derive(Debug)]
struct Rounded {
    tensor: HostTensor,
    to: Quantisation,
}

impl RowSource for Rounded {
    fn read(&self, rows: Range<usize>, out: &mut [u8]) {
        let mut values = vec![0.0; self.tensor.row_len()];
        let row_bytes = out.len() / rows.len().max(1);
        for (row, out) in rows.zip(out.chunks_exact_mut(row_bytes)) {
            self.tensor.dequantize_rows(row..row + 1, &mut values);
            match self.to {
                Quantisation::None => unreachable!("`quantised` makes no such source"),
                Quantisation::Int4 => int4(&values, out),
                Quantisation::Int8 => int8(&values, out),
                Quantisation::Fp8 => fp8(&values, out),
            }
        }
    }

    fn blocks_per_scale(&self) -> usize {
        match self.to {
            Quantisation::Int4 => int4_group(self.tensor.row_len()) / 32,
            Quantisation::None | Quantisation::Int8 | Quantisation::Fp8 => 1,
        }
    }
}

/// Inputs that share a scale of 4-bit codes, in rows of so many.
fn int4_group(cols: usize) -> usize {
    if cols.is_multiple_of(128) { 128 } else { 32 }
}

/// Q4_0 blocks whose scales are those of groups. With so few codes it counts which part of the range they cover; with 8 bits it
/// does not.
fn int4(values: &[f32], out: &mut [u8]) {
    let group = int4_group(values.len());
    for (values, blocks) in values.chunks_exact(group).zip(out.chunks_exact_mut(group / 32 * 18)) {
        let grid = Grid::closest(values, None, (4, true), WeightFormat::F16);
        for (values, block) in values.chunks_exact(32).zip(blocks.chunks_exact_mut(18)) {
            block[..2].copy_from_slice(&f16::from_f32(grid.scale).to_le_bytes());
            for (j, byte) in block[2..].iter_mut().enumerate() {
                *byte = grid.code(values[j]) | grid.code(values[j + 16]) << 4;
            }
        }
    }
}

/// Q8_0 blocks.
fn int8(values: &[f32], out: &mut [u8]) {
    for (values, block) in values.chunks_exact(32).zip(out.chunks_exact_mut(34)) {
        let grid = Grid::of(values, 8, true, WeightFormat::F16);
        block[..2].copy_from_slice(&f16::from_f32(grid.scale).to_le_bytes());
        block[2..].iter_mut().zip(values).for_each(|(byte, &x)| *byte = grid.code(x) ^ 0x80);
    }
}

/// The scale of an output in FP8, and what its values are multiplied with; 0 and 0 for zeros.
pub(super) fn fp8_scale(values: &[f32]) -> (f32, f32) {
    let scale = largest(values) / 448.0;
    (scale, if scale > 0.0 { 1.0 / scale } else { 0.0 })
}

/// The E4M3 nearest to a value of a row with this scale.
pub(super) fn fp8_code(x: f32, inverse: f32) -> E4m3 {
    E4m3::from_f32((x * inverse).clamp(-448.0, 448.0))
}

/// FP8_E4M3 blocks of one scale.
fn fp8(values: &[f32], out: &mut [u8]) {
    let (scale, inverse) = fp8_scale(values);
    for (values, block) in values.chunks_exact(32).zip(out.chunks_exact_mut(36)) {
        block[..4].copy_from_slice(&scale.to_le_bytes());
        for (byte, x) in block[4..].iter_mut().zip(values) {
            *byte = fp8_code(*x, inverse).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three rows of values that grow along the row.
    fn values(cols: usize) -> Vec<f32> {
        (0..3 * cols).map(|i| ((i * i + 7) as f32 * 0.37).sin() * (1.0 + (i / 32) as f32)).collect()
    }

    #[test]
    fn codes_are_the_nearest() {
        for (to, cols, shared, most) in [
            // Half a step, and what an f16 scale is off; the topmost code of the positive side is cut off by half a step more.
            (Quantisation::Int8, 64, 32, 1.0 / 255.0 + 1e-3),
            // Of a value, whose largest is that of its row: half of a third bit.
            (Quantisation::Fp8, 64, 64, 1.0 / 16.0),
        ] {
            let values = values(cols);
            let rounded = HostTensor::from_f32("t", vec![3, cols], &values).quantised(to).to_f32();
            let groups = values.chunks_exact(shared).zip(rounded.chunks_exact(shared));
            let error = |(values, rounded): (&[f32], &[f32])| {
                let worst = values.iter().zip(rounded).fold(0.0f32, |worst, (x, y)| worst.max((x - y).abs()));
                worst / largest(values)
            };
            let error = groups.map(error).fold(0.0, f32::max);
            assert!(error <= most && error > most / 3.0, "{to:?} of {cols}: {error}, at most {most}");
        }
    }

    #[test]
    fn codes_of_four_bits_are_the_nearest_of_the_closest_scale() {
        for (cols, shared) in [(256, 128), (96, 32)] {
            let values = values(cols);
            let rounded = HostTensor::from_f32("t", vec![3, cols], &values).quantised(Quantisation::Int4);
            let blocks = rounded.rows(0..3).to_vec();
            let scales = blocks.chunks_exact(shared / 32 * 18).map(|group| f16::from_le_bytes([group[0], group[1]]));
            let rounded = rounded.to_f32();
            let mut better = 0;
            for ((values, rounded), scale) in values.chunks_exact(shared).zip(rounded.chunks_exact(shared)).zip(scales)
            {
                let scale = scale.to_f32();
                for (x, y) in values.iter().zip(rounded) {
                    let nearest = (-8..8).map(|code| (code as f32 * scale - x).abs()).fold(f32::MAX, f32::min);
                    assert!((x - y).abs() <= nearest + 1e-6 * scale, "{x} became {y} in steps of {scale}");
                }
                let squares = |ys: &mut dyn Iterator<Item = f32>| -> f64 {
                    values.iter().zip(ys).map(|(&x, y)| f64::from(x - y).powi(2)).sum()
                };
                let plain = Grid::of(values, 4, true, WeightFormat::F16);
                let [ours, plain] = [
                    squares(&mut rounded.iter().copied()),
                    squares(&mut values.iter().map(|&x| plain.value(plain.code(x)))),
                ];
                // Sums in f32 may order grids that are as good.
                assert!(ours <= plain * 1.0001, "{ours} and {plain}");
                better += usize::from(ours < 0.9 * plain);
            }
            assert!(better > 0, "no group of {shared} was better than the plain one");
        }
    }

    #[test]
    fn what_cannot_be_rounded_stays() {
        let vector = HostTensor::from_f32("v", vec![32], &[1.0; 32]);
        assert_eq!(vector.quantised(Quantisation::Int4).format, WeightFormat::F32);
        let narrow = HostTensor::from_f32("m", vec![2, 20], &[1.0; 40]);
        assert_eq!(narrow.clone().quantised(Quantisation::Int8).format, WeightFormat::F32);
        assert_eq!(narrow.quantised(Quantisation::None).format, WeightFormat::F32);
        let zeros = HostTensor::from_f32("z", vec![1, 32], &[0.0; 32]);
        for (_, to) in Quantisation::NAMES {
            assert_eq!(zeros.clone().quantised(to).to_f32(), [0.0; 32]);
        }
    }
}
