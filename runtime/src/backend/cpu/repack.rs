//! Weight matrices as the kernels want them: panels of 16 output rows, one row per vector lane, repacked once at upload.
//!
//! Invariant: repacking changes places, never values: codes, scales and minima are those of the file (exact in f16, in f32
//! where they are products), so that `value = (code - zero) * scale + min` is the format's own definition. A few block
//! types serve all formats; a format is one arm of `read_group` and one of `Kind::of`. Rows are padded to 16 with zeros.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};

use super::memory::{Arena, ArenaRange, Shared};
use super::simd::{LANES, Simd};
use crate::error::DeviceError;
use crate::weights::{HostTensor, WeightFormat};

/// Elements of a quantisation group: codes that share a scale, or two half groups (Q6_K).
pub(super) const GROUP: usize = 32;

/// One group of one row, in the common form.
pub(super) struct Group {
    pub(super) codes: [u8; GROUP],
    /// Of each half.
    pub(super) scales: [f32; 2],
    pub(super) min: f32,
}

/// One group of 16 rows. Codes lie as vectors of 16 lanes x 4 consecutive elements.
pub(super) trait Block: Pod {
    /// Minima are stored and the zero point is 0; else the zero point is a power of two.
    const HAS_MIN: bool;
    /// Scales per group: 1 or 2.
    const HALVES: usize;
    /// Codes are below 32.
    const SMALL: bool;
    fn set(&mut self, lane: usize, group: &Group);
    fn get(&self, lane: usize) -> Group;
    /// Elements `4 i .. 4 i + 4` of all lanes at index i.
    fn codes<S: Simd>(&self, s: S) -> [S::B; 8];
    fn scale<S: Simd>(&self, s: S, half: usize) -> S::F;
    fn min<S: Simd>(&self, s: S) -> S::F;
}

/// A stored float: of a scale, or of a matrix that is not quantised.
pub(super) trait Float: Pod {
    fn from_f32(x: f32) -> Self;
    fn to_f32(self) -> f32;
    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::F;
}

impl Float for f32 {
    fn from_f32(x: f32) -> Self {
        x
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::F {
        s.load(x)
    }
}

impl Float for f16 {
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::F {
        s.load_f16(bytemuck::cast_ref(x))
    }
}

impl Float for bf16 {
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::F {
        s.load_bf16(bytemuck::cast_ref(x))
    }
}

/// Declares a block: scale type, scales and minima per group, code vectors (4: two elements per byte), whether codes stay
/// below 32.
macro_rules! block {
    ($name:ident, $float:ty, $halves:literal, $mins:literal, $vectors:literal) => {
        #[derive(Clone, Copy, Pod, Zeroable)]
        #[repr(C)]
        pub(super) struct $name {
            scales: [[$float; LANES]; $halves],
            mins: [[$float; LANES]; $mins],
            codes: [[u8; 64]; $vectors],
        }

        impl Block for $name {
            const HAS_MIN: bool = $mins == 1;
            const HALVES: usize = $halves;
            const SMALL: bool = $vectors == 4;

            fn set(&mut self, lane: usize, group: &Group) {
                for (scales, &scale) in self.scales.iter_mut().zip(&group.scales) {
                    scales[lane] = Float::from_f32(scale);
                }
                for mins in &mut self.mins {
                    mins[lane] = Float::from_f32(group.min);
                }
                for (i, quad) in group.codes.as_chunks::<4>().0.iter().enumerate() {
                    let bytes = &mut self.codes[i % $vectors][lane * 4..][..4];
                    bytes.iter_mut().zip(quad).for_each(|(byte, &code)| *byte |= code << (i / $vectors * 4));
                }
            }

            #[inline(always)]
            fn get(&self, lane: usize) -> Group {
                let mut codes = [0; GROUP];
                for (i, quad) in codes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    quad.copy_from_slice(&self.codes[i % $vectors][lane * 4..][..4]);
                    if Self::SMALL {
                        quad.iter_mut().for_each(|code| *code = *code >> (i / $vectors * 4) & 15);
                    }
                }
                Group {
                    codes,
                    scales: std::array::from_fn(|half| self.scales[half.min($halves - 1)][lane].to_f32()),
                    min: self.mins.first().map_or(0.0, |mins| mins[lane].to_f32()),
                }
            }

            #[inline(always)]
            fn codes<S: Simd>(&self, s: S) -> [S::B; 8] {
                let first = s.load_bytes(&self.codes[0]);
                let mut out = [first; 8];
                for (i, bytes) in self.codes.iter().enumerate() {
                    let v = s.load_bytes(bytes);
                    if Self::SMALL {
                        (out[i], out[i + 4]) = s.nibbles(v);
                    } else {
                        out[i] = v;
                    }
                }
                out
            }

            #[inline(always)]
            fn scale<S: Simd>(&self, s: S, half: usize) -> S::F {
                Float::load(s, &self.scales[half])
            }

            #[inline(always)]
            fn min<S: Simd>(&self, s: S) -> S::F {
                match self.mins.first() {
                    Some(mins) => Float::load(s, mins),
                    None => s.splat(0.0),
                }
            }
        }
    };
}

