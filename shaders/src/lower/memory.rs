//! The buffers of activations, inputs and partial sums, sized once for the largest step.
//!
//! Invariant: rows are padded to whole tiles, and every range starts at a multiple of 256 bytes.

use runtime::backend::{Bucket, InputLayout};
use runtime::error::DeviceError;
use runtime::ids::Slot;
use runtime::program::memory::{self, MemoryPlan};
use runtime::program::{Op, Program};
use runtime::sample::Sample;

use super::sample::num_shares;
use crate::device::{Buffer, Gpu, Range};
use crate::tuning::{DeviceClass, Tuning};

/// Rows of a slot are padded to a multiple of this: no tile covers more tokens.
pub(crate) const PAD_ROWS: u32 = 64;
/// Elements: ranges of slots start at multiples of 256 bytes.
const ALIGN_ELEMENTS: usize = 64;
/// Of one of two ranges that nobody touches.
const UNUSED_BYTES: u64 = 256;
/// At most this many splits, so that partial sums of long contexts stay small.
const MAX_SPLITS: u32 = 64;

/// The buffers of activations and inputs, shared by all plans.
pub(crate) struct Memory {
    plan: MemoryPlan,
    lanes: Vec<Buffer>,
    pub(crate) inputs: Buffer,
    /// `[tokens]`: see `CheckFinite`.
    pub(crate) flags: Buffer,
    /// `[sampled_rows]`: see `Sample`.
    pub(crate) samples: Buffer,
    /// What sampling knows of each share of a row: four words, and a score.
    pub(super) sample_bests: Buffer,
    pub(super) sample_scores: Buffer,
    /// Partial sums of attention.
    pub(super) partials: Buffer,
    unused: Buffer,
    /// Bytes of all of them.
    pub(crate) bytes: u64,
}

impl Memory {
    /// Sizes everything for `layout.bucket`, contexts of up to `context` tokens and kernels of these shapes.
    ///
    /// # Errors
    /// Out of memory.
    pub(crate) fn new(
        gpu: &Gpu,
        tuning: &Tuning,
        program: &Program,
        layout: &InputLayout,
        context: u32,
    ) -> Result<Self, DeviceError> {
        use wgpu::BufferUsages as Usage;
        let Bucket { tokens, rows, logit_rows } = layout.bucket;
        let pad = |rows: u32| rows.next_multiple_of(PAD_ROWS);
        let padded = Bucket { tokens: pad(tokens), rows, logit_rows: pad(logit_rows) };
        let plan = memory::plan(program, padded, ALIGN_ELEMENTS);
        let usage = Usage::STORAGE | Usage::COPY_SRC;
        let lanes = plan.lanes.iter().map(|&len| gpu.buffer("activations", 4 * len as u64, usage));
        let lanes = lanes.collect::<Result<Vec<_>, _>>()?;
        let inputs = gpu.buffer("step inputs", 4 * layout.num_words() as u64, Usage::STORAGE | Usage::COPY_DST)?;
        let flags = gpu.buffer("flags", 4 * u64::from(tokens), usage | Usage::COPY_DST)?;
        // The plain variant may take over later: room for either.
        let tunings = [tuning, DeviceClass::Unknown.tuning()];
        let partial_bytes = tunings.map(|tuning| partial_bytes(gpu, tuning, program, layout, context));
        let partials =
            gpu.buffer("partial sums of attention", partial_bytes[0].max(partial_bytes[1]), Usage::STORAGE)?;
        let shares = u64::from(logit_rows) * sample_shares(program);
        let sample_bytes = u64::from(logit_rows) * size_of::<Sample>() as u64;
        let samples = gpu.buffer("samples", sample_bytes, usage)?;
        let sample_bests = gpu.buffer("partial results of sampling", 16 * shares, Usage::STORAGE)?;
        let sample_scores = gpu.buffer("scores of sampling", 4 * shares, Usage::STORAGE)?;
        let unused = gpu.buffer("unused", 3 * UNUSED_BYTES, Usage::STORAGE)?;
        let all = lanes.iter().chain([&inputs, &flags, &samples, &sample_bests, &sample_scores, &partials]);
        let bytes = all.map(|buffer| buffer.size()).sum();
        Ok(Self { plan, lanes, inputs, flags, samples, sample_bests, sample_scores, partials, unused, bytes })
    }

