//! Text on both sides of the engine: tokenizer, chat template, incremental detokenizer, stop strings.
//!
//! Invariant: engine code never imports this module; it sees ids only. Nothing here slices text by a byte offset that a
//! token boundary gave.

use std::path::Path;

use crate::error::{LoadError, RequestError};
use crate::ids::TokenId;
use crate::weights::Checkpoint;

/// Everything about a model's text side.
#[derive(Clone, Debug)]
pub struct TextModel {}

impl TextModel {
    /// Loads tokenizer, chat template and special ids from a checkpoint (GGUF metadata, or the directory's files).
    /// `tokenizer` overrides where the tokenizer comes from; `chat_template` is a file or the template itself.
    ///
    /// # Errors
    /// Missing files, an unknown pre-tokenizer, a template that does not parse.
    pub fn load(
        checkpoint: &Checkpoint,
        tokenizer: Option<&Path>,
        chat_template: Option<&str>,
    ) -> Result<Self, LoadError> {
        let _ = (checkpoint, tokenizer, chat_template);
        todo!("helper text")
    }

    /// Encodes plain text. `special`: whether special-token strings inside it become special tokens; `add_special`: whether
    /// the model's BOS (and whatever its tokenizer adds) is put around it.
    pub fn encode(&self, text: &str, add_special: bool, special: bool) -> Vec<TokenId> {
        let _ = (text, add_special, special);
        todo!("helper text")
    }

    /// Decodes ids; with `skip_special` special tokens are left out. Invalid UTF-8 becomes U+FFFD.
    pub fn decode(&self, ids: &[TokenId], skip_special: bool) -> String {
        let _ = (ids, skip_special);
        todo!("helper text")
    }

    /// Renders a chat and encodes it: template text with special tokens, message text without.
    ///
    /// # Errors
    /// The template refused the messages (`raise_exception`), ran out of fuel, or there is no template: `Invalid`.
    pub fn encode_chat(&self, chat: &ChatInput<'_>) -> Result<Vec<TokenId>, RequestError> {
        let _ = chat;
        todo!("helper text")
    }
}

/// A chat to render.
#[derive(Clone, Copy, Debug)]
pub struct ChatInput<'a> {
    /// A JSON array of `{role, content, …}` objects, content already flattened to strings.
    pub messages: &'a serde_json::Value,
    /// Whether the assistant's header is appended.
    pub add_generation_prompt: bool,
    /// Whether the last (assistant) message is left open to be continued.
    pub continue_final_message: bool,
    /// Extra template variables.
    pub kwargs: &'a serde_json::Map<String, serde_json::Value>,
}
