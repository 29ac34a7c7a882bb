//! `RadixCache`: which tokens a block remembers. A tree whose edges are whole blocks, one root per cache salt.
//!
//! Invariant: identity is token-exact. A hash only chooses the bucket; a child is found by its parent and its tokens. A
//! cached block is one node, so that everything is a flat array indexed by `BlockId` and nothing is allocated after
//! start-up except the names of salts. Called by `KvCacheManager` only, which decides what is idle and may be removed.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::ids::{BlockId, TokenId};

/// A place in the tree: below `num_blocks` a cached block, from there on the root of a salt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeId(u32);

impl From<BlockId> for NodeId {
    fn from(block: BlockId) -> Self {
        Self(block.0)
    }
}

const NONE: u32 = u32::MAX;

/// What is known of one block.
#[derive(Clone, Copy, Debug)]
struct Node {
    /// `NONE`: the block is not cached.
    parent: u32,
    num_children: u32,
    /// Next block of the same bucket, or `NONE`.
    next: u32,
}

/// A salt in use. Its slot is free for another when `users` is 0.
#[derive(Clone, Debug, Default)]
struct Root {
    salt: Option<Arc<str>>,
    /// First-level blocks and open block tables.
    users: u32,
}

/// The tree.
#[derive(Debug)]
pub struct RadixCache {
    block_size: usize,
    /// `[num_blocks, block_size]`; meaningful for cached blocks.
    tokens: Vec<TokenId>,
    /// `[num_blocks]`.
    nodes: Vec<Node>,
    /// First block of each bucket, or `NONE`; a power of two of them.
    buckets: Vec<u32>,
    /// Keyed with random numbers, so that nobody can choose prompts that share a bucket. Results do not depend on it.
    hash_keys: RandomState,
    /// Root 0 belongs to requests without a salt and is always there.
    roots: Vec<Root>,
    roots_by_salt: FxHashMap<Arc<str>, u32>,
    free_roots: Vec<u32>,
    num_cached_blocks: u32,
}

impl RadixCache {
    /// An empty tree over `num_blocks` blocks of `block_size` tokens.
    pub fn new(num_blocks: u32, block_size: u32) -> Self {
        let (num_blocks, block_size) = (num_blocks as usize, block_size as usize);
        Self {
            block_size,
            tokens: vec![TokenId(0); num_blocks * block_size],
            nodes: vec![Node { parent: NONE, num_children: 0, next: NONE }; num_blocks],
            buckets: vec![NONE; num_blocks.next_power_of_two()],
            hash_keys: RandomState::new(),
            roots: vec![Root { salt: None, users: 1 }],
            roots_by_salt: FxHashMap::default(),
            free_roots: Vec::new(),
            num_cached_blocks: 0,
        }
    }

    /// Blocks in the tree.
    pub fn num_cached_blocks(&self) -> u32 {
        self.num_cached_blocks
    }

    /// Salts in use, "none" included.
    pub fn num_roots(&self) -> usize {
        self.roots.len() - self.free_roots.len()
    }

    /// Whether a block is in the tree.
    pub fn contains(&self, block: BlockId) -> bool {
        self.nodes[block.index()].parent != NONE
    }

    /// The root of a salt, made if need be; it stays until `close_root` and the removal of its last block.
    pub fn open_root(&mut self, salt: Option<&Arc<str>>) -> NodeId {
        let root = match salt {
            None => 0,
            Some(salt) => match self.roots_by_salt.get(salt) {
                Some(&root) => root,
                None => self.add_root(salt),
            },
        };
        self.roots[root as usize].users += 1;
        NodeId(self.nodes.len() as u32 + root)
    }

    /// Ends one `open_root`.
    pub fn close_root(&mut self, root: NodeId) {
        self.drop_root_user(root.0 - self.nodes.len() as u32);
    }

    /// The child of `parent` that remembers exactly `tokens`, one whole block.
    pub fn child(&self, parent: NodeId, tokens: &[TokenId]) -> Option<BlockId> {
        let mut block = self.buckets[self.bucket(parent.0, tokens)];
        while block != NONE {
            let node = &self.nodes[block as usize];
            if node.parent == parent.0 && self.tokens_of(BlockId(block)) == tokens {
                return Some(BlockId(block));
            }
            block = node.next;
        }
        None
    }

    /// Remembers `tokens`, one whole block, as the child `block` of `parent`, which must not have such a child.
    pub fn insert(&mut self, parent: NodeId, tokens: &[TokenId], block: BlockId) {
        assert!(!self.contains(block), "block {block} is in the tree already");
        debug_assert!(self.child(parent, tokens).is_none(), "these tokens are in the tree already");
        let bucket = self.bucket(parent.0, tokens);
        let start = block.index() * self.block_size;
        self.tokens[start..start + self.block_size].copy_from_slice(tokens);
        self.nodes[block.index()] = Node { parent: parent.0, num_children: 0, next: self.buckets[bucket] };
        self.buckets[bucket] = block.0;
        self.num_cached_blocks += 1;
        match self.root_index(parent) {
            Some(root) => self.roots[root].users += 1,
            None => self.nodes[parent.0 as usize].num_children += 1,
        }
    }

