//! Weight matrices as the kernels want them: panels of 16 output rows, one row per vector lane, repacked once at upload.
//!
//! Invariant: repacking changes places, never values: codes, scales, minima and zero points are those of the file (exact in
//! f16), so that `value = (code - zero) * scale + min` is the format's own definition. A few block types (`block`, `super_block`)
//! serve all formats; a format is one arm of `group` and one of `Kind::of`. Rows are padded to 16 with
//! zeros.

mod block;
mod group;
mod super_block;

use std::borrow::Cow;
use std::ops::Range;

use block::Group;
pub(super) use block::{
    Block, Byte, ByteMin, ByteZeroF32, E4M3_UNIT, Float, Fp4F32, Fp8, GROUP, Iq4, Nibble, NibbleMin, NibbleShared,
    NibbleZero, NibbleZeroShared,
};
pub(super) use super_block::{ByteHalvesK, ByteMinK, Iq4K, NibbleHalvesK, NibbleHalvesMinK, NibbleMinK};

use super::memory::{Arena, ArenaRange, Shared};
use super::simd::{LANES, Portable, Simd};
use crate::error::DeviceError;
use crate::weights::{HostTensor, WeightFormat};

/// What a matrix's panels are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Nibble,
    NibbleMin,
    NibbleZero,
    NibbleShared,
    NibbleZeroShared,
    Byte,
    ByteMin,
    ByteZeroF32,
    NibbleMinK,
    ByteMinK,
    NibbleHalvesK,
    NibbleHalvesMinK,
    ByteHalvesK,
    Iq4,
    Iq4K,
    Fp4F32,
    Fp8,
    F16,
    Bf16,
    F32,
}

impl Kind {
    /// The kind, and the zero point's binary logarithm where neither minima nor zero points are stored.
    fn of(tensor: &HostTensor) -> (Self, u32) {
        let is_shared = tensor.blocks_per_scale().is_multiple_of(block::SHARED);
        match tensor.format {
            WeightFormat::Q4_0 if is_shared => (Self::NibbleShared, 3),
            WeightFormat::Int4 if is_shared => (Self::NibbleZeroShared, 0),
            WeightFormat::F32 => (Self::F32, 0),
            WeightFormat::F16 => (Self::F16, 0),
            WeightFormat::Bf16 => (Self::Bf16, 0),
            WeightFormat::Q8_0 => (Self::Byte, 7),
            WeightFormat::Q4_0 => (Self::Nibble, 3),
            WeightFormat::Q4_1 => (Self::NibbleMin, 0),
            WeightFormat::Q5_0 => (Self::Byte, 4),
            WeightFormat::Q5_1 => (Self::ByteMin, 0),
            WeightFormat::Q4K => (Self::NibbleMinK, 0),
            WeightFormat::Q5K => (Self::ByteMinK, 0),
            WeightFormat::Q6K => (Self::ByteHalvesK, 5),
            WeightFormat::Q2K => (Self::NibbleHalvesMinK, 0),
            WeightFormat::Q3K => (Self::NibbleHalvesK, 2),
            WeightFormat::Iq4Nl => (Self::Iq4, 7),
            WeightFormat::Iq4Xs => (Self::Iq4K, 7),
            WeightFormat::Mxfp4 => (Self::Fp4F32, 4),
            WeightFormat::Int4 => (Self::NibbleZero, 0),
            WeightFormat::Int8 => (Self::ByteZeroF32, 0),
            WeightFormat::Fp8E4m3 => (Self::Fp8, 0),
        }
    }

    /// Whether it is multiplied with quantised activations.
    pub(super) fn is_quantised(self) -> bool {
        !matches!(self, Self::Fp8 | Self::F16 | Self::Bf16 | Self::F32)
    }
}

