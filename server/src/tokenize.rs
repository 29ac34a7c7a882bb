//! `POST /tokenize` and `/detokenize`, in vLLM's shapes.
//!
//! Invariant: the ids are those that the same prompt or messages would run with.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use runtime::ids::TokenId;
use serde::{Deserialize, Serialize};

use crate::body;
use crate::error::ApiError;
use crate::openai::chat;
use crate::openai::fields::Id;
use crate::openai::messages::Message;
use crate::openai::prepare;
use crate::openai::unsupported::refuse_unsupported;
use crate::state::AppState;

/// Body of `/tokenize`; with `messages` the fields of `TemplateBody` too.
#[derive(Debug, Deserialize)]
pub struct TokenizeBody {
    model: Option<String>,
    prompt: Option<String>,
    messages: Option<Vec<Message>>,
    add_special_tokens: Option<bool>,
    return_token_strs: Option<bool>,
}

/// Ids of a prompt.
#[derive(Debug, Serialize)]
pub struct Tokenized {
    count: usize,
    max_model_len: u32,
    tokens: Vec<TokenId>,
    token_strs: Option<Vec<String>>,
}

/// Body of `/detokenize`.
#[derive(Debug, Deserialize)]
pub struct DetokenizeBody {
    model: Option<String>,
    tokens: Vec<Id>,
}

/// Text of ids.
#[derive(Debug, Serialize)]
pub struct Detokenized {
    prompt: String,
}

/// Tokenises a prompt or a chat.
///
/// # Errors
/// In the shape of `ApiError`.
pub async fn tokenize(State(state): State<Arc<AppState>>, request: Request) -> Result<Json<Tokenized>, ApiError> {
    let bytes = prepare::read(&state, request).await?;
    let on_pool = Arc::clone(&state);
    state.pool.run(move || tokenize_now(&on_pool, &bytes)).await?.map(Json)
}

fn tokenize_now(state: &AppState, bytes: &[u8]) -> Result<Tokenized, ApiError> {
    refuse_unsupported(bytes)?;
    let body: TokenizeBody = body::parse(bytes)?;
    state.model_name(body.model.as_deref())?;
    let tokens = match (body.prompt, body.messages) {
        (Some(prompt), None) => state.text.encode(&prompt, body.add_special_tokens.unwrap_or(true), true),
        (None, Some(messages)) => chat::encode(state, None, messages, body::parse(bytes)?)?,
        _ => return Err(ApiError::invalid("prompt", "give one of prompt and messages")),
    };
    let strings = || tokens.iter().map(|id| state.text.token_str(*id)).collect();
    Ok(Tokenized {
        count: tokens.len(),
        max_model_len: state.engine.config().max_model_len,
        token_strs: body.return_token_strs.unwrap_or(false).then(strings),
        tokens,
    })
}

/// Text of a list of ids.
///
/// # Errors
/// In the shape of `ApiError`.
pub async fn detokenize(State(state): State<Arc<AppState>>, request: Request) -> Result<Json<Detokenized>, ApiError> {
    let bytes = prepare::read(&state, request).await?;
    let on_pool = Arc::clone(&state);
    state.pool.run(move || detokenize_now(&on_pool, &bytes)).await?.map(Json)
}

fn detokenize_now(state: &AppState, bytes: &[u8]) -> Result<Detokenized, ApiError> {
    let body: DetokenizeBody = body::parse(bytes)?;
    state.model_name(body.model.as_deref())?;
    let ids: Vec<TokenId> = body.tokens.into_iter().map(|id| id.0).collect();
    let vocab_size = state.engine.config().vocab_size;
    if let Some(id) = ids.iter().find(|id| id.0 >= vocab_size) {
        return Err(ApiError::invalid("tokens", format!("token {id} is not in the vocabulary of {vocab_size} tokens")));
    }
    Ok(Detokenized { prompt: state.text.decode(&ids, false) })
}
