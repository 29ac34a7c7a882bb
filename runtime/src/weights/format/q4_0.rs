//! Q4_0: 32 elements in 18 bytes, symmetric around 8.
//!
//! ```text
//! d f16 | q u8[16]          x[j]      = d * (low nibble of q[j] - 8)
//!                           x[j + 16] = d * (high nibble of q[j] - 8)
//! ```

use super::{f16_at, for_blocks};

pub(super) const BLOCK_LEN: usize = 32;
pub(super) const BLOCK_BYTES: usize = 18;

/// Whole blocks to f32.
pub(super) fn dequantize(bytes: &[u8], out: &mut [f32]) {
    for_blocks(bytes, out, |block: &[u8; BLOCK_BYTES], out: &mut [f32; BLOCK_LEN]| {
        let d = f16_at(block, 0);
        for (j, &q) in block[2..].iter().enumerate() {
            out[j] = f32::from((q & 0xf) as i8 - 8) * d;
            out[j + 16] = f32::from((q >> 4) as i8 - 8) * d;
        }
    });
}
