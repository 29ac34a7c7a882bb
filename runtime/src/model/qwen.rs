//! Qwen2 and 2.5 (`Qwen2ForCausalLM`, GGUF `qwen2`): Llama's decoder with biases of q, k and v. Qwen3, dense
//! (`Qwen3ForCausalLM`, GGUF `qwen3`): RMS norms on each head of q and k instead.
//!
//! Invariant: rotary pairs are half-split in both containers. Called by `registry`. Source: Qwen team 2024, "Qwen2 Technical
//! Report"; 2025, "Qwen3 Technical Report".

use serde_json::Value;

use super::config::DecoderConfig;
use super::experts::{EXPERT_KEYS, ExpertLayout, ExpertsSpec, read_counts};
use super::layers::{Biases, DecoderSpec, decoder};
use super::llama;
use super::names::{ATTENTION, ENDS, EXPERTS, MLP, MLP_NORM, Name, QK_NORMS};
use super::reader::{Key, Reader, WINDOWS};
use super::rope::RopeReader;
use super::{LoadOptions, Model};
use crate::error::LoadError;
use crate::program::{Router, RouterScore};
use crate::weights::Checkpoint;

const QWEN3_MOE_NAMES: &[&[Name]] = &[ENDS, ATTENTION, QK_NORMS, MLP_NORM, MLP, EXPERTS];
const NORM_TOP_K: Key = Key { hf: "norm_topk_prob", gguf: "" };
const EXPERT_INTERMEDIATE: Key = Key { hf: "moe_intermediate_size", gguf: "expert_feed_forward_length" };
/// Every so many layers one has experts.
const SPARSE_STEP: Key = Key { hf: "decoder_sparse_step", gguf: "" };
/// Layers that have none all the same.
const DENSE_LAYERS: &str = "mlp_only_layers";
const QWEN3_NAMES: &[&[Name]] = &[ENDS, ATTENTION, QK_NORMS, MLP_NORM, MLP];
/// Layers before this one see everything.
const MAX_WINDOW_LAYERS: Key = Key { hf: "max_window_layers", gguf: "" };

pub(super) fn load_2(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Model, LoadError> {
    load(checkpoint, options, &[], |reader, spec| {
        let qkv = reader.is_hf().then_some(true);
        let none = reader.is_hf().then_some(false);
        Ok(DecoderSpec { architecture: "qwen2", biases: Biases { qkv, o: none, mlp: none }, ..spec })
    })
}

/// Qwen3-MoE (`Qwen3MoeForCausalLM`, GGUF `qwen3moe`): Qwen3 with experts in most layers.
pub(super) fn load_3_moe(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Model, LoadError> {
    load(checkpoint, options, &EXPERT_KEYS, |reader, spec| {
        let Some((num_experts, top_k)) = read_counts(reader)? else {
            return Err(reader.error_at("num_experts", "missing"));
        };
        // GGUF files do not say: all that there are renormalise.
        let renormalise = reader.bool(NORM_TOP_K)?.unwrap_or(!reader.is_hf());
        let router = Router { top_k, score: RouterScore::Softmax, groups: 1, top_groups: 1, renormalise, scale: 1.0 };
        let experts = ExpertsSpec {
            num_experts,
            intermediate: reader.size(EXPERT_INTERMEDIATE)?,
            router,
            layout: ExpertLayout::Separate,
            bias: false,
            correction: false,
            shared: None,
        };
        let step = reader.u32(SPARSE_STEP)?.unwrap_or(1).max(1);
        let dense = match reader.json(DENSE_LAYERS) {
            None => Vec::new(),
            Some(list) => {
                let layers =
                    list.as_array().and_then(|list| list.iter().map(Value::as_u64).collect::<Option<Vec<_>>>());
                layers.ok_or_else(|| reader.error_at(DENSE_LAYERS, "expected a list of layers"))?
            }
        };
        let biases = llama::biases(reader)?;
        let spec = DecoderSpec { architecture: "qwen3moe", names: QWEN3_MOE_NAMES, qk_norm: true, biases, ..spec };
        let has_experts = |layer: u32| (layer + 1).is_multiple_of(step) && !dense.contains(&u64::from(layer));
        Ok(DecoderSpec { experts: Some(experts), ..spec }.with_experts(has_experts))
    })
}

pub(super) fn load_3(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Model, LoadError> {
    load(checkpoint, options, &[], |reader, spec| {
        let biases = llama::biases(reader)?;
        Ok(DecoderSpec { architecture: "qwen3", names: QWEN3_NAMES, qk_norm: true, biases, ..spec })
    })
}

fn load<'a>(
    checkpoint: &'a Checkpoint,
    options: &LoadOptions,
    honours: &[&str],
    special: impl Fn(&Reader<'a>, DecoderSpec) -> Result<DecoderSpec, LoadError>,
) -> Result<Model, LoadError> {
    let reader = Reader::new(checkpoint, &[&WINDOWS[..], honours].concat())?;
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
