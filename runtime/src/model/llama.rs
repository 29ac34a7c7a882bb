//! Llama 2 and 3, SmolLM2, TinyLlama and their fine-tunes (`LlamaForCausalLM`, GGUF `llama`).
//!
//! Invariant: GGUF files of this family have Q and K rows permuted for interleaved rotary pairs, Hugging Face files not.
//! Called by `registry`. Source: Touvron et al. 2023; Grattafiori et al. 2024, "The Llama 3 Herd of Models".

use super::config::DecoderConfig;
use super::layers::{Biases, DecoderSpec, decoder};
use super::mixtral;
use super::names::{ATTENTION, ENDS, MLP, MLP_NORM, Name};
use super::reader::{Key, Reader};
use super::rope::RopeReader;
use super::{LoadOptions, Model};
use crate::error::LoadError;
use crate::program::RopePairing;
use crate::weights::{Checkpoint, Container};

pub(super) const NAMES: &[&[Name]] = &[ENDS, ATTENTION, MLP_NORM, MLP];

pub(super) fn load(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Model, LoadError> {
    if is_mixtral(checkpoint) {
        return mixtral::load(checkpoint, options);
    }
    let reader = Reader::new(checkpoint, &[])?;
    let config = DecoderConfig::read(&reader, false)?;
    let rope = RopeReader::new(reader, &config, options).read(None)?;
    let spec = DecoderSpec {
        pairing: pairing(&reader),
        biases: biases(&reader)?,
        ..DecoderSpec::plain("llama", NAMES, &config).with_rope(rope.table())
    };
    reader.expect_activation(&["silu"])?;
    decoder(checkpoint, options, &config, &spec)
}

/// GGUF files of Mixtral say `llama`, too.
fn is_mixtral(checkpoint: &Checkpoint) -> bool {
    let Container::Gguf(metadata) = &checkpoint.container else { return false };
    matches!(metadata.u32("llama.expert_count"), Ok(Some(1..)))
}

/// The pairs of families whose GGUF converter permutes rows.
pub(super) fn pairing(reader: &Reader<'_>) -> RopePairing {
    if reader.is_hf() { RopePairing::Half } else { RopePairing::Interleaved }
}

/// Biases where `config.json` has switches for them.
pub(super) fn biases(reader: &Reader<'_>) -> Result<Biases, LoadError> {
    if !reader.is_hf() {
        return Ok(Biases::default());
    }
    let switch = |hf| Ok::<_, LoadError>(Some(reader.bool(Key { hf, gguf: "" })?.unwrap_or(false)));
    let attention = switch("attention_bias")?;
    Ok(Biases { qkv: attention, o: attention, mlp: switch("mlp_bias")? })
}
