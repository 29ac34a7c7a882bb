//! Q5_K: 256 elements in 176 bytes, eight groups of 32 with a 6-bit scale and minimum each (`k_scales`).
//! Bit g of `h[l]` is the fifth bit of element l of group g.
//!
//! ```text
//! d f16 | dmin f16 | scales u8[12] | h u8[32] | q u8[128]
//! x[32 g + l] = d * scale(g) * (nibble + 16 * bit g of h[l]) - dmin * min(g)                  g 0..8, l 0..32
//! nibble: of q[32 (g / 2) + l], low for even g, high for odd g
//! ```

use super::k_scales::scale_and_min;
use super::{f16_at, for_blocks};

pub(super) const BLOCK_LEN: usize = 256;
pub(super) const BLOCK_BYTES: usize = 176;

/// Whole blocks to f32.
pub(super) fn dequantize(bytes: &[u8], out: &mut [f32]) {
    for_blocks(bytes, out, |block: &[u8; BLOCK_BYTES], out: &mut [f32; BLOCK_LEN]| {
        let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
        let high = &block[16..48];
        for (group, x) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (scale, min) = scale_and_min(&block[4..16], group);
            let (d, m) = (d * f32::from(scale), dmin * f32::from(min));
            let q = &block[48 + group / 2 * 32..];
            let shift = group % 2 * 4;
            for ((x, &q), &h) in x.iter_mut().zip(q).zip(high) {
                *x = d * f32::from(((q >> shift) & 0xf) | (((h >> group) & 1) << 4)) - m;
            }
        }
    });
}
