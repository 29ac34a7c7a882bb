//! Causal attention over the paged cache, in fixed splits of the KV positions.
//!
//! Formula: `out = softmax(scale * q · kᵀ) · v` over positions `0..=position` of the token's row (online softmax, Milakov and
//! Gimelshein 2018; splits as in FlashAttention-2 and Flash-Decoding).
//! Operands: q `[tokens, heads * head_dim]` f32; keys and values as in `state`, f16 or f32; out like q; step inputs: row
//! starts, positions, block tables. A task owns a tile of consecutive queries of one row and all query heads of one KV head
//! (a "unit" is one query of one head); with few queries, one split of it.
//! Accumulation: f32. Within a split: scores by one chain over head_dim, their maximum, `exp`, the sum in 16 lanes, values
//! by one chain over the positions; then splits are merged in order. A unit's operations depend on its own position only:
//! any chunking, tile or batch gives the same bits. Tolerance: 1e-5 relative, from the order of sums and `exp`.
//! Limits: none on head_dim or block size; multiples of 16 are fast.

#![allow(clippy::needless_range_loop, reason = "register tiles are indexed side by side")]

use super::memory::Shared;
use super::repack::Float;
use super::rows::Columns;
use super::simd::{Kernel, LANES, Simd};
use super::state::LayerState;
use super::step::Step;
use crate::backend::StepInputs;
use crate::program::KvDtype;

/// KV positions of one split.
const SPLIT: usize = 256;
/// Scores of one unit: a split's, and room for the last whole vector.
const SCORE_LEN: usize = SPLIT + LANES;
/// Units of a tile: their scores stay in the second-level cache.
const UNITS_PER_TILE: usize = 48;
/// Units whose accumulators fit into registers together.
const MAX_REGISTER_UNITS: usize = 6;
/// Steps of up to so many tokens are split along the KV positions too.
const MAX_SPLIT_TOKENS: usize = 16;

/// An attention op with its operands resolved.
#[derive(Clone, Debug)]
pub(super) struct Attention {
    pub(super) q: Columns,
    pub(super) out: Columns,
    pub(super) layer: usize,
    pub(super) heads: usize,
    pub(super) scale: f32,
    pub(super) scratch: Scratch,
}

/// The plan's scratch memory, shared by all attention ops; starts in bytes, lengths in floats.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Scratch {
    /// `[threads]` areas of `thread_len`.
    pub(super) threads_start: usize,
    pub(super) thread_len: usize,
    /// `[MAX_SPLIT_TOKENS, heads, max_splits]` partial results of `partial_len`.
    pub(super) partials_start: usize,
    pub(super) partial_len: usize,
    pub(super) max_splits: usize,
    pub(super) heads: usize,
}

/// The shapes that scratch memory depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) dim: usize,
}

impl Scratch {
    /// Grows to serve attention of this shape over up to `max_positions` positions.
    pub(super) fn grow(&mut self, shape: Shape, max_positions: usize) {
        let units = UNITS_PER_TILE.max(shape.heads / shape.kv_heads);
        let padded_dim = shape.dim.next_multiple_of(LANES);
        self.thread_len =
            self.thread_len.max(shape.dim * MAX_REGISTER_UNITS + units * (SCORE_LEN + 2 * (padded_dim + LANES)));
        self.partial_len = self.partial_len.max(padded_dim + LANES);
        self.max_splits = self.max_splits.max(max_positions.div_ceil(SPLIT));
        self.heads = self.heads.max(shape.heads);
    }

    /// Bytes of the partial results.
    pub(super) fn partials_bytes(&self) -> usize {
        MAX_SPLIT_TOKENS * self.heads * self.max_splits * self.partial_len * size_of::<f32>()
    }
}

/// Whether this step's queries are split along the KV positions: a matter of speed, not of results.
pub(super) fn splits_positions(step: &Step<'_>) -> bool {
    let longest = step.inputs.positions().iter().max().map_or(0, |&p| p as usize + 1);
    step.inputs.num_tokens() <= MAX_SPLIT_TOKENS && longest > SPLIT
}

