//! `POST /v1/completions`.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use runtime::ids::TokenId;
use serde::Deserialize;

use super::answer::Head;
use super::completion_wire::{Completion, CompletionChunks, CompletionWriter, Echo};
use super::fields::{Int, Prompt, Prompts};
use super::params::{Delivery, Shared, integer};
use super::prepare::{self, Checked, Prompting};
use crate::error::ApiError;
use crate::generate::{Generation, Job};
use crate::state::AppState;
use crate::stream;

/// OpenAI's default length of a completion.
const PROMPTING: Prompting = Prompting { param: "prompt", default_max_tokens: Some(16) };

/// The fields that only a completion has.
#[derive(Debug, Deserialize)]
pub struct CompletionBody {
    prompt: Option<Prompts>,
    echo: Option<bool>,
    logprobs: Option<Int>,
    add_special_tokens: Option<bool>,
}

/// A completion that is ready for the engine.
struct Plan {
    job: Job,
    head: Head,
    delivery: Delivery,
    echo: Echo,
}

/// Continues prompts.
///
/// # Errors
/// In the shape of `ApiError`.
pub async fn completions(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let bytes = prepare::read(&state, request).await?;
    let on_pool = Arc::clone(&state);
    let Plan { job, head, delivery, echo } = state.pool.run(move || plan(&on_pool, &bytes, arrived)).await??;
    let n = job.n as usize;
    let mut generation = Generation::start(Arc::clone(&state), job)?;
    let keep_alive = state.keep_alive();
    let writer = CompletionWriter { state, head, delivery, echo, n };
    if delivery.stream {
        return stream::respond(generation, CompletionChunks { writer, started: Vec::new() }, keep_alive).await;
    }
    let answers = generation.collect().await?;
    let choices = answers.into_iter().map(|answer| writer.choice(&generation, answer, true)).collect();
    let usage = writer.usage(&generation);
    Ok(Json(Completion::new(&writer.head, choices, Some(usage))).into_response())
}

fn plan(state: &AppState, bytes: &[u8], arrived: Instant) -> Result<Plan, ApiError> {
    let Checked { own: body, mut shared, model } = prepare::check::<CompletionBody>(state, bytes)?;
    let Prompts(prompts) = body.prompt.ok_or_else(|| ApiError::invalid("prompt", "prompt is missing"))?;
    if prompts.is_empty() {
        return Err(ApiError::invalid("prompt", "prompt must not be empty"));
    }
    let num_choices = prompts.len().saturating_mul(shared.n as usize);
    let bounds = state.engine.config();
    let most = state.config.max_choices(bounds);
    if num_choices > most as usize {
        let message = format!("the request has {num_choices} choices, at most {most} are allowed");
        return Err(ApiError::invalid(if shared.n > 1 { "n" } else { "prompt" }, message));
    }
    let mut echo = Echo {
        prompt: body.echo.unwrap_or(false),
        only: matches!(shared.max_tokens, Some((0, _))),
        logprobs: body.logprobs.is_some(),
        prompt_logprobs: shared.params.prompt_logprobs.is_some(),
        texts: Vec::new(),
    };
    if let (Some((0, name)), false) = (shared.max_tokens, echo.prompt) {
        return Err(ApiError::invalid(name, format!("{name} may be 0 only with echo")));
    }
    shared.params.logprobs = body.logprobs.map(|top| integer("logprobs", top, 0, bounds.max_logprobs)).transpose()?;
    if echo.prompt {
        shared.params.prompt_logprobs = shared.params.prompt_logprobs.max(shared.params.logprobs);
    }
    let add_special = body.add_special_tokens.unwrap_or(true);
    let mut fitted = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        let (ids, text) = encode(state, &shared, prompt, add_special)?;
        let num_ids = ids.len();
        let (ids, max_tokens) = PROMPTING.fit(state, &shared, ids)?;
        if echo.prompt {
            let whole = text.filter(|_| ids.len() == num_ids);
            echo.texts.push(whole.unwrap_or_else(|| state.text.decode(&ids, shared.text.skip_special)));
        }
        fitted.push((ids, max_tokens));
    }
    let head = Head::new(state, "cmpl-", model);
    prepare::log(state, &head.id, &fitted, &shared.params);
    Ok(Plan { job: prepare::job(state, &shared, fitted, arrived), head, delivery: shared.delivery, echo })
}

/// The ids of a prompt, and its text where it came as text.
fn encode(
    state: &AppState,
    shared: &Shared,
    prompt: Prompt,
    add_special: bool,
) -> Result<(Vec<TokenId>, Option<String>), ApiError> {
    match prompt {
        Prompt::Ids(ids) => Ok((ids, None)),
        Prompt::Text(text) => {
            PROMPTING.check_bytes(state, shared, text.len())?;
            Ok((state.text.encode(&text, add_special, true), Some(text)))
        }
    }
}
