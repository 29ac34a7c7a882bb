//! The sizes that every decoder has, under one set of names.
//!
//! Invariant: sizes that belong together are held against each other here. Called by the architectures, which read what only
//! they have themselves.

use super::reader::{Key, MAX_SIZE, Reader};
use crate::error::LoadError;

const HIDDEN: Key = Key { hf: "hidden_size", gguf: "embedding_length" };
const LAYERS: Key = Key { hf: "num_hidden_layers", gguf: "block_count" };
const HEADS: Key = Key { hf: "num_attention_heads", gguf: "attention.head_count" };
const KV_HEADS: Key = Key { hf: "num_key_value_heads", gguf: "attention.head_count_kv" };
const HEAD_DIM: Key = Key { hf: "head_dim", gguf: "attention.key_length" };
const VALUE_DIM: Key = Key { hf: "", gguf: "attention.value_length" };
const INTERMEDIATE: Key = Key { hf: "intermediate_size", gguf: "feed_forward_length" };
const VOCAB: Key = Key { hf: "vocab_size", gguf: "vocab_size" };
const RMS_EPS: Key = Key { hf: "rms_norm_eps", gguf: "attention.layer_norm_rms_epsilon" };
const TIED: Key = Key { hf: "tie_word_embeddings", gguf: "" };
pub(super) const MAX_POSITION: Key = Key { hf: "max_position_embeddings", gguf: "context_length" };

/// The sizes of a decoder-only transformer with grouped-query attention and a gated MLP.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct DecoderConfig {
    pub hidden: u32,
    pub num_layers: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub intermediate: u32,
    /// What the configuration says; `None`: whatever the embedding has (GGUF).
    pub vocab_size: Option<u32>,
    pub max_position: u32,
    pub rms_eps: f32,
    /// Whether the head is the embedding table.
    pub tied: bool,
}

impl DecoderConfig {
    /// Reads and checks the sizes; `tied` is what a `config.json` that does not say means.
    pub fn read(reader: &Reader<'_>, tied: bool) -> Result<Self, LoadError> {
        let (hidden, heads) = (reader.size(HIDDEN)?, reader.size(HEADS)?);
        let head_dim = match reader.u32(HEAD_DIM)? {
            Some(_) => reader.size(HEAD_DIM)?,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => return Err(reader.error(HEADS, format!("{heads} heads do not divide hidden size {hidden}"))),
        };
        if let Some(dim) = reader.u32(VALUE_DIM)?.filter(|&dim| dim != head_dim) {
            return Err(reader.unsupported(
                "setting",
                format!("{} = {dim}", reader.name(VALUE_DIM)),
                &head_dim.to_string(),
            ));
        }
        Self::with_head_dim(reader, tied, head_dim)
    }

    /// As `read`, for families that have sizes of heads of their own.
    pub fn with_head_dim(reader: &Reader<'_>, tied: bool, head_dim: u32) -> Result<Self, LoadError> {
        let (hidden, heads) = (reader.size(HIDDEN)?, reader.size(HEADS)?);
        let kv_heads = if reader.u32(KV_HEADS)?.is_some() { reader.size(KV_HEADS)? } else { heads };
        if !heads.is_multiple_of(kv_heads) {
            return Err(reader.error(KV_HEADS, format!("{heads} heads are not a multiple of {kv_heads}")));
        }
        let too_wide = heads.checked_mul(head_dim).is_none_or(|width| width > MAX_SIZE);
        if too_wide || !head_dim.is_multiple_of(2) {
            return Err(reader.error(HEAD_DIM, format!("{heads} heads of {head_dim} elements are out of range")));
        }
        Ok(Self {
            hidden,
            num_layers: reader.size(LAYERS)?,
            heads,
            kv_heads,
            head_dim,
            intermediate: reader.size(INTERMEDIATE)?,
            vocab_size: if reader.is_hf() { Some(reader.size(VOCAB)?) } else { None },
            max_position: reader.size_up_to(MAX_POSITION, 1 << 30)?,
            rms_eps: reader.require_positive(RMS_EPS)?,
            tied: match reader.is_hf() {
                true => reader.bool(TIED)?.unwrap_or(tied),
                false => !reader.checkpoint.tensors.contains_key("output.weight"),
            },
        })
    }
}