/// Runs `$body` with `$block` as the block type of a quantised `$kind`, or `$float` as the element type of a plain one, or as
/// it is for E4M3.
macro_rules! with_kind {
    (@ $kind:expr, $block:ident, $quantised:expr, $float:ident, $plain:expr, $e4m3:expr,
        [$($name:ident)*], [$($plain_name:ident = $type:ty),*]) => {
        match $kind {
            $(Kind::$name => {
                type $block = $crate::backend::cpu::repack::$name;
                $quantised
            })*
            $(Kind::$plain_name => {
                type $float = $type;
                $plain
            })*
            Kind::Fp8 => $e4m3,
        }
    };
    ($kind:expr, $block:ident => $quantised:expr, $float:ident => $plain:expr, E4M3 => $e4m3:expr) => {
        $crate::backend::cpu::repack::with_kind!(@ $kind, $block, $quantised, $float, $plain, $e4m3,
            [Nibble NibbleMin NibbleZero NibbleShared NibbleZeroShared Byte ByteMin ByteZeroF32 NibbleMinK ByteMinK NibbleHalvesK
            NibbleHalvesMinK ByteHalvesK Iq4 Iq4K Fp4F32], [F16 = half::f16, Bf16 = half::bf16, F32 = f32])
    };
}
pub(super) use with_kind;

/// Columns of floats that are packed at a time: the places of a tile stay in the first cache while its 16 rows are written.
const TILE: usize = 64;

/// A repacked matrix `[rows, cols]` in an arena.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub(super) kind: Kind,
    /// The zero point is `1 << zero_bits` where the kind stores neither minima nor zero points.
    pub(super) zero_bits: u32,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) range: ArenaRange,
}

impl Matrix {
    /// Reserves room for a tensor; `pack` fills it.
    ///
    /// # Errors
    /// Out of memory.
    pub(super) fn reserve(tensor: &HostTensor, arena: &mut Arena) -> Result<Self, DeviceError> {
        let (kind, zero_bits) = Kind::of(tensor);
        let (rows, cols) = (tensor.num_rows(), tensor.row_len());
        let num_panels = rows.div_ceil(LANES);
        let panel_bytes = with_kind!(kind,
            B => cols / GROUP / B::GROUPS * size_of::<B>(),
            E => cols * size_of::<[E; LANES]>(),
            E4M3 => cols / GROUP * size_of::<Fp8>());
        let range = arena.alloc(num_panels * panel_bytes, &tensor.name)?;
        Ok(Self { kind, zero_bits, rows, cols, range })
    }

    /// The first `rows` rows of the `index`-th of `of` matrices in this one, each of whole panels.
    pub(super) fn part(&self, index: usize, of: usize, rows: usize) -> Self {
        Self { rows, range: self.range.part(index, of), ..*self }
    }

    /// Panels of 16 rows, the last one padded.
    pub(super) fn num_panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Fills the given panels of `out`, the matrix's range, which must be zero.
    pub(super) fn pack(&self, tensor: &HostTensor, panels: Range<usize>, out: Shared) {
        with_kind!(self.kind,
            B => self.pack_quantised::<B>(tensor, panels, out),
            E => self.pack_plain::<E>(tensor, panels, out),
            E4M3 => self.pack_e4m3(tensor, panels, out));
    }

