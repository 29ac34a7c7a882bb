//! The `decoder` of a tokenizer.json, read as rules that turn one token into bytes.
//!
//! Invariant: only decoders whose result is the joined bytes of the tokens (but for a space at the start) are accepted, so
//! that streaming and decoding cannot differ. Byte-level, SentencePiece byte fallback and Metaspace cover the causal
//! language models; others are a `LoadError`. `Tokenizer::from_file` reads it once.

use std::path::Path;

use serde_json::Value;

use super::vocab::{ByteAlphabet, LeadingSpace, byte_token};
use crate::error::LoadError;

const SUPPORTED: &str =
    "ByteLevel, Metaspace, and sequences of those, Replace, ByteFallback, Fuse and a final Strip of a leading space";

/// How a token's piece becomes bytes.
pub(super) struct DecodeRules {
    /// Strings to replace, in order.
    replace: Vec<(String, String)>,
    byte_fallback: bool,
    byte_level: Option<ByteAlphabet>,
    pub(super) leading_space: LeadingSpace,
}

impl DecodeRules {
    /// # Errors
    /// A decoder that is not one of those above.
    pub(super) fn parse(decoder: &Value, path: &Path) -> Result<Self, LoadError> {
        let mut rules =
            Self { replace: Vec::new(), byte_fallback: false, byte_level: None, leading_space: LeadingSpace::Keep };
        match decoder.get("decoders").and_then(Value::as_array) {
            Some(steps) => steps.iter().try_for_each(|step| rules.add(step, path))?,
            None => rules.add(decoder, path)?,
        }
        Ok(rules)
    }

    fn add(&mut self, step: &Value, path: &Path) -> Result<(), LoadError> {
        let text = |key: &str| step.get(key).and_then(Value::as_str).unwrap_or_default();
        let unsupported = || LoadError::Unsupported {
            path: path.into(),
            what: "tokenizer decoder",
            name: step.to_string(),
            supported: SUPPORTED.into(),
        };
        match text("type") {
            "ByteLevel" => self.byte_level = Some(ByteAlphabet::new()),
            "ByteFallback" => self.byte_fallback = true,
            "Fuse" => {}
            "Replace" => {
                let pattern = step.pointer("/pattern/String").and_then(Value::as_str).ok_or_else(unsupported)?;
                self.replace.push((pattern.to_owned(), text("content").to_owned()));
            }
            "Metaspace" => {
                self.replace.push((text("replacement").to_owned(), " ".into()));
                if text("prepend_scheme") != "never" {
                    self.leading_space = LeadingSpace::StripFirstToken;
                }
            }
            "Strip" => {
                let count = |key: &str| step.get(key).and_then(Value::as_u64);
                match (text("content"), count("start"), count("stop")) {
                    (_, Some(0), Some(0)) => {}
                    (" ", Some(1), Some(0)) => self.leading_space = LeadingSpace::StripOne,
                    _ => return Err(unsupported()),
                }
            }
            _ => return Err(unsupported()),
        }
        Ok(())
    }

    /// The bytes that a token's piece stands for.
    pub(super) fn bytes_of(&self, piece: &str) -> Vec<u8> {
        let mut piece = piece.to_owned();
        for (from, to) in &self.replace {
            piece = piece.replace(from, to);
        }
        if let Some(byte) = byte_token(&piece).filter(|_| self.byte_fallback) {
            return vec![byte];
        }
        match &self.byte_level {
            Some(alphabet) => alphabet.decode(&piece),
            None => piece.into_bytes(),
        }
    }
}
