//! INT8: 32 elements in 37 bytes, an f32 scale and a zero point for each block: what 8-bit checkpoints become, and 4-bit ones
//! whose scales are not exact in f16. No file has it.
//!
//! ```text
//! scale f32 | zero u8 | q u8[32]   x[j] = scale * (q[j] - zero)
//! ```

use super::{f32_at, for_blocks};

pub(super) const BLOCK_LEN: usize = 32;
pub(super) const BLOCK_BYTES: usize = 37;

/// Whole blocks to f32.
pub(super) fn dequantize(bytes: &[u8], out: &mut [f32]) {
    for_blocks(bytes, out, |block: &[u8; BLOCK_BYTES], out: &mut [f32; BLOCK_LEN]| {
        let (scale, zero) = (f32_at(block, 0), f32::from(block[4]));
        for (x, &q) in out.iter_mut().zip(&block[5..]) {
            *x = scale * (f32::from(q) - zero);
        }
    });
}
