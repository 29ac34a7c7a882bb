//! Everything that changes from step to step, in one buffer of `u32` words with aligned ranges.
//!
//! Invariant: ranges have fixed offsets for the life of a plan (capture and cached bind groups depend on it); the counts
//! in the header say how much of each range is in use. Written by `runner`, uploaded once per step.

use std::ops::Range;

use super::Bucket;
use crate::sample::Draw;

/// Where each range of the input buffer starts, in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct InputLayout {
    /// The sizes that the ranges hold.
    pub bucket: Bucket,
    /// Block-table entries per row.
    pub max_blocks_per_row: u32,
    /// Tokens per block.
    pub block_size: u32,
    token_ids: usize,
    positions: usize,
    slot_map: usize,
    token_rows: usize,
    row_starts: usize,
    kv_lens: usize,
    logit_rows: usize,
    draws: usize,
    block_tables: usize,
    tree_masks: usize,
    num_words: usize,
}

/// A token of a speculative tree, and where in its row's tree it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeToken {
    /// The token id.
    pub id: u32,
    /// The token before it, by its number in the row; `None` where it follows what is cached.
    pub parent: Option<u32>,
}

/// Tokens of a tree row at most: a mask has as many bits.
pub const MAX_TREE_TOKENS: usize = 64;

/// A token of a row in the making.
struct NewToken {
    id: u32,
    position: u32,
    /// 0 in a causal row.
    mask: u64,
}

impl InputLayout {
    const HEADER_WORDS: usize = 5;

    /// Lays the ranges out; each starts at a multiple of `align_words`.
    pub fn new(bucket: Bucket, max_blocks_per_row: u32, block_size: u32, align_words: usize) -> Self {
        let mut next = 0;
        let mut range = |words: usize| {
            let start = next;
            next = (next + words).next_multiple_of(align_words.max(1));
            start
        };
        let (tokens, rows) = (bucket.tokens as usize, bucket.rows as usize);
        range(Self::HEADER_WORDS);
        Self {
            bucket,
            max_blocks_per_row,
            block_size,
            token_ids: range(tokens),
            positions: range(tokens),
            slot_map: range(tokens),
            token_rows: range(tokens),
            row_starts: range(rows + 1),
            kv_lens: range(rows),
            logit_rows: range(bucket.logit_rows as usize),
            draws: range(1 + bucket.logit_rows as usize * Draw::WORDS),
            block_tables: range(rows * max_blocks_per_row as usize),
            // Last: not uploaded where a step has no tree.
            tree_masks: range(2 * tokens),
            num_words: range(0),
        }
    }

    /// Words of the whole buffer.
    pub fn num_words(&self) -> usize {
        self.num_words
    }

    /// The words where `[tokens]` token ids lie.
    pub fn token_ids(&self) -> Range<usize> {
        self.per_token(self.token_ids)
    }

    /// The words where `[tokens]` positions lie.
    pub fn positions(&self) -> Range<usize> {
        self.per_token(self.positions)
    }

    /// The words where the `[tokens]` slot map lies.
    pub fn slot_map(&self) -> Range<usize> {
        self.per_token(self.slot_map)
    }

    /// The words where the `[tokens]` rows of the tokens lie.
    pub fn token_rows(&self) -> Range<usize> {
        self.per_token(self.token_rows)
    }

    /// The words where the `[logit_rows]` token indices lie.
    pub fn logit_rows(&self) -> Range<usize> {
        self.logit_rows..self.logit_rows + self.bucket.logit_rows as usize
    }

    /// The words where the number of logit rows that are read back lies, and then the draws of the sampled rows, which
    /// follow them: `[logit_rows, Draw::WORDS]`.
    pub fn draws(&self) -> Range<usize> {
        self.draws..self.draws + 1 + self.bucket.logit_rows as usize * Draw::WORDS
    }

    /// The first word of the `[rows, max_blocks_per_row]` block tables.
    pub fn block_tables(&self) -> usize {
        self.block_tables
    }

    /// The first word of the `[tokens, 2]` tree masks, low half first.
    pub fn tree_masks(&self) -> usize {
        self.tree_masks
    }

    fn per_token(&self, start: usize) -> Range<usize> {
        start..start + self.bucket.tokens as usize
    }
}

/// One step's inputs. Slices returned by the getters cover what is in use, without padding.
#[derive(Clone, Debug)]
pub struct StepInputs {
    layout: InputLayout,
    words: Vec<u32>,
}

impl StepInputs {
    /// An empty step of this layout.
    pub fn new(layout: InputLayout) -> Self {
        Self { layout, words: vec![0; layout.num_words] }
    }

