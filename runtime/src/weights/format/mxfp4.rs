//! MXFP4: 32 elements in 17 bytes, E2M1 codes and a power of two (OCP Microscaling Formats; ggml's order of nibbles).
//!
//! ```text
//! e u8 | q u8[16]           x[j]      = 2^(e - 127) * E2M1 of the low nibble of q[j]
//!                           x[j + 16] = 2^(e - 127) * E2M1 of the high nibble of q[j]
//! ```
//! As in ggml, e = 255 is a number like the others, not the specification's NaN.

use super::for_blocks;
use super::four_bits::{self, FP4_DOUBLED};

pub(super) const BLOCK_LEN: usize = 32;
pub(super) const BLOCK_BYTES: usize = 17;

/// Whole blocks to f32.
pub(super) fn dequantize(bytes: &[u8], out: &mut [f32]) {
    for_blocks(bytes, out, |block: &[u8; BLOCK_BYTES], out: &mut [f32; BLOCK_LEN]| {
        four_bits::dequantize(&block[1..], &FP4_DOUBLED, half_scale(block[0]), out);
    });
}

/// `2^(e - 128)`: half of the scale, as the values are doubled.
pub(super) fn half_scale(e: u8) -> f32 {
    // Below 2^-126 the power is subnormal: a bit of the mantissa.
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { u32::from(e - 1) << 23 })
}
