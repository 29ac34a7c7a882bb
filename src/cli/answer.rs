//! One answer in the foreground: submit, show text as it comes, gather what `--json` prints.
//!
//! Invariant: what is shown joined is `Answer::text`. Tokens past a stop string are dropped and not counted.

use std::sync::mpsc;
use std::time::Instant;

use anyhow::bail;
use kittiwake::Loaded;
use runtime::ids::TokenId;
use runtime::request::{Event, FinishReason, Request, SamplingParams, TokenLogprobs};
use runtime::text::TextStreamOptions;
use serde::Serialize;

/// A finished answer.
#[derive(Debug, Serialize)]
pub struct Answer {
    /// What was asked.
    pub prompt_ids: Vec<TokenId>,
    /// What was answered, stop token included.
    pub token_ids: Vec<TokenId>,
    /// As text.
    pub text: String,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// One entry per output token, when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Vec<TokenEntry>>,
    /// One entry per prompt token (`null` for the first), when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Vec<Option<TokenEntry>>>,
    /// Where it ran.
    pub device: String,
    /// How long it took.
    pub timings: Timings,
}

/// The log-probability of one token and of the most probable ones at its place.
#[derive(Debug, Serialize)]
pub struct TokenEntry {
    id: TokenId,
    logprob: f32,
    top: Vec<(TokenId, f32)>,
}

/// Wall-clock times.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Timings {
    /// From opening the file to the engine being ready.
    pub load_s: f64,
    /// From submission to the first token.
    pub ttft_s: f64,
    /// Prompt tokens that were not in the prefix cache, over `ttft_s`.
    pub prefill_tokens_per_s: f64,
    /// Output tokens after the first over the time they took; 0 when there was one.
    pub decode_tokens_per_s: f64,
}

/// What to answer and how to turn it into text.
#[derive(Debug)]
pub struct Question {
    /// Prompt ids.
    pub prompt: Vec<TokenId>,
    /// How to draw.
    pub params: SamplingParams,
    /// Stop strings and the like.
    pub stream: TextStreamOptions,
}

/// Answers one question. `show` gets text as it becomes safe to show; when it returns `false` the answer is aborted.
///
/// # Errors
/// The request was refused, or the engine failed.
pub fn answer(loaded: &Loaded, question: Question, mut show: impl FnMut(&str) -> bool) -> anyhow::Result<Answer> {
    let engine = &loaded.engine;
    let prompt_ids = question.prompt.clone();
    let (id, params) = (engine.next_id(), question.params.clone());
    let (sender, events) = mpsc::channel();
    let request = Request { id, prompt: question.prompt.into(), params: question.params, cache_salt: None };
    let start = Instant::now();
    engine.submit(request, Box::new(move |event: Event| sender.send(event).is_ok()))?;

    let mut stream = loaded.text.stream(&question.stream);
    let mut gathered = Gathered::default();
    let mut first_token = None;
    let mut finish_reason = FinishReason::Abort;
    for event in events {
        match event {
            Event::Started { cached_tokens } => gathered.cached_tokens = cached_tokens as usize,
            Event::PromptLogprobs(entries) => gathered.prompt_logprobs.extend(entries),
            Event::Token { id: token, logprobs } if !gathered.stopped => {
                first_token.get_or_insert_with(Instant::now);
                gathered.tokens.push(token);
                gathered.logprobs.extend(logprobs.map(|boxed| *boxed));
                let delta = if params.is_stop(token) { stream.push_stop_token(token) } else { stream.push(token) };
                gathered.stopped = delta.stop.is_some();
                gathered.text.push_str(&delta.text);
                if !show(&delta.text) {
                    engine.abort(id);
                }
                if gathered.stopped {
                    engine.finish(id);
                }
            }
            Event::Token { .. } => {}
            Event::Finished { reason: FinishReason::Error, .. } => bail!("the model's logits were not finite"),
            Event::Finished { reason, .. } => {
                finish_reason = if gathered.stopped { FinishReason::Stop } else { reason }
            }
            Event::Failed(message) => bail!("the engine failed: {message}"),
        }
    }
    let end = Instant::now();
    let rest = stream.finish();
    show(&rest.text);
    gathered.text.push_str(&rest.text);
    let first = first_token.unwrap_or(end);
    let num_computed = prompt_ids.len() - gathered.cached_tokens;
    let num_decoded = gathered.tokens.len().saturating_sub(1);
    let (ttft_s, decode_s) = ((first - start).as_secs_f64(), (end - first).as_secs_f64());
    Ok(Answer {
        logprobs: params.logprobs.map(|_| {
            let entries = gathered.tokens.iter().zip(gathered.logprobs);
            entries.map(|(&id, logprobs)| entry(id, logprobs)).collect()
        }),
        prompt_logprobs: params.prompt_logprobs.map(|_| {
            let entries = prompt_ids.iter().zip(gathered.prompt_logprobs);
            entries.map(|(&id, logprobs)| Some(entry(id, logprobs?))).collect()
        }),
        prompt_ids,
        token_ids: gathered.tokens,
        text: gathered.text,
        finish_reason,
        device: loaded.device.clone(),
        timings: Timings {
            load_s: loaded.load_time.as_secs_f64(),
            ttft_s,
            prefill_tokens_per_s: num_computed as f64 / ttft_s,
            decode_tokens_per_s: if num_decoded == 0 { 0.0 } else { num_decoded as f64 / decode_s },
        },
    })
}

#[derive(Default)]
struct Gathered {
    cached_tokens: usize,
    prompt_logprobs: Vec<Option<TokenLogprobs>>,
    tokens: Vec<TokenId>,
    logprobs: Vec<TokenLogprobs>,
    text: String,
    stopped: bool,
}

fn entry(id: TokenId, logprobs: TokenLogprobs) -> TokenEntry {
    TokenEntry { id, logprob: logprobs.logprob, top: logprobs.top }
}
