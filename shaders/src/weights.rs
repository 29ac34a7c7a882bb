//! Weights on the device: matrices in panels (`layout`), cut by rows into pieces that fit a binding; vectors as f32.
//!
//! Invariant: a piece starts at a whole panel, and every range starts at a multiple of 256 bytes of an arena buffer.

use runtime::error::DeviceError;
use runtime::ids::WeightId;
use runtime::weights::{HostTensor, WeightFormat};

use crate::device::{ALIGN_BYTES, Buffer, Gpu, Range};
use crate::layout;

/// Arena buffers grow from the first to the second.
const ARENA_BYTES: std::ops::RangeInclusive<u64> = 1 << 20..=64 << 20;

/// Bytes of an arena buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    buffer: usize,
    offset: u64,
    size: u64,
}

impl Place {
    /// Both, where the other begins where this ends.
    fn join(self, next: Self) -> Option<Self> {
        let adjacent = self.buffer == next.buffer && self.offset + self.size == next.offset;
        adjacent.then_some(Self { size: self.size + next.size, ..self })
    }
}

/// What is put behind each other: codes of matrices that are uploaded one after the other can be bound as one.
#[derive(Clone, Copy, Debug)]
enum Stream {
    Codes,
    Side,
}

/// Some rows of a matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    /// First row of the matrix, a multiple of 64.
    pub(crate) first_row: u32,
    pub(crate) num_rows: u32,
    pub(crate) codes: Place,
    pub(crate) side: Place,
}

/// A matrix on the device.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    pub(crate) format: WeightFormat,
    pub(crate) rows: u32,
    /// Groups of 32 per row, the last padded with zeros.
    pub(crate) groups: u32,
    pub(crate) pieces: Vec<Piece>,
}

impl Matrix {
    /// Both as one of more rows, where the other lies right behind this, whole panels, and a binding holds them.
    pub(crate) fn join(&self, next: &Self, max_binding_bytes: u64) -> Option<Self> {
        let ([piece], [other]) = (self.pieces.as_slice(), next.pieces.as_slice()) else { return None };
        let alike = self.format == next.format && self.groups == next.groups;
        if !alike || !self.rows.is_multiple_of(layout::PANEL as u32) {
            return None;
        }
        let side = match layout::layout_of(self.format).side_words {
            0 => piece.side,
            _ => piece.side.join(other.side)?,
        };
        let codes = piece.codes.join(other.codes)?;
        let rows = self.rows + next.rows;
        let whole = Piece { first_row: 0, num_rows: rows, codes, side };
        (codes.size.max(side.size) <= max_binding_bytes).then(|| Self { rows, pieces: vec![whole], ..*self })
    }
}

#[derive(Debug)]
enum Weight {
    Matrix(Matrix),
    Vector(Place),
}

/// All weights, by `WeightId`.
#[derive(Default)]
pub(crate) struct Weights {
    buffers: Vec<Buffer>,
    /// Per stream, the buffer that it fills and the bytes in use of it.
    streams: [Option<(usize, u64)>; 2],
    entries: Vec<Option<Weight>>,
    /// Bytes of all weights.
    pub(crate) bytes: u64,
}

impl Weights {
    /// Uploads one tensor.
    ///
    /// # Errors
    /// Out of memory.
    pub(crate) fn upload(&mut self, gpu: &Gpu, id: WeightId, tensor: &HostTensor) -> Result<(), DeviceError> {
        let weight = if tensor.shape.len() < 2 {
            Weight::Vector(self.place(gpu, Stream::Side, &tensor.name, bytemuck::cast_slice(&tensor.to_f32()))?)
        } else {
            Weight::Matrix(self.matrix(gpu, tensor)?)
        };
        self.entries.resize_with(self.entries.len().max(id.index() + 1), || None);
        self.entries[id.index()] = Some(weight);
        // The driver's staging memory is given back once the copy is done.
        gpu.queue.submit([]);
        gpu.wait()
    }