    /// Where things are.
    pub fn layout(&self) -> &InputLayout {
        &self.layout
    }

    /// The whole buffer, for one upload. Words 0 to 4: number of tokens, rows and logit rows in use, largest KV length,
    /// number of tree rows.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// The buffer up to the last block table in use, or the last tree mask where there are trees: the rest is never read.
    pub fn used_words(&self) -> &[u32] {
        let end = match self.has_trees() {
            true => self.layout.tree_masks + 2 * self.num_tokens(),
            false => self.layout.block_tables + self.num_rows() * self.layout.max_blocks_per_row as usize,
        };
        &self.words[..end]
    }

    /// Tokens in use.
    pub fn num_tokens(&self) -> usize {
        self.words[0] as usize
    }

    /// Rows in use.
    pub fn num_rows(&self) -> usize {
        self.words[1] as usize
    }

    /// Logit rows in use.
    pub fn num_logit_rows(&self) -> usize {
        self.words[2] as usize
    }

    /// The first logit rows, whose logits are read back.
    pub fn num_read_rows(&self) -> usize {
        self.words[self.layout.draws] as usize
    }

    /// The logit rows after those, which the device samples.
    pub fn num_sampled_rows(&self) -> usize {
        self.num_logit_rows() - self.num_read_rows()
    }

    /// KV entries of the longest row once the step's own are stored.
    pub fn max_kv_len(&self) -> usize {
        self.words[3] as usize
    }

    /// Whether some row is a tree: else tree masks are never read.
    pub fn has_trees(&self) -> bool {
        self.words[4] > 0
    }

    /// Forgets the last step.
    pub fn clear(&mut self) {
        self.words[..InputLayout::HEADER_WORDS].fill(0);
        self.words[self.layout.row_starts] = 0;
        self.words[self.layout.draws] = 0;
    }

    /// Appends one row that computes `token_ids` at positions from `start`, with its whole block table.
    ///
    /// # Panics
    /// When the bucket is full or the table does not cover the positions: the runner's bound was wrong.
    pub fn push_row(&mut self, token_ids: impl ExactSizeIterator<Item = u32>, start: u32, block_table: &[u32]) {
        let token = |(i, id)| NewToken { id, position: start + i as u32, mask: 0 };
        self.push(token_ids.enumerate().map(token), start, block_table);
    }

    /// Appends one row that computes a tree of tokens after `start` cached ones, with its whole block table.
    ///
    /// Token j is stored at cache index `start + j`. It sees what is cached before `start`, the tokens from a root down to
    /// its parent, and itself: its path. Its position is `start` plus the number of tokens before it on the path, so that
    /// positions along a path are those of a causal row, and a backend that walks a path's keys in the order of positions
    /// gives each token of a tree the bits that it has as the last of a causal row. A window counts positions, too.
    ///
    /// # Panics
    /// When the tree is empty, has more than `MAX_TREE_TOKENS` tokens or a parent that does not come before its child, when
    /// the bucket is full or the table does not cover the tokens: the runner's bound was wrong.
    pub fn push_tree_row(&mut self, tokens: &[TreeToken], start: u32, block_table: &[u32]) {
        assert!((1..=MAX_TREE_TOKENS).contains(&tokens.len()), "a tree row of {} tokens", tokens.len());
        let mut masks = [0u64; MAX_TREE_TOKENS];
        for (j, token) in tokens.iter().enumerate() {
            let path = token.parent.map_or(0, |parent| {
                assert!((parent as usize) < j, "token {j} of a tree comes before its parent {parent}");
                masks[parent as usize]
            });
            masks[j] = path | 1 << j;
        }
        let token = |(token, mask): (&TreeToken, u64)| {
            let position = start + mask.count_ones() - 1;
            NewToken { id: token.id, position, mask }
        };
        self.push(tokens.iter().zip(masks).map(token), start, block_table);
        self.words[4] += 1;
    }

    fn push(&mut self, tokens: impl ExactSizeIterator<Item = NewToken>, start: u32, block_table: &[u32]) {
        let (layout, first, row) = (self.layout, self.num_tokens(), self.num_rows());
        let num_new = tokens.len();
        assert!(first + num_new <= layout.bucket.tokens as usize, "step has more tokens than its bucket");
        assert!(row < layout.bucket.rows as usize, "step has more rows than its bucket");
        assert!(block_table.len() <= layout.max_blocks_per_row as usize, "block table longer than its row");
        for (i, NewToken { id, position, mask }) in tokens.enumerate() {
            let index = start + i as u32;
            let block = block_table[(index / layout.block_size) as usize];
            self.words[layout.token_ids + first + i] = id;
            self.words[layout.positions + first + i] = position;
            self.words[layout.slot_map + first + i] = block * layout.block_size + index % layout.block_size;
            self.words[layout.token_rows + first + i] = row as u32;
            let masks = layout.tree_masks + 2 * (first + i);
            self.words[masks..masks + 2].copy_from_slice(&[mask as u32, (mask >> 32) as u32]);
        }
        self.words[layout.row_starts + row + 1] = (first + num_new) as u32;
        self.words[layout.kv_lens + row] = start + num_new as u32;
        let table = layout.block_tables + row * layout.max_blocks_per_row as usize;
        self.words[table..table + block_table.len()].copy_from_slice(block_table);
        self.words[0] = (first + num_new) as u32;
        self.words[1] = row as u32 + 1;
        self.words[3] = self.words[3].max(start + num_new as u32);
    }

