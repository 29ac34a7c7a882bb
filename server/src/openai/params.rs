//! The parameters that chat and completions share, and how they become `SamplingParams`.
//!
//! Invariant: what a request does not say comes from the model's generation defaults, then from vLLM's defaults. Ranges
//! of sampling values are `SamplingParams::validate`'s; here are the rules that need the wire's types or names.

use std::sync::Arc;

use runtime::engine::EngineConfig;
use runtime::ids::TokenId;
use runtime::request::SamplingParams;
use runtime::text::{TextModel, TextStreamOptions};
use serde::Deserialize;

use super::fields::{Id, Int, LogitBias, Strings};
use crate::config::ServerConfig;
use crate::error::ApiError;

/// Most stop strings of a request.
const MAX_STOP_STRINGS: usize = 4;
/// Longest stop string, in characters; the text side holds back this much.
const MAX_STOP_CHARS: usize = 1024;
/// Most bad words of a request; each may be two sequences of ids.
const MAX_BAD_WORDS: usize = 512;
/// Longest bad word.
const MAX_BAD_WORD_BYTES: usize = 256;
/// Longest cache salt, in characters.
const MAX_SALT_CHARS: usize = 128;

/// The fields of a body that both endpoints read.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct SharedBody {
    pub model: Option<String>,
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub top_k: Option<Int>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub frequency_penalty: Option<f64>,
    pub allowed_token_ids: Option<Vec<Id>>,
    pub bad_words: Option<Vec<String>>,
    pub logit_bias: Option<LogitBias>,
    pub seed: Option<Int>,
    pub stop: Option<Strings>,
    pub stop_token_ids: Option<Vec<Id>>,
    pub max_tokens: Option<Int>,
    pub max_completion_tokens: Option<Int>,
    pub min_tokens: Option<Int>,
    pub ignore_eos: Option<bool>,
    pub include_stop_str_in_output: Option<bool>,
    pub skip_special_tokens: Option<bool>,
    pub n: Option<Int>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    pub prompt_logprobs: Option<Int>,
    pub priority: Option<Int>,
    pub cache_salt: Option<String>,
    pub truncate_prompt_tokens: Option<Int>,
    pub truncation_side: Option<TruncationSide>,
    pub return_token_ids: Option<bool>,
}

/// Which part of a prompt that is cut goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TruncationSide {
    /// The beginning.
    #[default]
    Left,
    /// The end.
    Right,
}

/// `stream_options` of a body.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct StreamOptions {
    pub include_usage: Option<bool>,
    pub continuous_usage_stats: Option<bool>,
}

/// How an answer is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delivery {
    /// As server-sent events.
    pub stream: bool,
    /// A last chunk with `usage`.
    pub include_usage: bool,
    /// `usage` in every chunk.
    pub continuous_usage: bool,
    /// The ids of prompt and output too.
    pub return_token_ids: bool,
}

