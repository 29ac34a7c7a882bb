//! FP8_E4M3: 32 elements in 36 bytes, 8-bit floats (Micikevicius et al. 2022, the variant without infinities) and an f32 scale
//! for each block: what FP8 checkpoints become. No file has it.
//!
//! ```text
//! scale f32 | q u8[32]      x[j] = scale * E4M3 of q[j]: sign, four bits of exponent (bias 7), three of mantissa
//! ```
//! 0x7f and 0xff are NaN; whoever makes such blocks refuses them, kernels need not know.

use super::{E4m3, f32_at, for_blocks};

pub(super) const BLOCK_LEN: usize = 32;
pub(super) const BLOCK_BYTES: usize = 36;

/// Whole blocks to f32.
pub(super) fn dequantize(bytes: &[u8], out: &mut [f32]) {
    for_blocks(bytes, out, |block: &[u8; BLOCK_BYTES], out: &mut [f32; BLOCK_LEN]| {
        let scale = f32_at(block, 0);
        for (x, &q) in out.iter_mut().zip(&block[4..]) {
            *x = scale * E4m3(q).to_f32();
        }
    });
}