block!(Nibble, f16, 1, 0, 4);
block!(NibbleMin, f16, 1, 1, 4);
block!(Byte, f16, 1, 0, 8);
block!(ByteMin, f16, 1, 1, 8);
block!(NibbleMinF32, f32, 1, 1, 4);
block!(ByteMinF32, f32, 1, 1, 8);
block!(ByteHalvesF32, f32, 2, 0, 8);

/// What a matrix's panels are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Nibble,
    NibbleMin,
    Byte,
    ByteMin,
    NibbleMinF32,
    ByteMinF32,
    ByteHalvesF32,
    F16,
    Bf16,
    F32,
}

impl Kind {
    /// The kind, and the zero point's binary logarithm where there are no minima.
    fn of(format: WeightFormat) -> (Self, u32) {
        match format {
            WeightFormat::F32 => (Self::F32, 0),
            WeightFormat::F16 => (Self::F16, 0),
            WeightFormat::Bf16 => (Self::Bf16, 0),
            WeightFormat::Q8_0 => (Self::Byte, 7),
            WeightFormat::Q4_0 => (Self::Nibble, 3),
            WeightFormat::Q4_1 => (Self::NibbleMin, 0),
            WeightFormat::Q5_0 => (Self::Byte, 4),
            WeightFormat::Q5_1 => (Self::ByteMin, 0),
            WeightFormat::Q4K => (Self::NibbleMinF32, 0),
            WeightFormat::Q5K => (Self::ByteMinF32, 0),
            WeightFormat::Q6K => (Self::ByteHalvesF32, 5),
        }
    }

    /// Whether it is multiplied with quantised activations.
    pub(super) fn is_quantised(self) -> bool {
        !matches!(self, Self::F16 | Self::Bf16 | Self::F32)
    }
}

/// Runs `$body` with `$block` as the block type of a quantised `$kind`, or `$float` as the element type of another.
macro_rules! with_kind {
    ($kind:expr, $block:ident => $quantised:expr, $float:ident => $plain:expr) => {
        match $kind {
            Kind::Nibble => {
                type $block = $crate::backend::cpu::repack::Nibble;
                $quantised
            }
            Kind::NibbleMin => {
                type $block = $crate::backend::cpu::repack::NibbleMin;
                $quantised
            }
            Kind::Byte => {
                type $block = $crate::backend::cpu::repack::Byte;
                $quantised
            }
            Kind::ByteMin => {
                type $block = $crate::backend::cpu::repack::ByteMin;
                $quantised
            }
            Kind::NibbleMinF32 => {
                type $block = $crate::backend::cpu::repack::NibbleMinF32;
                $quantised
            }
            Kind::ByteMinF32 => {
                type $block = $crate::backend::cpu::repack::ByteMinF32;
                $quantised
            }
            Kind::ByteHalvesF32 => {
                type $block = $crate::backend::cpu::repack::ByteHalvesF32;
                $quantised
            }
            Kind::F16 => {
                type $float = half::f16;
                $plain
            }
            Kind::Bf16 => {
                type $float = half::bf16;
                $plain
            }
            Kind::F32 => {
                type $float = f32;
                $plain
            }
        }
    };
}
pub(super) use with_kind;

