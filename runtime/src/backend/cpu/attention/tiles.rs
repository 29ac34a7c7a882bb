//! How a step's attention is cut into tiles.
//!
//! Invariant: tiles and costs depend on the step's inputs and the op only, so that every thread walks the same list and
//! knows which tiles are its own; each (token, head, split) is in one tile. Called by `Attend`.

use super::{Attend, SPLIT, UNITS_PER_TILE, splits_positions};
use crate::backend::StepInputs;

/// A tile of queries of one row and one KV head, over some splits.
#[derive(Clone, Copy)]
pub(super) struct Tile<'a> {
    /// The row's block table.
    pub(super) blocks: &'a [u32],
    pub(super) first_token: usize,
    pub(super) num_tokens: usize,
    pub(super) kv_head: usize,
    /// The one split to compute, into the partial results; all of them otherwise.
    pub(super) split: Option<usize>,
}

/// All tiles of the step with their costs, in an order that every thread agrees on.
///
/// An iterator, not a callback: vector code inside a closure would not be compiled with the kernel's instructions.
pub(super) struct Tiles<'a> {
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
    pub(super) fn new(attend: &Attend<'a>) -> Self {
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
