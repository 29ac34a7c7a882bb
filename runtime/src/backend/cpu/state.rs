//! The paged KV state of one layer.
//!
//! Invariant: plane 1 (values) lies as `Plane` says, `[blocks, heads, block_size, dim]`; plane 0 (keys) lies transposed
//! within each block and head, `[blocks, heads, dim, block_size]`, so that one vector holds one element of 16 keys. Keys that
//! are values too have no plane 1. Planes of scales, where the type has them, are `[blocks, heads, block_size]`. What `read`
//! gives and `write` takes is the planes' own order.

use bytemuck::Pod;

use super::memory::{HugeBuf, Shared};
use crate::error::DeviceError;
use crate::program::{KvDtype, StateSpec};

/// Keys and values of one layer.
pub(super) struct LayerState {
    buffer: HugeBuf,
    pub(super) heads: usize,
    pub(super) dim: usize,
    pub(super) dtype: KvDtype,
    pub(super) block_size: usize,
    num_blocks: usize,
    /// Whether keys are values too.
    pub(super) is_shared: bool,
    /// Planes of the scales of keys and of values, where the type has them.
    pub(super) scales: [usize; 2],
    /// Where each plane begins and how it is divided.
    planes: Vec<PlaneRange>,
}

/// The bytes of one plane.
#[derive(Clone, Copy)]
struct PlaneRange {
    start: usize,
    /// Of one head in one block.
    head_bytes: usize,
}

/// Planes begin at cache lines, so that no element of another plane's type is cut.
const PLANE_ALIGN: usize = 64;

impl LayerState {
    /// Reserves all planes.
    ///
    /// # Errors
    /// Out of memory, or planes that this backend's attention cannot read.
    pub(super) fn new(
        layer: usize,
        spec: &StateSpec,
        num_blocks: usize,
        block_size: usize,
    ) -> Result<Self, DeviceError> {
        let Some(plane) = spec.kv_plane() else {
            return Err(DeviceError::Failed(format!("layer {layer}: {spec:?}, expected equal planes of K and V")));
        };
        let StateSpec::Paged { planes: specs } = spec;
        let what = format!("KV cache of layer {layer}");
        let bytes = spec.block_bytes(block_size as u32).saturating_mul(num_blocks as u64);
        let padded = bytes.saturating_add((specs.len() * PLANE_ALIGN) as u64);
        let len = usize::try_from(padded)
            .map_err(|_| DeviceError::OutOfMemory { what: what.clone(), needed_bytes: bytes })?;
        let (mut planes, mut start) = (Vec::new(), 0_usize);
        for spec in specs {
            let head_bytes = spec.dim as usize * block_size * spec.dtype.bytes();
            planes.push(PlaneRange { start, head_bytes });
            start = (start + num_blocks * spec.heads as usize * head_bytes).next_multiple_of(PLANE_ALIGN);
        }
        Ok(Self {
            buffer: HugeBuf::new(len, &what)?,
            heads: plane.heads as usize,
            dim: plane.dim as usize,
            dtype: plane.dtype,
            block_size,
            num_blocks,
            is_shared: spec.is_shared(),
            scales: spec.scale_planes(),
            planes,
        })
    }

    /// Bytes reserved.
    pub(super) fn num_bytes(&self) -> usize {
        self.buffer.len()
    }

    /// Whether the state got huge pages.
    pub(super) fn huge(&self) -> bool {
        self.buffer.huge
    }

    fn head_start(&self, plane: usize, block: usize, head: usize) -> usize {
        assert!(block < self.num_blocks, "block {block} of {}", self.num_blocks);
        let PlaneRange { start, head_bytes } = self.planes[plane];
        start + (block * self.heads + head) * head_bytes
    }

    /// The bytes of a block in one plane.
    fn block_range(&self, plane: usize, block: usize) -> std::ops::Range<usize> {
        let start = self.head_start(plane, block, 0);
        start..start + self.heads * self.planes[plane].head_bytes
    }

    /// The elements of one head in one block of one plane, to be read: `dim * block_size`, or `block_size` scales.
    ///
    /// # Safety
    /// No thread writes entries that the reader uses meanwhile: they were stored before the last barrier.
    #[inline(always)]
    pub(super) unsafe fn head<E: Pod>(&self, plane: usize, block: usize, head: usize) -> &[E] {
        let memory: Shared = self.buffer.shared();
        // SAFETY: the caller's promise.
        unsafe { memory.slice(self.head_start(plane, block, head), self.planes[plane].head_bytes / size_of::<E>()) }
    }

    /// The same elements, to be written one by one.
    ///
    /// # Safety
    /// As for `head`; each element is written by one thread.
    #[inline(always)]
    pub(super) unsafe fn head_ptr<E: Pod>(&self, plane: usize, block: usize, head: usize) -> *mut E {
        let memory: Shared = self.buffer.shared();
        memory.ptr(self.head_start(plane, block, head), self.planes[plane].head_bytes / size_of::<E>())
    }

    /// Copies all planes of a block.
    pub(super) fn copy_block(&mut self, from: usize, to: usize) {
        for plane in 0..self.planes.len() {
            let (from, to) = (self.block_range(plane, from), self.block_range(plane, to));
            self.buffer.bytes().copy_within(from, to.start);
        }
    }

    /// Appends a block's planes to `out`.
    pub(super) fn read_block(&mut self, block: usize, out: &mut Vec<u8>) {
        let elem = self.dtype.bytes();
        let range = self.block_range(0, block);
        for keys in self.buffer.bytes()[range].chunks_exact(self.dim * self.block_size * elem) {
            for entry in 0..self.block_size {
                for d in 0..self.dim {
                    out.extend_from_slice(&keys[(d * self.block_size + entry) * elem..][..elem]);
                }
            }
        }
        for plane in 1..self.planes.len() {
            let range = self.block_range(plane, block);
            out.extend_from_slice(&self.buffer.bytes()[range]);
        }
    }

    /// Takes what `read_block` gave.
    ///
    /// # Errors
    /// `bytes` has another length than a block.
    pub(super) fn write_block(&mut self, block: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        let ranges: Vec<_> = (0..self.planes.len()).map(|plane| self.block_range(plane, block)).collect();
        let expected: usize = ranges.iter().map(ExactSizeIterator::len).sum();
        if bytes.len() != expected {
            return Err(DeviceError::Failed(format!("block of {} bytes, expected {expected}", bytes.len())));
        }
        let (keys, mut rest) = bytes.split_at(ranges[0].len());
        for range in &ranges[1..] {
            let (own, after) = rest.split_at(range.len());
            self.buffer.bytes()[range.clone()].copy_from_slice(own);
            rest = after;
        }
        let (dim, block_size, elem) = (self.dim, self.block_size, self.dtype.bytes());
        let target = &mut self.buffer.bytes()[ranges[0].clone()];
        for (index, key_element) in keys.chunks_exact(elem).enumerate() {
            let (head, entry, d) = (index / (dim * block_size), index / dim % block_size, index % dim);
            let place = ((head * dim + d) * block_size + entry) * elem;
            target[place..place + elem].copy_from_slice(key_element);
        }
        Ok(())
    }
}
