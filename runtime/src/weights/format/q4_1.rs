//! Q4_1: 32 elements in 20 bytes, scale and minimum.
//!
//! ```text
//! d f16 | m f16 | q u8[16]  x[j]      = d * low nibble of q[j] + m
//!                           x[j + 16] = d * high nibble of q[j] + m
//! ```

use super::{f16_at, for_blocks};

pub(super) const BLOCK_LEN: usize = 32;
pub(super) const BLOCK_BYTES: usize = 20;

/// Whole blocks to f32.
pub(super) fn dequantize(bytes: &[u8], out: &mut [f32]) {
    for_blocks(bytes, out, |block: &[u8; BLOCK_BYTES], out: &mut [f32; BLOCK_LEN]| {
        let (d, m) = (f16_at(block, 0), f16_at(block, 2));
        for (j, &q) in block[4..].iter().enumerate() {
            out[j] = f32::from(q & 0xf) * d + m;
            out[j + 16] = f32::from(q >> 4) * d + m;
        }
    });
}
