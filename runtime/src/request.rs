//! What the outside may say to the engine and hear from it: token ids only, never text.
//!
//! Invariant: everything here has been validated before it reaches the scheduler (`engine::Engine::submit`
//! refuses what `SamplingParams::validate` and the engine's limits do not allow).

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::ids::{SeqId, TokenId};

/// How the next token is chosen and when a sequence ends. Names, ranges and defaults are vLLM's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// 0 (below 1e-5) is greedy; else logits are divided by it. `0..=2`.
    pub temperature: f32,
    /// Keep the smallest set of tokens whose probabilities sum to this. `(0, 1]`, 1 is off.
    pub top_p: f32,
    /// Keep this many most probable tokens; 0 is off.
    pub top_k: u32,
    /// Keep tokens with at least this fraction of the top probability. `[0, 1]`, 0 is off.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or output. `> 0`, 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from the logit of each token in the output. `[-2, 2]`.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit once per occurrence in the output. `[-2, 2]`.
    pub frequency_penalty: f32,
    /// Only these may be drawn: ascending, at least one; `None` is all.
    pub allowed_token_ids: Option<Vec<TokenId>>,
    /// Sequences that the output must not contain, each at least one token.
    pub bad_words: Vec<Vec<TokenId>>,
    /// Added to single logits, each clamped to ±100.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Key of the noise; `None`: derived from the engine's seed and an admission counter.
    pub seed: Option<u64>,
    /// At most this many output tokens. `>= 1`.
    pub max_tokens: u32,
    /// Stop ids are masked until this many output tokens exist. `<= max_tokens`.
    pub min_tokens: u32,
    /// The user's own stop ids; they end a sequence even with `ignore_eos`.
    pub stop_token_ids: Vec<TokenId>,
    /// The model's end-of-sequence ids.
    pub eos_token_ids: Vec<TokenId>,
    /// Do not end on (and do not mask) `eos_token_ids`.
    pub ignore_eos: bool,
    /// Report the log-probability of each output token and of this many alternatives.
    pub logprobs: Option<u32>,
    /// The same for every prompt token; the request then does not read the prefix cache.
    pub prompt_logprobs: Option<u32>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            allowed_token_ids: None,
            bad_words: Vec::new(),
            logit_bias: Vec::new(),
            seed: None,
            max_tokens: 16,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            eos_token_ids: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            prompt_logprobs: None,
        }
    }
}

impl SamplingParams {
    /// Temperatures below this are greedy (vLLM's threshold).
    pub const GREEDY_BELOW: f32 = 1e-5;

    /// Whether the most probable token is always taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature < Self::GREEDY_BELOW
    }

    /// Whether `token` ends the sequence.
    pub fn is_stop(&self, token: TokenId) -> bool {
        self.stop_token_ids.contains(&token) || (!self.ignore_eos && self.eos_token_ids.contains(&token))
    }
}

/// One wish: continue this prompt. Immutable once submitted; `n` choices are `n` requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// From `Engine::next_id`; unique for the life of the process.
    pub id: SeqId,
    /// Prompt ids, at least one, all below the vocabulary size.
    pub prompt: Arc<[TokenId]>,
    /// How to go on from there.
    pub params: SamplingParams,
    /// Requests share cached prefixes only with requests of the same salt.
    pub cache_salt: Option<Arc<str>>,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop id was drawn (it is the last token reported), or the text side matched a stop string.
    Stop,
    /// `max_tokens` or the context's end was reached.
    Length,
    /// The client went away or asked for it.
    Abort,
    /// The logits of this row were not finite.
    Error,
}

impl FinishReason {
    /// The name on the wire and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
        }
    }
}

/// Log-probabilities of one position: raw model log-softmax, before bias, penalties and temperature.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// Of the token at this position; never below -9999.
    pub logprob: f32,
    /// 1 is the most probable token.
    pub rank: u32,
    /// The most probable tokens, best first.
    pub top: Vec<(TokenId, f32)>,
}

/// When things happened to a request, in microseconds of the engine's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Times {
    /// The scheduler got it.
    pub arrived_us: u64,
    /// It entered a row for the first time.
    pub scheduled_us: u64,
    /// Its first output token was known.
    pub first_token_us: u64,
    /// Its last output token was known.
    pub finished_us: u64,
}

/// What a request hears, in order: `Started`, `PromptLogprobs`*, `Token`*, then exactly one of `Finished` and `Failed`.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The request entered a row for the first time.
    Started {
        /// Prompt tokens that the prefix cache held.
        cached_tokens: u32,
    },
    /// Log-probabilities of the next prompt positions (the first position of a prompt has `None`).
    PromptLogprobs(Vec<Option<TokenLogprobs>>),
    /// One more output token.
    Token {
        /// The token; stop ids are reported too.
        id: TokenId,
        /// Present when `SamplingParams::logprobs` asked for it.
        logprobs: Option<Box<TokenLogprobs>>,
    },
    /// The sequence ended; its blocks are released.
    Finished {
        /// Why.
        reason: FinishReason,
        /// Times for the latency histograms.
        times: Times,
        /// How often it was preempted.
        num_preemptions: u32,
    },
    /// The engine cannot go on; the message is safe to show.
    Failed(String),
}

/// Where a request's events go. The engine thread calls it and never waits on it.
pub trait EventSink: Send {
    /// Takes one event. `false` says that nobody listens any more: the engine aborts the sequence.
    fn send(&mut self, event: Event) -> bool;
}

impl<F: FnMut(Event) -> bool + Send> EventSink for F {
    fn send(&mut self, event: Event) -> bool {
        self(event)
    }
}
