//! Llama 2 and 3, SmolLM2, TinyLlama and their fine-tunes (`LlamaForCausalLM`, GGUF `llama`).
//!
//! Invariant: GGUF files of this family have Q and K rows permuted for interleaved rotary pairs, Hugging Face files not.
//! Called by `registry`. Source: Touvron et al. 2023; Grattafiori et al. 2024, "The Llama 3 Herd of Models".

use super::Model;
use super::config::DecoderConfig;
use super::layers::{DecoderSpec, Name, decoder};
use crate::error::LoadError;
use crate::program::{KvDtype, RopePairing};
use crate::weights::{Checkpoint, Container};

#[rustfmt::skip]
const NAMES: &[Name] = &[
    Name { house: "embed", gguf: "token_embd", hf: "model.embed_tokens" },
    Name { house: "layers.{i}.attn.norm", gguf: "blk.{i}.attn_norm", hf: "model.layers.{i}.input_layernorm" },
    Name { house: "layers.{i}.attn.q", gguf: "blk.{i}.attn_q", hf: "model.layers.{i}.self_attn.q_proj" },
    Name { house: "layers.{i}.attn.k", gguf: "blk.{i}.attn_k", hf: "model.layers.{i}.self_attn.k_proj" },
    Name { house: "layers.{i}.attn.v", gguf: "blk.{i}.attn_v", hf: "model.layers.{i}.self_attn.v_proj" },
    Name { house: "layers.{i}.attn.o", gguf: "blk.{i}.attn_output", hf: "model.layers.{i}.self_attn.o_proj" },
    Name { house: "layers.{i}.mlp.norm", gguf: "blk.{i}.ffn_norm", hf: "model.layers.{i}.post_attention_layernorm" },
    Name { house: "layers.{i}.mlp.gate", gguf: "blk.{i}.ffn_gate", hf: "model.layers.{i}.mlp.gate_proj" },
    Name { house: "layers.{i}.mlp.up", gguf: "blk.{i}.ffn_up", hf: "model.layers.{i}.mlp.up_proj" },
    Name { house: "layers.{i}.mlp.down", gguf: "blk.{i}.ffn_down", hf: "model.layers.{i}.mlp.down_proj" },
    Name { house: "norm", gguf: "output_norm", hf: "model.norm" },
    Name { house: "head", gguf: "output", hf: "lm_head" },
];

pub(super) fn load(checkpoint: &Checkpoint, kv_dtype: KvDtype) -> Result<Model, LoadError> {
    let config = DecoderConfig::read(checkpoint)?;
    let pairing = match checkpoint.container {
        Container::Gguf(_) => RopePairing::Interleaved,
        Container::HuggingFace { .. } => RopePairing::Half,
    };
    let spec = DecoderSpec { architecture: "llama", names: NAMES, qk_norm: false, pairing };
    decoder(checkpoint, kv_dtype, &config, &spec)
}
