//! Weights as they lie in files: containers (GGUF, safetensors), formats (how bytes mean numbers), tensors.
//!
//! Invariant: no length from a file is trusted; a tensor's byte range is checked against its file when the container is
//! opened, so that everyone after may slice without checks. `model/` maps names, backends repack.

pub mod checkpoint;
pub mod format;
pub mod gguf;
mod safetensors;
#[cfg(test)]
pub(crate) mod testing;

use std::sync::Arc;

pub use checkpoint::{Checkpoint, Container};
pub use format::WeightFormat;
use memmap2::Mmap;

/// A tensor in host memory: a view of a mapped file, or bytes made at load.
#[derive(Clone, Debug)]
pub struct HostTensor {
    /// The name in the file (or the house name of a computed tensor).
    pub name: String,
    /// How its bytes mean numbers.
    pub format: WeightFormat,
    /// Row-major, slowest first: `[out_features, in_features]`, `[vocab, hidden]`, `[n]`.
    pub shape: Vec<usize>,
    data: TensorData,
}

#[derive(Clone, Debug)]
enum TensorData {
    Mapped { file: Arc<Mmap>, start: usize, len: usize },
    Owned(Arc<[u8]>),
}

impl HostTensor {
    /// A view of a mapped file.
    ///
    /// # Panics
    /// When the range passes the file's end or is not `format.bytes_of(shape)` long: containers check before.
    pub fn mapped(name: String, format: WeightFormat, shape: Vec<usize>, file: Arc<Mmap>, start: usize) -> Self {
        let len = format.bytes_of(&shape).expect("shape was checked by the container");
        assert!(
            start.checked_add(len).is_some_and(|end| end <= file.len()),
            "tensor range was checked by the container"
        );
        Self { name, format, shape, data: TensorData::Mapped { file, start, len } }
    }

    /// A tensor of computed bytes.
    ///
    /// # Panics
    /// When `bytes` is not `format.bytes_of(shape)` long.
    pub fn owned(
        name: impl Into<String>,
        format: WeightFormat,
        shape: Vec<usize>,
        bytes: impl Into<Arc<[u8]>>,
    ) -> Self {
        let bytes = bytes.into();
        assert_eq!(format.bytes_of(&shape), Some(bytes.len()), "bytes do not match the shape");
        Self { name: name.into(), format, shape, data: TensorData::Owned(bytes) }
    }

    /// A computed f32 tensor.
    pub fn from_f32(name: impl Into<String>, shape: Vec<usize>, values: &[f32]) -> Self {
        Self::owned(name, WeightFormat::F32, shape, bytemuck::cast_slice::<f32, u8>(values).to_vec())
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.data {
            TensorData::Mapped { file, start, len } => &file[*start..*start + *len],
            TensorData::Owned(bytes) => bytes,
        }
    }

    /// Elements of the fastest dimension.
    pub fn row_len(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Number of rows: the product of all dimensions but the fastest.
    pub fn num_rows(&self) -> usize {
        self.shape[..self.shape.len().saturating_sub(1)].iter().product()
    }

    /// The bytes of row `row`.
    pub fn row_bytes(&self, row: usize) -> &[u8] {
        let len = self.bytes().len() / self.num_rows().max(1);
        &self.bytes()[row * len..(row + 1) * len]
    }

    /// Dequantises row `row` into `out`, `row_len()` long.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        self.format.dequantize(self.row_bytes(row), out);
    }

    /// The whole tensor as f32, row-major.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.shape.iter().product()];
        self.format.dequantize(self.bytes(), &mut out);
        out
    }
}
