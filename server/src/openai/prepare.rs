//! From a checked body to prompt ids within bounds: the part of both endpoints that runs on the tokenising pool.
//!
//! Invariant: a prompt that cannot fit is refused before it is tokenised where its length in bytes shows it, and before
//! the engine hears of it always; both numbers are in the message.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Bytes;
use axum::extract::Request;
use runtime::ids::TokenId;
use runtime::request::SamplingParams;
use serde::de::DeserializeOwned;

use super::params::{Shared, SharedBody};
use super::unsupported::refuse_unsupported;
use crate::body;
use crate::error::{ApiError, shorten};
use crate::generate::Job;
use crate::state::AppState;

/// A body, checked as far as both endpoints have it in common.
#[derive(Debug)]
pub struct Checked<B> {
    /// The endpoint's own fields.
    pub own: B,
    /// The shared ones.
    pub shared: Shared,
    /// The name that the answer carries.
    pub model: String,
}

/// Reads a body when the server takes requests.
///
/// # Errors
/// 503 when it does not; whatever is wrong with the body.
pub async fn read(state: &AppState, request: Request) -> Result<Bytes, ApiError> {
    state.ready()?;
    body::read_json(request, state.config.max_body_bytes, state.config.socket_timeout()).await
}

/// Parses a body and checks its shared fields.
///
/// # Errors
/// 400 naming the field, 404 for another model.
pub fn check<B: DeserializeOwned>(state: &AppState, bytes: &[u8]) -> Result<Checked<B>, ApiError> {
    refuse_unsupported(bytes)?;
    let shared: SharedBody = body::parse(bytes)?;
    let own = body::parse(bytes)?;
    let model = state.model_name(shared.model.as_deref())?;
    let shared = shared.check(&state.config, state.engine.config(), &state.text)?;
    Ok(Checked { own, shared, model })
}

/// Where a prompt came from and what an answer may cost.
#[derive(Clone, Copy, Debug)]
pub struct Prompting {
    /// The body's field: `prompt` or `messages`.
    pub param: &'static str,
    /// The endpoint's own default of `max_tokens`; `None` is the rest of the context.
    pub default_max_tokens: Option<u32>,
}

impl Prompting {
    /// Refuses text that no tokenizer could make short enough.
    ///
    /// # Errors
    /// 400.
    pub fn check_bytes(&self, state: &AppState, shared: &Shared, num_bytes: usize) -> Result<(), ApiError> {
        let max_model_len = state.engine.config().max_model_len;
        let most = (max_model_len as usize).saturating_mul(state.longest_token_bytes);
        if num_bytes > most && shared.truncation.is_none() {
            let message =
                format!("the prompt has {num_bytes} bytes, far more than the context of {max_model_len} tokens holds");
            return Err(ApiError::invalid(self.param, message));
        }
        Ok(())
    }

    /// A prompt that fits, and how long its answers may be.
    ///
    /// # Errors
    /// 400 for an empty prompt, for ids out of the vocabulary, and for a prompt that leaves no room.
    pub fn fit(
        &self,
        state: &AppState,
        shared: &Shared,
        mut ids: Vec<TokenId>,
    ) -> Result<(Arc<[TokenId]>, u32), ApiError> {
        let vocab_size = state.engine.config().vocab_size;
        if ids.is_empty() {
            return Err(ApiError::invalid(self.param, "the prompt has no tokens"));
        }
        if let Some(id) = ids.iter().find(|id| id.0 >= vocab_size) {
            let message = format!("the prompt has token {id}, the vocabulary has {vocab_size} tokens");
            return Err(ApiError::invalid(self.param, message));
        }
        shared.truncate(&mut ids);
        let max_tokens = shared.fit(self.param, ids.len(), self.default_max_tokens, state.engine.config())?;
        Ok((ids.into(), max_tokens))
    }
}

/// The job of a request.
pub fn job(state: &AppState, shared: &Shared, prompts: Vec<(Arc<[TokenId]>, u32)>, arrived: Instant) -> Job {
    let stream = shared.delivery.stream;
    Job {
        prompts,
        n: shared.n,
        params: shared.params.clone(),
        text: shared.text.clone(),
        cache_salt: shared.cache_salt.clone(),
        // A whole answer is gathered anyway: the fewer pieces the better.
        interval: if stream { state.config.stream_interval.max(1) } else { u32::MAX },
        arrived,
    }
}

/// Logs a request when the flag says so.
pub fn log(state: &AppState, id: &str, prompts: &[(Arc<[TokenId]>, u32)], params: &SamplingParams) {
    if !state.config.enable_log_requests {
        return;
    }
    for (ids, max_tokens) in prompts {
        let text = state.text.decode(ids, false);
        let text = state.config.max_log_len.map_or(text.clone(), |len| shorten(text, len));
        tracing::info!(id, num_tokens = ids.len(), max_tokens, prompt = text, ?params, "request");
    }
}
