//! Weights as they lie in files: containers (GGUF, safetensors), formats (how bytes mean numbers), schemes (how the tensors
//! of a quantised checkpoint belong together), tensors.
//!
//! Invariant: no length from a file is trusted; a tensor's byte range is checked against its file when the container is
//! opened, so that everyone after may slice without checks. `model/` maps names, backends repack.

pub mod checkpoint;
mod experts;
pub mod format;
pub mod gguf;
mod grid;
pub(crate) mod pack;
mod quantise;
pub(crate) mod safetensors;
pub mod scheme;
#[cfg(test)]
pub(crate) mod testing;

use std::borrow::Cow;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

pub use checkpoint::{Checkpoint, Container};
pub use format::WeightFormat;
use memmap2::Mmap;
pub use pack::Packing;
pub use quantise::Quantisation;
pub use scheme::{Matrix, Quantised};

/// A tensor in host memory: a view of a mapped file, bytes made at load, or rows that are computed when they are read.
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
    Computed(Arc<dyn RowSource>),
}

/// Rows that are computed when they are read: a file's codes and scales in the places of another format, so that a model is
/// never in memory twice. What is wrong with the file was said when the source was made: reading cannot fail.
pub trait RowSource: Send + Sync + Debug {
    /// Writes the bytes of the rows `rows`, one after the other, to `out`, which has their length. Rows that share a cache line
    /// of the file should be asked for together.
    fn read(&self, rows: Range<usize>, out: &mut [u8]);

    /// How many neighbouring blocks of a row, from its first on, have one scale and one zero point; 1 where it is not known.
    fn blocks_per_scale(&self) -> usize {
        1
    }
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

    /// A tensor whose rows `source` computes.
    ///
    /// # Panics
    /// When a row is not whole blocks.
    pub fn computed(
        name: impl Into<String>,
        format: WeightFormat,
        shape: Vec<usize>,
        source: Arc<dyn RowSource>,
    ) -> Self {
        assert!(format.bytes_of(&shape).is_some(), "rows are whole blocks");
        Self { name: name.into(), format, shape, data: TensorData::Computed(source) }
    }

    /// Length of all rows in bytes.
    pub fn num_bytes(&self) -> usize {
        self.format.bytes_of(&self.shape).expect("every constructor checks the shape")
    }

    /// Elements of the fastest dimension.
    pub fn row_len(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Number of rows: the product of all dimensions but the fastest.
    pub fn num_rows(&self) -> usize {
        self.shape[..self.shape.len().saturating_sub(1)].iter().product()
    }

    /// The bytes of some rows, one after the other: a view, unless they are computed.
    pub fn rows(&self, rows: Range<usize>) -> Cow<'_, [u8]> {
        let row_bytes = self.num_bytes() / self.num_rows().max(1);
        let range = rows.start * row_bytes..rows.end * row_bytes;
        match &self.data {
            TensorData::Mapped { file, start, len } => Cow::Borrowed(&file[*start..*start + *len][range]),
            TensorData::Owned(bytes) => Cow::Borrowed(&bytes[range]),
            TensorData::Computed(source) => {
                let mut bytes = vec![0; range.len()];
                source.read(rows, &mut bytes);
                Cow::Owned(bytes)
            }
        }
    }

    /// See `RowSource::blocks_per_scale`. A backend may keep what they share once.
    pub fn blocks_per_scale(&self) -> usize {
        match &self.data {
            TensorData::Computed(source) => source.blocks_per_scale(),
            TensorData::Mapped { .. } | TensorData::Owned(_) => 1,
        }
    }

    /// Dequantises the rows `rows` into `out`, `row_len()` elements for each.
    pub fn dequantize_rows(&self, rows: Range<usize>, out: &mut [f32]) {
        self.format.dequantize(&self.rows(rows), out);
    }

    /// The whole tensor as f32, row-major.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.shape.iter().product()];
        self.dequantize_rows(0..self.num_rows(), &mut out);
        out
    }
}
