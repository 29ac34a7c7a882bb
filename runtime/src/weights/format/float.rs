//! F32, F16, BF16: one little-endian float per element, no blocks.

macro_rules! float_format {
    ($name:ident, $bytes:literal, $to_f32:expr) => {
        pub(super) mod $name {
            pub(in super::super) const BLOCK_LEN: usize = 1;
            pub(in super::super) const BLOCK_BYTES: usize = $bytes;

            /// Whole elements to f32.
            pub(in super::super) fn dequantize(bytes: &[u8], out: &mut [f32]) {
                for (element, value) in bytes.as_chunks::<$bytes>().0.iter().zip(out) {
                    *value = $to_f32(*element);
                }
            }
        }
    };
}

float_format!(f32_le, 4, f32::from_le_bytes);
float_format!(bf16_le, 2, |bytes| half::bf16::from_le_bytes(bytes).to_f32());

pub(super) mod f16_le {
    use half::f16;
    use half::slice::HalfFloatSliceExt;

    pub(in super::super) const BLOCK_LEN: usize = 1;
    pub(in super::super) const BLOCK_BYTES: usize = 2;

    /// Elements that are converted at a time: the instruction for it is asked for once, not for each.
    const AT_ONCE: usize = 64;

    /// Whole elements to f32.
    pub(in super::super) fn dequantize(bytes: &[u8], out: &mut [f32]) {
        for (bytes, out) in bytes.chunks(2 * AT_ONCE).zip(out.chunks_mut(AT_ONCE)) {
            let mut halves = [f16::ZERO; AT_ONCE];
            let halves = &mut halves[..out.len()];
            halves
                .iter_mut()
                .zip(bytes.as_chunks::<2>().0)
                .for_each(|(half, bytes)| *half = f16::from_le_bytes(*bytes));
            halves.convert_to_f32_slice(out);
        }
    }
}
