//! How a weight's bytes mean numbers: one file per format, one row per format in the table below.
//!
//! Invariant: `dequantize` is the definition of a format; every kernel of every backend is tested against it.

/// A format of stored weights. Names follow GGUF and safetensors.
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
}

impl WeightFormat {
    /// Elements per block, all of one row.
    pub fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Bytes per block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
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

    /// Dequantises whole blocks: `bytes` holds exactly `out.len()` elements.
    pub fn dequantize(self, bytes: &[u8], out: &mut [f32]) {
        let _ = (bytes, out);
        todo!("helper weights")
    }
}
