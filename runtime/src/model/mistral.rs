//! Mistral (`MistralForCausalLM`; its GGUF files say `llama`): Llama's decoder, the first version with a window in all layers.
//!
//! Called by `registry`. Source: Jiang et al. 2023, "Mistral 7B".

use super::config::DecoderConfig;
use super::layers::{DecoderSpec, decoder};
use super::llama::{self, NAMES};
use super::reader::{Reader, WINDOWS};
use super::rope::RopeReader;
use super::{LoadOptions, Model};
use crate::error::LoadError;
use crate::weights::Checkpoint;

pub(super) fn load(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Model, LoadError> {
    let reader = Reader::new(checkpoint, &WINDOWS)?;
    let config = DecoderConfig::read(&reader, false)?;
    let rope = RopeReader::new(reader, &config, options).read(None)?;
    let windows = reader.windows(config.num_layers, |_| true)?;
    reader.expect_activation(&["silu"])?;
    let spec = DecoderSpec { biases: llama::biases(&reader)?, ..DecoderSpec::plain("mistral", NAMES, &config) };
    decoder(checkpoint, options, &config, &spec.with_rope(rope.table()).with_windows(&windows, &config))
}