/// The shared fields, checked. `params.max_tokens` is what was asked for; `fit` bounds it by the context.
#[derive(Clone, Debug)]
pub struct Shared {
    pub params: SamplingParams,
    pub text: TextStreamOptions,
    pub delivery: Delivery,
    pub n: u32,
    pub cache_salt: Option<Arc<str>>,
    pub truncation: Option<(u32, TruncationSide)>,
    /// `max_tokens` as asked for, and the field that said so.
    pub max_tokens: Option<(u32, &'static str)>,
    /// Upper bound of the answer by the model's defaults.
    pub default_max_tokens: Option<u32>,
}

/// An integer of `min..=max`, or 400.
pub fn integer(param: &'static str, value: Int, min: i64, max: u32) -> Result<u32, ApiError> {
    match u32::try_from(value.0) {
        Ok(number) if value.0 >= min && number <= max => Ok(number),
        _ => Err(ApiError::invalid(param, format!("{param} must be between {min} and {max}, got {}", value.0))),
    }
}

impl SharedBody {
    /// Checks the fields; `model` encodes bad words and knows the end-of-sequence ids.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn check(self, config: &ServerConfig, engine: &EngineConfig, model: &TextModel) -> Result<Shared, ApiError> {
        let delivery = self.delivery(config)?;
        let params = self.sampling(config, engine, model)?;
        let text = self.text_options(params.min_tokens)?;
        if self.priority.is_some_and(|priority| priority.0 != 0) {
            return Err(ApiError::invalid("priority", "priority must be 0: requests are served in order of arrival"));
        }
        let n = self.n.map_or(Ok(1), |n| integer("n", n, 1, config.max_choices(engine)))?;
        if n > 1 && params.is_greedy() {
            return Err(ApiError::invalid(
                "n",
                "n must be 1 when temperature is 0: greedy choices would all be the same",
            ));
        }
        if params.prompt_logprobs.is_some() && delivery.stream {
            return Err(ApiError::invalid("prompt_logprobs", "prompt_logprobs is not available with stream"));
        }
        let truncation = match self.truncate_prompt_tokens {
            None => None,
            Some(Int(-1)) => Some((engine.max_model_len.saturating_sub(1), self.truncation_side.unwrap_or_default())),
            Some(tokens) => {
                let tokens = integer("truncate_prompt_tokens", tokens, 1, engine.max_model_len)?;
                Some((tokens, self.truncation_side.unwrap_or_default()))
            }
        };
        let max_tokens = self.requested_tokens()?;
        let cache_salt = self.cache_salt.map(|salt| check_salt(&salt).map(|()| Arc::from(salt))).transpose()?;
        let default_max_tokens = config.generation_defaults.max_new_tokens;
        Ok(Shared { params, text, delivery, n, cache_salt, truncation, max_tokens, default_max_tokens })
    }

    /// `max_completion_tokens` wins over `max_tokens`; 0 is for completions with `echo` only, which check it.
    fn requested_tokens(&self) -> Result<Option<(u32, &'static str)>, ApiError> {
        let (value, name) = match (self.max_completion_tokens, self.max_tokens) {
            (Some(tokens), _) => (tokens, "max_completion_tokens"),
            (None, Some(tokens)) => (tokens, "max_tokens"),
            (None, None) => return Ok(None),
        };
        integer(name, value, 0, u32::MAX).map(|tokens| Some((tokens, name)))
    }

    fn delivery(&self, config: &ServerConfig) -> Result<Delivery, ApiError> {
        let stream = self.stream.unwrap_or(false);
        if self.stream_options.is_some() && !stream {
            return Err(ApiError::invalid("stream_options", "stream_options needs stream to be true"));
        }
        let options = self.stream_options.unwrap_or_default();
        let include_usage = options.include_usage.unwrap_or(false) || config.enable_force_include_usage;
        Ok(Delivery {
            stream,
            include_usage,
            continuous_usage: include_usage && options.continuous_usage_stats.unwrap_or(false),
            return_token_ids: self.return_token_ids.unwrap_or(false),
        })
    }

    fn text_options(&self, min_tokens: u32) -> Result<TextStreamOptions, ApiError> {
        let stop = self.stop.as_ref().map(|stop| stop.0.clone()).unwrap_or_default();
        if stop.len() > MAX_STOP_STRINGS {
            let message = format!("stop may have {MAX_STOP_STRINGS} strings at most, got {}", stop.len());
            return Err(ApiError::invalid("stop", message));
        }
        if stop.iter().any(|stop| stop.is_empty() || stop.chars().nth(MAX_STOP_CHARS).is_some()) {
            let message = format!("a stop string must have between 1 and {MAX_STOP_CHARS} characters");
            return Err(ApiError::invalid("stop", message));
        }
        Ok(TextStreamOptions {
            stop,
            min_tokens,
            include_stop: self.include_stop_str_in_output.unwrap_or(false),
            skip_special: self.skip_special_tokens.unwrap_or(true),
        })
    }

