//! Qwen3, dense (`Qwen3ForCausalLM`, GGUF `qwen3`): Llama's decoder with RMS norms on each head of q and k.
//!
//! Invariant: rotary pairs are half-split in both containers. Called by `registry`. Source: Qwen team 2025, "Qwen3
//! Technical Report".

use super::Model;
use super::config::DecoderConfig;
use super::layers::{DecoderSpec, Name, decoder};
use crate::error::LoadError;
use crate::program::{KvDtype, RopePairing};
use crate::weights::Checkpoint;

#[rustfmt::skip]
const NAMES: &[Name] = &[
    Name { house: "embed", gguf: "token_embd", hf: "model.embed_tokens" },
    Name { house: "layers.{i}.attn.norm", gguf: "blk.{i}.attn_norm", hf: "model.layers.{i}.input_layernorm" },
    Name { house: "layers.{i}.attn.q", gguf: "blk.{i}.attn_q", hf: "model.layers.{i}.self_attn.q_proj" },
    Name { house: "layers.{i}.attn.k", gguf: "blk.{i}.attn_k", hf: "model.layers.{i}.self_attn.k_proj" },
    Name { house: "layers.{i}.attn.v", gguf: "blk.{i}.attn_v", hf: "model.layers.{i}.self_attn.v_proj" },
    Name { house: "layers.{i}.attn.q_norm", gguf: "blk.{i}.attn_q_norm", hf: "model.layers.{i}.self_attn.q_norm" },
    Name { house: "layers.{i}.attn.k_norm", gguf: "blk.{i}.attn_k_norm", hf: "model.layers.{i}.self_attn.k_norm" },
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
    let spec = DecoderSpec { architecture: "qwen3", names: NAMES, qk_norm: true, pairing: RopePairing::Half };
    decoder(checkpoint, kv_dtype, &config, &spec)
}