/// A tile of queries of one row and one KV head, over some splits.
#[derive(Clone, Copy)]
struct Tile<'a> {
    blocks: &'a [u32],
    first_token: usize,
    num_tokens: usize,
    kv_head: usize,
    /// The one split to compute, into the partial results; all of them otherwise.
    split: Option<usize>,
}

/// One thread's share of an attention op.
pub(super) struct Attend<'a> {
    pub(super) step: &'a Step<'a>,
    pub(super) op: &'a Attention,
    pub(super) thread: usize,
    pub(super) num_threads: usize,
}

/// Merges the partial results of some tokens.
pub(super) struct Merge<'a> {
    pub(super) step: &'a Step<'a>,
    pub(super) op: &'a Attention,
    pub(super) tokens: std::ops::Range<usize>,
}

impl Kernel for Attend<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.layer().dtype {
            KvDtype::F16 => self.tiles::<S, half::f16>(s),
            KvDtype::F32 => self.tiles::<S, f32>(s),
        }
    }
}

impl Attend<'_> {
    #[inline(always)]
    fn layer(&self) -> &LayerState {
        &self.step.layers[self.op.layer]
    }

    /// Runs the tiles whose middle lies in this thread's share of the step's cost.
    #[inline(always)]
    fn tiles<S: Simd, E: Float>(&self, s: S) {
        let total: u64 = Tiles::new(self).map(|(_, cost)| cost).sum();
        let (thread, num_threads) = (self.thread as u64, self.num_threads as u64);
        let mut before = 0;
        for (tile, cost) in Tiles::new(self) {
            let owner = (2 * before + cost) * num_threads / (2 * total);
            before += cost;
            if owner == thread {
                self.tile::<S, E>(s, tile);
            }
        }
        if self.thread == 0 {
            self.clear_padding();
        }
    }

    /// Tokens that belong to no row: theirs is 0.
    fn clear_padding(&self) {
        let in_rows = self.step.inputs.row_starts().last().map_or(0, |&end| end as usize);
        for token in in_rows..self.step.inputs.num_tokens() {
            // SAFETY: no tile has this token; thread 0 alone writes it.
            unsafe { self.op.out.row_mut(self.step.memory, token) }.fill(0.0);
        }
    }

    #[inline(always)]
    fn tile<S: Simd, E: Float>(&self, s: S, tile: Tile<'_>) {
        let mut work = Work::new(self, tile);
        let inputs = self.step.inputs;
        match tile.split {
            Some(split) => {
                work.split::<S, E>(s, split);
                work.save_partials(split);
            }
            None => {
                let last = inputs.positions()[tile.first_token + tile.num_tokens - 1] as usize;
                for split in 0..=last / SPLIT {
                    work.split::<S, E>(s, split);
                    work.merge_split(s, split == 0);
                }
                work.finish(s);
            }
        }
    }
}

/// All tiles of the step with their costs, in an order that every thread agrees on.
///
/// An iterator, not a callback: vector code inside a closure would not be compiled with the kernel's instructions.
struct Tiles<'a> {
    inputs: &'a StepInputs,
    tokens_per_tile: usize,
    kv_heads: usize,
    by_split: bool,
    row: usize,
    next: Next,
}

/// Where `Tiles` stands within its row.
#[derive(Clone, Copy, Default)]
struct Next {
    /// Tokens of the row before the tile.
    token: usize,
    kv_head: usize,
    split: usize,
}

impl<'a> Tiles<'a> {
    fn new(attend: &Attend<'a>) -> Self {
        let kv_heads = attend.layer().heads;
        Self {
            inputs: attend.step.inputs,
            tokens_per_tile: (UNITS_PER_TILE * kv_heads / attend.op.heads).max(1),
            kv_heads,
            by_split: splits_positions(attend.step),
            row: 0,
            next: Next::default(),
        }
    }
}

