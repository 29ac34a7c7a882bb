//! Blocks of eight groups of 16 rows: the 256 elements of GGML's K formats, whose scales and minima are small integers times one
//! number in f16.
//!
//! Invariant: integers and numbers are stored as in the file, and multiplied in f32 where they are used, which is the product that
//! the formats define (`weights::format`): 4.6 bits for each weight of Q4_K, where products in f32 took 6. Used as `block`'s.

use bytemuck::{Pod, Zeroable};
use half::f16;

use super::super::simd::{LANES, Simd};
use super::block::{Block, Codes, Float, GROUP, Group, IQ4_CODES, is_small};

/// Groups of a block.
const GROUPS: usize = 8;

/// Declares a block: integers of scales and of minima per group, which may have halves; code vectors (4: two elements per byte) and
/// what nibbles stand for, where they are not the codes themselves.
macro_rules! super_block {
    ($name:ident, [$halves:literal, $mins:literal], $vectors:literal) => {
        super_block!($name, [$halves, $mins], $vectors, None);
    };
    ($name:ident, [$halves:literal, $mins:literal], $vectors:literal, $table:expr) => {
        #[derive(Clone, Copy, Pod, Zeroable)]
        #[repr(C)]
        pub(in super::super) struct $name {
            scale: [f16; LANES],
            /// Touched where there are minima.
            min: [f16; LANES],
            steps: [[[i8; LANES]; $halves]; GROUPS],
            min_steps: [[[i8; LANES]; $mins]; GROUPS],
            codes: [Codes<$vectors>; GROUPS],
        }

        impl Block for $name {
            type Scale = f16;
            const GROUPS: usize = GROUPS;
            const HAS_MIN: bool = $mins > 0;
            const HAS_ZERO: bool = false;
            const HALVES: usize = $halves;
            const SMALL: bool = is_small($vectors, $table);

            fn set(&mut self, lane: usize, index: usize, group: &Group<f16>) {
                self.scale[lane] = group.scale;
                self.min[lane] = group.min;
                for (steps, step) in self.steps[index].iter_mut().zip(group.steps) {
                    steps[lane] = step;
                }
                for (steps, step) in self.min_steps[index].iter_mut().zip(group.min_steps) {
                    steps[lane] = step;
                }
                self.codes[index].set(lane, &group.codes);
            }

            #[inline(always)]
            fn get(&self, lane: usize, index: usize) -> Group<f16> {
                let (steps, min_steps) = (&self.steps[index], &self.min_steps[index]);
                Group {
                    codes: self.codes[index].get(lane, $table),
                    scale: self.scale[lane],
                    steps: std::array::from_fn(|half| steps[half.min($halves - 1)][lane]),
                    min: self.min[lane],
                    min_steps: std::array::from_fn(|half| {
                        min_steps.get(half).or(min_steps.first()).map_or(0, |steps| steps[lane])
                    }),
                    zero: 0,
                }
            }

            #[inline(always)]
            fn codes<S: Simd>(&self, s: S, index: usize) -> [S::B; 8] {
                self.codes[index].load(s, $table)
            }

            #[inline(always)]
            fn scale<S: Simd>(&self, s: S, index: usize, half: usize) -> S::F {
                s.mul(Float::load(s, &self.scale), s.load_i8(&self.steps[index][half]))
            }

            #[inline(always)]
            fn min<S: Simd>(&self, s: S, index: usize, half: usize) -> S::F {
                match self.min_steps[index].get(half) {
                    Some(steps) => s.mul(Float::load(s, &self.min), s.load_i8(steps)),
                    None => s.splat(0.0),
                }
            }

            #[inline(always)]
            fn zero<S: Simd>(&self, s: S) -> S::F {
                s.splat(0.0)
            }
        }
    };
}

super_block!(NibbleMinK, [1, 1], 4);
super_block!(ByteMinK, [1, 1], 8);
super_block!(NibbleHalvesK, [2, 0], 4);
super_block!(NibbleHalvesMinK, [2, 2], 4);
super_block!(ByteHalvesK, [2, 0], 8);
super_block!(Iq4K, [1, 0], 4, Some(IQ4_CODES));

// Codes of a row's group of a block stay together: `linear` asks for them ahead in equal parts.
const _: () = assert!(size_of::<NibbleMinK>() == 64 + GROUPS * (2 * LANES + GROUP * LANES / 2));
