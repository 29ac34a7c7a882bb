//! The tokenizer of a GGUF file, built from its `tokenizer.ggml.*` metadata.
//!
//! Invariant: the ids are those of the model's own tokenizer.json. Two kinds exist: `gpt2` (byte-level BPE with merges and a
//! named pre-tokenizer) and `llama` (SentencePiece BPE, merges rebuilt from scores). A name that is not in the table
//! is refused, never guessed; a file without the name gets `default`, as in llama.cpp. Control tokens are special;
//! `TextModel::load` is the only caller.

use std::cmp::Reverse;

use rustc_hash::FxHashMap;
use tokenizers::models::bpe::{BPE, Merges, Vocab as PieceIds};
use tokenizers::normalizers::{NFC, NormalizerWrapper, Prepend, Replace, Sequence as NormalizerSequence};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior};

use super::pre_tokenizers::PRE_TOKENIZERS;
use super::tokenizer::Tokenizer;
use super::vocab::{ByteAlphabet, LeadingSpace, MAX_TOKENS, Vocab, byte_token};
use crate::error::LoadError;
use crate::ids::TokenId;
use crate::weights::gguf::Metadata;

/// The character that SentencePiece writes for a space.
const SPACE: char = '\u{2581}';
/// Longest SentencePiece token, in bytes: rebuilding merges tries every split of every token.
const MAX_PIECE_BYTES: usize = 1024;

/// Control tokens that end a turn, besides those that the metadata names: the common subset of what llama.cpp ends
/// generation on. Only tokens of type control count.
const END_OF_TURN: [&str; 15] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "<eos>",
    "</s>",
    "[EOT]",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
];

/// `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Byte,
}

/// A tokenizer and the ids that the metadata names.
pub(super) struct GgufTokenizer {
    pub(super) tokenizer: Tokenizer,
    pub(super) bos: Option<TokenId>,
    pub(super) eos: Option<TokenId>,
    pub(super) unknown: Option<TokenId>,
    pub(super) padding: Option<TokenId>,
    /// `eos` and every other token that ends a turn.
    pub(super) end_of_turn: Vec<TokenId>,
}

/// Builds the tokenizer that the metadata describes.
///
/// # Errors
/// Unknown model or pre-tokenizer, missing keys, ids out of range, duplicate tokens, merges of unknown tokens.
pub(super) fn build(meta: &Metadata) -> Result<GgufTokenizer, LoadError> {
    let pieces = Pieces::read(meta)?;
    match meta.require_str("tokenizer.ggml.model")? {
        "gpt2" => byte_level(meta, &pieces),
        "llama" => sentence_piece(meta, &pieces),
        other => Err(unsupported(meta, "tokenizer.ggml.model", other, "gpt2, llama".into())),
    }
}

/// The token list, checked: one id per piece. Empty pieces are holes: they cannot be encoded and decode to nothing.
struct Pieces<'m> {
    list: &'m [String],
    kinds: Vec<Kind>,
    ids: FxHashMap<&'m str, u32>,
}

impl<'m> Pieces<'m> {
    fn read(meta: &'m Metadata) -> Result<Self, LoadError> {
        const TOKENS: &str = "tokenizer.ggml.tokens";
        const TYPES: &str = "tokenizer.ggml.token_type";
        let list = meta.require_strs(TOKENS)?;
        if list.is_empty() || list.len() > MAX_TOKENS {
            return Err(meta.error(TOKENS, format!("{} tokens, expected 1 to {MAX_TOKENS}", list.len())));
        }
        let kinds = match meta.ints(TYPES)? {
            None => vec![Kind::Normal; list.len()],
            Some(types) if types.len() == list.len() => types.iter().map(|&code| Kind::from_code(code)).collect(),
            Some(types) => return Err(meta.error(TYPES, format!("{} types for {} tokens", types.len(), list.len()))),
        };
        let mut ids = FxHashMap::default();
        for (id, piece) in list.iter().enumerate().filter(|(_, piece)| !piece.is_empty()) {
            let id = u32::try_from(id).expect("at most MAX_TOKENS");
            if let Some(other) = ids.insert(piece.as_str(), id) {
                return Err(meta.error(TOKENS, format!("token '{piece}' has two ids, {other} and {id}")));
            }
        }
        Ok(Self { list, kinds, ids })
    }

