//! Q2_K: 256 elements in 84 bytes, sixteen groups of 16 with a 4-bit scale and minimum each.
//!
//! ```text
//! scales u8[16] | q u8[64] | d f16 | dmin f16
//! per half n (0..2) and quarter k (0..4) of it, j 0..32, with the byte s = scales[8 n + 2 k + j / 16]:
//! x[128 n + 32 k + j] = d * low nibble of s * bits 2 k, 2 k + 1 of q[32 n + j] - dmin * high nibble of s
//! ```

use super::{f16_at, for_blocks};

pub(super) const BLOCK_LEN: usize = 256;
pub(super) const BLOCK_BYTES: usize = 84;

/// Whole blocks to f32.
pub(super) fn dequantize(bytes: &[u8], out: &mut [f32]) {
    for_blocks(bytes, out, |block: &[u8; BLOCK_BYTES], out: &mut [f32; BLOCK_LEN]| {
        let (d, dmin) = (f16_at(block, 80), f16_at(block, 82));
        for (group, x) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let (scale, min) = (d * f32::from(block[group] & 0xf), dmin * f32::from(block[group] >> 4));
            let (half, quarter) = (group / 8, group % 8 / 2);
            let q = &block[16 + 32 * half + 16 * (group % 2)..];
            for (x, &q) in x.iter_mut().zip(q) {
                *x = scale * f32::from((q >> (2 * quarter)) & 3) - min;
            }
        }
    });
}
