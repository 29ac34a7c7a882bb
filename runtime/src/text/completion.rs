//! The text of one answer: detokenizer and stop strings behind one door.
//!
//! Invariant: the deltas of an answer, joined, are its text, the same whether they were streamed or gathered. The server's
//! per-request task, `generate` and `chat` feed it the engine's tokens; on a stop match they tell the engine `finish`.

use super::detokenizer::Detokenizer;
use super::stop::StopMatcher;
use crate::ids::TokenId;

/// How the tokens of an answer become text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextStreamOptions {
    /// Stop strings, none of them empty.
    pub stop: Vec<String>,
    /// Keep the stop string (or the text of the stop token) at the end of the text.
    pub include_stop: bool,
    /// Stop strings are looked for after this many tokens only.
    pub min_tokens: u32,
    /// Leave special tokens out of the text.
    pub skip_special: bool,
}

/// What one token adds to the text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextDelta {
    /// Text that is safe to show now; may be empty.
    pub text: String,
    /// Characters of text before this token, counting what is still held back: the `text_offset` of completions.
    pub offset_chars: usize,
    /// The stop string that matched, as an index into `TextStreamOptions::stop`. The text is complete then.
    pub stop: Option<usize>,
}

/// Turns the tokens of one answer into text.
#[derive(Clone, Debug)]
pub struct TextStream {
    detokenizer: Detokenizer,
    stops: StopMatcher,
    include_stop: bool,
    min_tokens: u32,
    num_tokens: u32,
    num_chars: usize,
}

impl TextStream {
    pub(super) fn new(detokenizer: Detokenizer, options: &TextStreamOptions) -> Self {
        Self {
            detokenizer,
            stops: StopMatcher::new(&options.stop, options.include_stop),
            include_stop: options.include_stop,
            min_tokens: options.min_tokens,
            num_tokens: 0,
            num_chars: 0,
        }
    }

    /// Takes the next token. After a stop match tokens add nothing: the caller drops them and does not count them.
    pub fn push(&mut self, id: TokenId) -> TextDelta {
        let offset_chars = self.num_chars;
        let piece = self.detokenizer.push(id);
        self.num_chars += piece.chars().count();
        self.num_tokens = self.num_tokens.saturating_add(1);
        let text = self.stops.push(&piece, self.num_tokens > self.min_tokens);
        TextDelta { text, offset_chars, stop: self.stops.matched() }
    }

    /// Takes the token that ended the answer (`SamplingParams::is_stop`): its text counts only if stops are included.
    pub fn push_stop_token(&mut self, id: TokenId) -> TextDelta {
        if self.include_stop {
            return self.push(id);
        }
        TextDelta { text: String::new(), offset_chars: self.num_chars, stop: self.stops.matched() }
    }

    /// Ends the text: what was held back and no stop string completed. Empty after a stop match.
    pub fn finish(&mut self) -> TextDelta {
        let offset_chars = self.num_chars;
        let piece = self.detokenizer.flush();
        let mut text = self.stops.push(&piece, self.num_tokens > self.min_tokens);
        text.push_str(&self.stops.flush());
        TextDelta { text, offset_chars, stop: self.stops.matched() }
    }
}
