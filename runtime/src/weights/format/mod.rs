//! How a weight's bytes mean numbers: one file per format, one row per format in the table below.
//!
//! Invariant: `dequantize` is the definition of a format; every kernel of every backend is tested against it. It takes
//! bytes of any alignment, as they lie in a mapped file. Containers ask the table which format a type id or name means.
//!
//! The quantised layouts and their arithmetic are ggml's (`ggml-quants.c`), in f32, so that values agree bit for bit.

mod e4m3;
mod float;
mod four_bits;
mod fp8_e4m3;
mod int4;
mod int8;
mod iq4_nl;
mod iq4_xs;
mod k_scales;
mod mxfp4;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;
#[cfg(test)]
mod tests;

pub(crate) use e4m3::{E4M3_FROM_HALF, E4m3};
use float::{bf16_le, f16_le, f32_le};
pub use four_bits::{FP4_DOUBLED, IQ4_VALUES};

/// A format of stored weights. Names follow GGUF and safetensors; `Int4`, `Int8` and `Fp8E4m3` are our own blocks, which
/// the checkpoints of `weights::scheme` are rearranged into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[allow(missing_docs)]
pub enum WeightFormat {
    F32,
    F16,
    Bf16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q4K,
    Q5K,
    Q6K,
    Q2K,
    Q3K,
    Iq4Nl,
    Iq4Xs,
    Mxfp4,
    Int4,
    Int8,
    Fp8E4m3,
}

/// What a format is, once.
struct FormatInfo {
    format: WeightFormat,
    name: &'static str,
    /// `enum ggml_type` of GGUF files, where they have it.
    ggml_type: Option<u32>,
    /// Elements per block, all of one row.
    block_len: usize,
    block_bytes: usize,
    /// Whole blocks to f32.
    dequantize: fn(&[u8], &mut [f32]),
}

macro_rules! info {
    ($format:ident, $name:literal, $ggml_type:expr, $layout:ident) => {
        FormatInfo {
            format: WeightFormat::$format,
            name: $name,
            ggml_type: $ggml_type,
            block_len: $layout::BLOCK_LEN,
            block_bytes: $layout::BLOCK_BYTES,
            dequantize: $layout::dequantize,
        }
    };
}

/// In the order of the enum.
static TABLE: [FormatInfo; 19] = [
    info!(F32, "F32", Some(0), f32_le),
    info!(F16, "F16", Some(1), f16_le),
    info!(Bf16, "BF16", Some(30), bf16_le),
    info!(Q8_0, "Q8_0", Some(8), q8_0),
    info!(Q4_0, "Q4_0", Some(2), q4_0),
    info!(Q4_1, "Q4_1", Some(3), q4_1),
    info!(Q5_0, "Q5_0", Some(6), q5_0),
    info!(Q5_1, "Q5_1", Some(7), q5_1),
    info!(Q4K, "Q4_K", Some(12), q4_k),
    info!(Q5K, "Q5_K", Some(13), q5_k),
    info!(Q6K, "Q6_K", Some(14), q6_k),
    info!(Q2K, "Q2_K", Some(10), q2_k),
    info!(Q3K, "Q3_K", Some(11), q3_k),
    info!(Iq4Nl, "IQ4_NL", Some(20), iq4_nl),
    info!(Iq4Xs, "IQ4_XS", Some(23), iq4_xs),
    info!(Mxfp4, "MXFP4", Some(39), mxfp4),
    info!(Int4, "INT4", None, int4),
    info!(Int8, "INT8", None, int8),
    info!(Fp8E4m3, "FP8_E4M3", None, fp8_e4m3),
];

impl WeightFormat {
    /// Every format, in table order.
    pub fn all() -> impl ExactSizeIterator<Item = Self> {
        TABLE.iter().map(|info| info.format)
    }

    /// The names of the formats that a GGUF file may have, for error messages.
    pub fn ggml_names() -> String {
        let in_files = TABLE.iter().filter(|info| info.ggml_type.is_some());
        in_files.map(|info| info.name).collect::<Vec<_>>().join(", ")
    }

    /// The format of a GGUF tensor type, if it is supported.
    pub fn from_ggml_type(id: u32) -> Option<Self> {
        TABLE.iter().find(|info| info.ggml_type == Some(id)).map(|info| info.format)
    }

    /// The format of a safetensors dtype (`F32`, `F16`, `BF16`), if it is supported.
    pub fn from_safetensors_dtype(dtype: &str) -> Option<Self> {
        TABLE.iter().find(|info| info.block_len == 1 && info.name == dtype).map(|info| info.format)
    }

    fn info(self) -> &'static FormatInfo {
        &TABLE[self as usize]
    }

    /// The name in GGUF and safetensors (`F16`, `Q4_K`), or our own.
    pub fn name(self) -> &'static str {
        self.info().name
    }

    /// The id of this format in a GGUF file (`enum ggml_type`), where they have it.
    pub fn ggml_type(self) -> Option<u32> {
        self.info().ggml_type
    }

    /// Elements per block, all of one row.
    pub fn block_len(self) -> usize {
        self.info().block_len
    }

    /// Bytes per block.
    pub fn block_bytes(self) -> usize {
        self.info().block_bytes
    }

    /// Bytes of a tensor of this shape; `None` when the row is not a multiple of the block or the product overflows.
    pub fn bytes_of(self, shape: &[usize]) -> Option<usize> {
        let row_len = shape.last().copied().unwrap_or(1);
        if !row_len.is_multiple_of(self.block_len()) {
            return None;
        }
        let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
        (elements / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Dequantises whole blocks: `bytes` holds exactly `out.len()` elements, at any alignment.
    ///
    /// # Panics
    /// When the two lengths do not belong together.
    pub fn dequantize(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(self.bytes_of(&[out.len()]), Some(bytes.len()), "bytes and elements of {} differ", self.name());
        (self.info().dequantize)(bytes, out);
    }
}

impl std::fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Calls `one(block, elements)` for each block.
fn for_blocks<const BYTES: usize, const LEN: usize>(
    bytes: &[u8],
    out: &mut [f32],
    one: impl Fn(&[u8; BYTES], &mut [f32; LEN]),
) {
    for (block, elements) in bytes.as_chunks::<BYTES>().0.iter().zip(out.as_chunks_mut::<LEN>().0) {
        one(block, elements);
    }
}

/// The little-endian f16 at `at`.
fn f16_at(block: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The little-endian f32 at `at`.
fn f32_at(block: &[u8], at: usize) -> f32 {
    f32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}
