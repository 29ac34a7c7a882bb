//! One tokenizer type for both origins: tokenizer.json, and GGUF metadata (`gguf_vocab` builds that one).
//!
//! Invariant: text becomes a special token only where this file finds one and the caller allows it; the `tokenizers`
//! library below is told never to look for them, so plain text cannot yield a special id. Each stretch between special
//! tokens is encoded on its own, as Hugging Face does. `TextModel` is the only caller.

use std::path::Path;
use std::sync::Arc;

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};
use serde_json::Value;
use tokenizers::{ModelWrapper, PreTokenizerWrapper};

use super::decoder::DecodeRules;
use super::detokenizer::Detokenizer;
use super::mask::Mask;
use super::vocab::{MAX_TOKENS, Vocab};
use crate::error::LoadError;
use crate::ids::TokenId;
use crate::weights::checkpoint::{malformed, read_file};

/// Longest tokenizer.json; the largest known ones have 35 MB.
const MAX_FILE_BYTES: u64 = 512 << 20;

/// Longest special token: looking for one at the end of a text takes the square of it.
const MAX_SPECIAL_BYTES: usize = 1024;
/// Built in linear time: a table of transitions would take half a minute for one token of 5,000 equal letters.
pub(super) const AUTOMATON: AhoCorasickKind = AhoCorasickKind::ContiguousNFA;

/// Encodes text to ids and knows what each id means.
#[derive(Clone, Debug)]
pub(super) struct Tokenizer {
    /// Encodes a stretch at the start of a text.
    first: tokenizers::Tokenizer,
    /// Encodes a stretch after a special token, where it differs: vocabularies that put a space before a text, but not
    /// before what follows a special token.
    rest: Option<tokenizers::Tokenizer>,
    vocab: Arc<Vocab>,
    specials: Specials,
    mask: Mask,
    /// What is put before and after a text with `add_special`.
    prefix: Vec<TokenId>,
    suffix: Vec<TokenId>,
}

impl Tokenizer {
    /// Reads a tokenizer.json.
    ///
    /// # Errors
    /// The file cannot be read or parsed, has a decoder that is not known, or ids past 4 Mi.
    pub(super) fn from_file(path: &Path) -> Result<Self, LoadError> {
        let bytes = read_file(path, MAX_FILE_BYTES)?;
        // The library panics on some broken files; nothing of it is left when it does.
        std::panic::catch_unwind(|| Self::parse(&bytes, path))
            .unwrap_or_else(|_| Err(malformed(path, "tokenizer", "the tokenizers library cannot take it")))
    }

    fn parse(bytes: &[u8], path: &Path) -> Result<Self, LoadError> {
        let library = tokenizers::Tokenizer::from_bytes(bytes)
            .map_err(|error| malformed(path, "tokenizer", error.to_string()))?;
        if let ModelWrapper::BPE(model) = library.get_model()
            && let Some(dropout) = model.dropout.filter(|&dropout| dropout > 0.0)
        {
            return Err(malformed(
                path,
                "model.dropout",
                format!("{dropout}: the same text would get other ids each time"),
            ));
        }
        let decoder = serde_json::to_value(library.get_decoder())
            .map_err(|error| malformed(path, "decoder", error.to_string()))?;
        let vocab = vocab_of(&library, &DecodeRules::parse(&decoder, path)?, path)?;
        let (prefix, suffix) = surroundings(&library).map_err(|problem| malformed(path, "post_processor", problem))?;
        Self::new(library, vocab, prefix, suffix, path)
    }

    /// Puts the parts together and proves that any text can be encoded.
    ///
    /// # Errors
    /// The vocabulary cannot encode every text (a missing unknown token), or its special tokens are too many.
    pub(super) fn new(
        mut library: tokenizers::Tokenizer,
        vocab: Vocab,
        prefix: Vec<TokenId>,
        suffix: Vec<TokenId>,
        path: &Path,
    ) -> Result<Self, LoadError> {
        library.set_encode_special_tokens(true);
        library.with_padding(None);
        library.with_truncation(None).map_err(|error| malformed(path, "truncation", error.to_string()))?;
        // Letters, digits, spaces and characters that no vocabulary has: whatever can fail on a text fails here.
        library
            .encode_fast("a 1\n\u{378}\u{10FFFF}\u{378}", false)
            .map_err(|error| malformed(path, "tokenizer", error.to_string()))?;
        let rest = continuing(&library).map_err(|error| malformed(path, "pre_tokenizer", error))?;
        let specials = Specials::new(&library).map_err(|error| malformed(path, "special tokens", error))?;
        let mask = Mask::new(specials.tokens.iter().map(|token| token.content.as_str()))
            .map_err(|error| malformed(path, "special tokens", error.to_string()))?;
        Ok(Self { first: library, rest, vocab: Arc::new(vocab), specials, mask, prefix, suffix })
    }

