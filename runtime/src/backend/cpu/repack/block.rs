//! What panels are made of: blocks of one group of 16 rows, or of four that share their scales, one row per vector lane, and plain floats. `super_block` has those of
//! eight groups whose scales are small integers.
//!
//! Invariant: a block holds codes and numbers as the format defines them, so that `value = (code - zero) * scale + min` is
//! exact up to that one rounding. Used by `repack` (places) and `linear` (products).

use std::ops::Neg;

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};

use super::super::simd::{LANES, Simd};
use crate::weights::format::{FP4_DOUBLED, IQ4_VALUES};

/// Elements of a quantisation group: codes that share a scale, or two half groups (Q6_K).
pub(in super::super) const GROUP: usize = 32;

/// One group of one row, in the common form: `value = (code - zero) * (scale * step) + min * min_step`, steps by half.
pub(in super::super) struct Group<F> {
    /// Nibbles where the block has a table, else codes.
    pub(in super::super) codes: [u8; GROUP],
    pub(in super::super) scale: F,
    pub(in super::super) steps: [i8; 2],
    pub(in super::super) min: F,
    pub(in super::super) min_steps: [i8; 2],
    pub(in super::super) zero: u8,
}

/// Some groups of 16 rows. Codes lie as vectors of 16 lanes x 4 consecutive elements.
pub(in super::super) trait Block: Pod {
    type Scale: Scale;
    /// How many groups.
    const GROUPS: usize;
    /// Minima are stored, and the zero point is 0.
    const HAS_MIN: bool;
    /// Zero points are stored; else, without minima, the zero point is a power of two.
    const HAS_ZERO: bool;
    /// Scales per group: 1 or 2; as many minima where there are some.
    const HALVES: usize;
    /// Codes are below 32.
    const SMALL: bool;
    /// Sets the `index`-th group of one row.
    fn set(&mut self, lane: usize, index: usize, group: &Group<Self::Scale>);
    /// The codes are those that `codes` gives.
    fn get(&self, lane: usize, index: usize) -> Group<Self::Scale>;
    /// Elements `4 i .. 4 i + 4` of all lanes at index i.
    fn codes<S: Simd>(&self, s: S, index: usize) -> [S::B; 8];
    fn scale<S: Simd>(&self, s: S, index: usize, half: usize) -> S::F;
    fn min<S: Simd>(&self, s: S, index: usize, half: usize) -> S::F;
    fn zero<S: Simd>(&self, s: S) -> S::F;
}

/// A stored scale or minimum. Files have most of them in f16, and f16 stays as it is: a conversion for each group there and back
/// took as long as moving its codes.
pub(in super::super) trait Scale: Float + Neg<Output = Self> {
    const ZERO: Self;
    fn from_f16(x: f16) -> Self;
}

impl Scale for f32 {
    const ZERO: Self = 0.0;
    fn from_f16(x: f16) -> Self {
        x.to_f32()
    }
}

impl Scale for f16 {
    const ZERO: Self = Self::ZERO;
    fn from_f16(x: f16) -> Self {
        x
    }
}

/// Zero points as they are stored.
const ZEROS: [f16; 256] = {
    let mut zeros = [f16::ZERO; 256];
    let mut i = 0;
    while i < 256 {
        zeros[i] = f16::from_f32_const(i as f32);
        i += 1;
    }
    zeros
};

/// A stored float: of a scale, or of a matrix that is not quantised.
pub(in super::super) trait Float: Pod {
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

// SAFETY: transparent over bytes.
unsafe impl<const VECTORS: usize> Zeroable for Codes<VECTORS> {}
// SAFETY: as above.
unsafe impl<const VECTORS: usize> Pod for Codes<VECTORS> {}

/// IQ4_NL's values as codes with the zero point 128.
pub(super) const IQ4_CODES: [u8; 16] = codes_of(&IQ4_VALUES, 128);
/// E2M1's doubled values as codes with the zero point 16.
const FP4_CODES: [u8; 16] = codes_of(&FP4_DOUBLED, 16);

const fn codes_of(values: &[i8; 16], zero: i16) -> [u8; 16] {
    let mut codes = [0; 16];
    let mut i = 0;
    while i < 16 {
        codes[i] = (values[i] as i16 + zero) as u8;
        i += 1;
    }
    codes
}

/// The codes of one group of 16 rows, in 4 vectors (two elements per byte) or 8.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Codes<const VECTORS: usize>(pub(super) [[u8; 64]; VECTORS]);

impl<const VECTORS: usize> Codes<VECTORS> {
    const PACKED: bool = VECTORS == 4;

    pub(super) fn set(&mut self, lane: usize, codes: &[u8; GROUP]) {
        let words: [u32; GROUP / 4] = bytemuck::cast(*codes);
        for (i, vector) in self.0.iter_mut().enumerate() {
            // Codes below 16: none reaches into its neighbour.
            let word = if Self::PACKED { words[i] | words[i + 4] << 4 } else { words[i] };
            vector.as_chunks_mut::<4>().0[lane] = word.to_ne_bytes();
        }
    }

    pub(super) fn get(&self, lane: usize, table: Option<[u8; 16]>) -> [u8; GROUP] {
        let mut codes = [0; GROUP];
        for (i, quad) in codes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            quad.copy_from_slice(&self.0[i % VECTORS][lane * 4..][..4]);
            if Self::PACKED {
                quad.iter_mut().for_each(|code| *code = *code >> (i / VECTORS * 4) & 15);
            }
            if let Some(table) = table {
                quad.iter_mut().for_each(|code| *code = table[usize::from(*code & 15)]);
            }
        }
        codes
    }

