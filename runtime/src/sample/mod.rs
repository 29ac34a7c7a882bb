//! Choosing a token from a row of logits: ordered options, one file each, then one draw with counter-based noise.
//!
//! Invariant: `Sampler::draw` is a pure function of (logits, parameters, seed, history, position): never of batch mates,
//! of time or of earlier calls. Scratch buffers are sized once; a draw allocates nothing but the log-probabilities that
//! it returns. What devices draw by themselves (`device`) is the same.
//!
//! The order is vLLM's: log-probabilities are of the raw logits; edits (`EDITS`); greedy answers here; temperature;
//! filters (`FILTERS`); the draw. Callers give finite logits (the runner flags other rows). A row is never masked whole:
//! whatever the first three edits mask, `SamplingParams::validate` leaves at least one id; every filter keeps the best.

mod allowed_token_ids;
mod argmax;
mod bad_words;
mod device;
mod draw;
mod exp;
mod frequency_penalty;
mod kept;
mod logit_bias;
mod logprobs;
mod min_p;
mod min_tokens;
mod philox;
mod presence_penalty;
mod repetition_penalty;
mod temperature;
#[cfg(test)]
mod tests;
mod token_counts;
mod top_k;
mod top_p;
mod validate;

pub use device::{Contender, Draw, MAX_CONTENDERS, MAX_TOP, Ranked, Sample, WINDOW, sample_row};
use draw::Noise;
use kept::{Candidate, Kept};
use token_counts::TokenCounts;

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

impl<'a> DrawContext<'a> {
    /// The tokens drawn so far.
    fn output(&self) -> &'a [TokenId] {
        &self.history[self.prompt_len..]
    }
}

/// An option that changes single logits, `[vocab]`, greedy draws included.
struct Edit {
    /// By the parameters alone: a request is sampled in one place for life.
    is_on: fn(&SamplingParams) -> bool,
    apply: fn(&mut [f32], &DrawContext<'_>, &mut TokenCounts),
}

/// In order of application.
const EDITS: [Edit; 7] = [
    allowed_token_ids::EDIT,
    bad_words::EDIT,
    min_tokens::EDIT,
    logit_bias::EDIT,
    repetition_penalty::EDIT,
    frequency_penalty::EDIT,
    presence_penalty::EDIT,
];

/// An option that narrows which tokens may be drawn, at the request's temperature.
struct Filter {
    is_on: fn(&SamplingParams) -> bool,
    apply: fn(&mut Kept<'_>, &SamplingParams),
}

/// In order of application.
const FILTERS: [Filter; 3] = [min_p::FILTER, top_k::FILTER, top_p::FILTER];

/// Draws tokens; holds scratch buffers only.
#[derive(Debug)]
pub struct Sampler {
    /// The logits after edits, `[vocab]`.
    edited: Vec<f32>,
    counts: TokenCounts,
    candidates: Vec<Candidate>,
}

impl Sampler {
    /// For rows of `vocab_size` logits.
    pub fn new(vocab_size: usize) -> Self {
        Self {
            edited: vec![0.0; vocab_size],
            counts: TokenCounts::new(vocab_size),
            candidates: Vec::with_capacity(vocab_size),
        }
    }

    /// Logits of a row.
    pub fn vocab_size(&self) -> usize {
        self.edited.len()
    }

    /// Draws the token that follows `context.history` from finite `logits`, `[vocab]`.
    ///
    /// # Panics
    /// When `logits` is not `vocab_size` long.
    pub fn draw(&mut self, logits: &[f32], context: &DrawContext<'_>) -> DrawnToken {
        assert_eq!(logits.len(), self.edited.len(), "a row of logits is as long as the vocabulary");
        let id = self.choose(logits, context);
        let logprobs = context.params.logprobs.map(|num_top| Box::new(self.logprobs_of(logits, id, num_top)));
        DrawnToken { id, logprobs }
    }

    fn choose(&mut self, logits: &[f32], context: &DrawContext<'_>) -> TokenId {
        let params = context.params;
        let mut edits = EDITS.iter().filter(|edit| (edit.is_on)(params)).peekable();
        let row = if edits.peek().is_none() {
            logits
        } else {
            self.edited.copy_from_slice(logits);
            for edit in edits {
                (edit.apply)(&mut self.edited, context, &mut self.counts);
            }
            &self.edited
        };

        let best = argmax::argmax(row);
        if params.is_greedy() {
            return best;
        }
        let row = temperature::scale(row, best, params.temperature);
        let noise = Noise::new(context.seed, context.history.len());

        let mut filters = FILTERS.iter().filter(|filter| (filter.is_on)(params)).peekable();
        if filters.peek().is_none() {
            return draw::from_row(&row, best, noise);
        }
        let mut kept = Kept::all_of(row, &mut self.candidates);
        for filter in filters {
            (filter.apply)(&mut kept, params);
        }
        draw::from_candidates(&row, kept.candidates(), noise)
    }

    /// Log-probabilities of a given token (prompt log-probabilities) with the `num_top` best.
    pub fn logprobs_of(&mut self, logits: &[f32], token: TokenId, num_top: u32) -> TokenLogprobs {
        logprobs::of(logits, token, num_top as usize, &mut self.candidates)
    }
}
