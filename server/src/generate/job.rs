//! What a `Generation` is given and what it gives: plain data.
//!
//! Invariant: a delta belongs to one choice, and the deltas of a choice, joined, are its answer; only its last one has a
//! `finish`. Made by `openai::prepare`, read by the wire formats.

use std::sync::Arc;
use std::time::Instant;

use runtime::ids::TokenId;
use runtime::request::{FinishReason, SamplingParams, TokenLogprobs};
use runtime::text::TextStreamOptions;
use tokio::sync::Semaphore;

/// What is to be generated.
#[derive(Clone, Debug)]
pub struct Job {
    /// Each prompt and how many tokens its answers may have.
    pub prompts: Vec<(Arc<[TokenId]>, u32)>,
    /// Choices per prompt.
    pub n: u32,
    /// For all choices; `max_tokens` and `seed` are filled in per choice.
    pub params: SamplingParams,
    pub text: TextStreamOptions,
    pub cache_salt: Option<Arc<str>>,
    /// Tokens per delta after the first.
    pub interval: u32,
    /// When the server got the request.
    pub arrived: Instant,
}

/// One output token.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputToken {
    pub id: TokenId,
    /// Characters of the answer before it.
    pub offset_chars: usize,
    pub logprobs: Option<Box<TokenLogprobs>>,
}

/// What ended an answer beyond its reason.
#[derive(Clone, Debug, PartialEq)]
pub enum StopCause {
    /// A stop string.
    Text(String),
    /// One of the request's stop ids.
    Token(TokenId),
}

/// More of one answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// Index of the choice, over all prompts.
    pub choice: usize,
    pub text: String,
    pub tokens: Vec<OutputToken>,
    /// With the last delta of a choice.
    pub finish: Option<(FinishReason, Option<StopCause>)>,
}

/// Tokens in and out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenCounts {
    pub prompt: usize,
    pub cached: usize,
    pub output: usize,
}

impl Job {
    /// Length of a queue that holds everything the engine may say about this job.
    pub(super) fn queue_len(&self) -> usize {
        /// `Started`, `Finished` and a reserve.
        const REST: usize = 4;
        let of_prompt = |(ids, max_tokens): &(Arc<[TokenId]>, u32)| {
            let logprobs = if self.params.prompt_logprobs.is_some() { ids.len() } else { 0 };
            logprobs + *max_tokens as usize + REST
        };
        let sum: usize = self.prompts.iter().map(of_prompt).sum();
        sum.saturating_mul(self.n as usize).clamp(1, Semaphore::MAX_PERMITS)
    }
}