    /// Encodes a text; `special`: special-token strings in it become special tokens; `add_special`: the model's BOS and
    /// whatever else it has are put around it.
    pub(super) fn encode(&self, text: &str, add_special: bool, special: bool) -> Vec<TokenId> {
        let mut ids = if add_special { self.prefix.clone() } else { Vec::new() };
        if special {
            self.encode_segments(text, |plain| plain.into(), &mut ids);
        } else {
            self.encode_plain(text, true, &mut ids);
        }
        if add_special {
            ids.extend_from_slice(&self.suffix);
        }
        ids
    }

    /// Encodes text whose messages were masked: special tokens outside them count, everything else is restored.
    pub(super) fn encode_masked(&self, masked: &str) -> Vec<TokenId> {
        let mut ids = Vec::new();
        self.encode_segments(masked, |plain| self.mask.restore(plain), &mut ids);
        ids
    }

    fn encode_segments<'t>(
        &self,
        text: &'t str,
        restore: impl Fn(&'t str) -> std::borrow::Cow<'t, str>,
        ids: &mut Vec<TokenId>,
    ) {
        let mut done = 0;
        for found in self.specials.find(text) {
            self.encode_plain(&restore(&text[done..found.start]), done == 0, ids);
            ids.push(found.id);
            done = found.end;
        }
        self.encode_plain(&restore(&text[done..]), done == 0, ids);
    }

    fn encode_plain(&self, text: &str, at_start: bool, ids: &mut Vec<TokenId>) {
        if text.is_empty() {
            return;
        }
        let library = if at_start { &self.first } else { self.rest.as_ref().unwrap_or(&self.first) };
        let encoding = library.encode_fast(text, false).expect("`new` proved that any text can be encoded");
        ids.extend(encoding.get_ids().iter().map(|&id| TokenId(id)));
    }

    pub(super) fn decode(&self, ids: &[TokenId], skip_special: bool) -> String {
        let mut detokenizer = self.detokenizer(skip_special, false);
        let mut text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
        text.push_str(&detokenizer.flush());
        text
    }

    pub(super) fn detokenizer(&self, skip_special: bool, continues: bool) -> Detokenizer {
        Detokenizer::new(Arc::clone(&self.vocab), skip_special, continues)
    }

    pub(super) fn vocab(&self) -> &Vocab {
        &self.vocab
    }

    pub(super) fn mask(&self) -> &Mask {
        &self.mask
    }

    pub(super) fn id_of(&self, token: &str) -> Option<TokenId> {
        self.first.token_to_id(token).map(TokenId)
    }

    pub(super) fn piece(&self, id: TokenId) -> Option<String> {
        self.first.id_to_token(id.0)
    }
}

/// Finds special tokens in text: leftmost first, then longest, with their flags as Hugging Face reads them.
#[derive(Clone, Debug)]
struct Specials {
    finder: AhoCorasick,
    tokens: Vec<tokenizers::AddedToken>,
    ids: Vec<TokenId>,
}

/// A special token in a text, with the white space that its flags take along.
struct Found {
    id: TokenId,
    start: usize,
    end: usize,
}