    fn sampling(
        &self,
        config: &ServerConfig,
        engine: &EngineConfig,
        model: &TextModel,
    ) -> Result<SamplingParams, ApiError> {
        let base = config.generation_defaults.params();
        let float = |given: Option<f64>, base: f32| given.map_or(base, |given| given as f32);
        let mut params = SamplingParams {
            temperature: float(self.temperature, base.temperature),
            top_p: float(self.top_p, base.top_p),
            top_k: match self.top_k {
                None => base.top_k,
                Some(Int(-1)) => 0,
                Some(top_k) => integer("top_k", top_k, -1, u32::MAX)?,
            },
            min_p: float(self.min_p, base.min_p),
            repetition_penalty: float(self.repetition_penalty, base.repetition_penalty),
            presence_penalty: float(self.presence_penalty, base.presence_penalty),
            frequency_penalty: float(self.frequency_penalty, base.frequency_penalty),
            logit_bias: self.biases(),
            seed: self.seed.filter(|seed| seed.0 != -1).map(|seed| seed.0 as u64),
            min_tokens: self
                .min_tokens
                .map_or(Ok(0), |tokens| integer("min_tokens", tokens, 0, engine.max_model_len))?,
            stop_token_ids: self.stop_token_ids.iter().flatten().map(|id| id.0).collect(),
            eos_token_ids: model.eos_token_ids().to_vec(),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            prompt_logprobs: self
                .prompt_logprobs
                .map(|top| integer("prompt_logprobs", top, 0, engine.max_logprobs))
                .transpose()?,
            ..base
        };
        if let Some(ids) = &self.allowed_token_ids {
            params.allow_only(ids.iter().map(|id| id.0));
        }
        let bad_words = self.bad_words.as_deref().unwrap_or_default();
        if bad_words.len() > MAX_BAD_WORDS || bad_words.iter().any(|word| word.len() > MAX_BAD_WORD_BYTES) {
            let message = format!("bad_words may have {MAX_BAD_WORDS} words of {MAX_BAD_WORD_BYTES} bytes at most");
            return Err(ApiError::invalid("bad_words", message));
        }
        params.ban_words(bad_words, |word| model.encode(word, false, true))?;
        Ok(params)
    }

    fn biases(&self) -> Vec<(TokenId, f32)> {
        let given = self.logit_bias.iter().flat_map(|bias| &bias.0);
        given.map(|&(id, bias)| (id, bias.clamp(-100.0, 100.0) as f32)).collect()
    }
}

impl Shared {
    /// Bounds of one answer to a prompt of `prompt_len` tokens: `max_tokens`, at most the rest of the context.
    /// `default` is the endpoint's own, `param` the prompt's field.
    ///
    /// # Errors
    /// 400 when the prompt leaves no room, naming both numbers.
    pub fn fit(
        &self,
        param: &'static str,
        prompt_len: usize,
        default: Option<u32>,
        engine: &EngineConfig,
    ) -> Result<u32, ApiError> {
        let rest = u32::try_from(prompt_len).ok().and_then(|len| engine.max_model_len.checked_sub(len));
        let Some(rest) = rest.filter(|rest| *rest > 0) else {
            let message = format!(
                "the prompt has {prompt_len} tokens, the context has {}: there is no room for an answer",
                engine.max_model_len
            );
            return Err(ApiError::invalid(param, message));
        };
        let asked = self.max_tokens.map(|(tokens, _)| tokens).or(self.default_max_tokens).or(default);
        let max_tokens = asked.unwrap_or(rest).min(rest).max(1);
        if self.params.min_tokens > max_tokens {
            let message = format!("min_tokens is {}, max_tokens is {max_tokens}", self.params.min_tokens);
            return Err(ApiError::invalid("min_tokens", message));
        }
        Ok(max_tokens)
    }

    /// Cuts a prompt as `truncate_prompt_tokens` asks.
    pub fn truncate(&self, prompt: &mut Vec<TokenId>) {
        let Some((tokens, side)) = self.truncation else { return };
        let excess = prompt.len().saturating_sub(tokens as usize);
        match side {
            TruncationSide::Left => drop(prompt.drain(..excess)),
            TruncationSide::Right => prompt.truncate(prompt.len() - excess),
        }
    }
}

fn check_salt(salt: &str) -> Result<(), ApiError> {
    let forbidden = |c: char| matches!(c, '@' | '/' | '\\' | '\0');
    if salt.is_empty() || salt.chars().nth(MAX_SALT_CHARS).is_some() || salt.contains(forbidden) {
        let message = format!("cache_salt must have 1 to {MAX_SALT_CHARS} characters and no '@', '/', '\\' or NUL");
        return Err(ApiError::invalid("cache_salt", message));
    }
    Ok(())
}
