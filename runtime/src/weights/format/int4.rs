//! INT4: 32 elements in 19 bytes, a zero point for each block: what asymmetric 4-bit checkpoints (AWQ, GPTQ, compressed-tensors)
//! become. No file has it.
//!
//! ```text
//! scale f16 | zero u8 | q u8[16]   x[j]      = scale * (low nibble of q[j] - zero)        zero 0..=16
//!                                  x[j + 16] = scale * (high nibble of q[j] - zero)
//! ```

use super::{f16_at, for_blocks};

pub(super) const BLOCK_LEN: usize = 32;
pub(super) const BLOCK_BYTES: usize = 19;

/// Whole blocks to f32.
pub(super) fn dequantize(bytes: &[u8], out: &mut [f32]) {
    for_blocks(bytes, out, |block: &[u8; BLOCK_BYTES], out: &mut [f32; BLOCK_LEN]| {
        let (scale, zero) = (f16_at(block, 0), f32::from(block[2]));
        for (j, &q) in block[3..].iter().enumerate() {
            out[j] = scale * (f32::from(q & 0xf) - zero);
            out[j + 16] = scale * (f32::from(q >> 4) - zero);
        }
    });
}
