//! The JSON of text completions and their chunks.
//!
//! Invariant: the four lists of `logprobs` have one entry per token, and `text_offset` counts characters of the choice's
//! text, the echoed prompt included.

use std::sync::Arc;

use runtime::ids::TokenId;
use runtime::request::TokenLogprobs;
use runtime::text::{TextModel, TextStreamOptions};
use serde::Serialize;

use super::answer::{Entries, Head, Logprob, PromptLogprobs, Usage, chunk_usage};
use super::params::Delivery;
use crate::generate::{Delta, Generation, OutputToken, StopCause};
use crate::state::AppState;
use crate::stream::{Chunks, Events};

/// A whole answer, or one chunk of it.
#[derive(Debug, Serialize)]
pub struct Completion<'a> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub model: &'a str,
    pub choices: Vec<CompletionChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

impl<'a> Completion<'a> {
    /// An answer or chunk under a request's head.
    pub fn new(head: &'a Head, choices: Vec<CompletionChoice>, usage: Option<Usage>) -> Self {
        Self { id: &head.id, object: "text_completion", created: head.created, model: &head.model, choices, usage }
    }
}

/// One choice.
#[derive(Debug, Default, Serialize)]
pub struct CompletionChoice {
    pub index: usize,
    pub text: String,
    pub logprobs: Option<CompletionLogprobs>,
    pub finish_reason: Option<&'static str>,
    pub stop_reason: Option<StopCause>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<TokenId>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<TokenId>>,
}

/// Log-probabilities of a choice's tokens, as parallel lists.
#[derive(Debug, Default, PartialEq, Serialize)]
pub struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<Logprob>>,
    top_logprobs: Vec<Option<Entries<String, Logprob>>>,
    text_offset: Vec<usize>,
}

impl CompletionLogprobs {
    /// Adds one token; without log-probabilities (the first of a prompt) its entries are null.
    fn push(&mut self, text: &TextModel, id: TokenId, offset: usize, logprobs: Option<&TokenLogprobs>) {
        let token = text.token_text(id);
        let top = logprobs.map(|logprobs| {
            let mut top: Vec<(String, Logprob)> = Vec::with_capacity(logprobs.top.len() + 1);
            for (other, logprob) in logprobs.top.iter().copied().chain([(id, logprobs.logprob)]) {
                let token = text.token_text(other);
                if top.iter().all(|(known, _)| *known != token) {
                    top.push((token, Logprob(logprob)));
                }
            }
            Entries(top)
        });
        self.tokens.push(token);
        self.token_logprobs.push(logprobs.map(|logprobs| Logprob(logprobs.logprob)));
        self.top_logprobs.push(top);
        self.text_offset.push(offset);
    }
}

/// How the prompt is shown before its answer.
#[derive(Clone, Debug, Default)]
pub struct Echo {
    /// Whether it is.
    pub prompt: bool,
    /// Whether the answer is left out (`max_tokens: 0`).
    pub only: bool,
    /// Whether log-probabilities were asked for.
    pub logprobs: bool,
    /// Whether `prompt_logprobs` were asked for by that name.
    pub prompt_logprobs: bool,
    /// Text of each prompt, in the order of the body; empty without `prompt`.
    pub texts: Vec<String>,
}

/// What chunks and whole answers need to make choices of deltas.
#[derive(Clone, Debug)]
pub struct CompletionWriter {
    pub state: Arc<AppState>,
    pub head: Head,
    pub delivery: Delivery,
    pub echo: Echo,
    /// Choices per prompt.
    pub n: usize,
}

impl CompletionWriter {
    /// The choice that a delta adds to; the first of a choice brings what the prompt contributes.
    pub fn choice(&self, generation: &Generation, delta: Delta, first: bool) -> CompletionChoice {
        let index = delta.choice;
        let mut choice = CompletionChoice { index, ..CompletionChoice::default() };
        let mut logprobs = CompletionLogprobs::default();
        let echo = self.echo.prompt.then(|| self.echo.texts[index / self.n].as_str());
        let shift = echo.map_or(0, |prompt| prompt.chars().count());
        if first {
            self.prompt_part(generation, &mut choice, &mut logprobs);
            choice.text.push_str(echo.unwrap_or_default());
        }
        if !self.echo.only {
            choice.text.push_str(&delta.text);
            for OutputToken { id, offset_chars, logprobs: own } in &delta.tokens {
                logprobs.push(&self.state.text, *id, shift + offset_chars, own.as_deref());
            }
            choice.token_ids =
                self.delivery.return_token_ids.then(|| delta.tokens.iter().map(|token| token.id).collect());
        }
        choice.logprobs = (self.echo.logprobs && !logprobs.tokens.is_empty()).then_some(logprobs);
        let (reason, stop_reason) = delta.finish.unzip();
        choice.finish_reason = reason.map(|reason| if self.echo.only { "length" } else { reason.as_str() });
        choice.stop_reason = stop_reason.flatten().filter(|_| !self.echo.only);
        choice
    }

    fn prompt_part(&self, generation: &Generation, choice: &mut CompletionChoice, logprobs: &mut CompletionLogprobs) {
        let text = &self.state.text;
        let prompt = generation.prompt(choice.index);
        let found = generation.prompt_logprobs(choice.index);
        if self.echo.prompt && self.echo.logprobs {
            // The same way as the output's offsets: special tokens have no characters in the text.
            let mut offsets = text.stream(&TextStreamOptions { skip_special: true, ..TextStreamOptions::default() });
            for (id, found) in prompt.iter().zip(found) {
                logprobs.push(text, *id, offsets.push(*id).offset_chars, found.as_ref());
            }
        }
        if self.echo.prompt_logprobs {
            choice.prompt_logprobs = Some(super::answer::prompt_logprobs(text, prompt, found));
        }
        choice.prompt_token_ids = self.delivery.return_token_ids.then(|| prompt.to_vec());
    }

    /// Usage of the whole request.
    pub fn usage(&self, generation: &Generation) -> Usage {
        let mut counts = generation.counts();
        if self.echo.only {
            counts.output = 0;
        }
        Usage::new(counts, self.state.config.enable_prompt_tokens_details)
    }
}

/// Writes the chunks of a completion.
#[derive(Debug)]
pub struct CompletionChunks {
    pub writer: CompletionWriter,
    /// Which choices have had a chunk.
    pub started: Vec<bool>,
}

impl Chunks for CompletionChunks {
    fn open(&mut self, generation: &Generation, _: &mut Events) {
        self.started = vec![false; generation.num_choices()];
    }

    fn delta(&mut self, generation: &Generation, delta: Delta, out: &mut Events) {
        let index = delta.choice;
        let first = !std::mem::replace(&mut self.started[index], true);
        let choice = self.writer.choice(generation, delta, first);
        let has_ids = choice.token_ids.is_some() || choice.prompt_token_ids.is_some();
        if choice.text.is_empty() && choice.finish_reason.is_none() && choice.logprobs.is_none() && !has_ids {
            return;
        }
        let details = self.writer.state.config.enable_prompt_tokens_details;
        let usage = chunk_usage(generation, index, self.writer.delivery, details);
        out.json(&Completion::new(&self.writer.head, vec![choice], usage));
    }

    fn close(&mut self, generation: &Generation, out: &mut Events) {
        if self.writer.delivery.include_usage {
            let usage = self.writer.usage(generation);
            out.json(&Completion::new(&self.writer.head, Vec::new(), Some(usage)));
        }
    }
}
