//! Keeps special-token strings inside messages from becoming special tokens.
//!
//! Invariant: in masked text no special token's string starts, not even one that only the next message or the template
//! would complete, nor one in another ASCII case that the template could change; `restore` gives back the text as
//! it was. The first character of each such string is replaced by a noncharacter (U+FDD0..U+FDEF), which templates leave
//! alone; noncharacters that were there before are escaped. `TextModel::encode_chat` masks, renders, splits, restores.

use std::borrow::Cow;
use std::collections::BTreeSet;

use aho_corasick::{AhoCorasick, BuildError};
use serde_json::Value;

use super::tokenizer::AUTOMATON;

/// Stands before a character that was in the text and looks like one of ours.
const ESCAPE: char = '\u{FDEF}';
/// Marks the end of the message to be continued. Never a mask.
pub(super) const END_OF_MESSAGE: char = '\u{FDEE}';
/// Masks of the first 30 first characters; a vocabulary with more goes on in the private plane.
const NEAR: std::ops::Range<u32> = 0xFDD0..0xFDEE;
const FAR_START: u32 = 0x10_0000;

/// Masks and restores the special tokens of one vocabulary.
#[derive(Clone, Debug)]
pub(super) struct Mask {
    /// Finds every special token's string, overlapping ones too, in any ASCII case.
    finder: AhoCorasick,
    specials: Vec<Box<str>>,
    /// First characters of special tokens, both cases; the index says the mask.
    firsts: Vec<char>,
    longest_bytes: usize,
}

impl Mask {
    /// # Errors
    /// More special tokens than an automaton can hold.
    pub(super) fn new<'a>(specials: impl Iterator<Item = &'a str>) -> Result<Self, BuildError> {
        let specials: Vec<Box<str>> = specials.filter(|special| !special.is_empty()).map(Into::into).collect();
        let finder = AhoCorasick::builder()
            .kind(Some(AUTOMATON))
            .ascii_case_insensitive(true)
            .build(specials.iter().map(|special| &**special))?;
        let firsts: BTreeSet<char> = specials
            .iter()
            .filter_map(|special| special.chars().next())
            .flat_map(|first| [first, first.to_ascii_lowercase(), first.to_ascii_uppercase()])
            .collect();
        let longest_bytes = specials.iter().map(|special| special.len()).max().unwrap_or(0);
        Ok(Self { finder, specials, firsts: firsts.into_iter().collect(), longest_bytes })
    }

    /// Masks every string inside a JSON value, keys included.
    pub(super) fn mask_json(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.mask(text)),
            Value::Array(items) => items.iter().map(|item| self.mask_json(item)).collect(),
            Value::Object(fields) => {
                Value::Object(fields.iter().map(|(key, item)| (self.mask(key), self.mask_json(item))).collect())
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
        }
    }

    /// Masks one text.
    pub(super) fn mask(&self, text: &str) -> String {
        let mut starts: BTreeSet<usize> = self.finder.find_overlapping_iter(text).map(|found| found.start()).collect();
        starts.extend(self.open_ends(text));
        let mut masked = String::with_capacity(text.len() + 4 * starts.len());
        for (at, c) in text.char_indices() {
            if self.is_code(c) {
                masked.push(ESCAPE);
            }
            let code = starts.contains(&at).then(|| self.code_of(c)).flatten();
            masked.push(code.unwrap_or(c));
        }
        masked
    }

    /// Where a special token's string starts that the end of the text leaves unfinished; spaces at the end do not close
    /// it, since templates strip them.
    fn open_ends<'t>(&'t self, text: &'t str) -> impl Iterator<Item = usize> + 't {
        [text, text.trim_end()].into_iter().flat_map(move |text| {
            let from = text.len().saturating_sub(self.longest_bytes);
            let tail_starts = text.char_indices().rev().map(|(at, _)| at).take_while(move |&at| at >= from);
            tail_starts
                .filter(move |&at| self.specials.iter().any(|special| starts_with_ignoring_case(special, &text[at..])))
        })
    }

    /// Undoes `mask`, also on text that a template cut or changed.
    pub(super) fn restore<'t>(&self, text: &'t str) -> Cow<'t, str> {
        if !text.chars().any(|c| self.is_code(c)) {
            return Cow::Borrowed(text);
        }
        let mut restored = String::with_capacity(text.len());
        let mut escaped = false;
        for c in text.chars() {
            if escaped || !self.is_code(c) {
                restored.push(c);
                escaped = false;
            } else if c == ESCAPE {
                escaped = true;
            } else {
                restored.push(self.first_of(c).unwrap_or(c));
            }
        }
        Cow::Owned(restored)
    }

    fn code_of(&self, first: char) -> Option<char> {
        let index = u32::try_from(self.firsts.binary_search(&first).ok()?).ok()?;
        let near = NEAR.end - NEAR.start;
        char::from_u32(if index < near { NEAR.start + index } else { FAR_START + index - near })
    }

    fn first_of(&self, code: char) -> Option<char> {
        let code = u32::from(code);
        let index =
            if NEAR.contains(&code) { code - NEAR.start } else { code.checked_sub(FAR_START)? + NEAR.end - NEAR.start };
        self.firsts.get(index as usize).copied()
    }

    /// Whether a character may be one of ours.
    fn is_code(&self, c: char) -> bool {
        matches!(c, '\u{FDD0}'..='\u{FDEF}') || (u32::from(c) >= FAR_START && self.first_of(c).is_some())
    }
}

fn starts_with_ignoring_case(text: &str, prefix: &str) -> bool {
    text.as_bytes().get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix.as_bytes()))
}