    /// Forgets a block that has no children.
    pub fn remove(&mut self, block: BlockId) {
        let Node { parent, num_children, next } = self.nodes[block.index()];
        assert!(parent != NONE, "block {block} is not in the tree");
        assert_eq!(num_children, 0, "block {block} removed before its children");
        let bucket = self.bucket(parent, self.tokens_of(block));
        let mut at = self.buckets[bucket];
        if at == block.0 {
            self.buckets[bucket] = next;
        } else {
            while self.nodes[at as usize].next != block.0 {
                at = self.nodes[at as usize].next;
            }
            self.nodes[at as usize].next = next;
        }
        self.nodes[block.index()].parent = NONE;
        self.num_cached_blocks -= 1;
        match self.root_index(NodeId(parent)) {
            Some(root) => self.drop_root_user(root as u32),
            None => self.nodes[parent as usize].num_children -= 1,
        }
    }

    /// The parent of a cached block, or `None` when that is a root.
    pub fn parent_block(&self, block: BlockId) -> Option<BlockId> {
        let parent = NodeId(self.nodes[block.index()].parent);
        self.root_index(parent).is_none().then_some(BlockId(parent.0))
    }

    /// Checks the tree against itself: every node reachable from a root and by its own key, counts equal to what is there.
    ///
    /// # Panics
    /// When a count or a link is wrong.
    pub fn check_invariants(&self, open_tables_per_root: impl Fn(NodeId) -> u32) {
        let mut num_children = vec![0; self.nodes.len()];
        let mut root_users = vec![0; self.roots.len()];
        let mut num_cached = 0;
        for block in (0..self.nodes.len() as u32).map(BlockId).filter(|&b| self.contains(b)) {
            num_cached += 1;
            let parent = NodeId(self.nodes[block.index()].parent);
            assert_eq!(self.child(parent, self.tokens_of(block)), Some(block), "block {block} is not found by its key");
            match self.root_index(parent) {
                Some(root) => root_users[root] += 1,
                None => {
                    assert!(self.contains(BlockId(parent.0)), "block {block} hangs on an uncached block");
                    num_children[parent.0 as usize] += 1;
                }
            }
            let mut depth = 0;
            let mut ancestor = Some(block);
            while let Some(at) = ancestor {
                depth += 1;
                assert!(depth <= self.nodes.len(), "block {block} is on a cycle");
                ancestor = self.parent_block(at);
            }
        }
        assert_eq!(num_cached, self.num_cached_blocks, "cached blocks");
        for (node, &children) in self.nodes.iter().zip(&num_children).filter(|(node, _)| node.parent != NONE) {
            assert_eq!(node.num_children, children, "children of a cached block");
        }
        for (i, root) in self.roots.iter().enumerate() {
            let tables = open_tables_per_root(NodeId((self.nodes.len() + i) as u32));
            assert_eq!(root.users, root_users[i] + tables + u32::from(i == 0), "users of root {i}");
        }
    }

    fn tokens_of(&self, block: BlockId) -> &[TokenId] {
        &self.tokens[block.index() * self.block_size..][..self.block_size]
    }

    fn root_index(&self, node: NodeId) -> Option<usize> {
        (node.0 as usize).checked_sub(self.nodes.len())
    }

    fn bucket(&self, parent: u32, tokens: &[TokenId]) -> usize {
        assert_eq!(tokens.len(), self.block_size, "the tree holds whole blocks only");
        let mut hasher = self.hash_keys.build_hasher();
        hasher.write_u32(parent);
        hasher.write(bytemuck::cast_slice(tokens));
        hasher.finish() as usize & (self.buckets.len() - 1)
    }

    fn add_root(&mut self, salt: &Arc<str>) -> u32 {
        let new = Root { salt: Some(salt.clone()), users: 0 };
        let root = match self.free_roots.pop() {
            Some(root) => {
                self.roots[root as usize] = new;
                root
            }
            None => {
                self.roots.push(new);
                self.roots.len() as u32 - 1
            }
        };
        self.roots_by_salt.insert(salt.clone(), root);
        root
    }

    fn drop_root_user(&mut self, index: u32) {
        let root = &mut self.roots[index as usize];
        root.users -= 1;
        if root.users == 0 {
            let salt = root.salt.take().expect("root 0 always has a user");
            self.roots_by_salt.remove(&salt);
            self.free_roots.push(index);
        }
    }
}
