//! IQ4_XS: 256 elements in 136 bytes, eight groups of 32 with a 6-bit scale each; codes as in IQ4_NL.
//!
//! ```text
//! d f16 | high u16 | low u8[4] | q u8[128]
//! scale of group g (0..8): s = nibble g % 2 of low[g / 2] + 16 * bits 2 g, 2 g + 1 of high - 32
//! x[32 g + j]      = d * s * value of the low nibble of q[16 g + j]        j 0..16
//! x[32 g + j + 16] = d * s * value of the high nibble of q[16 g + j]
//! ```

use super::four_bits::{self, IQ4_VALUES};
use super::{f16_at, for_blocks};

pub(super) const BLOCK_LEN: usize = 256;
pub(super) const BLOCK_BYTES: usize = 136;

/// Whole blocks to f32.
pub(super) fn dequantize(bytes: &[u8], out: &mut [f32]) {
    for_blocks(bytes, out, |block: &[u8; BLOCK_BYTES], out: &mut [f32; BLOCK_LEN]| {
        let high = u16::from_le_bytes([block[2], block[3]]);
        for (group, x) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let low = (block[4 + group / 2] >> (group % 2 * 4)) & 0xf;
            let scale = low | (((high >> (2 * group)) & 3) as u8) << 4;
            let scale = f16_at(block, 0) * f32::from(scale as i8 - 32);
            four_bits::dequantize(&block[8 + 16 * group..], &IQ4_VALUES, scale, x);
        }
    });
}
