//! Q3_K: 256 elements in 110 bytes, symmetric around 4, sixteen groups of 16 with a 6-bit scale each.
//!
//! ```text
//! h u8[32] | l u8[64] | scales u8[12] | d f16
//! per half n (0..2) and quarter k (0..4) of it, j 0..32, with the scale s of the group i = 8 n + 2 k + j / 16:
//! x[128 n + 32 k + j] = d * s * (bits 2 k, 2 k + 1 of l[32 n + j] + 4 * bit 4 n + k of h[j] - 4)
//! s = nibble i / 8 of scales[i % 8] + 16 * bits 2 (i / 4), 2 (i / 4) + 1 of scales[8 + i % 4] - 32
//! ```

use super::{f16_at, for_blocks};

pub(super) const BLOCK_LEN: usize = 256;
pub(super) const BLOCK_BYTES: usize = 110;

/// Whole blocks to f32.
pub(super) fn dequantize(bytes: &[u8], out: &mut [f32]) {
    for_blocks(bytes, out, |block: &[u8; BLOCK_BYTES], out: &mut [f32; BLOCK_LEN]| {
        for (group, x) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let scale = f16_at(block, 108) * f32::from(scale(&block[96..108], group));
            let (half, quarter, first) = (group / 8, group % 8 / 2, 16 * (group % 2));
            let (low, high) = (&block[32 + 32 * half + first..], &block[first..]);
            for (j, x) in x.iter_mut().enumerate() {
                let q = (low[j] >> (2 * quarter)) & 3 | ((high[j] >> (group / 2)) & 1) << 2;
                *x = scale * f32::from(q as i8 - 4);
            }
        }
    });
}

/// The scale of the group `group` of 16, -32..=31.
fn scale(bytes: &[u8], group: usize) -> i8 {
    let low = (bytes[group % 8] >> (group / 8 * 4)) & 0xf;
    let high = (bytes[8 + group % 4] >> (group / 4 * 2)) & 3;
    (low | high << 4) as i8 - 32
}