impl Specials {
    fn new(library: &tokenizers::Tokenizer) -> Result<Self, String> {
        let mut tokens: Vec<_> = library.get_added_tokens_decoder().into_iter().collect();
        tokens.retain(|(_, token)| token.special && !token.content.is_empty());
        tokens.sort_unstable_by_key(|(id, _)| *id);
        if let Some(long) = tokens.iter().map(|(_, token)| token.content.len()).find(|&len| len > MAX_SPECIAL_BYTES) {
            return Err(format!("one has {long} bytes, expected at most {MAX_SPECIAL_BYTES}"));
        }
        let (ids, tokens): (Vec<u32>, Vec<_>) = tokens.into_iter().unzip();
        let finder = AhoCorasick::builder()
            .kind(Some(AUTOMATON))
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|token| &token.content))
            .map_err(|error| error.to_string())?;
        Ok(Self { finder, tokens, ids: ids.into_iter().map(TokenId).collect() })
    }

    fn find<'t>(&'t self, text: &'t str) -> impl Iterator<Item = Found> + 't {
        let mut done = 0;
        self.finder.find_iter(text).filter_map(move |found| {
            let token = &self.tokens[found.pattern().as_usize()];
            let (before, after) = (&text[..found.start()], &text[found.end()..]);
            let is_word = |c: char| c.is_alphanumeric() || c == '_';
            if token.single_word && (before.ends_with(is_word) || after.starts_with(is_word)) {
                return None;
            }
            let start = if token.lstrip { before.trim_end().len() } else { found.start() };
            let end = if token.rstrip { text.len() - after.trim_start().len() } else { found.end() };
            let start = start.max(done);
            done = end;
            Some(Found { id: self.ids[found.pattern().as_usize()], start, end })
        })
    }
}

/// The byte table of a tokenizer.json.
fn vocab_of(library: &tokenizers::Tokenizer, rules: &DecodeRules, path: &Path) -> Result<Vocab, LoadError> {
    let mut by_id: Vec<(u32, String)> = library.get_vocab(true).into_iter().map(|(piece, id)| (id, piece)).collect();
    by_id.sort_unstable();
    if by_id.last().is_some_and(|(id, _)| *id as usize >= MAX_TOKENS) {
        return Err(malformed(path, "model.vocab", format!("token ids pass {MAX_TOKENS}")));
    }
    let added = library.get_added_vocabulary();
    let mut vocab = Vocab::new(rules.leading_space);
    for (id, piece) in by_id {
        while vocab.len() < id as usize {
            vocab.push(&[], false).ok_or_else(|| malformed(path, "model.vocab", "tokens pass 4 GiB"))?;
        }
        if vocab.len() > id as usize {
            return Err(malformed(
                path,
                "model.vocab",
                format!("id {id} stands for two tokens, one of them '{piece}'"),
            ));
        }
        // An added token may be known to the decoder by its normalised form.
        let written = added.simple_id_to_token(id).unwrap_or_else(|| piece.clone());
        vocab
            .push(&rules.bytes_of(&written), added.is_special_token(&piece))
            .ok_or_else(|| malformed(path, "model.vocab", "tokens pass 4 GiB"))?;
    }
    Ok(vocab)
}

/// What the post-processor puts before and after a text.
fn surroundings(library: &tokenizers::Tokenizer) -> Result<(Vec<TokenId>, Vec<TokenId>), String> {
    let encoding = library.encode_fast("a", true).map_err(|error| error.to_string())?;
    let marks = encoding.get_special_tokens_mask();
    let before = marks.iter().take_while(|&&mark| mark == 1).count();
    let after = marks[before..].iter().rev().take_while(|&&mark| mark == 1).count();
    let ids: Vec<TokenId> = encoding.get_ids().iter().map(|&id| TokenId(id)).collect();
    Ok((ids[..before].to_vec(), ids[ids.len() - after..].to_vec()))
}

/// The tokenizer for stretches after a special token, if the vocabulary makes a difference there.
fn continuing(library: &tokenizers::Tokenizer) -> Result<Option<tokenizers::Tokenizer>, String> {
    let mut steps = serde_json::to_value(library.get_pre_tokenizer()).map_err(|error| error.to_string())?;
    if !never_prepend(&mut steps) {
        return Ok(None);
    }
    let steps: PreTokenizerWrapper = serde_json::from_value(steps).map_err(|error| error.to_string())?;
    let mut rest = library.clone();
    rest.with_pre_tokenizer(Some(steps));
    Ok(Some(rest))
}

/// Turns `Metaspace` steps that prepend at a text's start only into ones that never do; says whether there were any.
fn never_prepend(step: &mut Value) -> bool {
    match step {
        Value::Object(fields) => {
            let mut changed = false;
            if fields.get("prepend_scheme").is_some_and(|scheme| scheme == "first") {
                fields.insert("prepend_scheme".into(), "never".into());
                changed = true;
            }
            fields.get_mut("pretokenizers").is_some_and(never_prepend) || changed
        }
        // Every step is visited: `max` does not stop at the first change.
        Value::Array(steps) => steps.iter_mut().map(never_prepend).max().unwrap_or(false),
        _ => false,
    }
}
