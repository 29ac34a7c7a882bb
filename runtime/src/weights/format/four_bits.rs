//! What the sixteen codes of a 4-bit format mean where that is no straight line: tables of small integers.
//!
//! Invariant: the integers are exact in 8 bits, so that backends multiply them as such; a format's scale does the rest.

/// IQ4_NL and IQ4_XS: unevenly spaced, denser around 0 (`kvalues_iq4nl` of ggml).
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// E2M1 of the OCP Microscaling Formats specification, doubled, so that 0.5 and 1.5 are whole: sign, two bits of exponent,
/// one of mantissa.
pub const FP4_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Writes 32 values: those of the low nibbles of 16 bytes, then those of the high ones, each times `scale`.
pub(super) fn dequantize(bytes: &[u8], values: &[i8; 16], scale: f32, out: &mut [f32]) {
    let (low, high) = out.split_at_mut(16);
    for ((low, high), &byte) in low.iter_mut().zip(high).zip(bytes) {
        *low = scale * f32::from(values[usize::from(byte & 0xf)]);
        *high = scale * f32::from(values[usize::from(byte >> 4)]);
    }
}