    fn matrix(&mut self, gpu: &Gpu, tensor: &HostTensor) -> Result<Matrix, DeviceError> {
        let padded = pad_columns(tensor);
        let tensor = padded.as_ref().unwrap_or(tensor);
        let (rows, cols, format) = (tensor.num_rows(), tensor.row_len(), tensor.format);
        let panel_bytes =
            4 * layout::codes_words(format, layout::PANEL, cols).max(layout::side_words(format, layout::PANEL, cols));
        let panels = (gpu.max_binding_bytes() / panel_bytes as u64) as usize;
        if panels == 0 {
            return Err(DeviceError::OutOfMemory {
                what: format!("64 rows of tensor '{}'", tensor.name),
                needed_bytes: panel_bytes as u64,
            });
        }
        let mut pieces = Vec::new();
        for first_row in (0..rows).step_by(panels * layout::PANEL) {
            let num_rows = (rows - first_row).min(panels * layout::PANEL);
            let mut codes = vec![0; layout::codes_words(format, num_rows, cols)];
            let mut side = vec![0; layout::side_words(format, num_rows, cols)];
            layout::pack(tensor, first_row..first_row + num_rows, &mut codes, &mut side);
            // The binding must exist where a format has no scales.
            side.resize(side.len().max(1), 0);
            let codes = self.place(gpu, Stream::Codes, &tensor.name, bytemuck::cast_slice(&codes))?;
            let side = self.place(gpu, Stream::Side, &tensor.name, bytemuck::cast_slice(&side))?;
            pieces.push(Piece { first_row: first_row as u32, num_rows: num_rows as u32, codes, side });
        }
        Ok(Matrix { format, rows: rows as u32, groups: (cols / layout::GROUP) as u32, pieces })
    }

    /// Puts bytes behind the last of their stream.
    fn place(&mut self, gpu: &Gpu, stream: Stream, name: &str, bytes: &[u8]) -> Result<Place, DeviceError> {
        // Whole elements of the widest type that a kernel reads.
        let size = (bytes.len() as u64).next_multiple_of(32);
        let current = self.streams[stream as usize];
        let last = current.map_or(0, |(buffer, _)| self.buffers[buffer].size());
        let (buffer, offset) = match current {
            Some((buffer, used)) if used + size <= last => (buffer, used),
            _ => {
                let grown = (last * 2).clamp(*ARENA_BYTES.start(), *ARENA_BYTES.end());
                let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST;
                self.buffers.push(gpu.buffer(&format!("tensor '{name}'"), size.max(grown), usage)?);
                (self.buffers.len() - 1, 0)
            }
        };
        gpu.queue.write_buffer(&self.buffers[buffer], offset, bytes);
        self.streams[stream as usize] = Some((buffer, (offset + size).next_multiple_of(ALIGN_BYTES)));
        self.bytes += size;
        Ok(Place { buffer, offset, size })
    }

    pub(crate) fn range(&self, place: Place) -> Range<'_> {
        Range { buffer: &self.buffers[place.buffer], offset: place.offset, size: place.size }
    }

    /// # Errors
    /// It is not there, or not a matrix.
    pub(crate) fn matrix_of(&self, id: WeightId) -> Result<&Matrix, DeviceError> {
        match self.entries.get(id.index()) {
            Some(Some(Weight::Matrix(matrix))) => Ok(matrix),
            _ => Err(DeviceError::Failed(format!("weight {id} is not an uploaded matrix"))),
        }
    }

    /// # Errors
    /// It is not there, or not a vector.
    pub(crate) fn vector_of(&self, id: WeightId) -> Result<Range<'_>, DeviceError> {
        match self.entries.get(id.index()) {
            Some(Some(Weight::Vector(place))) => Ok(self.range(*place)),
            _ => Err(DeviceError::Failed(format!("weight {id} is not an uploaded vector"))),
        }
    }
}

/// A matrix of plain numbers whose rows end within a group, with zeros up to the group's end. Block formats end with one.
fn pad_columns(tensor: &HostTensor) -> Option<HostTensor> {
    let (cols, format) = (tensor.row_len(), tensor.format);
    if cols.is_multiple_of(layout::GROUP) || format.block_len() > 1 {
        return None;
    }
    let (mut shape, padded) = (tensor.shape.clone(), cols.next_multiple_of(layout::GROUP));
    *shape.last_mut()? = padded;
    let mut bytes = Vec::with_capacity(tensor.num_rows() * padded * format.block_bytes());
    for row in 0..tensor.num_rows() {
        bytes.extend_from_slice(&tensor.rows(row..row + 1));
        bytes.resize((row + 1) * padded * format.block_bytes(), 0);
    }
    Some(HostTensor::owned(tensor.name.clone(), format, shape, bytes))
}
