//! One tile's computation: scores, their softmax, weighted values, split after split.
//!
//! Invariant: a unit's operations and their order depend on its position only, not on the units that share its registers.
//! A split's result is a record of `padded_dim + 16` floats: values, then maximum and sum. Called by `Attend`.

#![allow(clippy::needless_range_loop, reason = "register tiles are indexed side by side")]

mod shared;

use std::marker::PhantomData;
use std::ops::Range;

use self::shared::Shared;
use super::kernels::{Score, Weigh, Weighted};
use super::merge::{merge, write_out};
use super::tiles::Tile;
use super::widen::{Head, Place, is_widened};
use super::{Attend, Attention, MAX_REGISTER_UNITS, SCORE_LEN, SPLIT};
use crate::backend::cpu::repack::Float;
use crate::backend::cpu::simd::{LANES, Simd};
use crate::backend::cpu::state::LayerState;
use crate::backend::cpu::step::Step;

/// Consecutive positions of one block.
pub(super) struct Run {
    pub(super) block: usize,
    pub(super) first_entry: usize,
    pub(super) len: usize,
}

/// Some positions of a split and the columns of their values.
#[derive(Clone, Copy)]
pub(super) struct Values {
    pub(super) split: usize,
    /// The first unit.
    pub(super) unit: usize,
    pub(super) first_column: usize,
    pub(super) from: usize,
    pub(super) to: usize,
    /// Whether the record holds the sums of the positions before; else they begin here.
    pub(super) resumes: bool,
}

/// A tile being computed, in this thread's scratch.
pub(super) struct Work<'a> {
    step: &'a Step<'a>,
    op: &'a Attention,
    layer: &'a LayerState,
    tile: Tile<'a>,
    /// Query heads per KV head.
    group: usize,
    padded_dim: usize,
    /// `[dim, units of a register tile]`.
    queries: &'a mut [f32],
    /// `[16, padded_dim]`: keys or values of one run, where they are widened.
    widened: &'a mut [f32],
    /// `[units, SCORE_LEN]`.
    scores: &'a mut [f32],
    /// `[units, padded_dim + 16]`: this split's values, then maximum and sum.
    partial: &'a mut [f32],
    /// `[units, padded_dim + 16]`: the splits so far.
    total: &'a mut [f32],
    /// Those that see positions of this split.
    units: Range<usize>,
}

impl<'a> Work<'a> {
    #[inline(always)]
    pub(super) fn new(attend: &'a Attend<'a>, tile: Tile<'a>) -> Self {
        let (step, op, layer) = (attend.step, attend.op, attend.layer());
        let group = op.heads / layer.heads;
        let units = tile.num_tokens * group;
        let padded_dim = layer.dim.next_multiple_of(LANES);
        let area = op.scratch.threads_start + attend.thread * op.scratch.thread_len * size_of::<f32>();
        // SAFETY: this thread's own area, used by one tile at a time.
        let area = unsafe { step.memory.slice_mut::<f32>(area, op.scratch.thread_len) };
        let (queries, rest) = area.split_at_mut(layer.dim * MAX_REGISTER_UNITS);
        let (widened, rest) = rest.split_at_mut(LANES * padded_dim);
        let (scores, rest) = rest.split_at_mut(units * SCORE_LEN);
        let (partial, rest) = rest.split_at_mut(units * (padded_dim + LANES));
        let total = &mut rest[..units * (padded_dim + LANES)];
        Self { step, op, layer, tile, group, padded_dim, queries, widened, scores, partial, total, units: 0..0 }
    }

    #[inline(always)]
    fn num_units(&self) -> usize {
        self.tile.num_tokens * self.group
    }

    #[inline(always)]
    fn token(&self, unit: usize) -> usize {
        self.tile.first_token + unit / self.group
    }

    #[inline(always)]
    fn head(&self, unit: usize) -> usize {
        self.tile.kv_head * self.group + unit % self.group
    }

    /// Positions of a split that a unit attends to, counted from the split's first.
    #[inline(always)]
    fn seen(&self, unit: usize, split: usize) -> Range<usize> {
        let position = self.step.inputs.positions()[self.token(unit)];
        let (first, end) = (self.op.first_seen(position), position as usize + 1);
        first.saturating_sub(split * SPLIT).min(SPLIT)..end.saturating_sub(split * SPLIT).min(SPLIT)
    }

