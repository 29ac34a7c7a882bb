//! The paged state of one layer: planes of `[blocks, heads, block_size, dim]`.
//!
//! Invariant: a value that was stored reads back as that value rounded once to the plane's type; where the type has scales, as
//! the code times its scale. Called by the reference ops (entries) and the reference backend (whole blocks).

use half::{bf16, f16};

use crate::backend::cached::{E4m3, Int8Scale};
use crate::error::DeviceError;
use crate::program::{KvDtype, Plane, StateSpec};

/// All planes of one layer, as `StateSpec` has them.
#[derive(Debug)]
pub(super) struct LayerState {
    planes: Vec<PlaneState>,
    /// Where keys and values are.
    sides: [usize; 2],
    /// Where their scales are, where the type has them.
    scales: [usize; 2],
}

/// K or V of a layer.
#[derive(Clone, Copy, Debug)]
pub(super) enum Side {
    Keys,
    Values,
}

/// One plane.
#[derive(Debug)]
struct PlaneState {
    spec: Plane,
    block_size: usize,
    values: Values,
}

#[derive(Debug)]
enum Values {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    E4m3(Vec<E4m3>),
    I8(Vec<i8>),
}

/// Applies the same expression to the elements of whichever type.
macro_rules! each {
    ($values:expr, $all:ident => $body:expr) => {
        match $values {
            Values::F32($all) => $body,
            Values::F16($all) => $body,
            Values::Bf16($all) => $body,
            Values::E4m3($all) => $body,
            Values::I8($all) => $body,
        }
    };
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
        if spec.kv_plane().is_none() {
            return Err(DeviceError::Failed(format!("layer {layer}: {spec:?}, expected equal planes of K and V")));
        }
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
        Ok(Self { planes, sides: [0, spec.value_plane()], scales: spec.scale_planes() })
    }

    /// KV heads.
    pub fn heads(&self) -> usize {
        self.planes[0].spec.heads as usize
    }

    /// Elements per head.
    pub fn dim(&self) -> usize {
        self.planes[0].spec.dim as usize
    }

    /// Rounds `values` (`[dim]`) to the planes' type and stores them.
    pub fn store(&mut self, side: Side, entry: Entry, values: &[f32]) {
        let mut scale = Int8Scale::NONE;
        if let Some(scales) = self.planes.get_mut(self.scales[side as usize]) {
            scale = Int8Scale::of(values);
            scales.store(entry, &[scale.scale], Int8Scale::NONE);
        }
        self.planes[self.sides[side as usize]].store(entry, values, scale);
    }

    /// Reads one entry (`[dim]`).
    pub fn load(&self, side: Side, entry: Entry, out: &mut [f32]) {
        self.planes[self.sides[side as usize]].load(entry, out);
        if let Some(scales) = self.planes.get(self.scales[side as usize]) {
            let mut scale = [0.0];
            scales.load(entry, &mut scale);
            out.iter_mut().for_each(|value| *value *= scale[0]);
        }
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
            KvDtype::Bf16 => Values::Bf16(zeroed(len)?),
            KvDtype::Fp8E4m3 => Values::E4m3(zeroed(len)?),
            KvDtype::Int8PerTokenHead => Values::I8(zeroed(len)?),
        };
        Some(Self { spec, block_size, values })
    }

    fn range(&self, entry: Entry) -> std::ops::Range<usize> {
        let Plane { heads, dim, .. } = self.spec;
        let (block, offset) = (entry.slot / self.block_size, entry.slot % self.block_size);
        let start = ((block * heads as usize + entry.head) * self.block_size + offset) * dim as usize;
        start..start + dim as usize
    }

    fn store(&mut self, entry: Entry, values: &[f32], scale: Int8Scale) {
        fn fill<T>(stored: &mut [T], values: &[f32], round: impl Fn(f32) -> T) {
            stored.iter_mut().zip(values).for_each(|(stored, &value)| *stored = round(value));
        }
        let range = self.range(entry);
        match &mut self.values {
            Values::F32(all) => fill(&mut all[range], values, |value| value),
            Values::F16(all) => fill(&mut all[range], values, f16::from_f32),
            Values::Bf16(all) => fill(&mut all[range], values, bf16::from_f32),
            Values::E4m3(all) => fill(&mut all[range], values, E4m3::from_f32),
            Values::I8(all) => fill(&mut all[range], values, |value| scale.code(value)),
        }
    }

    /// Codes without their scale, where there are scales.
    fn load(&self, entry: Entry, out: &mut [f32]) {
        fn fill<T: Copy>(out: &mut [f32], stored: &[T], widen: impl Fn(T) -> f32) {
            out.iter_mut().zip(stored).for_each(|(value, &stored)| *value = widen(stored));
        }
        let range = self.range(entry);
        match &self.values {
            Values::F32(all) => fill(out, &all[range], |value| value),
            Values::F16(all) => fill(out, &all[range], f16::to_f32),
            Values::Bf16(all) => fill(out, &all[range], bf16::to_f32),
            Values::E4m3(all) => fill(out, &all[range], E4m3::to_f32),
            Values::I8(all) => fill(out, &all[range], f32::from),
        }
    }

    fn block_bytes(&self) -> usize {
        StateSpec::Paged { planes: vec![self.spec] }.block_bytes(self.block_size as u32) as usize
    }

    fn bytes(&self) -> &[u8] {
        each!(&self.values, all => bytemuck::cast_slice(all))
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        each!(&mut self.values, all => bytemuck::cast_slice_mut(all))
    }
}

/// `None` where there is no memory for it. Pages are taken when first written: a KV cache is mostly empty.
pub(super) fn zeroed<T: bytemuck::Zeroable>(len: usize) -> Option<Vec<T>> {
    bytemuck::allocation::try_zeroed_vec(len).ok()
}