impl<'a> Iterator for Tiles<'a> {
    type Item = (Tile<'a>, u64);

    fn next(&mut self) -> Option<Self::Item> {
        let bounds = loop {
            let bounds = self.inputs.row_starts().get(self.row..self.row + 2)?;
            if bounds[0] as usize + self.next.token < bounds[1] as usize {
                break bounds;
            }
            (self.row, self.next) = (self.row + 1, Next::default());
        };
        let Next { token, kv_head, split } = self.next;
        let first_token = bounds[0] as usize + token;
        let num_tokens = self.tokens_per_tile.min(bounds[1] as usize - first_token);
        let num_positions = self.inputs.positions()[first_token + num_tokens - 1] as usize + 1;
        let positions = if self.by_split { SPLIT.min(num_positions - split * SPLIT) } else { num_positions };
        if self.by_split && (split + 1) * SPLIT < num_positions {
            self.next.split += 1;
        } else if kv_head + 1 < self.kv_heads {
            self.next = Next { token, kv_head: kv_head + 1, split: 0 };
        } else {
            self.next = Next { token: token + num_tokens, kv_head: 0, split: 0 };
        }
        let split = self.by_split.then_some(split);
        let tile = Tile { blocks: self.inputs.block_table(self.row), first_token, num_tokens, kv_head, split };
        Some((tile, (num_tokens * positions) as u64))
    }
}

/// Consecutive positions of one block.
struct Run {
    block: usize,
    first_entry: usize,
    len: usize,
}

/// Some positions of a split and the columns of their values.
#[derive(Clone, Copy)]
struct Values {
    split: usize,
    /// The first unit.
    unit: usize,
    first_column: usize,
    from: usize,
    to: usize,
}

/// One unit's softmax so far: values are `acc / sum`, weights relative to `max`.
#[derive(Clone, Copy)]
struct Softmax {
    max: f32,
    sum: f32,
}

/// A tile being computed, in this thread's scratch.
struct Work<'a> {
    step: &'a Step<'a>,
    op: &'a Attention,
    layer: &'a LayerState,
    tile: Tile<'a>,
    /// Query heads per KV head.
    group: usize,
    padded_dim: usize,
    /// `[dim, units of a register tile]`.
    queries: &'a mut [f32],
    /// `[units, SCORE_LEN]`.
    scores: &'a mut [f32],
    /// `[units, padded_dim + 16]`: this split's values, then maximum and sum.
    partial: &'a mut [f32],
    /// `[units, padded_dim + 16]`: the splits so far.
    total: &'a mut [f32],
    /// Units before it have no position in this split.
    first_unit: usize,
}

