//! What panels are made of: blocks of one group of 16 rows, one row per vector lane, and plain floats.
//!
//! Invariant: a block holds codes and numbers as the format defines them, so that `value = (code - zero) * scale + min` is
//! exact up to that one rounding. Used by `repack` (places) and `linear` (products).

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};

use super::super::simd::{LANES, Simd};
use crate::weights::format::{FP4_DOUBLED, IQ4_VALUES};

/// Elements of a quantisation group: codes that share a scale, or two half groups (Q6_K).
pub(in super::super) const GROUP: usize = 32;

/// One group of one row, in the common form.
pub(in super::super) struct Group {
    /// Nibbles where the block has a table, else codes.
    pub(in super::super) codes: [u8; GROUP],
    /// Of each half.
    pub(in super::super) scales: [f32; 2],
    /// Of each half.
    pub(in super::super) mins: [f32; 2],
    pub(in super::super) zero: f32,
}

/// One group of 16 rows. Codes lie as vectors of 16 lanes x 4 consecutive elements.
pub(in super::super) trait Block: Pod {
    /// Minima are stored, and the zero point is 0.
    const HAS_MIN: bool;
    /// Zero points are stored; else, without minima, the zero point is a power of two.
    const HAS_ZERO: bool;
    /// Scales per group: 1 or 2; as many minima where there are some.
    const HALVES: usize;
    /// Codes are below 32.
    const SMALL: bool;
    fn set(&mut self, lane: usize, group: &Group);
    /// The codes are those that `codes` gives.
    fn get(&self, lane: usize) -> Group;
    /// Elements `4 i .. 4 i + 4` of all lanes at index i.
    fn codes<S: Simd>(&self, s: S) -> [S::B; 8];
    fn scale<S: Simd>(&self, s: S, half: usize) -> S::F;
    fn min<S: Simd>(&self, s: S, half: usize) -> S::F;
    fn zero<S: Simd>(&self, s: S) -> S::F;
}

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

/// IQ4_NL's values as codes with the zero point 128.
const IQ4_CODES: [u8; 16] = codes_of(&IQ4_VALUES, 128);
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

/// Declares a block: scale type; scales, minima and zero points per group; code vectors (4: two elements per byte) and what
/// nibbles stand for, where they are not the codes themselves.
macro_rules! block {
    ($name:ident, $float:ty, [$halves:literal, $mins:literal, $zeros:literal], $vectors:literal) => {
        block!($name, $float, [$halves, $mins, $zeros], $vectors, None);
    };
    ($name:ident, $float:ty, [$halves:literal, $mins:literal, $zeros:literal], $vectors:literal, $table:expr) => {
        #[derive(Clone, Copy, Pod, Zeroable)]
        #[repr(C)]
        pub(in super::super) struct $name {
            scales: [[$float; LANES]; $halves],
            mins: [[$float; LANES]; $mins],
            /// Small integers, exact in f16.
            zeros: [[f16; LANES]; $zeros],
            codes: [[u8; 64]; $vectors],
        }

        impl $name {
            const TABLE: Option<[u8; 16]> = $table;
            const PACKED: bool = $vectors == 4;

            #[inline(always)]
            fn nibbles<S: Simd>(s: S, v: S::B) -> (S::B, S::B) {
                let (low, high) = s.nibbles(v);
                match Self::TABLE {
                    Some(table) => (s.look_up(&table, low), s.look_up(&table, high)),
                    None => (low, high),
                }
            }
        }

        impl Block for $name {
            const HAS_MIN: bool = $mins > 0;
            const HAS_ZERO: bool = $zeros > 0;
            const HALVES: usize = $halves;
            const SMALL: bool = Self::PACKED
                && match Self::TABLE {
                    Some(table) => table[15] < 32 && table[7] < 32,
                    None => true,
                };

            fn set(&mut self, lane: usize, group: &Group) {
                for (scales, &scale) in self.scales.iter_mut().zip(&group.scales) {
                    scales[lane] = Float::from_f32(scale);
                }
                for (mins, &min) in self.mins.iter_mut().zip(&group.mins) {
                    mins[lane] = Float::from_f32(min);
                }
                for zeros in &mut self.zeros {
                    zeros[lane] = f16::from_f32(group.zero);
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
                    if Self::PACKED {
                        quad.iter_mut().for_each(|code| *code = *code >> (i / $vectors * 4) & 15);
                    }
                    if let Some(table) = Self::TABLE {
                        quad.iter_mut().for_each(|code| *code = table[usize::from(*code & 15)]);
                    }
                }
                let mins = &self.mins;
                Group {
                    codes,
                    scales: std::array::from_fn(|half| self.scales[half.min($halves - 1)][lane].to_f32()),
                    mins: std::array::from_fn(|half| {
                        mins.get(half).or(mins.first()).map_or(0.0, |mins| mins[lane].to_f32())
                    }),
                    zero: self.zeros.first().map_or(0.0, |zeros| zeros[lane].to_f32()),
                }
            }

            #[inline(always)]
            fn codes<S: Simd>(&self, s: S) -> [S::B; 8] {
                let first = s.load_bytes(&self.codes[0]);
                let mut out = [first; 8];
                for (i, bytes) in self.codes.iter().enumerate() {
                    let v = s.load_bytes(bytes);
                    if Self::PACKED {
                        (out[i], out[i + 4]) = Self::nibbles(s, v);
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
            fn min<S: Simd>(&self, s: S, half: usize) -> S::F {
                match self.mins.get(half) {
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

block!(Nibble, f16, [1, 0, 0], 4);
block!(NibbleMin, f16, [1, 1, 0], 4);
block!(NibbleZero, f16, [1, 0, 1], 4);
block!(Byte, f16, [1, 0, 0], 8);
block!(ByteMin, f16, [1, 1, 0], 8);
block!(ByteZeroF32, f32, [1, 0, 1], 8);
block!(NibbleMinF32, f32, [1, 1, 0], 4);
block!(ByteMinF32, f32, [1, 1, 0], 8);
block!(NibbleHalvesF32, f32, [2, 0, 0], 4);
block!(NibbleHalvesMinF32, f32, [2, 2, 0], 4);
block!(ByteHalvesF32, f32, [2, 0, 0], 8);
block!(Iq4, f16, [1, 0, 0], 4, Some(IQ4_CODES));
block!(Iq4F32, f32, [1, 0, 0], 4, Some(IQ4_CODES));
block!(Fp4F32, f32, [1, 0, 0], 4, Some(FP4_CODES));

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
