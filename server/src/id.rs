//! Ids of answers: unguessable enough to be unique over processes, unique within one by a counter.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};

/// Makes ids of 32 hex digits.
#[derive(Debug, Default)]
pub struct IdSource {
    high: RandomState,
    low: RandomState,
    count: AtomicU64,
}

impl IdSource {
    /// A fresh id, `prefix` before it.
    pub fn next(&self, prefix: &str) -> String {
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        format!("{prefix}{:016x}{:016x}", self.high.hash_one(count), self.low.hash_one(count))
    }
}