impl<'a> Work<'a> {
    #[inline(always)]
    fn new(attend: &'a Attend<'a>, tile: Tile<'a>) -> Self {
        let (step, op, layer) = (attend.step, attend.op, attend.layer());
        let group = op.heads / layer.heads;
        let units = tile.num_tokens * group;
        let padded_dim = layer.dim.next_multiple_of(LANES);
        let area = op.scratch.threads_start + attend.thread * op.scratch.thread_len * size_of::<f32>();
        // SAFETY: this thread's own area, used by one tile at a time.
        let area = unsafe { step.memory.slice_mut::<f32>(area, op.scratch.thread_len) };
        let (queries, rest) = area.split_at_mut(layer.dim * MAX_REGISTER_UNITS);
        let (scores, rest) = rest.split_at_mut(units * SCORE_LEN);
        let (partial, rest) = rest.split_at_mut(units * (padded_dim + LANES));
        let total = &mut rest[..units * (padded_dim + LANES)];
        Self { step, op, layer, tile, group, padded_dim, queries, scores, partial, total, first_unit: 0 }
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

    /// Positions of a split that a unit attends to.
    #[inline(always)]
    fn num_valid(&self, unit: usize, split: usize) -> usize {
        let end = self.step.inputs.positions()[self.token(unit)] as usize + 1;
        end.saturating_sub(split * SPLIT).min(SPLIT)
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
        let absolute = split * SPLIT + position;
        let first_entry = absolute % block_size;
        Run {
            block: self.tile.blocks[absolute / block_size] as usize,
            first_entry,
            len: (block_size - first_entry).min(end - position),
        }
    }

    /// Asks for the keys that are as far on in the next split as `position` is in this one.
    #[inline(always)]
    fn prefetch_next_split<S: Simd, E: Float>(&self, s: S, split: usize, position: usize) {
        let last = self.step.inputs.positions()[self.tile.first_token + self.tile.num_tokens - 1] as usize;
        if (split + 1) * SPLIT + position <= last {
            let run = self.run(split + 1, position, SPLIT);
            // SAFETY: nothing is read.
            s.prefetch_all(unsafe { self.layer.head::<E>(0, run.block, self.tile.kv_head) });
        }
    }

    /// Computes one split of every unit that has positions in it.
    #[inline(always)]
    fn split<S: Simd, E: Float>(&mut self, s: S, split: usize) {
        let units = self.num_units();
        self.first_unit = (0..units).find(|&unit| self.num_valid(unit, split) > 0).unwrap_or(units);
        let mut unit = self.first_unit;
        while unit < units {
            unit += match units - unit {
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
        // Positions ascend with the units: the first has the fewest, the last the most.
        let (common, most) = (self.num_valid(first, split), self.num_valid(first + U - 1, split));
        self.score::<S, E, U>(s, split, first, most);
        for unit in first..first + U {
            let softmax = self.weigh(s, unit, self.num_valid(unit, split));
            let end = self.padded_dim;
            let record = &mut self.partial[unit * (end + LANES)..][..end + LANES];
            record[end] = softmax.max;
            record[end + 1] = softmax.sum;
        }
        for chunk in 0..self.padded_dim.div_ceil(4 * LANES) {
            let first_column = chunk * 4 * LANES;
            self.value_columns::<S, E, U>(s, Values { split, unit: first, first_column, from: 0, to: common });
            for unit in first..first + U {
                let to = self.num_valid(unit, split);
                if to > common {
                    self.value_columns::<S, E, 1>(s, Values { split, unit, first_column, from: common, to });
                }
            }
        }
        U
    }

    /// `scores = scale * q · k` for the split's first `count` positions (and some beyond, in whole vectors).
    #[inline(always)]
    fn score<S: Simd, E: Float, const U: usize>(&mut self, s: S, split: usize, first: usize, count: usize) {
        let (block_size, dim) = (self.layer.block_size, self.layer.dim);
        for u in 0..U {
            for (d, &x) in self.query(first + u).iter().enumerate() {
                self.queries[d * U + u] = x;
            }
        }
        let scale = s.splat(self.op.scale);
        let mut position = 0;
        while position < count {
            let run = self.run(split, position, count);
            // SAFETY: the positions attended to were stored before the last barrier; scores of others are overwritten.
            let keys = unsafe { self.layer.head::<E>(0, run.block, self.tile.kv_head) };
            if first == self.first_unit {
                // SAFETY: as above; nothing is read.
                s.prefetch_all(unsafe { self.layer.head::<E>(1, run.block, self.tile.kv_head) });
            }
            let queries = self.queries[..dim * U].as_chunks::<U>().0;
            for offset in (0..run.len).step_by(LANES) {
                let entry = run.first_entry + offset;
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

    /// Turns a unit's scores into `exp(score - max)`.
    #[inline(always)]
    fn weigh<S: Simd>(&mut self, s: S, unit: usize, valid: usize) -> Softmax {
        let padded = valid.next_multiple_of(LANES);
        let scores = &mut self.scores[unit * SCORE_LEN..][..padded];
        scores[valid..].fill(f32::NEG_INFINITY);
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
        Softmax { max, sum: s.sum(sum) }
    }

    /// Up to four vectors of columns.
    #[inline(always)]
    fn value_columns<S: Simd, E: Float, const U: usize>(&mut self, s: S, values: Values) {
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
        let Values { split, unit, first_column, from, to } = values;
        let dim = self.layer.dim;
        let record_len = self.padded_dim + LANES;
        let weights: &[[f32; SCORE_LEN]; U] =
            self.scores.as_chunks::<SCORE_LEN>().0[unit..].first_chunk().expect("units are inside the tile");
        let mut acc = [[s.splat(0.0); C]; U];
        if from > 0 {
            for u in 0..U {
                let record = &self.partial[(unit + u) * record_len + first_column..];
                for c in 0..C {
                    acc[u][c] = s.load(record[c * LANES..].first_chunk().expect("records are padded"));
                }
            }
        }
        let mut position = from;
        while position < to {
            let run = self.run(split, position, to);
            // SAFETY: the positions attended to were stored before the last barrier; others are not read.
            let rows = unsafe { self.layer.head::<E>(1, run.block, self.tile.kv_head) };
            if unit == self.first_unit && first_column == 0 {
                self.prefetch_next_split::<S, E>(s, split, position);
            }
            for row in rows[run.first_entry * dim..][..run.len * dim].chunks_exact(dim) {
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
    fn merge_split<S: Simd>(&mut self, s: S, is_first: bool) {
        let len = self.padded_dim + LANES;
        let start = self.first_unit * len;
        let units = self.total[start..].chunks_exact_mut(len).zip(self.partial[start..].chunks_exact(len));
        for (total, partial) in units {
            if is_first {
                total.copy_from_slice(partial);
            } else {
                merge(s, total, partial);
            }
        }
    }

    #[inline(always)]
    fn save_partials(&mut self, split: usize) {
        let len = self.padded_dim + LANES;
        for unit in self.first_unit..self.num_units() {
            let start = self.op.scratch.partial_start(self.token(unit), self.head(unit), split);
            // SAFETY: the place of this token, head and split, which belongs to this tile.
            let out = unsafe { self.step.memory.slice_mut::<f32>(start, len) };
            out.copy_from_slice(&self.partial[unit * len..][..len]);
        }
    }

    #[inline(always)]
    fn finish<S: Simd>(&mut self, s: S) {
        let len = self.padded_dim + LANES;
        for unit in 0..self.num_units() {
            let total = &self.total[unit * len..][..len];
            write_out(s, self.step.memory, self.op, self.layer.dim, (self.token(unit), self.head(unit)), total);
        }
    }
}

impl Scratch {
    #[inline(always)]
    fn partial_start(&self, token: usize, head: usize, split: usize) -> usize {
        let index = (token * self.heads + head) * self.max_splits + split;
        self.partials_start + index * self.partial_len * size_of::<f32>()
    }
}

impl Kernel for Merge<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (step, op) = (self.step, self.op);
        let layer = &step.layers[op.layer];
        let len = layer.dim.next_multiple_of(LANES) + LANES;
        for token in self.tokens {
            if step.inputs.row_starts().last().is_none_or(|&end| token >= end as usize) {
                continue;
            }
            let last = step.inputs.positions()[token] as usize / SPLIT;
            for head in 0..op.heads {
                // SAFETY: this token's partial results: written before the last barrier, now owned by this thread.
                let total = unsafe { step.memory.slice_mut::<f32>(op.scratch.partial_start(token, head, 0), len) };
                for split in 1..=last {
                    // SAFETY: as above; another split than 0.
                    let partial =
                        unsafe { step.memory.slice::<f32>(op.scratch.partial_start(token, head, split), len) };
                    merge(s, total, partial);
                }
                write_out(s, step.memory, op, layer.dim, (token, head), total);
            }
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

/// `total` and `partial` are a unit's values, then maximum and sum: `total` becomes the softmax over both.
#[inline(always)]
fn merge<S: Simd>(s: S, total: &mut [f32], partial: &[f32]) {
    let dim = total.len() - LANES;
    let (before, new) = (total[dim], partial[dim]);
    let max = if before > new { before } else { new };
    let (keep, add) = (s.exp(s.splat(before - max)), s.exp(s.splat(new - max)));
    let factors = (s.array(keep)[0], s.array(add)[0]);
    for (t, p) in total[..dim].as_chunks_mut::<LANES>().0.iter_mut().zip(partial.as_chunks::<LANES>().0) {
        let kept = s.mul(s.load(t), keep);
        s.store(s.fma(s.load(p), add, kept), t);
    }
    total[dim] = max;
    total[dim + 1] = total[dim + 1] * factors.0 + partial[dim + 1] * factors.1;
}

/// Divides by the sum and writes one head of one token.
#[inline(always)]
fn write_out<S: Simd>(s: S, memory: Shared, op: &Attention, dim: usize, (token, head): (usize, usize), total: &[f32]) {
    let columns = Columns { start: op.out.start + head * dim * size_of::<f32>(), width: dim, ..op.out };
    // SAFETY: one head of one token, which belongs to this thread's tile.
    let out = unsafe { columns.row_mut(memory, token) };
    let padded_dim = total.len() - LANES;
    let inverse = s.splat(1.0 / total[padded_dim + 1]);
    for (out, total) in out.chunks_mut(LANES).zip(total.as_chunks::<LANES>().0) {
        s.store_part(s.mul(s.load(total), inverse), out);
    }
}