/// A repacked matrix `[rows, cols]` in an arena.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub(super) kind: Kind,
    /// The zero point is `1 << zero_bits` where the kind has no minima.
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
        let (kind, zero_bits) = Kind::of(tensor.format);
        let (rows, cols) = (tensor.num_rows(), tensor.row_len());
        let num_panels = rows.div_ceil(LANES);
        let panel_bytes = with_kind!(kind,
            B => cols / GROUP * size_of::<B>(),
            E => cols * size_of::<[E; LANES]>());
        let range = arena.alloc(num_panels * panel_bytes, &tensor.name)?;
        Ok(Self { kind, zero_bits, rows, cols, range })
    }

    /// Panels of 16 rows, the last one padded.
    pub(super) fn num_panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Fills the given panels of `out`, the matrix's range, which must be zero.
    pub(super) fn pack(&self, tensor: &HostTensor, panels: Range<usize>, out: Shared) {
        with_kind!(self.kind,
            B => self.pack_quantised::<B>(tensor, panels, out),
            E => self.pack_plain::<E>(tensor, panels, out));
    }

    fn pack_quantised<B: Block>(&self, tensor: &HostTensor, panels: Range<usize>, out: Shared) {
        let groups = self.cols / GROUP;
        for panel in panels {
            // SAFETY: the caller gives each panel to one thread, and nobody reads before the upload is over.
            let blocks = unsafe { out.slice_mut::<B>(panel * groups * size_of::<B>(), groups) };
            for lane in 0..LANES.min(self.rows - panel * LANES) {
                let row = tensor.row_bytes(panel * LANES + lane);
                for (index, block) in blocks.iter_mut().enumerate() {
                    block.set(lane, &read_group(tensor.format, row, index));
                }
            }
        }
    }

    fn pack_plain<E: Float>(&self, tensor: &HostTensor, panels: Range<usize>, out: Shared) {
        for panel in panels {
            let start = panel * self.cols * size_of::<[E; LANES]>();
            // SAFETY: as in `pack_quantised`.
            let elements = unsafe { out.slice_mut::<E>(start, self.cols * LANES) };
            for lane in 0..LANES.min(self.rows - panel * LANES) {
                let row = tensor.row_bytes(panel * LANES + lane);
                for (k, bytes) in row.chunks_exact(size_of::<E>()).enumerate() {
                    elements[k * LANES + lane] = bytemuck::pod_read_unaligned(bytes);
                }
            }
        }
    }

    /// Writes row `row` as f32: the embedding.
    pub(super) fn read_row(&self, arena: &Arena, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} of a table of {}", self.rows);
        let (panel, lane) = (row / LANES, row % LANES);
        with_kind!(self.kind, B => {
            let groups = self.cols / GROUP;
            let zero = if B::HAS_MIN { 0 } else { 1 << self.zero_bits };
            let blocks = &arena.slice::<B>(self.range)[panel * groups..][..groups];
            for (block, out) in blocks.iter().zip(out.as_chunks_mut::<GROUP>().0) {
                let group = block.get(lane);
                for (i, x) in out.iter_mut().enumerate() {
                    let code = (i32::from(group.codes[i]) - zero) as f32;
                    let value = code * group.scales[i * 2 / GROUP];
                    *x = if B::HAS_MIN { value + group.min } else { value };
                }
            }
        }, E => {
            let columns = &arena.slice::<[E; LANES]>(self.range)[panel * self.cols..][..self.cols];
            out.iter_mut().zip(columns).for_each(|(x, lanes)| *x = lanes[lane].to_f32());
        });
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Group `index` of a row of a quantised format (see `weights::format` for the definitions).
fn read_group(format: WeightFormat, row: &[u8], index: usize) -> Group {
    let per_block = format.block_len() / GROUP;
    let block = &row[index / per_block * format.block_bytes()..][..format.block_bytes()];
    let in_block = index % per_block;
    let nibble_halves = |qs: &[u8]| std::array::from_fn(|i| if i < 16 { qs[i] & 15 } else { qs[i - 16] >> 4 });
    let with_fifth = |qs: &[u8], bits: &[u8]| {
        let bits = u32::from_le_bytes([bits[0], bits[1], bits[2], bits[3]]);
        let low: [u8; GROUP] = nibble_halves(qs);
        std::array::from_fn(|i| low[i] | ((bits >> i & 1) as u8) << 4)
    };
    let (codes, scale, min) = match format {
        WeightFormat::Q8_0 => (std::array::from_fn(|i| block[2 + i] ^ 0x80), half_at(block, 0), 0.0),
        WeightFormat::Q4_0 => (nibble_halves(&block[2..]), half_at(block, 0), 0.0),
        WeightFormat::Q4_1 => (nibble_halves(&block[4..]), half_at(block, 0), half_at(block, 2)),
        WeightFormat::Q5_0 => (with_fifth(&block[6..], &block[2..]), half_at(block, 0), 0.0),
        WeightFormat::Q5_1 => (with_fifth(&block[8..], &block[4..]), half_at(block, 0), half_at(block, 2)),
        WeightFormat::Q4K | WeightFormat::Q5K => return read_k_group(format, block, in_block),
        WeightFormat::Q6K => return read_q6_k_group(block, in_block),
        WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => unreachable!("not a quantised format"),
    };
    Group { codes, scales: [scale; 2], min }
}

