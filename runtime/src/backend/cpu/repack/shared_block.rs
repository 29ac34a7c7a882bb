//! Blocks of four groups of 16 rows that share their scales: 4-bit checkpoints with a scale, and maybe a zero point, for each 128
//! inputs.
//!
//! Invariant: numbers are those of `block`'s kinds for each group, kept once: 4.1 bits for a weight instead of 4.5, 4.3 instead of
//! 5 with zero points. Used as `block`'s, where a tensor says so (`HostTensor::blocks_per_scale`).

use bytemuck::{Pod, Zeroable};
use half::f16;

use super::super::simd::{LANES, Simd};
use super::block::{Block, Codes, Float, Group, ZEROS};

/// Groups of a block.
pub(super) const GROUPS: usize = 4;

/// Declares a block of nibbles: zero points or none.
macro_rules! shared_block {
    ($name:ident, $zeros:literal) => {
        #[derive(Clone, Copy, Pod, Zeroable)]
        #[repr(C)]
        pub(in super::super) struct $name {
            scales: [f16; LANES],
            zeros: [[f16; LANES]; $zeros],
            codes: [Codes<4>; GROUPS],
        }

        impl Block for $name {
            type Scale = f16;
            const GROUPS: usize = GROUPS;
            const HAS_MIN: bool = false;
            const HAS_ZERO: bool = $zeros > 0;
            const HALVES: usize = 1;
            const SMALL: bool = true;

            fn set(&mut self, lane: usize, index: usize, group: &Group<f16>) {
                debug_assert!(index == 0 || self.scales[lane] == group.scale, "groups that share a scale");
                self.scales[lane] = group.scale;
                for zeros in &mut self.zeros {
                    let zero = ZEROS[usize::from(group.zero)];
                    debug_assert!(index == 0 || zeros[lane] == zero, "groups that share a zero point");
                    zeros[lane] = zero;
                }
                self.codes[index].set(lane, &group.codes);
            }

            #[inline(always)]
            fn get(&self, lane: usize, index: usize) -> Group<f16> {
                Group {
                    codes: self.codes[index].get(lane, None),
                    scale: self.scales[lane],
                    steps: [1; 2],
                    min: f16::ZERO,
                    min_steps: [1; 2],
                    zero: self.zeros.first().map_or(0, |zeros| zeros[lane].to_f32() as u8),
                }
            }

            #[inline(always)]
            fn codes<S: Simd>(&self, s: S, index: usize) -> [S::B; 8] {
                self.codes[index].load(s, None)
            }

            #[inline(always)]
            fn scale<S: Simd>(&self, s: S, _index: usize, _half: usize) -> S::F {
                Float::load(s, &self.scales)
            }

            #[inline(always)]
            fn min<S: Simd>(&self, s: S, _index: usize, _half: usize) -> S::F {
                s.splat(0.0)
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

shared_block!(NibbleShared, 0);
shared_block!(NibbleZeroShared, 1);
