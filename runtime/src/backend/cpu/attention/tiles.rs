//! How a step's attention is cut into tiles.
//!
//! Invariant: tiles and costs depend on the step's inputs and the op only, so that every thread walks the same list and
//! knows which tiles are its own; each (token, head, split) is in one tile. Called by `Attend`.

use super::{Attend, Attention, SPLIT, UNITS_PER_TILE, splits_positions};
use crate::backend::StepInputs;

/// A tile of queries of one row and one KV head, over some splits.
#[derive(Clone, Copy)]
pub(super) struct Tile<'a> {
    /// The row's block table.
    pub(super) blocks: &'a [u32],
    pub(super) path: Path,
    pub(super) first_token: usize,
    pub(super) num_tokens: usize,
    pub(super) kv_head: usize,
    /// The one split to compute, into the partial results; all of them otherwise.
    pub(super) split: Option<usize>,
}

/// Where positions lie in a row's cache: in order, but those of a tree from where it begins.
#[derive(Clone, Copy)]
pub(super) struct Path {
    /// The first position that is the tree's; `usize::MAX` in a causal row.
    first: usize,
    /// Bit j: the path goes through the tree's j-th token.
    mask: u64,
}

impl Path {
    fn of(inputs: &StepInputs, token: usize) -> Self {
        match inputs.tree_mask(token) {
            0 => Self { first: usize::MAX, mask: 0 },
            mask => Self { first: inputs.positions()[token] as usize + 1 - mask.count_ones() as usize, mask },
        }
    }

    fn is_of_tree(self) -> bool {
        self.mask != 0
    }

    /// The cache index of a position up to the token's own, and how many of `len` positions from there on follow each other.
    #[inline(always)]
    pub(super) fn run(self, position: usize, len: usize) -> (usize, usize) {
        if position < self.first {
            return (position, len.min(self.first - position));
        }
        let mut rest = self.mask;
        for _ in self.first..position {
            rest &= rest - 1;
        }
        (self.first + rest.trailing_zeros() as usize, 1)
    }
}

/// All tiles of the step with their costs, in an order that every thread agrees on.
///
/// An iterator, not a callback: vector code inside a closure would not be compiled with the kernel's instructions.
pub(super) struct Tiles<'a> {
    inputs: &'a StepInputs,
    op: &'a Attention,
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
    /// Splits of the tile before this one.
    split: usize,
}

impl<'a> Tiles<'a> {
    pub(super) fn new(attend: &Attend<'a>) -> Self {
        let kv_heads = attend.layer().heads;
        Self {
            inputs: attend.step.inputs,
            op: attend.op,
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
        let path = Path::of(self.inputs, first_token);
        let most = if path.is_of_tree() { 1 } else { self.tokens_per_tile };
        let num_tokens = most.min(bounds[1] as usize - first_token);
        let end = self.inputs.positions()[first_token + num_tokens - 1] as usize + 1;
        let start = self.op.first_seen(self.inputs.positions()[first_token]);
        let this_split = start / SPLIT + split;
        let split_end = (this_split + 1) * SPLIT;
        let positions = if self.by_split { split_end.min(end) - start.max(this_split * SPLIT) } else { end - start };
        if self.by_split && split_end < end {
            self.next.split += 1;
        } else if kv_head + 1 < self.kv_heads {
            self.next = Next { token, kv_head: kv_head + 1, split: 0 };
        } else {
            self.next = Next { token: token + num_tokens, kv_head: 0, split: 0 };
        }
        let split = self.by_split.then_some(this_split);
        let tile = Tile { blocks: self.inputs.block_table(self.row), path, first_token, num_tokens, kv_head, split };
        Some((tile, (num_tokens * positions) as u64))
    }
}