    /// Asks for the logits of one token of the step.
    ///
    /// # Panics
    /// After a sampled row, or when the bucket is full: the runner's bound was wrong.
    pub fn push_logit_row(&mut self, token_index: u32) {
        assert_eq!(self.num_sampled_rows(), 0, "rows that are read back come before sampled ones");
        self.words[self.layout.draws] += 1;
        self.push_row_of_logits(token_index);
    }

    /// Asks for a token drawn from the logits of one token of the step, which stay on the device.
    ///
    /// # Panics
    /// When the bucket is full: the runner's bound was wrong.
    pub fn push_sampled_row(&mut self, token_index: u32, draw: Draw) {
        let start = self.layout.draws + 1 + self.num_sampled_rows() * Draw::WORDS;
        self.push_row_of_logits(token_index);
        self.words[start..start + Draw::WORDS].copy_from_slice(&draw.to_words());
    }

    fn push_row_of_logits(&mut self, token_index: u32) {
        let count = self.num_logit_rows();
        assert!(count < self.layout.bucket.logit_rows as usize, "step has more logit rows than its bucket");
        self.words[self.layout.logit_rows + count] = token_index;
        self.words[2] = count as u32 + 1;
    }

    /// Makes the words past what is in use harmless up to `bucket`: padding tokens and logit rows read token 0 at position
    /// 0 and write to block 0, padding rows are empty.
    ///
    /// # Panics
    /// When the bucket is smaller than the step or larger than the layout.
    pub fn pad(&mut self, bucket: Bucket) {
        let layout = self.layout;
        let (num_tokens, rows, logit_rows) = (self.num_tokens(), self.num_rows(), self.num_logit_rows());
        let mut fill = |start: usize, used: usize, padded: u32, most: u32, value: u32| {
            assert!(used <= padded as usize && padded <= most, "bucket does not fit the step or the layout");
            self.words[start + used..start + padded as usize].fill(value);
        };
        for start in [layout.token_ids, layout.positions, layout.slot_map, layout.token_rows] {
            fill(start, num_tokens, bucket.tokens, layout.bucket.tokens, 0);
        }
        fill(layout.tree_masks, 2 * num_tokens, 2 * bucket.tokens, 2 * layout.bucket.tokens, 0);
        fill(layout.row_starts + 1, rows, bucket.rows, layout.bucket.rows, num_tokens as u32);
        fill(layout.kv_lens, rows, bucket.rows, layout.bucket.rows, 0);
        fill(layout.logit_rows, logit_rows, bucket.logit_rows, layout.bucket.logit_rows, 0);
        // Sampled greedily.
        let sampled = self.num_sampled_rows();
        let unused = sampled..bucket.logit_rows as usize - self.num_read_rows();
        self.words[layout.draws + 1..][unused.start * Draw::WORDS..unused.end * Draw::WORDS].fill(0);
    }

    /// The padded step as if the padding were in use, for a test backend that really computes it.
    #[cfg(test)]
    pub(crate) fn with_padding_in_use(&self, bucket: Bucket) -> Self {
        let mut all = self.clone();
        all.words[..3].copy_from_slice(&[bucket.tokens, bucket.rows, bucket.logit_rows]);
        all
    }

    /// `[tokens]`.
    pub fn token_ids(&self) -> &[u32] {
        &self.words[self.layout.token_ids..][..self.num_tokens()]
    }

    /// `[tokens]`: absolute position of each token in its sequence; in a tree row, along its path.
    pub fn positions(&self) -> &[u32] {
        &self.words[self.layout.positions..][..self.num_tokens()]
    }

    /// `[tokens]`: `block * block_size + offset` where the token's KV goes.
    pub fn slot_map(&self) -> &[u32] {
        &self.words[self.layout.slot_map..][..self.num_tokens()]
    }

    /// `[rows + 1]`: row r owns tokens `row_starts[r] .. row_starts[r + 1]`.
    pub fn row_starts(&self) -> &[u32] {
        &self.words[self.layout.row_starts..][..self.num_rows() + 1]
    }

