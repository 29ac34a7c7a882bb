//! Q8_0: 32 elements in 34 bytes, symmetric.
//!
//! ```text
//! d f16 | q i8[32]          x[j] = d * q[j]
//! ```

use super::{f16_at, for_blocks};

pub(super) const BLOCK_LEN: usize = 32;
pub(super) const BLOCK_BYTES: usize = 34;

/// Whole blocks to f32.
pub(super) fn dequantize(bytes: &[u8], out: &mut [f32]) {
    for_blocks(bytes, out, |block: &[u8; BLOCK_BYTES], out: &mut [f32; BLOCK_LEN]| {
        let d = f16_at(block, 0);
        for (x, &q) in out.iter_mut().zip(&block[2..]) {
            *x = f32::from(q as i8) * d;
        }
    });
}