    fn with_kind(&self) -> impl Iterator<Item = (&'m str, Kind)> + '_ {
        self.list.iter().map(String::as_str).zip(self.kinds.iter().copied())
    }

    fn to_vocab(&self) -> PieceIds {
        self.ids.iter().map(|(&piece, &id)| (piece.to_owned(), id)).collect()
    }

    /// Control tokens become special tokens, user-defined ones are kept whole wherever they stand.
    fn added(&self) -> Vec<AddedToken> {
        let pieces = self.with_kind().filter(|(piece, _)| !piece.is_empty());
        pieces
            .filter_map(|(piece, kind)| match kind {
                Kind::Control | Kind::Unknown => Some(AddedToken::from(piece, true)),
                Kind::UserDefined => Some(AddedToken::from(piece, false).normalized(false)),
                Kind::Normal | Kind::Byte => None,
            })
            .collect()
    }

    /// Reads a special id; `None` where neither the file nor `default` has one.
    fn id(&self, meta: &Metadata, name: &str, default: Option<u32>) -> Result<Option<TokenId>, LoadError> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        match meta.u32(&key)? {
            Some(id) if (id as usize) < self.list.len() => Ok(Some(TokenId(id))),
            Some(id) => Err(meta.error(&key, format!("{id} is not an id of the {} tokens", self.list.len()))),
            None => Ok(default.filter(|&id| (id as usize) < self.list.len()).map(TokenId)),
        }
    }
}

impl Kind {
    fn from_code(code: i64) -> Self {
        match code {
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            6 => Self::Byte,
            // 1 is normal; 5 (unused) and what later versions add is encoded like it, as in llama.cpp.
            _ => Self::Normal,
        }
    }

    fn is_special(self) -> bool {
        matches!(self, Self::Control | Self::Unknown)
    }
}

fn byte_level(meta: &Metadata, pieces: &Pieces<'_>) -> Result<GgufTokenizer, LoadError> {
    let name = meta.str("tokenizer.ggml.pre")?.unwrap_or_else(|| {
        tracing::warn!(
            "{}: no tokenizer.ggml.pre; using 'default', which may not be this model's",
            meta.path.display()
        );
        "default"
    });
    let Some(pre) = PRE_TOKENIZERS.iter().find(|pre| pre.names.contains(&name)) else {
        let known: Vec<&str> = PRE_TOKENIZERS.iter().flat_map(|pre| pre.names).copied().collect();
        return Err(unsupported(meta, "pre-tokenizer", name, known.join(", ")));
    };
    let broken = |error: tokenizers::Error| meta.error("tokenizer.ggml.merges", error.to_string());
    let model = BPE::builder()
        .vocab_and_merges(pieces.to_vocab(), read_merges(meta)?)
        .ignore_merges(pre.ignore_merges)
        .build()
        .map_err(broken)?;
    let mut library = tokenizers::Tokenizer::new(model);
    let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
    for pattern in pre.splits {
        let pattern = SplitPattern::Regex((*pattern).to_owned());
        steps.push(Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(broken)?.into());
    }
    steps.push(ByteLevel::new(false, false, false).into());
    library.with_pre_tokenizer(Some(Sequence::new(steps)));
    if pre.nfc {
        library.with_normalizer(Some(NFC)).map_err(broken)?;
    }

    let alphabet = ByteAlphabet::new();
    let mut vocab = Vocab::new(LeadingSpace::Keep);
    for (piece, kind) in pieces.with_kind() {
        let bytes = if kind == Kind::Normal { alphabet.decode(piece) } else { piece.as_bytes().to_vec() };
        push(&mut vocab, &bytes, kind, meta)?;
    }
    finish(meta, pieces, Parts { library, vocab, add_bos: pre.add_bos, bos: None, eos: None, unknown: None })
}

