//! Pieces of answers that chat and completions share: usage, finish reasons, log-probabilities.
//!
//! Invariant: a log-probability on the wire is finite by its type: JSON has no infinity.

use runtime::ids::TokenId;
use runtime::request::TokenLogprobs;
use runtime::text::TextModel;
use serde::{Serialize, Serializer};

use crate::generate::{Generation, StopCause, TokenCounts};
use crate::openai::params::Delivery;
use crate::state::{AppState, unix_now_s};

/// What every answer and chunk of one request carries.
#[derive(Clone, Debug)]
pub struct Head {
    pub id: String,
    pub created: u64,
    pub model: String,
}

impl Head {
    /// A fresh head; `prefix` is `chatcmpl-` or `cmpl-`.
    pub fn new(state: &AppState, prefix: &str, model: String) -> Self {
        Self { id: state.ids.next(prefix), created: unix_now_s(), model }
    }
}

/// Tokens that a request cost.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct PromptDetails {
    cached_tokens: usize,
}

impl Usage {
    /// `details`: whether cached tokens are told.
    pub fn new(counts: TokenCounts, details: bool) -> Self {
        Self {
            prompt_tokens: counts.prompt,
            completion_tokens: counts.output,
            total_tokens: counts.prompt + counts.output,
            prompt_tokens_details: details.then_some(PromptDetails { cached_tokens: counts.cached }),
        }
    }
}

/// The usage of a chunk of `choice`, where the request asked for it.
pub fn chunk_usage(generation: &Generation, choice: usize, delivery: Delivery, details: bool) -> Option<Usage> {
    delivery.continuous_usage.then(|| Usage::new(generation.counts_of(choice), details))
}

impl Serialize for StopCause {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Text(text) => serializer.serialize_str(text),
            Self::Token(id) => serializer.serialize_u32(id.0),
        }
    }
}

/// A log-probability that JSON can hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Logprob(pub f32);

impl Serialize for Logprob {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f32(if self.0.is_nan() { -9999.0 } else { self.0.clamp(-9999.0, 0.0) })
    }
}

/// A JSON object, in the order of its entries.
#[derive(Clone, Debug, PartialEq)]
pub struct Entries<K, V>(pub Vec<(K, V)>);

impl<K: Serialize, V: Serialize> Serialize for Entries<K, V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

/// vLLM's `prompt_logprobs`: per prompt token, from id to log-probability; null for the first.
pub type PromptLogprobs = Vec<Option<Entries<TokenId, PromptLogprob>>>;

/// One token that a prompt has, or could have had, at a position.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PromptLogprob {
    logprob: Logprob,
    rank: u32,
    decoded_token: String,
}

/// The log-probabilities of `prompt` as the wire has them.
pub fn prompt_logprobs(text: &TextModel, prompt: &[TokenId], logprobs: &[Option<TokenLogprobs>]) -> PromptLogprobs {
    let entry = |id: TokenId, logprob: f32, rank: u32| {
        (id, PromptLogprob { logprob: Logprob(logprob), rank, decoded_token: text.token_text(id) })
    };
    let of_token = |(&id, logprobs): (&TokenId, &Option<TokenLogprobs>)| {
        let logprobs = logprobs.as_ref()?;
        let others = (1..).zip(&logprobs.top).filter(|(_, (other, _))| *other != id);
        let others = others.map(|(rank, &(other, logprob))| entry(other, logprob, rank));
        Some(Entries(std::iter::once(entry(id, logprobs.logprob, logprobs.rank)).chain(others).collect()))
    };
    prompt.iter().zip(logprobs).map(of_token).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_logprob_on_the_wire_is_always_finite() {
        for (logprob, wire) in [(f32::NEG_INFINITY, "-9999.0"), (f32::NAN, "-9999.0"), (0.5, "0.0"), (-0.25, "-0.25")] {
            assert_eq!(serde_json::to_string(&Logprob(logprob)).expect("serialises"), wire);
        }
    }
}
