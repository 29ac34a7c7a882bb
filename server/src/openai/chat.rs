//! `POST /v1/chat/completions`.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use runtime::ids::TokenId;
use runtime::request::FinishReason;
use runtime::text::{ChatInput, ChatTemplate};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::answer::{Head, Usage, prompt_logprobs};
use super::chat_wire::{AnswerMessage, ChatChoice, ChatChunks, ChatCompletion, chat_logprobs};
use super::fields::Int;
use super::messages::{self, Message};
use super::params::{Delivery, Shared, integer};
use super::prepare::{self, Checked, Prompting};
use crate::body;
use crate::error::ApiError;
use crate::generate::{Delta, Generation, Job};
use crate::state::AppState;
use crate::stream;

const PROMPTING: Prompting = Prompting { param: "messages", default_max_tokens: None };

/// The fields that only a chat has.
#[derive(Debug, Deserialize)]
pub struct ChatBody {
    messages: Vec<Message>,
    logprobs: Option<bool>,
    top_logprobs: Option<Int>,
    echo: Option<bool>,
}

/// The fields that say how messages are rendered; `/tokenize` has them too.
#[derive(Debug, Default, Deserialize)]
pub struct TemplateBody {
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    add_special_tokens: Option<bool>,
    chat_template: Option<String>,
    chat_template_kwargs: Option<Map<String, Value>>,
    reasoning_effort: Option<String>,
    documents: Option<Value>,
}

/// A chat that is ready for the engine.
struct Plan {
    job: Job,
    head: Head,
    delivery: Delivery,
}

/// Answers a chat.
///
/// # Errors
/// In the shape of `ApiError`.
pub async fn chat_completions(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let bytes = prepare::read(&state, request).await?;
    let on_pool = Arc::clone(&state);
    let Plan { job, head, delivery } = state.pool.run(move || plan(&on_pool, &bytes, arrived)).await??;
    let mut generation = Generation::start(Arc::clone(&state), job)?;
    if delivery.stream {
        let keep_alive = state.keep_alive();
        return stream::respond(generation, ChatChunks { state, head, delivery }, keep_alive).await;
    }
    let answers = generation.collect().await?;
    Ok(Json(whole(&state, &generation, head, delivery, answers)).into_response())
}

fn plan(state: &AppState, bytes: &[u8], arrived: Instant) -> Result<Plan, ApiError> {
    let Checked { own: chat, mut shared, model } = prepare::check::<ChatBody>(state, bytes)?;
    if chat.echo == Some(true) {
        return Err(ApiError::invalid("echo", "echo is not supported for chats"));
    }
    if let Some((0, name)) = shared.max_tokens {
        return Err(ApiError::invalid(name, format!("{name} must be at least 1")));
    }
    shared.params.logprobs = match (chat.logprobs.unwrap_or(false), chat.top_logprobs) {
        (true, None) => Some(0),
        (true, Some(top)) => Some(integer("top_logprobs", top, 0, state.engine.config().max_logprobs)?),
        (false, None | Some(Int(0))) => None,
        (false, Some(_)) => return Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs to be true")),
    };
    let ids = encode(state, Some(&shared), chat.messages, body::parse(bytes)?)?;
    let prompts = vec![PROMPTING.fit(state, &shared, ids)?];
    let head = Head::new(state, "chatcmpl-", model);
    prepare::log(state, &head.id, &prompts, &shared.params);
    Ok(Plan { job: prepare::job(state, &shared, prompts, arrived), head, delivery: shared.delivery })
}

/// Renders messages and encodes them; `shared` is there for a request that will be answered.
///
/// # Errors
/// 400 for messages that are none, options that exclude each other, a template that refuses.
pub fn encode(
    state: &AppState,
    shared: Option<&Shared>,
    messages: Vec<Message>,
    body: TemplateBody,
) -> Result<Vec<TokenId>, ApiError> {
    let continue_final_message = body.continue_final_message.unwrap_or(false);
    if continue_final_message && body.add_generation_prompt == Some(true) {
        let message = "continue_final_message and add_generation_prompt exclude each other";
        return Err(ApiError::invalid("continue_final_message", message));
    }
    if body.add_special_tokens == Some(true) {
        let message = "add_special_tokens is not supported for chats: the template writes the special tokens";
        return Err(ApiError::invalid("add_special_tokens", message));
    }
    let template = body.chat_template.map(|source| own_template(state, &source)).transpose()?;
    let messages = messages::to_template(messages)?;
    if let Some(shared) = shared {
        PROMPTING.check_bytes(state, shared, messages::num_bytes(&messages))?;
    }
    let mut kwargs = state.config.default_chat_template_kwargs.clone();
    kwargs.extend(body.reasoning_effort.map(|effort| ("reasoning_effort".into(), Value::String(effort))));
    kwargs.extend(body.documents.map(|documents| ("documents".into(), documents)));
    kwargs.extend(body.chat_template_kwargs.unwrap_or_default());
    let chat = ChatInput {
        messages: &messages,
        add_generation_prompt: body.add_generation_prompt.unwrap_or(!continue_final_message),
        continue_final_message,
        kwargs: &kwargs,
    };
    Ok(state.text.encode_chat_with(&chat, template.as_ref())?)
}

/// A request's own template, where the server allows one: templates are programs.
fn own_template(state: &AppState, source: &str) -> Result<ChatTemplate, ApiError> {
    if !state.config.trust_request_chat_template {
        let message = "chat_template is not allowed: start the server with --trust-request-chat-template";
        return Err(ApiError::invalid("chat_template", message));
    }
    ChatTemplate::parse(source).map_err(|problem| ApiError::invalid("chat_template", problem.to_string()))
}

fn whole(
    state: &AppState,
    generation: &Generation,
    head: Head,
    delivery: Delivery,
    answers: Vec<Delta>,
) -> ChatCompletion {
    let choice = |answer: Delta| {
        let (reason, stop_reason) = answer.finish.unzip();
        let content = answer.text;
        ChatChoice {
            index: answer.choice,
            message: AnswerMessage { role: state.config.response_role.clone(), content, refusal: None },
            logprobs: chat_logprobs(&state.text, &answer.tokens),
            finish_reason: reason.map_or("stop", FinishReason::as_str),
            stop_reason: stop_reason.flatten(),
            token_ids: delivery.return_token_ids.then(|| answer.tokens.iter().map(|token| token.id).collect()),
        }
    };
    let prompt = generation.prompt(0);
    let found = generation.prompt_logprobs(0);
    ChatCompletion {
        id: head.id,
        object: "chat.completion",
        created: head.created,
        model: head.model,
        choices: answers.into_iter().map(choice).collect(),
        usage: Usage::new(generation.counts(), state.config.enable_prompt_tokens_details),
        prompt_logprobs: (!found.is_empty()).then(|| prompt_logprobs(&state.text, prompt, found)),
        prompt_token_ids: delivery.return_token_ids.then(|| prompt.to_vec()),
    }
}
