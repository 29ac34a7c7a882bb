//! Paged state on the device: one buffer per plane and layer, `[blocks, kv_heads, block_size, head_dim]`.
//!
//! Invariant: a block of a plane is one contiguous range, so that copies, reads and writes of blocks are plain transfers.

use runtime::error::DeviceError;
use runtime::ids::BlockId;
use runtime::program::{Plane, StateSpec};

use crate::device::{Buffer, Gpu, Range};

/// One plane of a layer.
pub(crate) struct PlaneState {
    pub(crate) spec: Plane,
    pub(crate) buffer: Buffer,
    block_bytes: u64,
}

/// The planes of a layer.
pub(crate) type LayerState = Vec<PlaneState>;

/// All layers.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) layers: Vec<LayerState>,
    pub(crate) block_size: u32,
    pub(crate) bytes: u64,
    /// One block on its way: a buffer cannot be copied to itself.
    transfer: Option<Buffer>,
    /// One block on its way to the host.
    readback: Option<Buffer>,
}

impl PlaneState {
    pub(crate) fn range(&self) -> Range<'_> {
        Range { buffer: &self.buffer, offset: 0, size: self.buffer.size() }
    }

    fn at(&self, block: BlockId) -> u64 {
        u64::from(block.0) * self.block_bytes
    }
}

impl State {
    /// # Errors
    /// Out of memory.
    pub(crate) fn new(gpu: &Gpu, specs: &[StateSpec], num_blocks: u32, block_size: u32) -> Result<Self, DeviceError> {
        use wgpu::BufferUsages as Usage;
        let mut state = Self { block_size, ..Self::default() };
        let mut largest = 0;
        for (layer, StateSpec::Paged { planes }) in specs.iter().enumerate() {
            let mut layer_state = Vec::new();
            for &spec in planes {
                let block_bytes = StateSpec::Paged { planes: vec![spec] }.block_bytes(block_size);
                let bytes = block_bytes * u64::from(num_blocks);
                let usage = Usage::STORAGE | Usage::COPY_SRC | Usage::COPY_DST;
                let buffer = gpu.buffer(&format!("KV cache of layer {layer}"), bytes, usage)?;
                state.bytes += bytes;
                largest = largest.max(block_bytes);
                layer_state.push(PlaneState { spec, buffer, block_bytes });
            }
            state.layers.push(layer_state);
        }
        state.transfer = Some(gpu.buffer("one KV block", largest, Usage::COPY_SRC | Usage::COPY_DST)?);
        state.readback = Some(gpu.buffer("one KV block", largest, Usage::MAP_READ | Usage::COPY_DST)?);
        Ok(state)
    }

    /// Copies whole blocks of every layer, in order.
    pub(crate) fn copy_blocks(&self, gpu: &Gpu, pairs: &[(BlockId, BlockId)]) {
        let Some(transfer) = &self.transfer else { return };
        let mut encoder = gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        for &(from, to) in pairs {
            for plane in self.layers.iter().flatten() {
                encoder.copy_buffer_to_buffer(&plane.buffer, plane.at(from), transfer, 0, plane.block_bytes);
                encoder.copy_buffer_to_buffer(transfer, 0, &plane.buffer, plane.at(to), plane.block_bytes);
            }
        }
        gpu.queue.submit([encoder.finish()]);
    }

    /// Appends a block of a layer, plane after plane.
    ///
    /// # Errors
    /// The device was lost.
    pub(crate) fn read_block(
        &self,
        gpu: &Gpu,
        layer: usize,
        block: BlockId,
        out: &mut Vec<u8>,
    ) -> Result<(), DeviceError> {
        let Some(readback) = &self.readback else { return Ok(()) };
        for plane in &self.layers[layer] {
            let mut encoder = gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            encoder.copy_buffer_to_buffer(&plane.buffer, plane.at(block), readback, 0, plane.block_bytes);
            encoder.map_buffer_on_submit(readback, wgpu::MapMode::Read, 0..plane.block_bytes, |_| ());
            gpu.queue.submit([encoder.finish()]);
            gpu.wait()?;
            let view =
                readback.get_mapped_range(0..plane.block_bytes).map_err(|e| DeviceError::Failed(e.to_string()))?;
            out.extend_from_slice(&view);
            drop(view);
            readback.unmap();
        }
        Ok(())
    }

    /// Writes a block of a layer as `read_block` gave it.
    ///
    /// # Errors
    /// `bytes` is not one block.
    pub(crate) fn write_block(&self, gpu: &Gpu, layer: usize, block: BlockId, bytes: &[u8]) -> Result<(), DeviceError> {
        let planes = &self.layers[layer];
        let expected: u64 = planes.iter().map(|plane| plane.block_bytes).sum();
        if bytes.len() as u64 != expected {
            return Err(DeviceError::Failed(format!(
                "a block of layer {layer} is {expected} bytes, got {}",
                bytes.len()
            )));
        }
        let mut rest = bytes;
        for plane in planes {
            let (own, after) = rest.split_at(plane.block_bytes as usize);
            gpu.queue.write_buffer(&plane.buffer, plane.at(block), own);
            rest = after;
        }
        Ok(())
    }
}
