//! The paged KV cache's bookkeeping: which sequence holds which block, and which prefixes are remembered.
//!
//! `KvCacheManager` is the only door; `BlockPool` (who holds a block) and `RadixCache` (which tokens a block remembers)
//! lie behind it. Invariants: only whole, computed blocks enter the tree, and only while their table holds them; a table
//! that holds a cached block holds the whole path above it, so that the idle list, filled leaf first, always starts with
//! a leaf. Called by the scheduler; `check_invariants` says all of it in code.

mod pool;
mod radix;
#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use self::pool::BlockPool;
pub use self::radix::{NodeId, RadixCache};
use crate::ids::{BlockId, TokenId};

/// The blocks of one sequence, in the order of its positions. Made by `open`, given back by `release`.
#[derive(Debug, Default)]
pub struct BlockTable {
    /// Position p lives in block `p / block_size`.
    blocks: Vec<BlockId>,
    /// How many of the first blocks are in the tree.
    num_committed_blocks: usize,
    /// Another sequence's block was committed first for tokens of this one: from there on the blocks stay private,
    /// because a child needs a path that its own table holds.
    is_private: bool,
    /// The root of the sequence's salt, while open.
    root: Option<NodeId>,
}

impl BlockTable {
    /// The blocks, in the order of positions.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Whether blocks of this table will not be committed any more.
    pub fn is_private(&self) -> bool {
        self.is_private
    }

    /// Makes room for `num_blocks` blocks in all, so that growing to them does not allocate.
    pub fn reserve_capacity(&mut self, num_blocks: usize) {
        self.blocks.reserve(num_blocks.saturating_sub(self.blocks.len()));
    }
}

/// Not enough blocks, even with every idle one evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfBlocks;

/// Owns the pool and the tree.
#[derive(Debug)]
pub struct KvCacheManager {
    pool: BlockPool,
    radix: RadixCache,
    block_size: u32,
    enable_prefix_caching: bool,
    num_evicted_blocks: u64,
}

impl KvCacheManager {
    /// A cache of `num_blocks` blocks (the reserved block 0 included) of `block_size` tokens.
    ///
    /// # Panics
    /// When `block_size` is 0 or there is no block besides block 0; `EngineConfig::check` refuses both.
    pub fn new(num_blocks: u32, block_size: u32, enable_prefix_caching: bool) -> Self {
        assert!(block_size > 0, "a block holds at least one token");
        Self {
            pool: BlockPool::new(num_blocks),
            radix: RadixCache::new(num_blocks, block_size),
            block_size,
            enable_prefix_caching,
            num_evicted_blocks: 0,
        }
    }

    /// Tokens per block.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Whether computed blocks are remembered at all.
    pub fn is_prefix_caching(&self) -> bool {
        self.enable_prefix_caching
    }

    /// Blocks that sequences can have, block 0 excluded.
    pub fn num_total_blocks(&self) -> u32 {
        self.pool.num_blocks() - 1
    }

    /// Blocks that nobody holds: free or idle.
    pub fn num_available_blocks(&self) -> u32 {
        self.pool.num_free_blocks() + self.pool.num_idle_blocks()
    }

    /// Blocks held by sequences.
    pub fn num_used_blocks(&self) -> u32 {
        self.num_total_blocks() - self.num_available_blocks()
    }

    /// Blocks in the prefix tree, held or idle.
    pub fn num_cached_blocks(&self) -> u32 {
        self.radix.num_cached_blocks()
    }

    /// Salts in use by tables or cached blocks, "none" included.
    pub fn num_salts(&self) -> usize {
        self.radix.num_roots()
    }

    /// Cached blocks that were given up for new ones; only grows.
    pub fn num_evicted_blocks(&self) -> u64 {
        self.num_evicted_blocks
    }

    /// Opens an empty table with the longest cached prefix of `tokens`, in whole blocks and at most `max_tokens` and
    /// `tokens.len() - 1` tokens (the last known token is always computed, because its logits are needed). Returns the
    /// number of tokens found; the table holds a reference on each of their blocks.
    pub fn match_prefix(
        &mut self,
        table: &mut BlockTable,
        salt: Option<&Arc<str>>,
        tokens: &[TokenId],
        max_tokens: usize,
    ) -> u32 {
        assert!(table.root.is_none() && table.blocks.is_empty(), "a table is opened once");
        let root = self.radix.open_root(salt);
        table.root = Some(root);
        if !self.enable_prefix_caching {
            return 0;
        }
        let mut parent = root;
        let matchable = &tokens[..tokens.len().saturating_sub(1).min(max_tokens)];
        for block_tokens in matchable.chunks_exact(self.block_size as usize) {
            let Some(block) = self.radix.child(parent, block_tokens) else { break };
            self.pool.acquire(block);
            table.blocks.push(block);
            parent = block.into();
        }
        table.num_committed_blocks = table.blocks.len();
        table.blocks.len() as u32 * self.block_size
    }

