//! What each token id means as bytes: the one table that decoding, streaming and log-probabilities read.
//!
//! Invariant: text is made by joining whole tokens' bytes and reading them as UTF-8, so decoding needs no library call and
//! costs the same for every token. The rules come from a tokenizer.json's `decoder` or from GGUF's token types.
//! `Detokenizer` walks it; `Tokenizer` owns it.

use rustc_hash::FxHashMap;

use crate::ids::TokenId;

/// Most token ids that a vocabulary may have; the largest known ones have half a million.
pub(super) const MAX_TOKENS: usize = 1 << 22;

/// What happens to a space at the start of a text: SentencePiece vocabularies put one there when they encode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeadingSpace {
    /// It is text.
    Keep,
    /// One space at the start is dropped.
    StripOne,
    /// Every space of the first token is dropped (Hugging Face's `Metaspace` decoder).
    StripFirstToken,
}

/// The bytes of every token.
#[derive(Clone, Debug)]
pub(super) struct Vocab {
    bytes: Vec<u8>,
    /// `ends[id]` is where token `id` ends in `bytes`.
    ends: Vec<u32>,
    special: Vec<bool>,
    pub(super) leading_space: LeadingSpace,
}

impl Vocab {
    /// An empty table to be filled in the order of ids.
    pub(super) fn new(leading_space: LeadingSpace) -> Self {
        Self { bytes: Vec::new(), ends: Vec::new(), special: Vec::new(), leading_space }
    }

    /// Appends the next id. `None` when all bytes together pass 4 GiB.
    pub(super) fn push(&mut self, bytes: &[u8], special: bool) -> Option<()> {
        self.bytes.extend_from_slice(bytes);
        self.ends.push(u32::try_from(self.bytes.len()).ok()?);
        self.special.push(special);
        Some(())
    }

    /// Number of ids.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The bytes of a token; none for ids past the vocabulary (a model's padding rows).
    pub(super) fn bytes(&self, id: TokenId) -> &[u8] {
        let Some(&end) = self.ends.get(id.index()) else { return &[] };
        let start = if id.0 == 0 { 0 } else { self.ends[id.index() - 1] };
        &self.bytes[start as usize..end as usize]
    }

    /// Whether a token is a control token, to be left out of text.
    pub(super) fn is_special(&self, id: TokenId) -> bool {
        self.special.get(id.index()).copied().unwrap_or(false)
    }
}

/// The alphabet of byte-level BPE (Radford et al., GPT-2): each byte is written as one printable character.
pub(super) struct ByteAlphabet(FxHashMap<char, u8>);

impl ByteAlphabet {
    pub(super) fn new() -> Self {
        let mut unprintable = 0x100..;
        let mut bytes = FxHashMap::default();
        for byte in 0..=u8::MAX {
            let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
            let code = if printable { u32::from(byte) } else { unprintable.next().expect("endless") };
            bytes.insert(char::from_u32(code).expect("below the surrogates"), byte);
        }
        Self(bytes)
    }

    /// The bytes that a piece stands for; a piece with any other character stands for itself.
    pub(super) fn decode(&self, piece: &str) -> Vec<u8> {
        let bytes: Option<Vec<u8>> = piece.chars().map(|c| self.0.get(&c).copied()).collect();
        bytes.unwrap_or_else(|| piece.as_bytes().to_vec())
    }
}

/// The byte that a SentencePiece byte token (`<0x0A>`) stands for.
pub(super) fn byte_token(piece: &str) -> Option<u8> {
    let hex = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() != 2 || !hex.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(hex, 16).ok()
}