    /// `[rows]`: KV entries of the row once the step's own are stored.
    pub fn kv_lens(&self) -> &[u32] {
        &self.words[self.layout.kv_lens..][..self.num_rows()]
    }

    /// Bit j is set where a token of a tree row sees the row's j-th token; 0 in a causal row.
    pub fn tree_mask(&self, token: usize) -> u64 {
        if !self.has_trees() {
            return 0;
        }
        let at = self.layout.tree_masks + 2 * token;
        u64::from(self.words[at]) | u64::from(self.words[at + 1]) << 32
    }

    /// `[logit_rows]`: indices into the step's tokens.
    pub fn logit_rows(&self) -> &[u32] {
        &self.words[self.layout.logit_rows..][..self.num_logit_rows()]
    }

    /// What is wanted of each sampled row.
    pub fn draws(&self) -> impl ExactSizeIterator<Item = Draw> {
        let words = &self.words[self.layout.draws + 1..][..self.num_sampled_rows() * Draw::WORDS];
        words.as_chunks().0.iter().map(|&words| Draw::from_words(words))
    }

    /// Block table of one row; entries past its length are stale.
    pub fn block_table(&self, row: usize) -> &[u32] {
        let per_row = self.layout.max_blocks_per_row as usize;
        &self.words[self.layout.block_tables + row * per_row..][..per_row]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUCKET: Bucket = Bucket { tokens: 80, rows: 4, logit_rows: 2 };

    fn step() -> StepInputs {
        StepInputs::new(InputLayout::new(BUCKET, 3, 32, 64))
    }

    fn tree(parents: &[Option<u32>]) -> Vec<TreeToken> {
        parents.iter().zip(70..).map(|(&parent, id)| TreeToken { id, parent }).collect()
    }

    #[test]
    fn tokens_of_a_tree_have_places_by_number_and_positions_by_depth() {
        let mut step = step();
        step.push_row([5, 6].into_iter(), 9, &[1]);
        step.push_tree_row(&tree(&[None, Some(0), Some(0), None, Some(2)]), 30, &[7, 3]);
        step.push_row([8].into_iter(), 0, &[2]);
        assert_eq!(step.token_ids(), [5, 6, 70, 71, 72, 73, 74, 8]);
        assert_eq!(step.positions(), [9, 10, 30, 31, 31, 30, 32, 0]);
        let places = [7 * 32 + 30, 7 * 32 + 31, 3 * 32, 3 * 32 + 1, 3 * 32 + 2];
        assert_eq!(step.slot_map()[2..7], places);
        let masks: Vec<u64> = (0..8).map(|token| step.tree_mask(token)).collect();
        assert_eq!(masks, [0, 0, 0b1, 0b11, 0b101, 0b1000, 0b10101, 0]);
        assert_eq!((step.kv_lens(), step.max_kv_len()), (&[11, 35, 1][..], 35));
    }

    #[test]
    fn masks_are_uploaded_and_read_in_steps_with_trees_only() {
        let mut step = step();
        let chain: Vec<Option<u32>> = (0..64).map(|j: u32| j.checked_sub(1)).collect();
        step.push_tree_row(&tree(&chain), 0, &[1, 2]);
        assert!(step.has_trees());
        assert_eq!(step.tree_mask(63), u64::MAX);
        assert_eq!(step.used_words().len(), step.layout().tree_masks() + 2 * 64);
        assert_eq!(step.used_words().last(), Some(&u32::MAX));
        step.clear();
        step.push_row([1].into_iter(), 0, &[1]);
        assert_eq!((step.has_trees(), step.tree_mask(0)), (false, 0));
        assert_eq!(step.used_words().len(), step.layout().block_tables() + 3);
        // A token of a causal row has no mask left from a tree that was there before, nor has padding.
        step.push_tree_row(&tree(&[None]), 4, &[1]);
        step.pad(BUCKET);
        let step = step.with_padding_in_use(BUCKET);
        assert_eq!([0, 1, 2, 63].map(|token| step.tree_mask(token)), [0, 1, 0, 0]);
    }

    #[test]
    #[should_panic(expected = "token 1 of a tree comes before its parent 1")]
    fn a_parent_comes_before_its_child() {
        step().push_tree_row(&tree(&[None, Some(1)]), 0, &[1]);
    }

    #[test]
    #[should_panic(expected = "a tree row of 65 tokens")]
    fn a_tree_has_as_many_tokens_as_a_mask_has_bits() {
        step().push_tree_row(&tree(&[None; 65]), 0, &[1, 2, 3]);
    }
}
