//! What a request may ask for: a prompt within the engine's bounds, and parameters that `SamplingParams::validate` passes.
//!
//! Invariant: a request that passes here can always be served to its end; nothing behind it checks again. Called by
//! `Engine::validate` and `Engine::submit`.

use super::EngineConfig;
use crate::error::RequestError;
use crate::ids::TokenId;
use crate::request::Request;

/// # Errors
/// `Invalid` naming the parameter.
pub(super) fn validate(request: &Request, config: &EngineConfig) -> Result<(), RequestError> {
    check_prompt(&request.prompt, config)?;
    request.params.validate(config.vocab_size, config.max_logprobs)
}

fn check_prompt(prompt: &[TokenId], config: &EngineConfig) -> Result<(), RequestError> {
    let max_prompt_tokens = config.max_model_len - 1;
    require("prompt", !prompt.is_empty(), || "the prompt has no tokens".to_owned())?;
    require("prompt", prompt.len() <= max_prompt_tokens as usize, || {
        let (got, context) = (prompt.len(), config.max_model_len);
        format!("the prompt has {got} tokens; the context of {context} tokens leaves room for {max_prompt_tokens}")
    })?;
    match prompt.iter().find(|id| id.0 >= config.vocab_size) {
        None => Ok(()),
        Some(id) => {
            let message = format!("token id {id} in prompt is out of the vocabulary of {} tokens", config.vocab_size);
            Err(RequestError::invalid("prompt", message))
        }
    }
}

fn require(name: &'static str, ok: bool, message: impl FnOnce() -> String) -> Result<(), RequestError> {
    if ok { Ok(()) } else { Err(RequestError::invalid(name, message())) }
}