fn sentence_piece(meta: &Metadata, pieces: &Pieces<'_>) -> Result<GgufTokenizer, LoadError> {
    let broken = |error: tokenizers::Error| meta.error("tokenizer.ggml.tokens", error.to_string());
    let merges = merges_from_scores(meta, pieces)?;
    let mut model = BPE::builder().vocab_and_merges(pieces.to_vocab(), merges).fuse_unk(true).byte_fallback(true);
    if let Some(id) = pieces.id(meta, "unknown", Some(0))? {
        model = model.unk_token(pieces.list[id.index()].clone());
    }
    let mut library = tokenizers::Tokenizer::new(model.build().map_err(broken)?);
    let add_space = meta.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    if add_space {
        steps.push(Prepend::new(SPACE.into()).into());
    }
    steps.push(Replace::new(" ", SPACE).map_err(broken)?.into());
    library.with_normalizer(Some(NormalizerSequence::new(steps))).map_err(broken)?;

    let mut vocab = Vocab::new(if add_space { LeadingSpace::StripOne } else { LeadingSpace::Keep });
    for (piece, kind) in pieces.with_kind() {
        let bytes = match kind {
            Kind::Byte => vec![byte_token(piece).ok_or_else(|| {
                meta.error("tokenizer.ggml.tokens", format!("'{piece}' has the type of a byte token, but not its form"))
            })?],
            Kind::Control | Kind::Unknown => piece.as_bytes().to_vec(),
            Kind::Normal | Kind::UserDefined => piece.replace(SPACE, " ").into_bytes(),
        };
        push(&mut vocab, &bytes, kind, meta)?;
    }
    finish(meta, pieces, Parts { library, vocab, add_bos: true, bos: Some(1), eos: Some(2), unknown: Some(0) })
}

/// What the two kinds leave to be finished alike, with llama.cpp's defaults for keys that are missing.
struct Parts {
    library: tokenizers::Tokenizer,
    vocab: Vocab,
    add_bos: bool,
    bos: Option<u32>,
    eos: Option<u32>,
    unknown: Option<u32>,
}

fn finish(meta: &Metadata, pieces: &Pieces<'_>, mut parts: Parts) -> Result<GgufTokenizer, LoadError> {
    parts
        .library
        .add_tokens(pieces.added())
        .map_err(|error| meta.error("tokenizer.ggml.token_type", error.to_string()))?;
    let bos = pieces.id(meta, "bos", parts.bos)?;
    let eos = pieces.id(meta, "eos", parts.eos)?;
    let around = |key: &str, id: Option<TokenId>, default: bool| match (meta.bool(key)?, id) {
        (Some(true), None) => Err(meta.error(key, "is true, but there is no such token id")),
        (wanted, id) => Ok(id.filter(|_| wanted.unwrap_or(default)).into_iter().collect()),
    };
    let prefix = around("tokenizer.ggml.add_bos_token", bos, parts.add_bos)?;
    let suffix = around("tokenizer.ggml.add_eos_token", eos, false)?;

    let mut end_of_turn: Vec<TokenId> = eos.into_iter().collect();
    end_of_turn.extend(pieces.id(meta, "eot", None)?);
    end_of_turn.extend(pieces.id(meta, "eom", None)?);
    let named = END_OF_TURN.iter().filter_map(|piece| pieces.ids.get(piece));
    end_of_turn.extend(named.filter(|&&id| pieces.kinds[id as usize] == Kind::Control).map(|&id| TokenId(id)));
    end_of_turn.sort_unstable();
    end_of_turn.dedup();
    Ok(GgufTokenizer {
        tokenizer: Tokenizer::new(parts.library, parts.vocab, prefix, suffix, &meta.path)?,
        bos,
        eos,
        unknown: pieces.id(meta, "unknown", parts.unknown)?,
        padding: pieces.id(meta, "padding", None)?,
        end_of_turn,
    })
}

