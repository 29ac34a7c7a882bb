//! Log-probabilities: the log-softmax of the raw logits, before any option, of one token and of the best ones.

use super::argmax::argmax;
use super::exp::sum_of_exp;
use super::kept::{Candidate, best_of};
use crate::ids::TokenId;
use crate::request::TokenLogprobs;

/// Nothing is reported below: JSON has no infinity.
const LEAST: f64 = -9999.0;

/// The logarithm of a softmax's denominator.
pub(super) struct Softmax {
    log_sum: f64,
}

impl Softmax {
    /// From the largest logit and the sum of `e^(logit - max)`.
    pub(super) fn new(max: f32, sum: f64) -> Self {
        Self { log_sum: f64::from(max) + sum.ln() }
    }

    /// Of a token with this logit.
    pub(super) fn logprob(&self, logit: f32) -> f32 {
        (f64::from(logit) - self.log_sum).max(LEAST) as f32
    }
}

/// A token's place among all, from 1; equal logits are ordered by id.
pub(super) fn rank(logits: &[f32], token: TokenId) -> u32 {
    let own = logits[token.index()];
    let larger = logits.iter().map(|&logit| u32::from(logit > own)).sum::<u32>();
    let equal_before = logits[..token.index()].iter().map(|&logit| u32::from(logit == own)).sum::<u32>();
    1 + larger + equal_before
}

/// Of `token`, with the `num_top` best; rank and `top` order equal logits by id. `scratch` is overwritten.
pub(super) fn of(logits: &[f32], token: TokenId, num_top: usize, scratch: &mut Vec<Candidate>) -> TokenLogprobs {
    let max = logits[argmax(logits).index()];
    let softmax = Softmax::new(max, sum_of_exp(logits, max, 1.0));
    best_of(logits, num_top.min(logits.len()), scratch);
    scratch.sort_unstable_by(Candidate::order);
    let top = scratch.iter().map(|candidate| (TokenId(candidate.id), softmax.logprob(candidate.logit))).collect();
    TokenLogprobs { logprob: softmax.logprob(logits[token.index()]), rank: rank(logits, token), top }
}
