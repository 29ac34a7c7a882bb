//! Reads one group of a row of any quantised format in the common form: the CPU's arm of each format.
//!
//! Invariant: codes, scales, their steps, minima and zero points are those of the file; the format's definition
//! (`weights::format`) multiplies them in f32.

use half::f16;

use super::block::{GROUP, Group, Scale};
use crate::weights::WeightFormat;

fn half_at<F: Scale>(bytes: &[u8], at: usize) -> F {
    F::from_f16(f16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

fn float_at(bytes: &[u8], at: usize) -> f32 {
    f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Low nibbles of 16 bytes, then their high nibbles.
#[inline]
fn nibbles(bytes: &[u8]) -> [u8; GROUP] {
    const LOW: u128 = u128::from_ne_bytes([15; 16]);
    let bytes = u128::from_le_bytes(*bytes.first_chunk().expect("half a group"));
    bytemuck::cast([(bytes & LOW).to_le_bytes(), (bytes >> 4 & LOW).to_le_bytes()])
}

/// The bits of each byte that `mask` keeps after a shift. A loop with one shift for all is vectors; each of its own is not.
#[inline]
fn bits_of(bytes: &[u8], shift: usize, mask: u8) -> [u8; GROUP] {
    let bytes: &[u8; GROUP] = bytes.first_chunk().expect("a group");
    let mut codes = [0; GROUP];
    codes.iter_mut().zip(bytes).for_each(|(code, byte)| *code = byte >> shift & mask);
    codes
}

/// Codes with more bits above those they have.
#[inline]
fn with_high(mut codes: [u8; GROUP], high: [u8; GROUP], shift: usize) -> [u8; GROUP] {
    codes.iter_mut().zip(high).for_each(|(code, high)| *code |= high << shift);
    codes
}

/// With bit i of four bytes as the fifth bit of code i.
fn with_fifth(codes: [u8; GROUP], bits: &[u8]) -> [u8; GROUP] {
    let bits = u32::from_le_bytes([bits[0], bits[1], bits[2], bits[3]]);
    std::array::from_fn(|i| codes[i] | ((bits >> i & 1) as u8) << 4)
}

impl<F: Scale> Group<F> {
    fn new(codes: [u8; GROUP], scale: F) -> Self {
        Self { codes, scale, steps: [1; 2], min: F::ZERO, min_steps: [1; 2], zero: 0 }
    }

    fn with_min(self, min: F) -> Self {
        Self { min, ..self }
    }

    fn with_zero(self, zero: u8) -> Self {
        Self { zero, ..self }
    }

    /// Group `index` of a block of the format.
    pub(super) fn read(format: WeightFormat, block: &[u8], index: usize) -> Self {
        let half = |at| half_at(block, at);
        match format {
            WeightFormat::Q8_0 => Self::new(std::array::from_fn(|i| block[2 + i] ^ 0x80), half(0)),
            WeightFormat::Q4_0 | WeightFormat::Iq4Nl => Self::new(nibbles(&block[2..]), half(0)),
            WeightFormat::Q4_1 => Self::new(nibbles(&block[4..]), half(0)).with_min(half(2)),
            WeightFormat::Q5_0 => Self::new(with_fifth(nibbles(&block[6..]), &block[2..]), half(0)),
            WeightFormat::Q5_1 => Self::new(with_fifth(nibbles(&block[8..]), &block[4..]), half(0)).with_min(half(2)),
            WeightFormat::Int4 => Self::new(nibbles(&block[3..]), half(0)).with_zero(block[2]),
            WeightFormat::Int8 => {
                Self::new(std::array::from_fn(|i| block[5 + i]), F::from_f32(float_at(block, 0))).with_zero(block[4])
            }
            // 2^(e - 128) through f64, whose exponents reach further.
            WeightFormat::Mxfp4 => {
                Self::new(nibbles(&block[1..]), F::from_f32(2f64.powi(i32::from(block[0]) - 128) as f32))
            }
            WeightFormat::Q4K | WeightFormat::Q5K => Self::read_k(format, block, index),
            WeightFormat::Q6K => Self::read_q6_k(block, index),
            WeightFormat::Q2K => Self::read_q2_k(block, index),
            WeightFormat::Q3K => Self::read_q3_k(block, index),
            WeightFormat::Iq4Xs => Self::read_iq4_xs(block, index),
            WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 | WeightFormat::Fp8E4m3 => {
                unreachable!("no codes")
            }
        }
    }

    /// Q4_K and Q5_K: f16 scale of scales and of minima, 6-bit scales and minima, [fifth bits], nibbles in runs of 64.
    fn read_k(format: WeightFormat, block: &[u8], index: usize) -> Self {
        let packed = &block[4..16];
        let (scale, min) = if index < 4 {
            (packed[index] & 63, packed[index + 4] & 63)
        } else {
            let low = packed[index + 4];
            (low & 15 | packed[index - 4] >> 6 << 4, low >> 4 | packed[index] >> 6 << 4)
        };
        let low = |nibbles: &[u8]| bits_of(&nibbles[index / 2 * GROUP..], index % 2 * 4, 15);
        let codes = match format {
            WeightFormat::Q5K => with_high(low(&block[48..]), bits_of(&block[16..], index, 1), 4),
            _ => low(&block[16..]),
        };
        let (steps, min_steps) = ([scale as i8; 2], [min as i8; 2]);
        Self { steps, min_steps, ..Self::new(codes, half_at(block, 0)) }.with_min(-half_at::<F>(block, 2))
    }

    /// Q6_K: low nibbles, high bit pairs, 8-bit scales per 16, f16 scale; two halves of 128.
    fn read_q6_k(block: &[u8], index: usize) -> Self {
        let (half, run) = (index / 4, index % 4);
        let low = bits_of(&block[half * 64 + run % 2 * GROUP..], run / 2 * 4, 15);
        let codes = with_high(low, bits_of(&block[128 + half * GROUP..], run * 2, 3), 4);
        let steps = std::array::from_fn(|part| block[192 + half * 8 + run * 2 + part] as i8);
        Self { steps, ..Self::new(codes, half_at(block, 208)) }
    }

    /// Q2_K: a 4-bit scale and minimum per 16, bit pairs in runs of 128, f16 scale of scales and of minima.
    fn read_q2_k(block: &[u8], index: usize) -> Self {
        let codes = bits_of(&block[16 + index / 4 * GROUP..], index % 4 * 2, 3);
        let parts = [block[2 * index], block[2 * index + 1]];
        let (steps, min_steps) = (parts.map(|part| (part & 15) as i8), parts.map(|part| (part >> 4) as i8));
        Self { steps, min_steps, ..Self::new(codes, half_at(block, 80)) }.with_min(-half_at::<F>(block, 82))
    }

    /// Q3_K: third bits, bit pairs in runs of 128, 6-bit scales per 16 around 32, f16 scale.
    fn read_q3_k(block: &[u8], index: usize) -> Self {
        let pairs = bits_of(&block[32 + index / 4 * GROUP..], index % 4 * 2, 3);
        let codes = with_high(pairs, bits_of(block, index, 1), 2);
        let packed = &block[96..108];
        let scale = |i: usize| packed[i % 8] >> (i / 8 * 4) & 15 | (packed[8 + i % 4] >> (i / 4 * 2) & 3) << 4;
        let steps = std::array::from_fn(|half| scale(2 * index + half) as i8 - 32);
        Self { steps, ..Self::new(codes, half_at(block, 108)) }
    }

    /// IQ4_XS: f16 scale, 6-bit scales per 32 around 32, nibbles.
    fn read_iq4_xs(block: &[u8], index: usize) -> Self {
        let high = u16::from_le_bytes([block[2], block[3]]);
        let scale = block[4 + index / 2] >> (index % 2 * 4) & 15 | ((high >> (2 * index) & 3) as u8) << 4;
        let steps = [scale as i8 - 32; 2];
        Self { steps, ..Self::new(nibbles(&block[8 + 16 * index..]), half_at(block, 0)) }
    }
}
