//! Q5_0: 32 elements in 22 bytes, symmetric around 16. Bit j of `h` is the fifth bit of element j.
//!
//! ```text
//! d f16 | h u32 | q u8[16]  x[j]      = d * (low nibble of q[j]  + 16 * bit j of h      - 16)
//!                           x[j + 16] = d * (high nibble of q[j] + 16 * bit j + 16 of h - 16)
//! ```

use super::{f16_at, for_blocks};

pub(super) const BLOCK_LEN: usize = 32;
pub(super) const BLOCK_BYTES: usize = 22;

/// Whole blocks to f32.
pub(super) fn dequantize(bytes: &[u8], out: &mut [f32]) {
    for_blocks(bytes, out, |block: &[u8; BLOCK_BYTES], out: &mut [f32; BLOCK_LEN]| {
        let d = f16_at(block, 0);
        let h = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
        for (j, &q) in block[6..].iter().enumerate() {
            let low = (q & 0xf) | (((h >> j) & 1) << 4) as u8;
            let high = (q >> 4) | (((h >> (j + 16)) & 1) << 4) as u8;
            out[j] = f32::from(low as i8 - 16) * d;
            out[j + 16] = f32::from(high as i8 - 16) * d;
        }
    });
}
