//! The JSON of chat answers and chunks.
//!
//! Invariant: every chunk of a stream has the same `id`, `created` and `model`; a choice's first chunk has the role and
//! empty content, its last one the only `finish_reason`.

use runtime::ids::TokenId;
use runtime::request::FinishReason;
use runtime::text::TextModel;
use serde::Serialize;

use super::answer::{Head, Logprob, PromptLogprobs, Usage, chunk_usage};
use super::params::Delivery;
use crate::generate::{Delta, Generation, OutputToken, StopCause};
use crate::state::AppState;
use crate::stream::{Chunks, Events};

/// A whole answer.
#[derive(Debug, Serialize)]
pub struct ChatCompletion {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub choices: Vec<ChatChoice>,
    pub usage: Usage,
    pub prompt_logprobs: Option<PromptLogprobs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<TokenId>>,
}

/// One choice of a whole answer.
#[derive(Debug, Serialize)]
pub struct ChatChoice {
    pub index: usize,
    pub message: AnswerMessage,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: &'static str,
    pub stop_reason: Option<StopCause>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<TokenId>>,
}

/// The answer's message.
#[derive(Debug, Serialize)]
pub struct AnswerMessage {
    pub role: String,
    pub content: String,
    pub refusal: Option<String>,
}

/// Log-probabilities of a choice.
#[derive(Debug, Default, Serialize)]
pub struct ChatLogprobs {
    pub content: Vec<ChatLogprob>,
}

/// Log-probability of one output token.
#[derive(Debug, Serialize)]
pub struct ChatLogprob {
    token: String,
    logprob: Logprob,
    bytes: Vec<u8>,
    top_logprobs: Vec<TopLogprob>,
}

#[derive(Debug, Serialize)]
struct TopLogprob {
    token: String,
    logprob: Logprob,
    bytes: Vec<u8>,
}

/// The log-probabilities of some tokens; `None` when they were not asked for.
pub fn chat_logprobs(text: &TextModel, tokens: &[OutputToken]) -> Option<ChatLogprobs> {
    let one = |token: &OutputToken| {
        let logprobs = token.logprobs.as_deref()?;
        let top = |&(id, logprob): &(TokenId, f32)| TopLogprob {
            token: text.token_text(id),
            logprob: Logprob(logprob),
            bytes: text.token_bytes(id).to_vec(),
        };
        Some(ChatLogprob {
            token: text.token_text(token.id),
            logprob: Logprob(logprobs.logprob),
            bytes: text.token_bytes(token.id).to_vec(),
            top_logprobs: logprobs.top.iter().map(top).collect(),
        })
    };
    let content: Vec<_> = tokens.iter().filter_map(one).collect();
    (!content.is_empty()).then_some(ChatLogprobs { content })
}

#[derive(Debug, Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [ChunkChoice<'a>],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [TokenId]>,
}

#[derive(Debug, Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    delta: ChunkDelta<'a>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<StopCause>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<TokenId>>,
}

#[derive(Debug, Default, Serialize)]
struct ChunkDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

/// Writes the chunks of a chat.
#[derive(Debug)]
pub struct ChatChunks {
    pub state: std::sync::Arc<AppState>,
    pub head: Head,
    pub delivery: Delivery,
}

impl ChatChunks {
    fn chunk<'a>(&'a self, choices: &'a [ChunkChoice<'a>], usage: Option<Usage>) -> Chunk<'a> {
        let Head { id, created, model } = &self.head;
        Chunk { id, object: "chat.completion.chunk", created: *created, model, choices, usage, prompt_token_ids: None }
    }

    fn details(&self) -> bool {
        self.state.config.enable_prompt_tokens_details
    }
}

impl Chunks for ChatChunks {
    fn open(&mut self, generation: &Generation, out: &mut Events) {
        for index in 0..generation.num_choices() {
            let delta = ChunkDelta { role: Some(&self.state.config.response_role), content: Some("") };
            let choice =
                [ChunkChoice { index, delta, logprobs: None, finish_reason: None, stop_reason: None, token_ids: None }];
            // Nothing is counted in the first chunk, although tokens may be waiting.
            let counts = crate::generate::TokenCounts { output: 0, ..generation.counts_of(index) };
            let usage = self.delivery.continuous_usage.then(|| Usage::new(counts, self.details()));
            let mut chunk = self.chunk(&choice, usage);
            chunk.prompt_token_ids = self.delivery.return_token_ids.then_some(&generation.prompt(index)[..]);
            out.json(&chunk);
        }
    }

    fn delta(&mut self, generation: &Generation, delta: Delta, out: &mut Events) {
        let (reason, stop_reason) = delta.finish.unzip();
        // A token that completes no character and no stop string has nothing to show yet.
        let silent = delta.text.is_empty() && reason.is_none();
        let logprobs = chat_logprobs(&self.state.text, &delta.tokens);
        if silent && logprobs.is_none() && !self.delivery.return_token_ids {
            return;
        }
        let choice = [ChunkChoice {
            index: delta.choice,
            delta: ChunkDelta { role: None, content: Some(&delta.text) },
            logprobs,
            finish_reason: reason.map(FinishReason::as_str),
            stop_reason: stop_reason.flatten(),
            token_ids: self.delivery.return_token_ids.then(|| delta.tokens.iter().map(|token| token.id).collect()),
        }];
        let usage = chunk_usage(generation, delta.choice, self.delivery, self.details());
        out.json(&self.chunk(&choice, usage));
    }

    fn close(&mut self, generation: &Generation, out: &mut Events) {
        if self.delivery.include_usage {
            let usage = Usage::new(generation.counts(), self.details());
            out.json(&self.chunk(&[], Some(usage)));
        }
    }
}
