//! The ranges of sampling parameters, which are vLLM's. After this check no id indexes past a row of logits and no row
//! is masked whole, so that the sampler itself has no errors. Called by the engine before a request is queued.

use crate::error::RequestError;
use crate::ids::TokenId;
use crate::request::SamplingParams;

/// The user's stop ids are looked through once per token.
const MAX_STOP_TOKEN_IDS: usize = 1024;
/// Banned sequences are compared with the end of the output once per token.
const MAX_BAD_WORDS: usize = 1024;

fn check(holds: bool, param: &str, message: impl FnOnce() -> String) -> Result<(), RequestError> {
    if holds { Ok(()) } else { Err(RequestError::invalid(param, message())) }
}

impl SamplingParams {
    /// Checks ranges and ids; `max_logprobs` is the most alternatives that a request may ask for.
    ///
    /// # Errors
    /// `Invalid` naming the parameter as it is called on the wire.
    pub fn validate(&self, vocab_size: u32, max_logprobs: u32) -> Result<(), RequestError> {
        self.check_ranges()?;
        self.check_ids(vocab_size)?;
        for (param, asked) in [("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)] {
            let asked = asked.unwrap_or(0);
            check(asked <= max_logprobs, param, || format!("{param} must be at most {max_logprobs}, got {asked}"))?;
        }
        Ok(())
    }

    fn check_ranges(&self) -> Result<(), RequestError> {
        // NaN is in no range, and the infinities are in none of the closed ones.
        let between = |param, value: f32, min: f32, max: f32| {
            check((min..=max).contains(&value), param, || {
                format!("{param} must be between {min} and {max}, got {value}")
            })
        };
        between("temperature", self.temperature, 0.0, 2.0)?;
        check(self.top_p > 0.0 && self.top_p <= 1.0, "top_p", || {
            format!("top_p must be above 0 and at most 1, got {}", self.top_p)
        })?;
        between("min_p", self.min_p, 0.0, 1.0)?;
        let repetition = self.repetition_penalty;
        check(repetition > 0.0 && repetition.is_finite(), "repetition_penalty", || {
            format!("repetition_penalty must be above 0 and finite, got {repetition}")
        })?;
        between("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        for &(token, bias) in &self.logit_bias {
            check(bias.is_finite(), "logit_bias", || {
                format!("logit_bias of token {token} must be finite, got {bias}")
            })?;
        }
        check(self.max_tokens >= 1, "max_tokens", || "max_tokens must be at least 1".to_string())?;
        check(self.min_tokens <= self.max_tokens, "min_tokens", || {
            format!("min_tokens must be at most max_tokens ({}), got {}", self.max_tokens, self.min_tokens)
        })
    }

    fn check_ids(&self, vocab_size: u32) -> Result<(), RequestError> {
        let known = |param, token: TokenId| {
            check(token.0 < vocab_size, param, || {
                format!("{param}: token id {token} is not below the vocabulary size {vocab_size}")
            })
        };
        let (num_stops, num_biases) = (self.stop_token_ids.len(), self.logit_bias.len());
        let num_bad_words = self.bad_words.len();
        check(num_bad_words <= MAX_BAD_WORDS, "bad_words", || {
            format!("bad_words may have {MAX_BAD_WORDS} sequences at most, got {num_bad_words}")
        })?;
        for word in &self.bad_words {
            check(!word.is_empty(), "bad_words", || "bad_words must not contain an empty sequence".to_string())?;
            word.iter().try_for_each(|&token| known("bad_words", token))?;
        }
        if let Some(allowed) = &self.allowed_token_ids {
            check(!allowed.is_empty(), "allowed_token_ids", || "allowed_token_ids must not be empty".to_string())?;
            allowed.iter().try_for_each(|&token| known("allowed_token_ids", token))?;
            check(allowed.is_sorted_by(|a, b| a < b), "allowed_token_ids", || {
                "allowed_token_ids must be ascending".to_string()
            })?;
        }
        check(num_stops <= MAX_STOP_TOKEN_IDS, "stop_token_ids", || {
            format!("stop_token_ids may have {MAX_STOP_TOKEN_IDS} entries at most, got {num_stops}")
        })?;
        check(num_biases <= vocab_size as usize, "logit_bias", || {
            format!("logit_bias may have {vocab_size} entries at most, one per token, got {num_biases}")
        })?;
        self.logit_bias.iter().try_for_each(|&(token, _)| known("logit_bias", token))?;
        self.stop_token_ids.iter().try_for_each(|&token| known("stop_token_ids", token))?;
        self.check_some_id_is_left(vocab_size)
    }

    /// Some id must be left to draw at every step: one that is allowed and that no bad word ends with and, with
    /// `min_tokens`, that is no stop id. What has been drawn does not count: a request is refused at once or never.
    fn check_some_id_is_left(&self, vocab_size: u32) -> Result<(), RequestError> {
        let eos = if self.ignore_eos { &[][..] } else { &self.eos_token_ids };
        let stops = self.stop_token_ids.iter().chain(eos).filter(|_| self.min_tokens > 0);
        let mut masked: Vec<TokenId> =
            self.bad_words.iter().filter_map(|word| word.last()).chain(stops).copied().collect();
        masked.retain(|token| token.0 < vocab_size);
        masked.sort_unstable();
        masked.dedup();
        let (param, is_left) = match &self.allowed_token_ids {
            Some(allowed) => ("allowed_token_ids", allowed.iter().any(|token| masked.binary_search(token).is_err())),
            None if self.bad_words.is_empty() => ("stop_token_ids", masked.len() < vocab_size as usize),
            None => ("bad_words", masked.len() < vocab_size as usize),
        };
        check(is_left, param, || {
            format!(
                "{param}: no token would be left to draw beside those of bad_words and, until min_tokens, the stop ids"
            )
        })
    }
}