    #[inline(always)]
    fn query(&self, unit: usize) -> &'a [f32] {
        // SAFETY: q was written before the last barrier.
        let row = unsafe { self.op.q.row(self.step.memory, self.token(unit)) };
        &row[self.head(unit) * self.layer.dim..][..self.layer.dim]
    }

    /// The run of positions of one block from `position` of a split, at most up to its `end`.
    #[inline(always)]
    fn run(&self, split: usize, position: usize, end: usize) -> Run {
        let block_size = self.layer.block_size;
        let (index, len) = self.tile.path.run(split * SPLIT + position, end - position);
        let first_entry = index % block_size;
        Run {
            block: self.tile.blocks[index / block_size] as usize,
            first_entry,
            len: (block_size - first_entry).min(len),
        }
    }

    /// Asks for the keys that are as far on in the next split as `position` is in this one.
    #[inline(always)]
    fn prefetch_next_split<S: Simd>(&self, s: S, split: usize, position: usize) {
        let last = self.step.inputs.positions()[self.tile.first_token + self.tile.num_tokens - 1] as usize;
        if (split + 1) * SPLIT + position <= last {
            let run = self.run(split + 1, position, SPLIT);
            // SAFETY: nothing is read.
            s.prefetch_all(unsafe { self.layer.head::<u8>(0, run.block, self.tile.kv_head) });
        }
    }

    #[inline(always)]
    fn cached_head(&self) -> Head<'a> {
        Head { layer: self.layer, kv_head: self.tile.kv_head }
    }

    /// Computes one split of every unit that has positions in it.
    #[inline(always)]
    pub(super) fn split<S: Simd, E: Float>(&mut self, s: S, split: usize) {
        // A window moves on with the units: those that see nothing here are the first ones and the last ones.
        let all = self.num_units();
        let first = (0..all).find(|&unit| !self.seen(unit, split).is_empty()).unwrap_or(all);
        let end = (first..all).find(|&unit| self.seen(unit, split).is_empty()).unwrap_or(all);
        self.units = first..end;
        let mut unit = first;
        while unit < end {
            unit += match end - unit {
                MAX_REGISTER_UNITS.. if S::WIDE => self.units::<S, E, MAX_REGISTER_UNITS>(s, split, unit),
                3.. => self.units::<S, E, 3>(s, split, unit),
                2 => self.units::<S, E, 2>(s, split, unit),
                _ => self.units::<S, E, 1>(s, split, unit),
            };
        }
    }

    /// The split's `U` units from `first`; gives `U`.
    #[inline(always)]
    fn units<S: Simd, E: Float, const U: usize>(&mut self, s: S, split: usize, first: usize) -> usize {
        // Positions ascend with the units: all of these see those from the last's first to the first's last, if any.
        let (low, high) = (self.seen(first, split), self.seen(first + U - 1, split));
        let (common, resumes) = (high.start..low.end, high.start > low.start);
        let positions = low.start..high.end;
        s.call(Score::<E, U> { work: self, split, first, positions, element: PhantomData });
        for unit in first..first + U {
            let seen = self.seen(unit, split);
            s.call(Weigh { work: self, unit, seen });
            let end = self.padded_dim;
            let record = &mut self.partial[unit * (end + LANES)..][..end + LANES];
            if resumes {
                record[..end].fill(0.0);
            }
        }
        if self.layer.is_shared {
            s.call(Shared::<E, U> { work: self, split, first, positions: low.start..high.end, element: PhantomData });
            return U;
        }
        for chunk in 0..self.padded_dim.div_ceil(4 * LANES) {
            let first_column = chunk * 4 * LANES;
            for is_after in [false, true] {
                for unit in first..first + U {
                    let seen = self.seen(unit, split);
                    let (from, to) = match is_after {
                        false => (seen.start, seen.end.min(common.start)),
                        true => (common.start.max(common.end), seen.end),
                    };
                    if from < to {
                        let values = Values { split, unit, first_column, from, to, resumes: true };
                        s.call(Weighted::<E, 1> { work: self, values, element: PhantomData });
                    }
                }
                if !is_after && !common.is_empty() {
                    let Range { start: from, end: to } = common;
                    let values = Values { split, unit: first, first_column, from, to, resumes };
                    s.call(Weighted::<E, U> { work: self, values, element: PhantomData });
                }
            }
        }
        U
    }

    /// `scores = scale * q · k` for some of the split's positions (and some beyond, in whole vectors).
    #[inline(always)]
    pub(super) fn score<S: Simd, E: Float, const U: usize>(
        &mut self,
        s: S,
        split: usize,
        first: usize,
        positions: Range<usize>,
    ) {
        let (block_size, dim) = (self.layer.block_size, self.layer.dim);
        for u in 0..U {
            for (d, &x) in self.query(first + u).iter().enumerate() {
                self.queries[d * U + u] = x;
            }
        }
        let (scale, head) = (s.splat(self.op.scale), self.cached_head());
        let mut position = positions.start;
        while position < positions.end {
            let run = self.run(split, position, positions.end);
            if first == self.units.start && !self.layer.is_shared {
                // SAFETY: nothing is read.
                s.prefetch_all(unsafe { self.layer.head::<u8>(1, run.block, self.tile.kv_head) });
            }
            let queries = self.queries[..dim * U].as_chunks::<U>().0;
            for offset in (0..run.len).step_by(LANES) {
                let entry = run.first_entry + offset;
                let (keys, block_size, entry) = if is_widened::<E>(self.layer.dtype) {
                    let keys = &mut self.widened[..dim * LANES];
                    head.keys(s, Place { block: run.block, entry, first_element: 0 }, keys);
                    (bytemuck::cast_slice(keys), LANES, 0)
                } else {
                    // SAFETY: the positions attended to were stored before the last barrier; scores of others are overwritten.
                    (unsafe { self.layer.head::<E>(0, run.block, self.tile.kv_head) }, block_size, entry)
                };
                let acc = if entry + LANES <= block_size {
                    dot_keys::<S, E, U, false>(s, queries, keys, block_size, entry)
                } else {
                    dot_keys::<S, E, U, true>(s, queries, keys, block_size, entry)
                };
                for (u, acc) in acc.into_iter().enumerate() {
                    let at = (first + u) * SCORE_LEN + position + offset;
                    let out = self.scores[at..].first_chunk_mut::<LANES>().expect("score rows are padded");
                    s.store(s.mul(acc, scale), out);
                }
            }
            position += run.len;
        }
    }

    /// Caps a unit's scores and turns them into `exp(score - max)`, with maximum and sum in its record.
    #[inline(always)]
    pub(super) fn weigh<S: Simd>(&mut self, s: S, unit: usize, seen: Range<usize>) {
        // Lanes are those of the split's positions whatever the window leaves out: whole vectors of nothing add nothing.
        let (first, padded) = (seen.start / LANES * LANES, seen.end.next_multiple_of(LANES));
        let scores = &mut self.scores[unit * SCORE_LEN..][first..padded];
        if let Some(cap) = self.op.soft_cap {
            let cap = s.splat(cap);
            for chunk in scores.as_chunks_mut::<LANES>().0 {
                s.store(s.mul(cap, s.tanh(s.div(s.load(chunk), cap))), chunk);
            }
        }
        scores[..seen.start - first].fill(f32::NEG_INFINITY);
        scores[seen.end - first..].fill(f32::NEG_INFINITY);
        let chunks = scores.as_chunks_mut::<LANES>().0;
        let mut max = s.splat(f32::NEG_INFINITY);
        for chunk in &*chunks {
            max = s.max(max, s.load(chunk));
        }
        let max = s.max_lane(max);
        let (offset, mut sum) = (s.splat(max), s.splat(0.0));
        for chunk in chunks {
            let weight = s.exp(s.sub(s.load(chunk), offset));
            sum = s.add(sum, weight);
            s.store(weight, chunk);
        }
        let record_len = self.padded_dim + LANES;
        let record = &mut self.partial[unit * record_len..][..record_len];
        record[self.padded_dim..][..2].copy_from_slice(&[max, s.sum(sum)]);
    }

    /// Up to four vectors of columns.
    #[inline(always)]
    pub(super) fn value_columns<S: Simd, E: Float, const U: usize>(&mut self, s: S, values: Values) {
        let rest = self.layer.dim - values.first_column;
        if rest >= 4 * LANES {
            return self.values::<S, E, U, 4, false>(s, values);
        }
        for vector in 0..rest.div_ceil(LANES) {
            let values = Values { first_column: values.first_column + vector * LANES, ..values };
            if values.first_column + LANES <= self.layer.dim {
                self.values::<S, E, U, 1, false>(s, values);
            } else {
                self.values::<S, E, U, 1, true>(s, values);
            }
        }
    }

    /// Adds the weighted values of some positions to `C` vectors of columns of `U` units.
    #[inline(always)]
    fn values<S: Simd, E: Float, const U: usize, const C: usize, const PART: bool>(&mut self, s: S, values: Values) {
        let Values { split, unit, first_column, from, to, resumes } = values;
        let dim = self.layer.dim;
        let record_len = self.padded_dim + LANES;
        let weights: &[[f32; SCORE_LEN]; U] =
            self.scores.as_chunks::<SCORE_LEN>().0[unit..].first_chunk().expect("units are inside the tile");
        let mut acc = [[s.splat(0.0); C]; U];
        if resumes {
            for u in 0..U {
                let record = &self.partial[(unit + u) * record_len + first_column..];
                for c in 0..C {
                    acc[u][c] = s.load(record[c * LANES..].first_chunk().expect("records are padded"));
                }
            }
        }
        let (mut position, head) = (from, self.cached_head());
        while position < to {
            let mut run = self.run(split, position, to);
            if unit == self.units.start && first_column == 0 {
                self.prefetch_next_split(s, split, position);
            }
            let (rows, stride) = if is_widened::<E>(self.layer.dtype) {
                run.len = run.len.min(LANES);
                let columns = first_column..dim.min(first_column + C * LANES);
                head.values(s, &run, columns, (self.widened, self.padded_dim));
                (bytemuck::cast_slice(&self.widened[..run.len * self.padded_dim]), self.padded_dim)
            } else {
                // SAFETY: the positions attended to were stored before the last barrier; others are not read.
                let rows = unsafe { self.layer.head::<E>(1, run.block, self.tile.kv_head) };
                (&rows[run.first_entry * dim..][..run.len * dim], dim)
            };
            for row in rows.chunks_exact(stride) {
                let mut v = [s.splat(0.0); C];
                for c in 0..C {
                    v[c] = load_columns::<S, E, PART>(s, &row[first_column + c * LANES..]);
                }
                for u in 0..U {
                    let weight = s.splat(weights[u][position]);
                    for c in 0..C {
                        acc[u][c] = s.fma(v[c], weight, acc[u][c]);
                    }
                }
                position += 1;
            }
        }
        for u in 0..U {
            let record = &mut self.partial[(unit + u) * record_len + first_column..];
            for c in 0..C {
                s.store(acc[u][c], record[c * LANES..].first_chunk_mut().expect("records are padded"));
            }
        }
    }

    /// Merges the split just computed into the total.
    #[inline(always)]
    pub(super) fn merge_split<S: Simd>(&mut self, s: S, split: usize) {
        let len = self.padded_dim + LANES;
        for unit in self.units.clone() {
            let first = self.op.first_seen(self.step.inputs.positions()[self.token(unit)]) / SPLIT;
            let (total, partial) = (&mut self.total[unit * len..][..len], &self.partial[unit * len..][..len]);
            if split == first {
                total.copy_from_slice(partial);
            } else {
                merge(s, total, partial);
            }
        }
    }

    #[inline(always)]
    pub(super) fn save_partials(&mut self, split: usize) {
        let len = self.padded_dim + LANES;
        for unit in self.units.clone() {
            let start = self.op.scratch.partial_start(self.token(unit), self.head(unit), split);
            // SAFETY: the place of this token, head and split, which belongs to this tile.
            let out = unsafe { self.step.memory.slice_mut::<f32>(start, len) };
            out.copy_from_slice(&self.partial[unit * len..][..len]);
        }
    }

    #[inline(always)]
    pub(super) fn finish<S: Simd>(&mut self, s: S) {
        let len = self.padded_dim + LANES;
        for unit in 0..self.num_units() {
            let total = &self.total[unit * len..][..len];
            write_out(s, self.step, self.op, self.layer.dim, (self.token(unit), self.head(unit)), total);
        }
    }
}

/// `q · k` of `U` queries, `[dim, U]`, and 16 keys from `entry` of a block; lanes past the block are 0.
#[inline(always)]
fn dot_keys<S: Simd, E: Float, const U: usize, const PART: bool>(
    s: S,
    queries: &[[f32; U]],
    keys: &[E],
    block_size: usize,
    entry: usize,
) -> [S::F; U] {
    let mut acc = [s.splat(0.0); U];
    for (q, row) in queries.iter().zip(keys.chunks_exact(block_size)) {
        let k = load_columns::<S, E, PART>(s, &row[entry..]);
        for u in 0..U {
            acc[u] = s.fma(k, s.splat(q[u]), acc[u]);
        }
    }
    acc
}

/// The first 16 values; with `PART` there may be fewer, and 0 past their end.
#[inline(always)]
fn load_columns<S: Simd, E: Float, const PART: bool>(s: S, values: &[E]) -> S::F {
    if PART {
        let mut padded = [E::zeroed(); LANES];
        let count = values.len().min(LANES);
        padded[..count].copy_from_slice(&values[..count]);
        E::load(s, &padded)
    } else {
        E::load(s, values.first_chunk().expect("a whole vector"))
    }
}
