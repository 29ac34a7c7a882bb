//! Attention over the paged cache, in fixed splits of the KV positions.
//!
//! Formula: `out = softmax(scale * q · kᵀ) · v` over the positions that the token sees (`Op::Attention`; online softmax, Milakov
//! and Gimelshein 2018; splits as in FlashAttention-2 and Flash-Decoding).
//! Operands: q `[tokens, heads * head_dim]` f32; keys and values as in `state`, f16, f32, or widened to f32; out like q; step
//! inputs. A task owns a tile of consecutive queries of one row, or one of a tree, and all query heads of one KV head (a "unit" is
//! one query of one head); with few queries, one split of it.
//! Accumulation: f32. Within a split: scores by one chain over head_dim, their maximum, `exp`, the sum in 16 lanes, values
//! by one chain over the positions; then splits are merged in order. A unit's operations depend on its own position only:
//! any chunking, tile or batch gives the same bits. Tolerance: 1e-5 relative, from the order of sums and `exp`.
//! Limits: none on head_dim or block size; multiples of 16 are fast.
//! `tiles` cuts a step into tiles, `work` computes one, `widen` loads small types, `merge` joins splits.

mod kernels;
mod merge;
mod tiles;
mod widen;
mod work;

use super::repack::Float;
use super::rows::Columns;
use super::simd::{Kernel, LANES, Simd};
use super::state::LayerState;
use super::step::Step;
use crate::program::KvDtype;
use merge::{merge, write_out};
use tiles::{Tile, Tiles};
use work::Work;

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
    /// `usize::MAX` where there is none.
    pub(super) window: usize,
    pub(super) soft_cap: Option<f32>,
    /// Names a vector.
    pub(super) sinks: Option<usize>,
    pub(super) scratch: Scratch,
}

impl Attention {
    /// The first position that a token at `position` sees.
    #[inline(always)]
    fn first_seen(&self, position: u32) -> usize {
        (position as usize + 1).saturating_sub(self.window)
    }
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
        let per_tile = shape.dim * MAX_REGISTER_UNITS + LANES * padded_dim;
        self.thread_len = self.thread_len.max(per_tile + units * (SCORE_LEN + 2 * (padded_dim + LANES)));
        self.partial_len = self.partial_len.max(padded_dim + LANES);
        self.max_splits = self.max_splits.max(max_positions.div_ceil(SPLIT));
        self.heads = self.heads.max(shape.heads);
    }

    /// Bytes of the partial results.
    pub(super) fn partials_bytes(&self) -> usize {
        MAX_SPLIT_TOKENS * self.heads * self.max_splits * self.partial_len * size_of::<f32>()
    }

    /// Byte where the partial result of one token, head and split starts.
    #[inline(always)]
    fn partial_start(&self, token: usize, head: usize, split: usize) -> usize {
        let index = (token * self.heads + head) * self.max_splits + split;
        self.partials_start + index * self.partial_len * size_of::<f32>()
    }
}

/// Whether this step's queries are split along the KV positions: a matter of speed, not of results.
pub(super) fn splits_positions(step: &Step<'_>) -> bool {
    let longest = step.inputs.positions().iter().max().map_or(0, |&p| p as usize + 1);
    step.inputs.num_tokens() <= MAX_SPLIT_TOKENS && longest > SPLIT
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
            // As they are, or widened.
            KvDtype::F32 | KvDtype::Bf16 | KvDtype::Fp8E4m3 | KvDtype::Int8PerTokenHead => self.tiles::<S, f32>(s),
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
                let first = self.op.first_seen(inputs.positions()[tile.first_token]);
                for split in first / SPLIT..=last / SPLIT {
                    work.split::<S, E>(s, split);
                    work.merge_split(s, split);
                }
                work.finish(s);
            }
        }
    }
}

impl Kernel for Merge<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (step, op) = (self.step, self.op);
        let layer = &step.layers[op.layer];
        let len = layer.dim.next_multiple_of(LANES) + LANES;
        for token in self.tokens {
            let position = step.inputs.positions()[token];
            let (first, last) = (op.first_seen(position) / SPLIT, position as usize / SPLIT);
            for head in 0..op.heads {
                // SAFETY: this token's partial results: written before the last barrier, now owned by this thread.
                let total = unsafe { step.memory.slice_mut::<f32>(op.scratch.partial_start(token, head, first), len) };
                for split in first + 1..=last {
                    // SAFETY: as above; another split than the first.
                    let partial =
                        unsafe { step.memory.slice::<f32>(op.scratch.partial_start(token, head, split), len) };
                    merge(s, total, partial);
                }
                write_out(s, step, op, layer.dim, (token, head), total);
            }
        }
    }
}
