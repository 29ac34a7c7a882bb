//! Pool, tree and manager against naive models, after every operation; two tokens and tiny pools, so that paths collide.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use proptest::prelude::*;

use super::{BlockPool, BlockTable, KvCacheManager, OutOfBlocks, RadixCache};
use crate::ids::{BlockId, TokenId};

fn tokens(ids: &[u32]) -> Vec<TokenId> {
    ids.iter().copied().map(TokenId).collect()
}

/// The pool as two queues and a map.
#[derive(Default)]
struct NaivePool {
    free: VecDeque<u32>,
    idle: VecDeque<u32>,
    held: BTreeMap<u32, u32>,
}

impl NaivePool {
    fn check(&self, pool: &BlockPool) {
        assert!(pool.free_blocks().map(|b| b.0).eq(self.free.iter().copied()), "free list");
        assert!(pool.idle_blocks().map(|b| b.0).eq(self.idle.iter().copied()), "idle list");
        assert_eq!(pool.num_free_blocks() as usize, self.free.len());
        assert_eq!(pool.num_idle_blocks() as usize, self.idle.len());
        for block in 1..pool.num_blocks() {
            assert_eq!(pool.ref_count(BlockId(block)), self.held.get(&block).copied().unwrap_or(0));
        }
    }

    fn release(&mut self, block: u32, remembered: bool) {
        let count = self.held.get_mut(&block).expect("held");
        *count -= 1;
        if *count == 0 {
            self.held.remove(&block);
            if remembered { self.idle.push_back(block) } else { self.free.push_front(block) }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn pool_equals_its_naive_model(num_blocks in 2u32..12, ops in prop::collection::vec((0u8..5, any::<prop::sample::Index>()), 0..200)) {
        let mut pool = BlockPool::new(num_blocks);
        let mut naive = NaivePool { free: (1..num_blocks).collect(), ..NaivePool::default() };
        for (op, pick) in ops {
            let held: Vec<u32> = naive.held.keys().copied().collect();
            match op {
                0 => {
                    let expected = naive.free.pop_front();
                    if let Some(block) = expected {
                        naive.held.insert(block, 1);
                    }
                    prop_assert_eq!(pool.allocate().map(|b| b.0), expected);
                }
                1 | 2 if !held.is_empty() => {
                    let block = held[pick.index(held.len())];
                    pool.release(BlockId(block), op == 1);
                    naive.release(block, op == 1);
                }
                3 if !naive.idle.is_empty() => {
                    // From the middle of the list.
                    let block = naive.idle.remove(pick.index(naive.idle.len())).expect("in range");
                    naive.held.insert(block, 1);
                    pool.acquire(BlockId(block));
                }
                3 if !held.is_empty() => {
                    let block = held[pick.index(held.len())];
                    *naive.held.get_mut(&block).expect("held") += 1;
                    pool.acquire(BlockId(block));
                }
                4 if !naive.idle.is_empty() => {
                    prop_assert_eq!(pool.oldest_idle().map(|b| b.0), naive.idle.front().copied());
                    let block = naive.idle.remove(pick.index(naive.idle.len())).expect("in range");
                    pool.forget(BlockId(block));
                    naive.free.push_front(block);
                }
                _ => (),
            }
            naive.check(&pool);
        }
    }

    #[test]
    fn tree_equals_a_map_of_paths(block_size in 1usize..4, ops in prop::collection::vec((0u8..3, any::<prop::sample::Index>(), any::<u8>()), 0..150)) {
        let num_blocks = 20;
        let mut tree = RadixCache::new(num_blocks, block_size as u32);
        let root = tree.open_root(None);
        // Path in tokens from the root -> block.
        let mut paths: BTreeMap<Vec<TokenId>, BlockId> = BTreeMap::new();
        let mut unused: Vec<BlockId> = (1..num_blocks).map(BlockId).collect();
        for (op, pick, bits) in ops {
            let mut parents: Vec<Vec<TokenId>> = paths.keys().cloned().collect();
            parents.push(Vec::new());
            let path = parents[pick.index(parents.len())].clone();
            let parent = paths.get(&path).map_or(root, |&block| block.into());
            let edge: Vec<TokenId> = (0..block_size).map(|i| TokenId(u32::from(bits >> i & 1))).collect();
            let child_path = [path.clone(), edge.clone()].concat();
            prop_assert_eq!(tree.child(parent, &edge), paths.get(&child_path).copied());
            let is_leaf = |path: &Vec<TokenId>| !paths.keys().any(|other| other.len() > path.len() && other.starts_with(path));
            if op == 0 && !path.is_empty() && is_leaf(&path) {
                let block = paths.remove(&path).expect("in the model");
                tree.remove(block);
                unused.push(block);
            } else if op > 0 && !paths.contains_key(&child_path) && let Some(block) = unused.pop() {
                tree.insert(parent, &edge, block);
                paths.insert(child_path, block);
            }
            prop_assert_eq!(tree.num_cached_blocks() as usize, paths.len());
            tree.check_invariants(|node| u32::from(node == root));
        }
    }

    /// Tables that match, grow, commit and go, against a list of every path ever committed.
    #[test]
    fn manager_keeps_its_invariants(
        block_size in prop::sample::select(vec![1u32, 3, 4, 16]),
        num_blocks in 3u32..14,
        ops in prop::collection::vec((0u8..6, any::<u32>(), 0u32..40, 0u8..3), 1..80),
    ) {
        let salts: [Option<Arc<str>>; 3] = [None, Some("a".into()), Some("b".into())];
        let mut kv = KvCacheManager::new(num_blocks, block_size, true);
        let mut open: Vec<(BlockTable, Vec<TokenId>, u8)> = Vec::new();
        // What a block held when it was committed: salt and the whole path of tokens.
        let mut remembered: BTreeMap<u32, (u8, Vec<TokenId>)> = BTreeMap::new();
        for (op, seed, length, salt) in ops {
            match op {
                0..=2 => {
                    let ids: Vec<u32> = (0..=length).map(|i| seed.rotate_left(i) & 1).collect();
                    let prompt = tokens(&ids);
                    let mut table = BlockTable::default();
                    let num_cached = kv.match_prefix(&mut table, salts[salt as usize].as_ref(), &prompt, usize::MAX) as usize;
                    prop_assert!(num_cached < prompt.len(), "the last token is always computed");
                    for (i, block) in table.blocks().iter().enumerate() {
                        let path = &prompt[..(i + 1) * block_size as usize];
                        prop_assert_eq!(remembered.get(&block.0), Some(&(salt, path.to_vec())), "a hit on other tokens");
                    }
                    let (available, held) = (kv.num_available_blocks(), table.blocks().len() as u32);
                    let needed = (prompt.len() as u32).div_ceil(block_size) - held;
                    let reserved = kv.reserve(&mut table, prompt.len() as u32);
                    prop_assert_eq!(reserved.is_ok(), needed <= available, "fails exactly when it must");
                    if reserved == Err(OutOfBlocks) {
                        prop_assert_eq!(kv.num_available_blocks(), available, "a failed reserve has no side effects");
                        prop_assert_eq!(table.blocks().len() as u32, held);
                        kv.release(&mut table);
                    } else {
                        open.push((table, prompt, salt));
                    }
                }
                3 | 4 if !open.is_empty() => {
                    let at = seed as usize % open.len();
                    let (table, prompt, salt) = &mut open[at];
                    let computed = length.min(prompt.len() as u32);
                    kv.commit(table, prompt, computed);
                    for (i, block) in table.blocks().iter().enumerate().take((computed / block_size) as usize) {
                        if kv.radix.contains(*block) {
                            remembered.insert(block.0, (*salt, prompt[..(i + 1) * block_size as usize].to_vec()));
                        }
                    }
                }
                5 if seed % 8 == 0 => {
                    kv.reset();
                    prop_assert_eq!(kv.pool.num_idle_blocks(), 0);
                }
                _ if !open.is_empty() => kv.release(&mut open.swap_remove(seed as usize % open.len()).0),
                _ => (),
            }
            kv.check_invariants(open.iter().map(|(table, ..)| table));
        }
        open.iter_mut().for_each(|(table, ..)| kv.release(table));
        prop_assert_eq!(kv.num_used_blocks(), 0);
        kv.reset();
        prop_assert_eq!((kv.num_cached_blocks(), kv.radix.num_roots()), (0, 1), "salts are forgotten with their blocks");
    }
}

/// Commits a whole prompt and gives it back.
fn remember(kv: &mut KvCacheManager, prompt: &[TokenId]) {
    let mut table = BlockTable::default();
    kv.match_prefix(&mut table, None, prompt, usize::MAX);
    kv.reserve(&mut table, prompt.len() as u32).expect("fits");
    kv.commit(&mut table, prompt, prompt.len() as u32);
    kv.release(&mut table);
}

fn num_cached(kv: &mut KvCacheManager, prompt: &[TokenId]) -> u32 {
    let mut table = BlockTable::default();
    let found = kv.match_prefix(&mut table, None, prompt, usize::MAX);
    kv.release(&mut table);
    found
}

#[test]
fn a_match_is_whole_blocks_and_leaves_the_last_token() {
    let mut kv = KvCacheManager::new(20, 4, true);
    let prompt = tokens(&(0..16).collect::<Vec<_>>());
    remember(&mut kv, &prompt);
    for (length, expected) in [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (15, 12), (16, 12)] {
        assert_eq!(num_cached(&mut kv, &prompt[..length]), expected, "prompt of {length} tokens");
    }
    let mut table = BlockTable::default();
    assert_eq!(kv.match_prefix(&mut table, None, &prompt, 7), 4, "at most what the caller allows");
    kv.release(&mut table);
}

#[test]
fn eviction_takes_the_least_recently_used_leaf() {
    let mut kv = KvCacheManager::new(7, 1, true);
    remember(&mut kv, &tokens(&[1, 2, 3]));
    remember(&mut kv, &tokens(&[7, 8, 9]));
    // Used again: now 7, 8, 9 is the older path, although it came later.
    assert_eq!(num_cached(&mut kv, &tokens(&[1, 2, 3, 4])), 3);
    let mut table = BlockTable::default();
    kv.match_prefix(&mut table, None, &tokens(&[5, 5]), usize::MAX);
    kv.reserve(&mut table, 2).expect("two are idle");
    assert_eq!(num_cached(&mut kv, &tokens(&[7, 8, 9, 4])), 1, "the leaves went first");
    assert_eq!(num_cached(&mut kv, &tokens(&[1, 2, 3, 4])), 3);
    assert_eq!(kv.num_evicted_blocks(), 2);
    kv.release(&mut table);
}

#[test]
fn a_block_that_lost_the_race_stays_private() {
    let mut kv = KvCacheManager::new(20, 2, true);
    let prompt = tokens(&[1, 2, 3, 4, 5]);
    let mut tables = [BlockTable::default(), BlockTable::default()];
    for table in &mut tables {
        kv.match_prefix(table, None, &prompt, usize::MAX);
        kv.reserve(table, 5).expect("fits");
    }
    for table in &mut tables {
        kv.commit(table, &prompt, 5);
    }
    let [first, second] = &tables;
    assert!(!first.is_private() && second.is_private());
    assert_eq!(kv.num_cached_blocks(), 2);
    kv.check_invariants(tables.iter());
    tables.iter_mut().for_each(|table| kv.release(table));
    assert_eq!((kv.num_used_blocks(), kv.num_cached_blocks()), (0, 2), "the private copies are free");
}

#[test]
fn salts_share_nothing() {
    let mut kv = KvCacheManager::new(20, 2, true);
    let prompt = tokens(&[1, 2, 3]);
    remember(&mut kv, &prompt);
    let salt: Arc<str> = "tenant".into();
    let mut table = BlockTable::default();
    assert_eq!(kv.match_prefix(&mut table, Some(&salt), &prompt, usize::MAX), 0);
    kv.release(&mut table);
    assert_eq!(num_cached(&mut kv, &prompt), 2);
}