/// Q4_K and Q5_K: f16 scale of scales and of minima, 6-bit scales and minima, [fifth bits], nibbles in runs of 64.
fn read_k_group(format: WeightFormat, block: &[u8], index: usize) -> Group {
    let packed = &block[4..16];
    let (scale, min) = if index < 4 {
        (packed[index] & 63, packed[index + 4] & 63)
    } else {
        let low = packed[index + 4];
        (low & 15 | packed[index - 4] >> 6 << 4, low >> 4 | packed[index] >> 6 << 4)
    };
    let (fifth, nibbles) = match format {
        WeightFormat::Q5K => (Some(&block[16..48]), &block[48..]),
        _ => (None, &block[16..]),
    };
    let nibbles = &nibbles[index / 2 * GROUP..][..GROUP];
    let codes = std::array::from_fn(|i| {
        (nibbles[i] >> (index % 2 * 4) & 15) | fifth.map_or(0, |bits| (bits[i] >> index & 1) << 4)
    });
    let scale = half_at(block, 0) * f32::from(scale);
    Group { codes, scales: [scale; 2], min: -(half_at(block, 2) * f32::from(min)) }
}

/// Q6_K: low nibbles, high bit pairs, 8-bit scales per 16, f16 scale; two halves of 128.
fn read_q6_k_group(block: &[u8], index: usize) -> Group {
    let (half, run) = (index / 4, index % 4);
    let low = &block[half * 64 + run % 2 * GROUP..][..GROUP];
    let high = &block[128 + half * GROUP..][..GROUP];
    let codes = std::array::from_fn(|i| (low[i] >> (run / 2 * 4) & 15) | (high[i] >> (run * 2) & 3) << 4);
    let scales =
        std::array::from_fn(|part| half_at(block, 208) * f32::from(block[192 + half * 8 + run * 2 + part] as i8));
    Group { codes, scales, min: 0.0 }
}
