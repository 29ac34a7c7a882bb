//! Qwen2 and 2.5 (`Qwen2ForCausalLM`, GGUF `qwen2`): Llama's decoder with biases of q, k and v. Qwen3, dense
//! (`Qwen3ForCausalLM`, GGUF `qwen3`): RMS norms on each head of q and k instead.
//!
//! Invariant: rotary pairs are half-split in both containers. Called by `registry`. Source: Qwen team 2024, "Qwen2 Technical
//! Report"; 2025, "Qwen3 Technical Report".

use super::config::DecoderConfig;
use super::layers::{Biases, DecoderSpec, decoder};
use super::llama;
use super::names::{ATTENTION, ENDS, MLP, MLP_NORM, Name, QK_NORMS};
use super::reader::{Key, Reader, WINDOWS};
use super::rope::RopeReader;
use super::{LoadOptions, Model};
use crate::error::LoadError;
use crate::weights::Checkpoint;

const QWEN3_NAMES: &[&[Name]] = &[ENDS, ATTENTION, QK_NORMS, MLP_NORM, MLP];
/// Layers before this one see everything.
const MAX_WINDOW_LAYERS: Key = Key { hf: "max_window_layers", gguf: "" };

pub(super) fn load_2(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Model, LoadError> {
    load(checkpoint, options, |reader, spec| {
        let qkv = reader.is_hf().then_some(true);
        let none = reader.is_hf().then_some(false);
        Ok(DecoderSpec { architecture: "qwen2", biases: Biases { qkv, o: none, mlp: none }, ..spec })
    })
}

pub(super) fn load_3(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Model, LoadError> {
    load(checkpoint, options, |reader, spec| {
        let biases = llama::biases(reader)?;
        Ok(DecoderSpec { architecture: "qwen3", names: QWEN3_NAMES, qk_norm: true, biases, ..spec })
    })
}

fn load<'a>(
    checkpoint: &'a Checkpoint,
    options: &LoadOptions,
    special: impl Fn(&Reader<'a>, DecoderSpec) -> Result<DecoderSpec, LoadError>,
) -> Result<Model, LoadError> {
    let reader = Reader::new(checkpoint, &WINDOWS)?;
    let config = DecoderConfig::read(&reader, false)?;
    let rope = RopeReader::new(reader, &config, options).read(None)?;
    // Without the switch Qwen has no windows, whatever else the file says.
    let is_windowed = reader.json("use_sliding_window").is_some() || reader.json("layer_types").is_some();
    let first = reader.u32(MAX_WINDOW_LAYERS)?.unwrap_or(0);
    let windows = reader.windows(config.num_layers, |layer| is_windowed && layer >= first)?;
    reader.expect_activation(&["silu"])?;
    let spec = DecoderSpec::plain("", llama::NAMES, &config).with_rope(rope.table()).with_windows(&windows, &config);
    decoder(checkpoint, options, &config, &special(&reader, spec)?)
}
