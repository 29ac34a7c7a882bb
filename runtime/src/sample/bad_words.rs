//! `bad_words`: the token that would complete a banned sequence is masked. Only the output is looked at, as in vLLM: a word
//! that the prompt has begun may be ended.

use super::Edit;
use crate::error::RequestError;
use crate::ids::TokenId;
use crate::request::SamplingParams;

pub(super) const EDIT: Edit = Edit {
    is_on: |params| !params.bad_words.is_empty(),
    apply: |logits, context, _| {
        for word in &context.params.bad_words {
            if let Some((last, begun)) = word.split_last()
                && context.output().ends_with(begun)
            {
                logits[last.index()] = f32::NEG_INFINITY;
            }
        }
    },
};

impl SamplingParams {
    /// Bans words: at the start of a text and, with a space before them, within it. `encode` makes ids of a text without
    /// adding any.
    ///
    /// # Errors
    /// `Invalid` for a word of white space, and for one that has no ids.
    pub fn ban_words(
        &mut self,
        words: &[impl AsRef<str>],
        encode: impl Fn(&str) -> Vec<TokenId>,
    ) -> Result<(), RequestError> {
        for word in words.iter().map(|word| word.as_ref().trim_start()) {
            let (first, inner) = (encode(word), encode(&format!(" {word}")));
            if word.is_empty() || first.is_empty() {
                return Err(RequestError::invalid("bad_words", "bad_words must not contain a word without text"));
            }
            if inner != first {
                self.bad_words.push(inner);
            }
            self.bad_words.push(first);
        }
        Ok(())
    }
}
