//! IQ4_NL: 32 elements in 18 bytes, each code one of sixteen uneven values (`IQ4_VALUES`).
//!
//! ```text
//! d f16 | q u8[16]          x[j]      = d * value of the low nibble of q[j]
//!                           x[j + 16] = d * value of the high nibble of q[j]
//! ```

use super::four_bits::{self, IQ4_VALUES};
use super::{f16_at, for_blocks};

pub(super) const BLOCK_LEN: usize = 32;
pub(super) const BLOCK_BYTES: usize = 18;

/// Whole blocks to f32.
pub(super) fn dequantize(bytes: &[u8], out: &mut [f32]) {
    for_blocks(bytes, out, |block: &[u8; BLOCK_BYTES], out: &mut [f32; BLOCK_LEN]| {
        four_bits::dequantize(&block[2..], &IQ4_VALUES, f16_at(block, 0), out);
    });
}