fn read_merges(meta: &Metadata) -> Result<Merges, LoadError> {
    const MERGES: &str = "tokenizer.ggml.merges";
    let lines = meta.require_strs(MERGES)?;
    if lines.len() > 2 * MAX_TOKENS {
        return Err(meta.error(MERGES, format!("{} merges, expected at most {}", lines.len(), 2 * MAX_TOKENS)));
    }
    let merge = |(index, line): (usize, &String)| match line.split_once(' ') {
        Some((left, right)) if !left.is_empty() && !right.is_empty() => Ok((left.to_owned(), right.to_owned())),
        _ => Err(meta.error(MERGES, format!("merge {index} is '{line}', expected two pieces"))),
    };
    lines.iter().enumerate().map(merge).collect()
}

/// The merges of a SentencePiece vocabulary, which stores only scores: every way to join two pieces into a third is a
/// merge, best score of the result first, then the longer left piece (as Hugging Face's converter has it).
/// Control, unknown and byte tokens are not made by merging.
fn merges_from_scores(meta: &Metadata, pieces: &Pieces<'_>) -> Result<Merges, LoadError> {
    const SCORES: &str = "tokenizer.ggml.scores";
    let scores = meta.f32s(SCORES)?.ok_or_else(|| meta.error(SCORES, "missing"))?;
    if scores.len() != pieces.list.len() {
        return Err(meta.error(SCORES, format!("{} scores for {} tokens", scores.len(), pieces.list.len())));
    }
    if scores.iter().any(|score| score.is_nan()) {
        return Err(meta.error(SCORES, "a score is not a number"));
    }
    let mergeable = |piece: &str| {
        let id = *pieces.ids.get(piece)?;
        matches!(pieces.kinds[id as usize], Kind::Normal | Kind::UserDefined).then_some(id)
    };
    let mut merges = Vec::new();
    for (piece, &score) in pieces.list.iter().zip(scores).filter(|(piece, _)| mergeable(piece).is_some()) {
        if piece.len() > MAX_PIECE_BYTES {
            let problem = format!("a token has {} bytes, expected at most {MAX_PIECE_BYTES}", piece.len());
            return Err(meta.error("tokenizer.ggml.tokens", problem));
        }
        for (at, _) in piece.char_indices().skip(1) {
            let (left, right) = piece.split_at(at);
            if let (Some(left_id), Some(right_id)) = (mergeable(left), mergeable(right)) {
                merges.push(ScoredMerge { score, left, right, left_id, right_id });
            }
        }
    }
    merges.sort_by(|a, b| {
        let by_score = b.score.partial_cmp(&a.score).expect("no score is NaN");
        by_score.then_with(|| a.tie_break().cmp(&b.tie_break()))
    });
    Ok(merges.into_iter().map(|merge| (merge.left.to_owned(), merge.right.to_owned())).collect())
}

struct ScoredMerge<'m> {
    score: f32,
    left: &'m str,
    right: &'m str,
    left_id: u32,
    right_id: u32,
}

impl ScoredMerge<'_> {
    fn tie_break(&self) -> (Reverse<usize>, Reverse<usize>, u32, u32) {
        let chars = |piece: &str| Reverse(piece.chars().count());
        (chars(self.left), chars(self.right), self.left_id, self.right_id)
    }
}

fn push(vocab: &mut Vocab, bytes: &[u8], kind: Kind, meta: &Metadata) -> Result<(), LoadError> {
    vocab
        .push(bytes, kind.is_special())
        .ok_or_else(|| meta.error("tokenizer.ggml.tokens", "all tokens together pass 4 GiB"))
}

fn unsupported(meta: &Metadata, what: &'static str, name: &str, supported: String) -> LoadError {
    LoadError::Unsupported { path: meta.path.clone(), what, name: name.into(), supported }
}
