//! Mixtral (`MixtralForCausalLM`; its GGUF files say `llama` and have experts): Mistral's attention, experts for the MLP.
//!
//! Called by `registry` and, for GGUF files, by `llama`. Source: Jiang et al. 2024, "Mixtral of Experts".

use super::config::DecoderConfig;
use super::experts::{EXPERT_KEYS, ExpertLayout, ExpertsSpec, read_counts};
use super::layers::{DecoderSpec, decoder};
use super::llama;
use super::names::{ATTENTION, ENDS, MLP_NORM, Name};
use super::reader::{Reader, WINDOWS};
use super::rope::RopeReader;
use super::{LoadOptions, Model};
use crate::error::LoadError;
use crate::program::{Router, RouterScore};
use crate::weights::Checkpoint;

#[rustfmt::skip]
const EXPERTS: &[Name] = &[
    Name { house: "layers.{i}.mlp.router", gguf: "blk.{i}.ffn_gate_inp", hf: "model.layers.{i}.block_sparse_moe.gate" },
    Name { house: "layers.{i}.mlp.experts.gate", gguf: "blk.{i}.ffn_gate_exps", hf: "model.layers.{i}.block_sparse_moe.experts.{e}.w1" },
    Name { house: "layers.{i}.mlp.experts.up", gguf: "blk.{i}.ffn_up_exps", hf: "model.layers.{i}.block_sparse_moe.experts.{e}.w3" },
    Name { house: "layers.{i}.mlp.experts.down", gguf: "blk.{i}.ffn_down_exps", hf: "model.layers.{i}.block_sparse_moe.experts.{e}.w2" },
];
const NAMES: &[&[Name]] = &[ENDS, ATTENTION, MLP_NORM, EXPERTS];

pub(super) fn load(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Model, LoadError> {
    let reader = Reader::new(checkpoint, &[&WINDOWS[..], &EXPERT_KEYS[..]].concat())?;
    let config = DecoderConfig::read(&reader, false)?;
    let rope = RopeReader::new(reader, &config, options).read(None)?;
    let windows = reader.windows(config.num_layers, |_| true)?;
    reader.expect_activation(&["silu"])?;
    let Some((num_experts, top_k)) = read_counts(&reader)? else {
        return Err(reader.error_at("num_local_experts", "missing"));
    };
    let score = RouterScore::Softmax;
    let experts = ExpertsSpec {
        num_experts,
        intermediate: config.intermediate,
        router: Router { top_k, score, groups: 1, top_groups: 1, renormalise: true, scale: 1.0 },
        layout: ExpertLayout::Separate,
        bias: false,
        correction: false,
        shared: None,
    };
    let spec = DecoderSpec {
        pairing: llama::pairing(&reader),
        biases: llama::biases(&reader)?,
        experts: Some(experts),
        ..DecoderSpec::plain("mixtral", NAMES, &config).with_rope(rope.table()).with_windows(&windows, &config)
    };
    decoder(checkpoint, options, &config, &spec.with_experts(|_| true))
}
