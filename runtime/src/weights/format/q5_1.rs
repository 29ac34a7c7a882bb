//! Q5_1: 32 elements in 24 bytes, scale and minimum. Bit j of `h` is the fifth bit of element j.
//!
//! ```text
//! d f16 | m f16 | h u32 | q u8[16]  x[j]      = d * (low nibble of q[j]  + 16 * bit j of h)      + m
//!                                   x[j + 16] = d * (high nibble of q[j] + 16 * bit j + 16 of h) + m
//! ```

use super::{f16_at, for_blocks};

pub(super) const BLOCK_LEN: usize = 32;
pub(super) const BLOCK_BYTES: usize = 24;

/// Whole blocks to f32.
pub(super) fn dequantize(bytes: &[u8], out: &mut [f32]) {
    for_blocks(bytes, out, |block: &[u8; BLOCK_BYTES], out: &mut [f32; BLOCK_LEN]| {
        let (d, m) = (f16_at(block, 0), f16_at(block, 2));
        let h = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
        for (j, &q) in block[8..].iter().enumerate() {
            let low = (q & 0xf) | (((h >> j) & 1) << 4) as u8;
            let high = (q >> 4) | (((h >> (j + 16)) & 1) << 4) as u8;
            out[j] = f32::from(low) * d + m;
            out[j + 16] = f32::from(high) * d + m;
        }
    });
}
