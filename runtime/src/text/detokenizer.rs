//! Incremental detokenizer: token by token, text in whole UTF-8 scalars only.
//!
//! Invariant: the pieces of any sequence, joined, equal the decoding of the whole; invalid bytes become U+FFFD exactly as
//! `String::from_utf8_lossy` has it. At most three bytes wait for the rest of a scalar, so memory is bounded and each
//! token costs its own length. One lives in each `TextStream`.

use std::sync::Arc;

use super::vocab::{LeadingSpace, Vocab};
use crate::ids::TokenId;

/// Turns token ids into text as they come.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    vocab: Arc<Vocab>,
    skip_special: bool,
    leading_space: LeadingSpace,
    /// The start of a scalar whose end has not come yet.
    pending: Vec<u8>,
}

impl Detokenizer {
    /// `continues`: the text goes on after a prompt, so a leading space is text and is kept.
    pub(super) fn new(vocab: Arc<Vocab>, skip_special: bool, continues: bool) -> Self {
        let leading_space = if continues { LeadingSpace::Keep } else { vocab.leading_space };
        Self { vocab, skip_special, leading_space, pending: Vec::new() }
    }

    /// Takes one token; returns the text that is complete now, often none.
    pub fn push(&mut self, id: TokenId) -> String {
        if self.skip_special && self.vocab.is_special(id) {
            return String::new();
        }
        let vocab = Arc::clone(&self.vocab);
        let mut bytes = vocab.bytes(id);
        if bytes.is_empty() {
            return String::new();
        }
        match std::mem::replace(&mut self.leading_space, LeadingSpace::Keep) {
            LeadingSpace::Keep => {}
            LeadingSpace::StripOne => bytes = bytes.strip_prefix(b" ").unwrap_or(bytes),
            LeadingSpace::StripFirstToken => {
                self.pending.extend(bytes.iter().filter(|&&byte| byte != b' '));
                return self.complete();
            }
        }
        self.pending.extend_from_slice(bytes);
        self.complete()
    }

    /// Ends the text: an unfinished scalar becomes U+FFFD.
    pub fn flush(&mut self) -> String {
        let rest = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        rest
    }

    /// Moves every whole scalar out of `pending`.
    fn complete(&mut self) -> String {
        let mut text = String::new();
        let mut read = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            read += chunk.valid().len();
            let invalid = chunk.invalid();
            if invalid.is_empty() {
                continue;
            }
            let unfinished = read + invalid.len() == self.pending.len()
                && std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none());
            if unfinished {
                break;
            }
            text.push(char::REPLACEMENT_CHARACTER);
            read += invalid.len();
        }
        self.pending.drain(..read);
        text
    }
}
