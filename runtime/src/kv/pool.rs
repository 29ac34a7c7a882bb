//! `BlockPool`: who holds a block. Reference counts, and two intrusive doubly linked lists.
//!
//! Invariant: a block is in exactly one state: *held* (references > 0, in no list), *idle* (no references, but the prefix
//! cache remembers its tokens; in the idle list, least recently used first), or *free* (in the free list). Every move is
//! O(1), removal from the middle of a list included. Called by `KvCacheManager` only.

use crate::ids::BlockId;

/// Neighbours in a list; a list is a ring through its head.
#[derive(Clone, Copy, Debug)]
struct Link {
    prev: u32,
    next: u32,
}

/// Blocks `1 .. num_blocks`; block 0 is reserved for padding and its link heads the free list.
#[derive(Debug)]
pub struct BlockPool {
    /// `[num_blocks]`.
    ref_counts: Vec<u32>,
    /// `[num_blocks + 1]`: entry 0 heads the free list, the last entry heads the idle list.
    links: Vec<Link>,
    num_free_blocks: u32,
    num_idle_blocks: u32,
}

impl BlockPool {
    const FREE: u32 = 0;

    /// A pool of `num_blocks` blocks, the reserved block 0 included; all others are free.
    ///
    /// # Panics
    /// When there is no block besides block 0, or too many to number.
    pub fn new(num_blocks: u32) -> Self {
        assert!((2..u32::MAX).contains(&num_blocks), "a pool needs block 0 and at least one more");
        let links = (0..=num_blocks).map(|i| Link { prev: i, next: i }).collect();
        let mut pool = Self { ref_counts: vec![0; num_blocks as usize], links, num_free_blocks: 0, num_idle_blocks: 0 };
        for block in 1..num_blocks {
            pool.insert_before(Self::FREE, block);
        }
        pool.num_free_blocks = num_blocks - 1;
        pool
    }

    /// Number of blocks, the reserved one included.
    pub fn num_blocks(&self) -> u32 {
        self.ref_counts.len() as u32
    }

    /// Blocks that nobody holds and nobody remembers.
    pub fn num_free_blocks(&self) -> u32 {
        self.num_free_blocks
    }

    /// Blocks that nobody holds but the prefix cache remembers.
    pub fn num_idle_blocks(&self) -> u32 {
        self.num_idle_blocks
    }

    /// How many owners a block has.
    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.ref_counts[block.index()]
    }

    /// Takes a free block; its one reference is the caller's. The last one freed comes first: it may still be in a cache.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let block = self.links[Self::FREE as usize].next;
        if block == Self::FREE {
            return None;
        }
        self.unlink(block);
        self.num_free_blocks -= 1;
        self.ref_counts[block as usize] = 1;
        Some(BlockId(block))
    }

    /// Adds a reference to a block that is held or idle.
    pub fn acquire(&mut self, block: BlockId) {
        if self.ref_counts[block.index()] == 0 {
            self.unlink(block.0);
            self.num_idle_blocks -= 1;
        }
        self.ref_counts[block.index()] += 1;
    }

    /// Drops a reference. A block without any becomes the most recently used idle one if it is `remembered`, else free.
    pub fn release(&mut self, block: BlockId, remembered: bool) {
        let count = &mut self.ref_counts[block.index()];
        assert!(*count > 0, "block {block} released more often than acquired");
        *count -= 1;
        if *count > 0 {
            return;
        }
        if remembered {
            self.insert_before(self.idle(), block.0);
            self.num_idle_blocks += 1;
        } else {
            self.push_free(block);
        }
    }

    /// The idle block that was used longest ago.
    pub fn oldest_idle(&self) -> Option<BlockId> {
        let block = self.links[self.idle() as usize].next;
        (block != self.idle()).then_some(BlockId(block))
    }

    /// Makes an idle block free: the prefix cache has forgotten it.
    pub fn forget(&mut self, block: BlockId) {
        assert_eq!(self.ref_counts[block.index()], 0, "block {block} forgotten while held");
        self.unlink(block.0);
        self.num_idle_blocks -= 1;
        self.push_free(block);
    }

    /// Free blocks, the next one to be allocated first.
    pub fn free_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.walk(Self::FREE)
    }

    /// Idle blocks, the least recently used first.
    pub fn idle_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.walk(self.idle())
    }

    fn idle(&self) -> u32 {
        self.ref_counts.len() as u32
    }

    fn push_free(&mut self, block: BlockId) {
        self.insert_before(self.links[Self::FREE as usize].next, block.0);
        self.num_free_blocks += 1;
    }

    fn insert_before(&mut self, next: u32, block: u32) {
        let prev = self.links[next as usize].prev;
        self.links[block as usize] = Link { prev, next };
        self.links[prev as usize].next = block;
        self.links[next as usize].prev = block;
    }

    fn unlink(&mut self, block: u32) {
        let Link { prev, next } = self.links[block as usize];
        debug_assert_ne!(next, block, "block {block} is in no list");
        self.links[prev as usize].next = next;
        self.links[next as usize].prev = prev;
        self.links[block as usize] = Link { prev: block, next: block };
    }

    /// Follows a list once round; a broken list ends with a panic, not in a loop.
    fn walk(&self, head: u32) -> impl Iterator<Item = BlockId> + '_ {
        let mut at = head;
        let mut steps = 0;
        std::iter::from_fn(move || {
            let next = self.links[at as usize].next;
            assert_eq!(self.links[next as usize].prev, at, "list is torn between {at} and {next}");
            assert!(steps <= self.ref_counts.len(), "list does not come back to its head");
            steps += 1;
            at = next;
            (next != head).then_some(BlockId(next))
        })
    }
}
