//! Gemma 2 (`Gemma2ForCausalLM`, GGUF `gemma2`) and Gemma 3's text models (`Gemma3ForCausalLM`, GGUF `gemma3`): local and
//! global layers, four norms a layer, GELU gates, scaled embeddings. Gemma 2 caps scores and logits; Gemma 3 norms q and k
//! and turns local layers with a base of their own.
//!
//! Invariant: Hugging Face files store norms without the 1 that belongs to them; GGUF files have it. Called by `registry`.
//! Source: Gemma Team 2024, "Gemma 2"; 2025, "Gemma 3 Technical Report".

use super::config::DecoderConfig;
use super::layers::{DecoderSpec, decoder};
use super::llama;
use super::names::{ATTENTION, ENDS, MLP, Name, QK_NORMS};
use super::reader::{Key, Reader, WINDOWS};
use super::rope::{RopeConfig, RopeReader, RopeScaling};
use super::{LoadOptions, Model};
use crate::error::LoadError;
use crate::program::{Activation, RopePairing};
use crate::weights::Checkpoint;

#[rustfmt::skip]
const NORMS: &[Name] = &[
    Name { house: "layers.{i}.attn.post_norm", gguf: "blk.{i}.post_attention_norm", hf: "model.layers.{i}.post_attention_layernorm" },
    Name { house: "layers.{i}.mlp.norm", gguf: "blk.{i}.ffn_norm", hf: "model.layers.{i}.pre_feedforward_layernorm" },
    Name { house: "layers.{i}.mlp.post_norm", gguf: "blk.{i}.post_ffw_norm", hf: "model.layers.{i}.post_feedforward_layernorm" },
];
const GEMMA2_NAMES: &[&[Name]] = &[ENDS, ATTENTION, NORMS, MLP];
const GEMMA3_NAMES: &[&[Name]] = &[ENDS, ATTENTION, QK_NORMS, NORMS, MLP];

const QUERY_SCALAR: Key = Key { hf: "query_pre_attn_scalar", gguf: "" };
const ATTENTION_CAP: Key = Key { hf: "attn_logit_softcapping", gguf: "attn_logit_softcapping" };
const LOGIT_CAP: Key = Key { hf: "final_logit_softcapping", gguf: "final_logit_softcapping" };
/// Every so many layers one is global.
const PATTERN: Key = Key { hf: "sliding_window_pattern", gguf: "" };
const LOCAL_THETA: Key = Key { hf: "rope_local_base_freq", gguf: "rope.freq_base_swa" };
const LOCAL: &str = "sliding_attention";

/// Layers of the 27B models, whose queries are scaled by hidden / heads; GGUF files do not say (llama.cpp goes by it, too).
const LAYERS_OF_27B: [u32; 2] = [46, 62];

pub(super) fn load_2(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Model, LoadError> {
    let gemma = Gemma::read(checkpoint, 2)?;
    let rope = RopeReader::new(gemma.reader, &gemma.config, options).read(None)?;
    let spec = DecoderSpec {
        attention_cap: gemma.reader.positive(ATTENTION_CAP)?,
        logit_cap: gemma.reader.positive(LOGIT_CAP)?,
        ..gemma.spec("gemma2", GEMMA2_NAMES)?.with_rope(rope.table())
    };
    decoder(checkpoint, options, &gemma.config, &spec)
}

pub(super) fn load_3(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Model, LoadError> {
    let gemma = Gemma::read(checkpoint, 6)?;
    let (reader, config) = (gemma.reader, &gemma.config);
    let ropes = RopeReader { default_theta: 1_000_000.0, ..RopeReader::new(reader, config, options) };
    let global = ropes.read(Some("full_attention"))?;
    let is_by_type = reader.json("rope_parameters").is_some_and(|all| all.get(LOCAL).is_some());
    let local = match is_by_type {
        true => RopeReader { default_theta: RopeConfig::DEFAULT_THETA, ..ropes }.read(Some(LOCAL))?,
        false => RopeConfig {
            theta: reader.positive(LOCAL_THETA)?.unwrap_or(RopeConfig::DEFAULT_THETA),
            rotary_dim: config.head_dim,
            scaling: RopeScaling::None,
        },
    };
    let mut spec = DecoderSpec { qk_norm: true, ..gemma.spec("gemma3", GEMMA3_NAMES)? };
    spec.attention_cap = reader.positive(ATTENTION_CAP)?;
    spec.logit_cap = reader.positive(LOGIT_CAP)?;
    spec.ropes = vec![("rope.inv_freq", global.table()), ("rope.local_inv_freq", local.table())];
    for (layer, is_local) in spec.layers.iter_mut().zip(&gemma.is_local) {
        layer.rope = Some(usize::from(*is_local));
    }
    decoder(checkpoint, options, config, &spec)
}

/// What both versions are built from.
struct Gemma<'a> {
    reader: Reader<'a>,
    config: DecoderConfig,
    windows: Vec<Option<u32>>,
    is_local: Vec<bool>,
}

impl<'a> Gemma<'a> {
    /// Of every `pattern` layers the last is global.
    fn read(checkpoint: &'a Checkpoint, pattern: u32) -> Result<Self, LoadError> {
        let honours = [QUERY_SCALAR.hf, ATTENTION_CAP.hf, LOGIT_CAP.hf];
        let reader = Reader::new(checkpoint, &[&WINDOWS[..], &honours[..]].concat())?;
        let config = DecoderConfig::read(&reader, true)?;
        let pattern = reader.u32(PATTERN)?.unwrap_or(pattern);
        let windows = reader.windows(config.num_layers, |layer| (layer + 1).checked_rem(pattern) != Some(0))?;
        reader.expect_activation(&["gelu_pytorch_tanh"])?;
        let is_local = windows.iter().map(Option::is_some).collect();
        Ok(Self { reader, config, windows, is_local })
    }

    fn spec(&self, architecture: &'static str, names: &'static [&'static [Name]]) -> Result<DecoderSpec, LoadError> {
        let (reader, config) = (&self.reader, &self.config);
        let scalar = match reader.positive(QUERY_SCALAR)? {
            Some(scalar) => scalar,
            None if LAYERS_OF_27B.contains(&config.num_layers) => config.hidden as f32 / config.heads as f32,
            None => config.head_dim as f32,
        };
        let spec = DecoderSpec {
            pairing: RopePairing::Half,
            post_norms: true,
            norm_offset: if reader.is_hf() { 1.0 } else { 0.0 },
            biases: llama::biases(reader)?,
            attention_scale: 1.0 / scalar.sqrt(),
            embed_scale: (config.hidden as f32).sqrt(),
            activation: Activation::GeluTanh,
            ..DecoderSpec::plain(architecture, names, config)
        };
        Ok(spec.with_windows(&self.windows, config))
    }
}