    #[inline(always)]
    pub(super) fn load<S: Simd>(&self, s: S, table: Option<[u8; 16]>) -> [S::B; 8] {
        let first = s.load_bytes(&self.0[0]);
        let mut out = [first; 8];
        for (i, bytes) in self.0.iter().enumerate() {
            let v = s.load_bytes(bytes);
            if Self::PACKED {
                let (low, high) = s.nibbles(v);
                (out[i], out[i + 4]) = match table {
                    Some(table) => (s.look_up(&table, low), s.look_up(&table, high)),
                    None => (low, high),
                };
            } else {
                out[i] = v;
            }
        }
        out
    }
}

/// Whether all codes are below 32.
pub(super) const fn is_small(vectors: usize, table: Option<[u8; 16]>) -> bool {
    vectors == 4
        && match table {
            Some(table) => table[15] < 32 && table[7] < 32,
            None => true,
        }
}

/// Declares a block: scale type; groups, which share scale, minimum and zero point; minima and zero points; code vectors of a group
/// (4: two elements per byte) and what nibbles stand for, where they are not the codes themselves.
macro_rules! block {
    ($name:ident, $float:ty, $groups:expr, [$mins:literal, $zeros:literal], $vectors:literal) => {
        block!($name, $float, $groups, [$mins, $zeros], $vectors, None);
    };
    ($name:ident, $float:ty, $groups:expr, [$mins:literal, $zeros:literal], $vectors:literal, $table:expr) => {
        #[derive(Clone, Copy, Pod, Zeroable)]
        #[repr(C)]
        pub(in super::super) struct $name {
            scales: [$float; LANES],
            mins: [[$float; LANES]; $mins],
            /// Small integers, exact in f16.
            zeros: [[f16; LANES]; $zeros],
            codes: [Codes<$vectors>; $groups],
        }

        impl Block for $name {
            type Scale = $float;
            const GROUPS: usize = $groups;
            const HAS_MIN: bool = $mins > 0;
            const HAS_ZERO: bool = $zeros > 0;
            const HALVES: usize = 1;
            const SMALL: bool = is_small($vectors, $table);

            fn set(&mut self, lane: usize, index: usize, group: &Group<$float>) {
                debug_assert!(index == 0 || self.scales[lane] == group.scale, "groups that share a scale");
                self.scales[lane] = group.scale;
                for mins in &mut self.mins {
                    debug_assert!(index == 0 || mins[lane] == group.min, "groups that share a minimum");
                    mins[lane] = group.min;
                }
                for zeros in &mut self.zeros {
                    let zero = ZEROS[usize::from(group.zero)];
                    debug_assert!(index == 0 || zeros[lane] == zero, "groups that share a zero point");
                    zeros[lane] = zero;
                }
                self.codes[index].set(lane, &group.codes);
            }

            #[inline(always)]
            fn get(&self, lane: usize, index: usize) -> Group<$float> {
                Group {
                    codes: self.codes[index].get(lane, $table),
                    scale: self.scales[lane],
                    steps: [1; 2],
                    min: self.mins.first().map_or(Scale::ZERO, |mins| mins[lane]),
                    min_steps: [1; 2],
                    zero: self.zeros.first().map_or(0, |zeros| zeros[lane].to_f32() as u8),
                }
            }

            #[inline(always)]
            fn codes<S: Simd>(&self, s: S, index: usize) -> [S::B; 8] {
                self.codes[index].load(s, $table)
            }

            #[inline(always)]
            fn scale<S: Simd>(&self, s: S, _index: usize, _half: usize) -> S::F {
                Float::load(s, &self.scales)
            }

            #[inline(always)]
            fn min<S: Simd>(&self, s: S, _index: usize, _half: usize) -> S::F {
                match self.mins.first() {
                    Some(mins) => Float::load(s, mins),
                    None => s.splat(0.0),
                }
            }

            #[inline(always)]
            fn zero<S: Simd>(&self, s: S) -> S::F {
                match self.zeros.first() {
                    Some(zeros) => Float::load(s, zeros),
                    None => s.splat(0.0),
                }
            }
        }
    };
}

/// Groups that share their scales: those of 4-bit checkpoints with a scale, and maybe a zero point, for each 128 inputs. 4.1 bits for
/// a weight instead of 4.5, with zero points 4.3 instead of 5.
pub(super) const SHARED: usize = 4;

block!(Nibble, f16, 1, [0, 0], 4);
block!(NibbleMin, f16, 1, [1, 0], 4);
block!(NibbleZero, f16, 1, [0, 1], 4);
block!(NibbleShared, f16, SHARED, [0, 0], 4);
block!(NibbleZeroShared, f16, SHARED, [0, 1], 4);
block!(Byte, f16, 1, [0, 0], 8);
block!(ByteMin, f16, 1, [1, 0], 8);
block!(ByteZeroF32, f32, 1, [0, 1], 8);
block!(Iq4, f16, 1, [0, 0], 4, Some(IQ4_CODES));
block!(Fp4F32, f32, 1, [0, 0], 4, Some(FP4_CODES));

/// One group of 16 rows of E4M3, which is multiplied as f32. Values are decoded in registers, 2^8 too small; the scales are
/// 2^8 times the file's.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(in super::super) struct Fp8 {
    pub(in super::super) scales: [f32; LANES],
    /// By element of the group.
    pub(in super::super) values: [[u8; LANES]; GROUP],
}

/// `Simd::load_e4m3` gives values divided by this.
pub(in super::super) const E4M3_UNIT: f32 = 256.0;
