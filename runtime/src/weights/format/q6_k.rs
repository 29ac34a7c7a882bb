//! Q6_K: 256 elements in 210 bytes, symmetric around 32, sixteen groups of 16 with an 8-bit scale each.
//!
//! ```text
//! l u8[128] | h u8[64] | scale i8[16] | d f16
//! per half n (0..2) and quarter k (0..4) of it, j 0..32, x[128 n + 32 k + j] = d * scale[8 n + 2 k + j / 16] * (q - 32)
//! q: low four bits are a nibble of l[64 n + 32 (k % 2) + j], low for k < 2, high for k >= 2;
//!    upper two bits are bits 2 k and 2 k + 1 of h[32 n + j]
//! ```

use super::{f16_at, for_blocks};

pub(super) const BLOCK_LEN: usize = 256;
pub(super) const BLOCK_BYTES: usize = 210;

/// Whole blocks to f32.
pub(super) fn dequantize(bytes: &[u8], out: &mut [f32]) {
    for_blocks(bytes, out, |block: &[u8; BLOCK_BYTES], out: &mut [f32; BLOCK_LEN]| {
        let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
        let d = f16_at(block, 208);
        for (part, x) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (half, quarter) = (part / 4, part % 4);
            let low = &low[64 * half + 32 * (quarter % 2)..];
            let high = &high[32 * half..];
            for (j, x) in x.iter_mut().enumerate() {
                let nibble = (low[j] >> (quarter / 2 * 4)) & 0xf;
                let q = nibble | (((high[j] >> (2 * quarter)) & 3) << 4);
                let scale = scales[8 * half + 2 * quarter + j / 16] as i8;
                *x = d * f32::from(scale) * f32::from(q as i8 - 32);
            }
        }
    });
}
