//! SmolLM3 (`SmolLM3ForCausalLM`, GGUF `smollm3`): Llama's decoder in which every fourth layer has no rotary embedding.
//!
//! Invariant: GGUF files have interleaved rotary pairs, as Llama's. Called by `registry`. Source: Bakouch et al. 2025,
//! "SmolLM3"; Yang et al. 2025, "RoPE to NoPE and Back Again".

use serde_json::Value;

use super::config::DecoderConfig;
use super::layers::{DecoderSpec, decoder};
use super::llama::{self, NAMES};
use super::reader::{Key, Reader, WINDOWS};
use super::rope::RopeReader;
use super::{LoadOptions, Model};
use crate::error::LoadError;
use crate::weights::Checkpoint;

/// Every so many layers one has no rotary embedding; GGUF files do not say.
const INTERVAL: Key = Key { hf: "no_rope_layer_interval", gguf: "" };
/// 1 where a layer has one, whatever the name promises.
const LAYERS: &str = "no_rope_layers";

pub(super) fn load(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Model, LoadError> {
    let reader = Reader::new(checkpoint, &WINDOWS)?;
    let config = DecoderConfig::read(&reader, true)?;
    let rope = RopeReader { default_theta: 2_000_000.0, ..RopeReader::new(reader, &config, options) }.read(None)?;
    let has_rope = layers_with_rope(&reader, config.num_layers)?;
    // Only a file that says so has windows, and then where there is no rotary embedding.
    let is_on = reader.json("use_sliding_window").is_some();
    let windows = reader.windows(config.num_layers, |layer| is_on && !has_rope[layer as usize])?;
    reader.expect_activation(&["silu"])?;
    let mut spec = DecoderSpec {
        pairing: llama::pairing(&reader),
        biases: llama::biases(&reader)?,
        ..DecoderSpec::plain("smollm3", NAMES, &config).with_rope(rope.table()).with_windows(&windows, &config)
    };
    for (layer, _) in spec.layers.iter_mut().zip(has_rope).filter(|(_, has_rope)| !has_rope) {
        layer.rope = None;
    }
    decoder(checkpoint, options, &config, &spec)
}

fn layers_with_rope(reader: &Reader<'_>, num_layers: u32) -> Result<Vec<bool>, LoadError> {
    let Some(given) = reader.json(LAYERS) else {
        let interval = reader.u32(INTERVAL)?.unwrap_or(4);
        return Ok((1..=num_layers).map(|layer| layer.checked_rem(interval) != Some(0)).collect());
    };
    let list = given.as_array().filter(|list| list.len() >= num_layers as usize);
    let flags =
        list.and_then(|list| list.iter().take(num_layers as usize).map(Value::as_u64).collect::<Option<Vec<_>>>());
    let flags = flags.ok_or_else(|| reader.error_at(LAYERS, format!("expected a list of {num_layers} numbers")))?;
    Ok(flags.into_iter().map(|flag| flag != 0).collect())
}