    pub(crate) fn slot(&self, slot: Slot) -> Range<'_> {
        let place = self.plan.slots[slot.index()];
        Range { buffer: &self.lanes[place.lane], offset: 4 * place.offset as u64, size: 4 * place.len as u64 }
    }

    /// What is bound in the place of a buffer that a kernel's variant does not touch; each of three places has its own, since no
    /// two bindings of a dispatch may write to the same bytes.
    pub(super) fn unused(&self, place: usize) -> Range<'_> {
        Range { buffer: &self.unused, offset: place as u64 * UNUSED_BYTES, size: UNUSED_BYTES }
    }

    pub(super) fn input(&self, words: std::ops::Range<usize>) -> Range<'_> {
        Range { buffer: &self.inputs, offset: 4 * words.start as u64, size: 4 * words.len() as u64 }
    }
}

pub(super) fn whole(buffer: &wgpu::Buffer) -> Range<'_> {
    Range { buffer, offset: 0, size: buffer.size() }
}

/// Shares of a row that a program samples.
fn sample_shares(program: &Program) -> u64 {
    let shares = program.ops.iter().map(|op| match op {
        Op::Sample { logits } => num_shares(program.slots[logits.index()].width),
        _ => 0,
    });
    u64::from(shares.max().unwrap_or(0))
}

/// Turns of all loops together that a lane may take on software Vulkan: Mesa's lavapipe leaves every loop after 65535 turns,
/// those of inner loops counted, and says nothing.
const MAX_SOFTWARE_TURNS: u32 = 60_000;

/// Positions per split: the table's, or more where the context is long. Fixed for the life of an engine.
pub(crate) fn split_len(gpu: &Gpu, tuning: &Tuning, context: u32) -> u32 {
    let split = tuning.attention.split.max(context.div_ceil(MAX_SPLITS).next_power_of_two());
    // Of heads of up to 512 elements a lane walks 64 positions.
    if gpu.is_software() { split.min(64 * tuning.attention.parts) } else { split }
}

/// Splits that one dispatch may walk: as many as there are, but on software Vulkan.
pub(super) fn walk_splits(gpu: &Gpu, split: u32, parts: u32, lane_heads: u32, head_dim: u32) -> u32 {
    if !gpu.is_software() {
        return u32::MAX;
    }
    // Every loop of attention.wgsl, as if none were unrolled.
    let quads = head_dim / 4;
    let per_position = 1 + 2 * quads * (1 + lane_heads) + lane_heads * (1 + quads);
    let per_split = 1 + 3 * lane_heads * (1 + quads) + parts * lane_heads * (2 + quads);
    (MAX_SOFTWARE_TURNS / (split.div_ceil(parts) * per_position + per_split)).max(1)
}

/// Splits that the positions which a token sees lie in at most.
pub(super) fn window_splits(window: Option<u32>, split: u32) -> u32 {
    // Of `window` positions in a row, all but the first may reach into further splits.
    window.map_or(u32::MAX, |window| (window - 1).div_ceil(split) + 1)
}

fn partial_bytes(gpu: &Gpu, tuning: &Tuning, program: &Program, layout: &InputLayout, context: u32) -> u64 {
    // At most one more than the context has, where a block reaches past it.
    let positions = layout.max_blocks_per_row.saturating_mul(layout.block_size);
    let split = split_len(gpu, tuning, context);
    let splits = |window| u64::from(positions.div_ceil(split).min(window_splits(window, split)));
    let all_tokens = u64::from(layout.bucket.tokens);
    let split_tokens = all_tokens.min(u64::from(tuning.attention.max_split_tokens));
    let bytes = program.ops.iter().map(|op| match op {
        Op::Attention { heads, head_dim, window, .. } => {
            // A long walk leaves one sum for each token.
            let sums = (split_tokens * splits(*window)).max(if gpu.is_software() { all_tokens } else { 0 });
            sums * u64::from(*heads) * u64::from(head_dim + 4) * 4
        }
        _ => 0,
    });
    bytes.max().unwrap_or(0)
}
