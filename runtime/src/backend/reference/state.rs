//! The paged state of one layer: planes of `[blocks, heads, block_size, dim]`.
//!
//! Invariant: a value that was stored reads back as that value rounded once to the plane's type. Called by the reference
//! ops (entries) and the reference backend (whole blocks).

use half::f16;

use crate::error::DeviceError;
use crate::program::{KvDtype, Plane, StateSpec};

/// All planes of one layer.
#[derive(Debug)]
pub(super) struct LayerState {
    pub planes: Vec<PlaneState>,
}

/// One plane.
#[derive(Debug)]
pub(super) struct PlaneState {
    spec: Plane,
    block_size: usize,
    values: Values,
}

#[derive(Debug)]
enum Values {
    F32(Vec<f32>),
    F16(Vec<f16>),
}

/// Where one head's entry of one token lies.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    /// `block * block_size + offset`, as the slot map has it.
    pub slot: usize,
    pub head: usize,
}

impl LayerState {
    pub fn new(layer: usize, spec: &StateSpec, num_blocks: usize, block_size: usize) -> Result<Self, DeviceError> {
        let StateSpec::Paged { planes } = spec;
        let planes = planes
            .iter()
            .map(|&plane| {
                PlaneState::new(plane, num_blocks, block_size).ok_or_else(|| DeviceError::OutOfMemory {
                    what: format!("KV cache of layer {layer}"),
                    needed_bytes: spec.block_bytes(block_size as u32).saturating_mul(num_blocks as u64),
                })
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { planes })
    }

    pub fn num_bytes(&self) -> u64 {
        self.planes.iter().map(|p| p.bytes().len() as u64).sum()
    }

    /// Appends the bytes of one block, all planes back to back.
    pub fn read_block(&self, block: usize, out: &mut Vec<u8>) {
        for plane in &self.planes {
            let len = plane.block_bytes();
            out.extend_from_slice(&plane.bytes()[block * len..][..len]);
        }
    }

    pub fn write_block(&mut self, block: usize, mut bytes: &[u8]) {
        for plane in &mut self.planes {
            let len = plane.block_bytes();
            let (own, rest) = bytes.split_at(len);
            plane.bytes_mut()[block * len..][..len].copy_from_slice(own);
            bytes = rest;
        }
        assert!(bytes.is_empty(), "block has more bytes than its layer's planes");
    }
}

impl PlaneState {
    fn new(spec: Plane, num_blocks: usize, block_size: usize) -> Option<Self> {
        let len = [spec.heads as usize, spec.dim as usize, block_size]
            .into_iter()
            .try_fold(num_blocks, |product, n| product.checked_mul(n))?;
        let values = match spec.dtype {
            KvDtype::F32 => Values::F32(zeroed(len)?),
            KvDtype::F16 => Values::F16(zeroed(len)?),
        };
        Some(Self { spec, block_size, values })
    }

    pub fn heads(&self) -> usize {
        self.spec.heads as usize
    }

    pub fn dim(&self) -> usize {
        self.spec.dim as usize
    }

    fn start(&self, entry: Entry) -> usize {
        let (block, offset) = (entry.slot / self.block_size, entry.slot % self.block_size);
        ((block * self.heads() + entry.head) * self.block_size + offset) * self.dim()
    }

    /// Rounds `values` (`[dim]`) to the plane's type and stores them.
    pub fn store(&mut self, entry: Entry, values: &[f32]) {
        let (start, dim) = (self.start(entry), self.dim());
        match &mut self.values {
            Values::F32(all) => all[start..start + dim].copy_from_slice(values),
            Values::F16(all) => {
                for (stored, &value) in all[start..start + dim].iter_mut().zip(values) {
                    *stored = f16::from_f32(value);
                }
            }
        }
    }

    /// Reads one entry (`[dim]`).
    pub fn load(&self, entry: Entry, out: &mut [f32]) {
        let (start, dim) = (self.start(entry), self.dim());
        match &self.values {
            Values::F32(all) => out.copy_from_slice(&all[start..start + dim]),
            Values::F16(all) => {
                for (value, &stored) in out.iter_mut().zip(&all[start..start + dim]) {
                    *value = stored.to_f32();
                }
            }
        }
    }

    fn block_bytes(&self) -> usize {
        self.heads() * self.block_size * self.dim() * self.spec.dtype.bytes()
    }

    fn bytes(&self) -> &[u8] {
        match &self.values {
            Values::F32(all) => bytemuck::cast_slice(all),
            Values::F16(all) => bytemuck::cast_slice(all),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.values {
            Values::F32(all) => bytemuck::cast_slice_mut(all),
            Values::F16(all) => bytemuck::cast_slice_mut(all),
        }
    }
}

/// `None` where there is no memory for it. Pages are taken when first written: a KV cache is mostly empty.
pub(super) fn zeroed<T: bytemuck::Zeroable>(len: usize) -> Option<Vec<T>> {
    bytemuck::allocation::try_zeroed_vec(len).ok()
}
