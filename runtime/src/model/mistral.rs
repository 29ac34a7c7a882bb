//! Mistral (`MistralForCausalLM`; its GGUF files say `llama`): Llama's decoder, the first version with a window in all layers.
//! Ministral 3 (`Ministral3ForCausalLM`, GGUF `mistral3`): YaRN, and queries that grow with the context.
//!
//! Invariant: GGUF files of Ministral 3 have interleaved rotary pairs, as Llama's. Called by `registry`. Source: Jiang et al.
//! 2023, "Mistral 7B"; Liu et al. 2026, "Ministral 3".

use super::config::DecoderConfig;
use super::layers::{DecoderSpec, decoder};
use super::llama::{self, NAMES};
use super::reader::{Key, Reader, WINDOWS};
use super::rope::{RopeReader, RopeScaling};
use super::{LoadOptions, Model};
use crate::error::LoadError;
use crate::weights::Checkpoint;

/// Beta of the growth; in Hugging Face files among the rotary parameters.
const GROWTH: Key = Key { hf: "", gguf: "attention.temperature_scale" };
const HF_GROWTH: &str = "llama_4_scaling_beta";

pub(super) fn load(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Model, LoadError> {
    let reader = Reader::new(checkpoint, &[&WINDOWS[..], &[GROWTH.gguf]].concat())?;
    let config = DecoderConfig::read(&reader, false)?;
    let rope = RopeReader::new(reader, &config, options).read(None)?;
    let windows = reader.windows(config.num_layers, |_| true)?;
    reader.expect_activation(&["silu"])?;
    let beta = match reader.json("rope_parameters") {
        Some(parameters) => reader.f32_in(parameters, HF_GROWTH)?,
        None => reader.f32(GROWTH)?,
    };
    let query_growth = match (beta.filter(|&beta| beta != 0.0), &rope.scaling) {
        (None, _) => None,
        (Some(beta), RopeScaling::Yarn(yarn)) if yarn.original_max_position >= 1.0 => {
            Some((beta, yarn.original_max_position as u32))
        }
        (Some(_), _) => return Err(reader.error_at(HF_GROWTH, "queries grow from YaRN's original context on: no YaRN")),
    };
    let spec = DecoderSpec {
        pairing: llama::pairing(&reader),
        biases: llama::biases(&reader)?,
        query_growth,
        ..DecoderSpec::plain("mistral", NAMES, &config)
    };
    decoder(checkpoint, options, &config, &spec.with_rope(rope.table()).with_windows(&windows, &config))
}
