//! What a request may ask for: the ranges of its parameters and the engine's bounds.
//!
//! Invariant: a request that passes here can always be served to its end; nothing behind it checks again. Called by
//! `Engine::validate` and `Engine::submit`.

use super::EngineConfig;
use crate::error::RequestError;
use crate::ids::TokenId;
use crate::request::{Request, SamplingParams};

/// The user's stop ids are looked through once per token.
const MAX_STOP_TOKEN_IDS: usize = 1024;

/// # Errors
/// `Invalid` naming the parameter.
pub(super) fn validate(request: &Request, config: &EngineConfig) -> Result<(), RequestError> {
    check_prompt(&request.prompt, config)?;
    check_ranges(&request.params)?;
    check_ids(&request.params, config)?;
    check_limits(&request.params, config)
}

fn check_prompt(prompt: &[TokenId], config: &EngineConfig) -> Result<(), RequestError> {
    let max_prompt_tokens = config.max_model_len - 1;
    require("prompt", !prompt.is_empty(), || "the prompt has no tokens".to_owned())?;
    require("prompt", prompt.len() <= max_prompt_tokens as usize, || {
        let (got, context) = (prompt.len(), config.max_model_len);
        format!("the prompt has {got} tokens; the context of {context} tokens leaves room for {max_prompt_tokens}")
    })?;
    check_in_vocab("prompt", prompt.iter().copied(), config)
}

fn check_ranges(params: &SamplingParams) -> Result<(), RequestError> {
    // `contains` is false for NaN.
    let in_range = |name: &'static str, value: f32, ok: bool, range: &str| {
        require(name, ok, || format!("{name} is {value}; it must be in {range}"))
    };
    let p = params;
    in_range("temperature", p.temperature, (0.0..=2.0).contains(&p.temperature), "0..=2")?;
    in_range("top_p", p.top_p, p.top_p > 0.0 && p.top_p <= 1.0, "(0, 1]")?;
    in_range("min_p", p.min_p, (0.0..=1.0).contains(&p.min_p), "0..=1")?;
    let repetition_ok = p.repetition_penalty > 0.0 && p.repetition_penalty.is_finite();
    in_range("repetition_penalty", p.repetition_penalty, repetition_ok, "(0, infinity)")?;
    in_range("presence_penalty", p.presence_penalty, (-2.0..=2.0).contains(&p.presence_penalty), "-2..=2")?;
    in_range("frequency_penalty", p.frequency_penalty, (-2.0..=2.0).contains(&p.frequency_penalty), "-2..=2")?;
    let finite_bias = p.logit_bias.iter().all(|(_, bias)| bias.is_finite());
    require("logit_bias", finite_bias, || "logit_bias must be finite".to_owned())?;
    require("max_tokens", p.max_tokens >= 1, || "max_tokens must be at least 1".to_owned())?;
    require("min_tokens", p.min_tokens <= p.max_tokens, || {
        format!("min_tokens is {}; it must not exceed max_tokens, {}", p.min_tokens, p.max_tokens)
    })
}

fn check_ids(params: &SamplingParams, config: &EngineConfig) -> Result<(), RequestError> {
    require("stop_token_ids", params.stop_token_ids.len() <= MAX_STOP_TOKEN_IDS, || {
        format!("{} stop_token_ids; at most {MAX_STOP_TOKEN_IDS} are allowed", params.stop_token_ids.len())
    })?;
    check_in_vocab("stop_token_ids", params.stop_token_ids.iter().copied(), config)?;
    require("logit_bias", params.logit_bias.len() <= config.vocab_size as usize, || {
        format!("{} entries in logit_bias; the vocabulary has {}", params.logit_bias.len(), config.vocab_size)
    })?;
    check_in_vocab("logit_bias", params.logit_bias.iter().map(|&(id, _)| id), config)
}

fn check_limits(params: &SamplingParams, config: &EngineConfig) -> Result<(), RequestError> {
    for (name, asked) in [("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)] {
        require(name, asked.is_none_or(|asked| asked <= config.max_logprobs), || {
            format!("{name} is {}; at most {} are allowed", asked.unwrap_or(0), config.max_logprobs)
        })?;
    }
    Ok(())
}

fn check_in_vocab(
    name: &'static str,
    mut ids: impl Iterator<Item = TokenId>,
    config: &EngineConfig,
) -> Result<(), RequestError> {
    match ids.find(|id| id.0 >= config.vocab_size) {
        None => Ok(()),
        Some(id) => Err(RequestError::invalid(
            name,
            format!("token id {id} in {name} is out of the vocabulary of {} tokens", config.vocab_size),
        )),
    }
}

fn require(name: &'static str, ok: bool, message: impl FnOnce() -> String) -> Result<(), RequestError> {
    if ok { Ok(()) } else { Err(RequestError::invalid(name, message())) }
}
