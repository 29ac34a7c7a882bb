//! Counts tokens of a history without hashing: a table over the vocabulary that is all zeros between calls.

use crate::ids::TokenId;

#[derive(Debug)]
pub(super) struct TokenCounts {
    counts: Vec<u32>,
}

impl TokenCounts {
    pub(super) fn new(vocab_size: usize) -> Self {
        Self { counts: vec![0; vocab_size] }
    }

    /// Calls `each(token, occurrences)` once per distinct token, in the order of first occurrence.
    pub(super) fn for_each(&mut self, tokens: &[TokenId], mut each: impl FnMut(TokenId, u32)) {
        for token in tokens {
            self.counts[token.index()] += 1;
        }
        for &token in tokens {
            let count = std::mem::take(&mut self.counts[token.index()]);
            if count > 0 {
                each(token, count);
            }
        }
    }
}
