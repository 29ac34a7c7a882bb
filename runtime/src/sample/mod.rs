//! Choosing a token from a row of logits: ordered options, one file each, then one draw with counter-based noise.
//!
//! Invariant: `Sampler::draw` is a pure function of (logits, parameters, seed, history, position): never of batch mates,
//! of time or of earlier calls.

use crate::ids::TokenId;
use crate::request::{SamplingParams, TokenLogprobs};
use crate::step::DrawnToken;

/// What a draw depends on besides the logits.
#[derive(Clone, Copy, Debug)]
pub struct DrawContext<'a> {
    /// The request's parameters.
    pub params: &'a SamplingParams,
    /// Key of its noise.
    pub seed: u64,
    /// Known tokens before the drawn one: prompt, then output.
    pub history: &'a [TokenId],
    /// How many of them are the prompt.
    pub prompt_len: usize,
}

/// Draws tokens; holds scratch buffers only.
#[derive(Debug)]
pub struct Sampler {}

impl Sampler {
    /// For rows of `vocab_size` logits.
    pub fn new(vocab_size: usize) -> Self {
        let _ = vocab_size;
        todo!("helper sample")
    }

    /// Draws the token that follows `context.history`.
    pub fn draw(&mut self, logits: &[f32], context: &DrawContext<'_>) -> DrawnToken {
        let _ = (logits, context);
        todo!("helper sample")
    }

    /// Log-probabilities of a given token (prompt log-probabilities) with the `num_top` best.
    pub fn logprobs_of(&mut self, logits: &[f32], token: TokenId, num_top: u32) -> TokenLogprobs {
        let _ = (logits, token, num_top);
        todo!("helper sample")
    }
}
