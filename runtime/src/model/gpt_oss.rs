//! gpt-oss (`GptOssForCausalLM`, GGUF `gpt-oss`): attention with sinks and biases, every second layer with a window, experts
//! with clamped SwiGLU, YaRN.
//!
//! Invariant: Hugging Face files keep the experts' gates and ups as rows that alternate, GGUF files apart. Called by `registry`.
//! Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card"; numbers that files do not say are llama.cpp's and transformers'.

use super::config::DecoderConfig;
use super::experts::{EXPERT_KEYS, ExpertLayout, ExpertsSpec, read_counts};
use super::layers::{Biases, DecoderSpec, decoder};
use super::names::{ATTENTION, ENDS, Name};
use super::reader::{Key, Reader, WINDOWS};
use super::rope::{RopeReader, RopeScaling};
use super::{LoadOptions, Model};
use crate::error::LoadError;
use crate::program::{Activation, Router, RouterScore};
use crate::weights::Checkpoint;

#[rustfmt::skip]
const BLOCKS: &[Name] = &[
    Name { house: "layers.{i}.attn.sinks", gguf: "blk.{i}.attn_sinks", hf: "model.layers.{i}.self_attn.sinks" },
    Name { house: "layers.{i}.mlp.norm", gguf: "blk.{i}.post_attention_norm", hf: "model.layers.{i}.post_attention_layernorm" },
    Name { house: "layers.{i}.mlp.router", gguf: "blk.{i}.ffn_gate_inp", hf: "model.layers.{i}.mlp.router" },
    Name { house: "layers.{i}.mlp.experts.gate_up", gguf: "", hf: "model.layers.{i}.mlp.experts.gate_up_proj" },
    Name { house: "layers.{i}.mlp.experts.gate", gguf: "blk.{i}.ffn_gate_exps", hf: "" },
    Name { house: "layers.{i}.mlp.experts.up", gguf: "blk.{i}.ffn_up_exps", hf: "" },
    Name { house: "layers.{i}.mlp.experts.down", gguf: "blk.{i}.ffn_down_exps", hf: "model.layers.{i}.mlp.experts.down_proj" },
];
const NAMES: &[&[Name]] = &[ENDS, ATTENTION, BLOCKS];
const EXPERT_INTERMEDIATE: Key = Key { hf: "intermediate_size", gguf: "expert_feed_forward_length" };
/// Constants of the activation, and what they must be.
const ACTIVATION: [(Key, f32); 2] =
    [(Key { hf: "swiglu_limit", gguf: "" }, 7.0), (Key { hf: "swiglu_alpha", gguf: "" }, 1.702)];

pub(super) fn load(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Model, LoadError> {
    let reader = Reader::new(checkpoint, &[&WINDOWS[..], &EXPERT_KEYS[..]].concat())?;
    let config = DecoderConfig::read(&reader, false)?;
    let ropes = RopeReader { default_theta: 150_000.0, ..RopeReader::new(reader, &config, options) };
    let mut rope = ropes.read(None)?;
    if let RopeScaling::Yarn(yarn) = &mut rope.scaling
        && !reader.is_hf()
    {
        // The model's own ramp; GGUF files do not say.
        yarn.truncate = false;
    }
    let windows = reader.windows(config.num_layers, |layer| layer.is_multiple_of(2))?;
    reader.expect_activation(&["silu"])?;
    for (key, expected) in ACTIVATION {
        if let Some(value) = reader.f32(key)?.filter(|&value| value != expected) {
            return Err(reader.unsupported("setting", format!("{} = {value}", key.hf), &expected.to_string()));
        }
    }
    let Some((num_experts, top_k)) = read_counts(&reader)? else {
        return Err(reader.error_at("num_local_experts", "missing"));
    };
    let experts = ExpertsSpec {
        num_experts,
        intermediate: reader.size(EXPERT_INTERMEDIATE)?,
        // A softmax over the chosen logits is one over all, divided by its sum.
        router: Router { top_k, score: RouterScore::Softmax, groups: 1, top_groups: 1, renormalise: true, scale: 1.0 },
        layout: ExpertLayout::Alternating,
        bias: true,
        correction: false,
        shared: None,
    };
    let spec = DecoderSpec {
        sinks: true,
        biases: Biases { qkv: Some(true), o: Some(true), mlp: None },
        activation: Activation::ClampedSwiglu,
        experts: Some(experts),
        ..DecoderSpec::plain("gpt-oss", NAMES, &config).with_rope(rope.table()).with_windows(&windows, &config)
    };
    decoder(checkpoint, options, &config, &spec.with_experts(|_| true))
}