    /// Makes the table cover `num_tokens` positions, evicting the least recently used idle blocks if need be. The new
    /// blocks are at the table's end.
    ///
    /// # Errors
    /// Too few blocks are free or idle; nothing has changed.
    pub fn reserve(&mut self, table: &mut BlockTable, num_tokens: u32) -> Result<(), OutOfBlocks> {
        assert!(table.root.is_some(), "the table is not open");
        let needed = (num_tokens.div_ceil(self.block_size) as usize).saturating_sub(table.blocks.len());
        if needed > self.num_available_blocks() as usize {
            return Err(OutOfBlocks);
        }
        for _ in 0..needed {
            if self.pool.num_free_blocks() == 0 {
                self.evict_oldest();
                self.num_evicted_blocks += 1;
            }
            table.blocks.push(self.pool.allocate().expect("a block was evicted for this"));
        }
        Ok(())
    }

    /// Remembers the blocks that the first `num_computed_tokens` of `tokens` fill and that are not in the tree yet.
    ///
    /// The caller promises that the KV of those positions is stored, finite, and of accepted tokens.
    pub fn commit(&mut self, table: &mut BlockTable, tokens: &[TokenId], num_computed_tokens: u32) {
        let block_size = self.block_size as usize;
        let num_full_blocks = num_computed_tokens as usize / block_size;
        if num_full_blocks <= table.num_committed_blocks || table.is_private || !self.enable_prefix_caching {
            return;
        }
        let root = table.root.expect("the table is not open");
        for i in table.num_committed_blocks..num_full_blocks {
            let parent = if i == 0 { root } else { table.blocks[i - 1].into() };
            let block_tokens = &tokens[i * block_size..(i + 1) * block_size];
            if self.radix.child(parent, block_tokens).is_some() {
                table.is_private = true;
                return;
            }
            self.radix.insert(parent, block_tokens, table.blocks[i]);
            table.num_committed_blocks = i + 1;
        }
    }

    /// Gives every block back and closes the table. Cached blocks become idle once nobody else holds them.
    pub fn release(&mut self, table: &mut BlockTable) {
        let Some(root) = table.root.take() else { return };
        // Leaf first: a parent must come after its children in the idle list.
        while let Some(block) = table.blocks.pop() {
            self.pool.release(block, self.radix.contains(block));
        }
        self.radix.close_root(root);
        table.num_committed_blocks = 0;
        table.is_private = false;
    }

    /// Forgets every cached prefix that no table holds.
    pub fn reset(&mut self) {
        while self.pool.num_idle_blocks() > 0 {
            self.evict_oldest();
        }
    }

    fn evict_oldest(&mut self) {
        let block = self.pool.oldest_idle().expect("an idle block was counted");
        self.radix.remove(block);
        self.pool.forget(block);
    }

    /// Checks pool, tree and the given tables, which must be all there are, against each other.
    ///
    /// # Panics
    /// When they disagree: a block is lost, in two places, or counted wrongly.
    pub fn check_invariants<'a>(&self, tables: impl Iterator<Item = &'a BlockTable> + Clone) {
        let mut owners = vec![0; self.pool.num_blocks() as usize];
        let open_tables = tables.clone().filter(|table| table.root.is_some());
        self.radix.check_invariants(|root| open_tables.clone().filter(|table| table.root == Some(root)).count() as u32);
        for table in tables {
            assert!(table.root.is_some() || table.blocks.is_empty(), "a closed table holds blocks");
            for (i, &block) in table.blocks.iter().enumerate() {
                owners[block.index()] += 1;
                let committed = i < table.num_committed_blocks;
                assert_eq!(self.radix.contains(block), committed, "block {block} at place {i} of its table");
                let parent = i.checked_sub(1).map(|i| table.blocks[i]);
                assert!(!committed || self.radix.parent_block(block) == parent, "path of block {block}");
            }
        }
        assert_eq!(owners[0], 0, "the reserved block is in a table");
        for block in (1..self.pool.num_blocks()).map(BlockId) {
            let count = self.pool.ref_count(block);
            assert_eq!(count, owners[block.index()], "references of block {block}");
            assert!(count <= 1 || self.radix.contains(block), "block {block} is shared but not cached");
        }
        self.check_lists();
    }

    fn check_lists(&self) {
        let mut idle_rank = vec![None; self.pool.num_blocks() as usize];
        let mut num_listed = 0;
        for block in self.pool.free_blocks() {
            assert_eq!(self.pool.ref_count(block), 0, "free block {block} is held");
            assert!(!self.radix.contains(block), "free block {block} is cached");
            num_listed += 1;
        }
        assert_eq!(num_listed, self.pool.num_free_blocks(), "free blocks");
        for (rank, block) in self.pool.idle_blocks().enumerate() {
            assert_eq!(self.pool.ref_count(block), 0, "idle block {block} is held");
            assert!(self.radix.contains(block), "idle block {block} is not cached");
            idle_rank[block.index()] = Some(rank);
            num_listed += 1;
        }
        assert_eq!(num_listed, self.num_available_blocks(), "idle blocks");
        let held = (1..self.pool.num_blocks()).filter(|&b| self.pool.ref_count(BlockId(b)) > 0).count() as u32;
        assert_eq!(num_listed + held, self.num_total_blocks(), "free + idle + held = total");
        for block in self.pool.idle_blocks() {
            if let Some(parent) = self.radix.parent_block(block)
                && let Some(parent_rank) = idle_rank[parent.index()]
            {
                assert!(
                    Some(parent_rank) > idle_rank[block.index()],
                    "block {parent} would go before its child {block}"
                );
            }
        }
    }
}
