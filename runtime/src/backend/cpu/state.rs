//! The paged KV state of one layer.
//!
//! Invariant: plane 1 (values) lies as `Plane` says, `[blocks, heads, block_size, dim]`; plane 0 (keys) lies transposed
//! within each block and head, `[blocks, heads, dim, block_size]`, so that one vector holds one element of 16 keys. What
//! `read` gives and `write` takes is the plane's own order.

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
}

impl LayerState {
    /// Reserves both planes.
    ///
    /// # Errors
    /// Out of memory, or planes that this backend's attention cannot read.
    pub(super) fn new(
        layer: usize,
        spec: &StateSpec,
        num_blocks: usize,
        block_size: usize,
    ) -> Result<Self, DeviceError> {
        let StateSpec::Paged { planes } = spec;
        let [keys, values] = planes.as_slice() else {
            return Err(DeviceError::Failed(format!(
                "layer {layer}: {} planes, expected keys and values",
                planes.len()
            )));
        };
        if keys != values {
            return Err(DeviceError::Failed(format!("layer {layer}: keys and values differ in shape")));
        }
        let what = format!("KV cache of layer {layer}");
        let bytes = spec.block_bytes(block_size as u32).saturating_mul(num_blocks as u64);
        let len =
            usize::try_from(bytes).map_err(|_| DeviceError::OutOfMemory { what: what.clone(), needed_bytes: bytes })?;
        Ok(Self {
            buffer: HugeBuf::new(len, &what)?,
            heads: keys.heads as usize,
            dim: keys.dim as usize,
            dtype: keys.dtype,
            block_size,
            num_blocks,
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

    /// Elements of one head in one block of one plane.
    fn head_len(&self) -> usize {
        self.dim * self.block_size
    }

    fn head_start(&self, plane: usize, block: usize, head: usize) -> usize {
        assert!(block < self.num_blocks, "block {block} of {}", self.num_blocks);
        ((plane * self.num_blocks + block) * self.heads + head) * self.head_len() * self.dtype.bytes()
    }

    /// The `dim * block_size` elements of one head in one block of one plane, to be read.
    ///
    /// # Safety
    /// No thread writes entries that the reader uses meanwhile: they were stored before the last barrier.
    #[inline(always)]
    pub(super) unsafe fn head<E: Pod>(&self, plane: usize, block: usize, head: usize) -> &[E] {
        let memory: Shared = self.buffer.shared();
        // SAFETY: the caller's promise.
        unsafe { memory.slice(self.head_start(plane, block, head), self.head_len()) }
    }

    /// The same elements, to be written one by one.
    ///
    /// # Safety
    /// As for `head`; each element is written by one thread.
    #[inline(always)]
    pub(super) unsafe fn head_ptr<E: Pod>(&self, plane: usize, block: usize, head: usize) -> *mut E {
        let memory: Shared = self.buffer.shared();
        memory.ptr(self.head_start(plane, block, head), self.head_len())
    }

    /// Copies both planes of a block.
    pub(super) fn copy_block(&mut self, from: usize, to: usize) {
        let len = self.heads * self.head_len() * self.dtype.bytes();
        for plane in 0..2 {
            let (from, to) = (self.head_start(plane, from, 0), self.head_start(plane, to, 0));
            self.buffer.bytes().copy_within(from..from + len, to);
        }
    }

    /// Appends a block's planes to `out`.
    pub(super) fn read_block(&mut self, block: usize, out: &mut Vec<u8>) {
        let (elem, len) = (self.dtype.bytes(), self.head_len() * self.dtype.bytes());
        for head in 0..self.heads {
            let start = self.head_start(0, block, head);
            let keys = &self.buffer.bytes()[start..start + len];
            for entry in 0..self.block_size {
                for d in 0..self.dim {
                    out.extend_from_slice(&keys[(d * self.block_size + entry) * elem..][..elem]);
                }
            }
        }
        let start = self.head_start(1, block, 0);
        let values_len = self.heads * len;
        out.extend_from_slice(&self.buffer.bytes()[start..start + values_len]);
    }

    /// Takes what `read_block` gave.
    ///
    /// # Errors
    /// `bytes` has another length than a block.
    pub(super) fn write_block(&mut self, block: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        let (elem, plane_len) = (self.dtype.bytes(), self.heads * self.head_len() * self.dtype.bytes());
        if bytes.len() != 2 * plane_len {
            return Err(DeviceError::Failed(format!("block of {} bytes, expected {}", bytes.len(), 2 * plane_len)));
        }
        let (keys, values) = bytes.split_at(plane_len);
        let start = self.head_start(1, block, 0);
        self.buffer.bytes()[start..start + plane_len].copy_from_slice(values);
        let (dim, block_size) = (self.dim, self.block_size);
        let start = self.head_start(0, block, 0);
        let target = &mut self.buffer.bytes()[start..start + plane_len];
        for (index, key_element) in keys.chunks_exact(elem).enumerate() {
            let (head, entry, d) = (index / (dim * block_size), index / dim % block_size, index % dim);
            let place = ((head * dim + d) * block_size + entry) * elem;
            target[place..place + elem].copy_from_slice(key_element);
        }
        Ok(())
    }
}