    /// The bytes of a panel's rows.
    fn panel<'a>(&self, tensor: &'a HostTensor, panel: usize) -> Cow<'a, [u8]> {
        let first = panel * LANES;
        tensor.rows(first..self.rows.min(first + LANES))
    }

    /// Calls `one(lane, row)` for the rows of a panel.
    fn for_rows(&self, tensor: &HostTensor, panel: usize, mut one: impl FnMut(usize, &[u8])) {
        let row_bytes = self.cols / tensor.format.block_len() * tensor.format.block_bytes();
        let bytes = self.panel(tensor, panel);
        bytes.chunks_exact(row_bytes).enumerate().for_each(|(lane, row)| one(lane, row));
    }

    fn pack_quantised<B: Block>(&self, tensor: &HostTensor, panels: Range<usize>, out: Shared) {
        let count = self.cols / GROUP / B::GROUPS;
        let (block_bytes, per_block) = (tensor.format.block_bytes(), tensor.format.block_len() / GROUP);
        for panel in panels {
            // SAFETY: the caller gives each panel to one thread, and nobody reads before the upload is over.
            let blocks = unsafe { out.slice_mut::<B>(panel * count * size_of::<B>(), count) };
            self.for_rows(tensor, panel, |lane, row| {
                let mut index = 0;
                for bytes in row.chunks_exact(block_bytes) {
                    for part in 0..per_block {
                        let group = Group::read(tensor.format, bytes, part);
                        blocks[index / B::GROUPS].set(lane, index % B::GROUPS, &group);
                        index += 1;
                    }
                }
            });
        }
    }

    fn pack_e4m3(&self, tensor: &HostTensor, panels: Range<usize>, out: Shared) {
        let groups = self.cols / GROUP;
        for panel in panels {
            // SAFETY: as in `pack_quantised`.
            let blocks = unsafe { out.slice_mut::<Fp8>(panel * groups * size_of::<Fp8>(), groups) };
            self.for_rows(tensor, panel, |lane, row| {
                for (block, bytes) in blocks.iter_mut().zip(row.chunks_exact(tensor.format.block_bytes())) {
                    let (scale, values) = bytes.split_at(size_of::<f32>());
                    block.scales[lane] = E4M3_UNIT * bytemuck::pod_read_unaligned::<f32>(scale);
                    block.values.iter_mut().zip(values).for_each(|(lanes, &value)| lanes[lane] = value);
                }
            });
        }
    }

    fn pack_plain<E: Float>(&self, tensor: &HostTensor, panels: Range<usize>, out: Shared) {
        for panel in panels {
            let start = panel * self.cols * size_of::<[E; LANES]>();
            // SAFETY: as in `pack_quantised`.
            let elements = unsafe { out.slice_mut::<E>(start, self.cols * LANES) };
            let bytes = self.panel(tensor, panel);
            for (tile, elements) in elements.chunks_mut(TILE * LANES).enumerate() {
                for (lane, row) in bytes.chunks_exact(self.cols * size_of::<E>()).enumerate() {
                    let row = row[tile * TILE * size_of::<E>()..].chunks_exact(size_of::<E>());
                    for (lanes, bytes) in elements.as_chunks_mut::<LANES>().0.iter_mut().zip(row) {
                        lanes[lane] = bytemuck::pod_read_unaligned(bytes);
                    }
                }
            }
        }
    }

    /// Writes row `row` as f32: the embedding.
    pub(super) fn read_row(&self, arena: &Arena, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} of a table of {}", self.rows);
        let (panel, lane) = (row / LANES, row % LANES);
        with_kind!(self.kind, B => {
            let count = self.cols / GROUP / B::GROUPS;
            let blocks = &arena.slice::<B>(self.range)[panel * count..][..count];
            for (block, out) in blocks.iter().zip(out.chunks_exact_mut(GROUP * B::GROUPS)) {
                for (part, out) in out.as_chunks_mut::<GROUP>().0.iter_mut().enumerate() {
                    let group = block.get(lane, part);
                    let has_own_zero = B::HAS_MIN || B::HAS_ZERO;
                    let zero = if has_own_zero { f32::from(group.zero) } else { (1u32 << self.zero_bits) as f32 };
                    let (scale, min) = (group.scale.to_f32(), group.min.to_f32());
                    for (i, x) in out.iter_mut().enumerate() {
                        let half = i * 2 / GROUP;
                        let value = (f32::from(group.codes[i]) - zero) * (scale * f32::from(group.steps[half]));
                        *x = if B::HAS_MIN { value + min * f32::from(group.min_steps[half]) } else { value };
                    }
                }
            }
        }, E => {
            let columns = &arena.slice::<[E; LANES]>(self.range)[panel * self.cols..][..self.cols];
            out.iter_mut().zip(columns).for_each(|(x, lanes)| *x = lanes[lane].to_f32());
        }, E4M3 => {
            let groups = self.cols / GROUP;
            let blocks = &arena.slice::<Fp8>(self.range)[panel * groups..][..groups];
            for (block, out) in blocks.iter().zip(out.as_chunks_mut::<GROUP>().0) {
                for (x, lanes) in out.iter_mut().zip(&block.values) {
                    let values = Portable.array(Portable.load_e4m3(lanes));
                    *x = values[lane] * block.scales[lane];
                }
            }
        });
    }
}
