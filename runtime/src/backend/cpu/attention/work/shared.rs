//! Weighted sums of values that are the keys themselves, which lie transposed: one vector holds one element of 16 positions.
//!
//! Invariant: a position's lane is that of its place in the split, wherever its entry lies; what a unit does not see has the
//! weight 0 and adds nothing, so that a unit's sums do not depend on the units beside it. Lanes are added last, in `Simd`'s order.
//! Called by `Work::units`.

#![allow(clippy::needless_range_loop, reason = "register tiles are indexed side by side")]

use std::marker::PhantomData;
use std::ops::Range;

use super::{Run, Work};
use crate::backend::cpu::attention::widen::{Place, is_widened};
use crate::backend::cpu::attention::{SCORE_LEN, SPLIT};
use crate::backend::cpu::repack::Float;
use crate::backend::cpu::simd::{Kernel, LANES, Simd};

/// Elements of a head whose sums are in registers together.
const ELEMENTS: usize = 4;

/// The values of `U` units from `first`, which see some of the positions.
pub(super) struct Shared<'w, 'a, E, const U: usize> {
    pub(super) work: &'w mut Work<'a>,
    pub(super) split: usize,
    pub(super) first: usize,
    pub(super) positions: Range<usize>,
    pub(super) element: PhantomData<E>,
}

impl<E: Float, const U: usize> Kernel for Shared<'_, '_, E, U> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { work, split, first, positions, .. } = self;
        for unit in first..first + U {
            let seen = work.seen(unit, split);
            let scores = &mut work.scores[unit * SCORE_LEN..][..SPLIT];
            scores[..seen.start].fill(0.0);
            scores[seen.end..].fill(0.0);
        }
        let (dim, padded_dim) = (work.layer.dim, work.padded_dim);
        for first_element in (0..dim).step_by(ELEMENTS) {
            let sums = work.sums::<S, E, U>(s, split, (first, first_element), positions.clone());
            for u in 0..U {
                let record = &mut work.partial[(first + u) * (padded_dim + LANES)..][..dim];
                for (value, sum) in record[first_element..].iter_mut().zip(sums[u]) {
                    *value = s.sum(sum);
                }
            }
        }
        for u in 0..U {
            work.partial[(first + u) * (padded_dim + LANES)..][dim..padded_dim].fill(0.0);
        }
    }
}

impl Work<'_> {
    /// Per unit and element the sums of the positions of each lane; elements past the head's are 0.
    #[inline(always)]
    fn sums<S: Simd, E: Float, const U: usize>(
        &mut self,
        s: S,
        split: usize,
        (first, first_element): (usize, usize),
        positions: Range<usize>,
    ) -> [[S::F; ELEMENTS]; U] {
        let mut acc = [[s.splat(0.0); ELEMENTS]; U];
        let mut position = positions.start;
        while position < positions.end {
            // Up to the end of the vector of positions.
            let lane = position % LANES;
            let run = self.run(split, position, positions.end.min(position - lane + LANES));
            let v = self.elements::<S, E>(s, &run, lane, first_element);
            for u in 0..U {
                let weights = &self.scores[(first + u) * SCORE_LEN + position - lane..];
                let weights = s.load(weights.first_chunk().expect("score rows are padded"));
                for e in 0..ELEMENTS {
                    acc[u][e] = s.fma(v[e], weights, acc[u][e]);
                }
            }
            position += run.len;
        }
        acc
    }

    /// Some elements of the entries of a run, the first of which stands in lane `lane`; other lanes are 0.
    #[inline(always)]
    fn elements<S: Simd, E: Float>(&mut self, s: S, run: &Run, lane: usize, first_element: usize) -> [S::F; ELEMENTS] {
        let count = ELEMENTS.min(self.layer.dim - first_element);
        let (block_size, head) = (self.layer.block_size, self.cached_head());
        let (rows, stride, entry): (&[E], usize, usize) = if is_widened::<E>(self.layer.dtype) {
            let keys = &mut self.widened[..count * LANES];
            head.keys(s, Place { block: run.block, entry: run.first_entry, first_element }, keys);
            (bytemuck::cast_slice(keys), LANES, 0)
        } else {
            // SAFETY: the positions attended to were stored before the last barrier; others are not read.
            let keys = unsafe { self.layer.head::<E>(0, run.block, self.tile.kv_head) };
            (&keys[first_element * block_size..], block_size, run.first_entry)
        };
        let mut v = [s.splat(0.0); ELEMENTS];
        for (e, row) in rows.chunks_exact(stride).take(count).enumerate() {
            v[e] = match row[entry..][..run.len].first_chunk() {
                Some(whole) => E::load(s, whole),
                None => {
                    let mut padded = [E::zeroed(); LANES];
                    padded[lane..][..run.len].copy_from_slice(&row[entry..][..run.len]);
                    E::load(s, &padded)
                }
            };
        }
        v
    }
}
