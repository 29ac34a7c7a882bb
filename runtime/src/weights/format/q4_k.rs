//! Q4_K: 256 elements in 144 bytes, eight groups of 32 with a 6-bit scale and minimum each (`k_scales`).
//!
//! ```text
//! d f16 | dmin f16 | scales u8[12] | q u8[128]
//! x[64 i + l]      = d * scale(2 i)     * low nibble of q[32 i + l]  - dmin * min(2 i)        i 0..4, l 0..32
//! x[64 i + 32 + l] = d * scale(2 i + 1) * high nibble of q[32 i + l] - dmin * min(2 i + 1)
//! ```

use super::k_scales::scale_and_min;
use super::{f16_at, for_blocks};

pub(super) const BLOCK_LEN: usize = 256;
pub(super) const BLOCK_BYTES: usize = 144;

/// Whole blocks to f32.
pub(super) fn dequantize(bytes: &[u8], out: &mut [f32]) {
    for_blocks(bytes, out, |block: &[u8; BLOCK_BYTES], out: &mut [f32; BLOCK_LEN]| {
        let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
        for (group, x) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (scale, min) = scale_and_min(&block[4..16], group);
            let (d, m) = (d * f32::from(scale), dmin * f32::from(min));
            let q = &block[16 + group / 2 * 32..];
            let shift = group % 2 * 4;
            for (x, &q) in x.iter_mut().zip(q) {
                *x = d * f32::from((q >> shift) & 0xf) - m;
            }
        }
    });
}
