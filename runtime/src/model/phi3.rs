//! Phi-3, 3.5 and 4, dense (`Phi3ForCausalLM`, GGUF `phi3`): q, k and v are one matrix, gate and up another; part of a head
//! turns; LongRoPE.
//!
//! Invariant: LongRoPE's set of factors is chosen once, by the context that the engine is built for. Called by `registry`.
//! Source: Abdin et al. 2024, "Phi-3 Technical Report"; Ding et al. 2024, "LongRoPE".

use super::config::DecoderConfig;
use super::layers::{Biases, DecoderSpec, decoder};
use super::names::{ENDS, MLP_NORM, Name};
use super::reader::{Reader, WINDOWS};
use super::rope::RopeReader;
use super::{LoadOptions, Model};
use crate::error::LoadError;
use crate::weights::Checkpoint;

#[rustfmt::skip]
const BLOCKS: &[Name] = &[
    Name { house: "layers.{i}.attn.norm", gguf: "blk.{i}.attn_norm", hf: "model.layers.{i}.input_layernorm" },
    Name { house: "layers.{i}.attn.qkv", gguf: "blk.{i}.attn_qkv", hf: "model.layers.{i}.self_attn.qkv_proj" },
    Name { house: "layers.{i}.attn.o", gguf: "blk.{i}.attn_output", hf: "model.layers.{i}.self_attn.o_proj" },
    Name { house: "layers.{i}.mlp.gate_up", gguf: "blk.{i}.ffn_up", hf: "model.layers.{i}.mlp.gate_up_proj" },
    Name { house: "layers.{i}.mlp.down", gguf: "blk.{i}.ffn_down", hf: "model.layers.{i}.mlp.down_proj" },
];
const NAMES: &[&[Name]] = &[ENDS, MLP_NORM, BLOCKS];

pub(super) fn load(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Model, LoadError> {
    let reader = Reader::new(checkpoint, &WINDOWS)?;
    let config = DecoderConfig::read(&reader, false)?;
    let rope = RopeReader::new(reader, &config, options).read(None)?;
    let windows = reader.windows(config.num_layers, |_| true)?;
    reader.expect_activation(&["silu"])?;
    let none = reader.is_hf().then_some(false);
    let spec = DecoderSpec {
        is_fused: true,
        biases: Biases { qkv: none, o: none, mlp: none },
        ..DecoderSpec::plain("phi3", NAMES, &config)
    };
    decoder(checkpoint, options, &config, &spec.with_rope(rope.table()).with_windows(&windows, &config))
}
