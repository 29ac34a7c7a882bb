//! DeepSeek-V2 (`DeepseekV2ForCausalLM`), V3 and R1 (`DeepseekV3ForCausalLM`), both `deepseek2` in GGUF: latent attention, experts
//! in all but the first layers, beside experts that all tokens share.
//!
//! Invariant: V2 routes by softmax, V3 by sigmoid with a correction of the choice; the class tells them apart, in GGUF files
//! `expert_gating_func`. Called by `registry`. Source: DeepSeek-AI 2024, "DeepSeek-V2" and "DeepSeek-V3 Technical Report".

use super::config::DecoderConfig;
use super::experts::{EXPERT_KEYS, ExpertLayout, ExpertsSpec, read_counts};
use super::latent::LatentSpec;
use super::layers::{Biases, DecoderSpec, decoder};
use super::names::{ENDS, EXPERTS, MLP, MLP_NORM, Name, SHARED_EXPERTS};
use super::reader::{Key, Reader};
use super::rope::{RopeConfig, RopeReader, RopeScaling, yarn_amplitude};
use super::{LoadOptions, Model};
use crate::error::LoadError;
use crate::program::{RopePairing, Router, RouterScore};
use crate::weights::Checkpoint;

#[rustfmt::skip]
const LATENT: &[Name] = &[
    Name { house: "layers.{i}.attn.norm", gguf: "blk.{i}.attn_norm", hf: "model.layers.{i}.input_layernorm" },
    Name { house: "layers.{i}.attn.q", gguf: "blk.{i}.attn_q", hf: "model.layers.{i}.self_attn.q_proj" },
    Name { house: "layers.{i}.attn.q_a", gguf: "blk.{i}.attn_q_a", hf: "model.layers.{i}.self_attn.q_a_proj" },
    Name { house: "layers.{i}.attn.q_a_norm", gguf: "blk.{i}.attn_q_a_norm", hf: "model.layers.{i}.self_attn.q_a_layernorm" },
    Name { house: "layers.{i}.attn.q_b", gguf: "blk.{i}.attn_q_b", hf: "model.layers.{i}.self_attn.q_b_proj" },
    Name { house: "layers.{i}.attn.kv_a", gguf: "blk.{i}.attn_kv_a_mqa", hf: "model.layers.{i}.self_attn.kv_a_proj_with_mqa" },
    Name { house: "layers.{i}.attn.kv_a_norm", gguf: "blk.{i}.attn_kv_a_norm", hf: "model.layers.{i}.self_attn.kv_a_layernorm" },
    Name { house: "layers.{i}.attn.kv_b", gguf: "blk.{i}.attn_kv_b", hf: "model.layers.{i}.self_attn.kv_b_proj" },
    Name { house: "layers.{i}.attn.k_b", gguf: "blk.{i}.attn_k_b", hf: "" },
    Name { house: "layers.{i}.attn.v_b", gguf: "blk.{i}.attn_v_b", hf: "" },
    Name { house: "layers.{i}.attn.o", gguf: "blk.{i}.attn_output", hf: "model.layers.{i}.self_attn.o_proj" },
];
const NAMES: &[&[Name]] = &[ENDS, LATENT, MLP_NORM, MLP, EXPERTS, SHARED_EXPERTS];

const Q_RANK: Key = Key { hf: "q_lora_rank", gguf: "attention.q_lora_rank" };
const RANK: Key = Key { hf: "kv_lora_rank", gguf: "attention.kv_lora_rank" };
const PLAIN: Key = Key { hf: "qk_nope_head_dim", gguf: "" };
const ROTARY: Key = Key { hf: "qk_rope_head_dim", gguf: "rope.dimension_count" };
const VALUE: Key = Key { hf: "v_head_dim", gguf: "attention.value_length_mla" };
/// Of plain and rotary elements; files from before latent rows were cached have it under the second name.
const GGUF_KEY: [Key; 2] =
    [Key { hf: "", gguf: "attention.key_length_mla" }, Key { hf: "", gguf: "attention.key_length" }];
const GGUF_VALUE: Key = Key { hf: "", gguf: "attention.value_length" };
const INTERLEAVED: Key = Key { hf: "rope_interleave", gguf: "" };
const BIASES: Key = Key { hf: "attention_bias", gguf: "" };

const EXPERT_INTERMEDIATE: Key = Key { hf: "moe_intermediate_size", gguf: "expert_feed_forward_length" };
const NUM_SHARED: Key = Key { hf: "n_shared_experts", gguf: "expert_shared_count" };
const FIRST_DENSE: Key = Key { hf: "first_k_dense_replace", gguf: "leading_dense_block_count" };
const FREQUENCY: Key = Key { hf: "moe_layer_freq", gguf: "" };
const GROUPS: Key = Key { hf: "n_group", gguf: "expert_group_count" };
const TOP_GROUPS: Key = Key { hf: "topk_group", gguf: "expert_group_used_count" };
const SCALE: Key = Key { hf: "routed_scaling_factor", gguf: "expert_weights_scale" };
const RENORMALISE: Key = Key { hf: "norm_topk_prob", gguf: "expert_weights_norm" };
/// 1: softmax, 2: sigmoid.
const GATING: Key = Key { hf: "", gguf: "expert_gating_func" };
const NUM_PREDICTING: Key = Key { hf: "num_nextn_predict_layers", gguf: "nextn_predict_layers" };

pub(super) fn load(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Model, LoadError> {
    let reader = Reader::new(checkpoint, &EXPERT_KEYS)?;
    let latent = read_latent(&reader)?;
    let mut config = DecoderConfig::with_head_dim(&reader, false, latent.rotary)?;
    let mut rope = RopeReader::new(reader, &config, options).read(None)?;
    let attention_scale = attention_scale(&reader, &mut rope, latent);
    // What attention sees: one head of cached rows.
    (config.kv_heads, config.head_dim) = (1, latent.rank + latent.rotary);
    reader.expect_activation(&["silu"])?;
    if reader.bool(BIASES)? == Some(true) {
        return Err(reader.unsupported("setting", "attention_bias = true", "false"));
    }
    let is_half = reader.bool(INTERLEAVED)? == Some(false);
    let first_dense = reader.u32(FIRST_DENSE)?.unwrap_or(0);
    let spec = DecoderSpec {
        pairing: if is_half { RopePairing::Half } else { RopePairing::Interleaved },
        attention_scale,
        biases: Biases { mlp: Some(false), ..Biases::default() },
        experts: read_experts(&reader)?,
        latent: Some(latent),
        unread_layers: if reader.is_hf() { reader.u32(NUM_PREDICTING)?.unwrap_or(0) } else { 0 },
        ..DecoderSpec::plain("deepseek", NAMES, &config).with_rope(rope.table())
    };
    decoder(checkpoint, options, &config, &spec.with_experts(|layer| layer >= first_dense))
}

fn read_latent(reader: &Reader<'_>) -> Result<LatentSpec, LoadError> {
    let (rank, rotary) = (reader.size(RANK)?, reader.size(ROTARY)?);
    let (plain, value) = if reader.is_hf() {
        (reader.size(PLAIN)?, reader.size(VALUE)?)
    } else {
        let is_new = reader.u32(GGUF_KEY[0])?.is_some();
        let [key, value] = if is_new { [GGUF_KEY[0], VALUE] } else { [GGUF_KEY[1], GGUF_VALUE] };
        let length = reader.size(key)?;
        let plain = length.checked_sub(rotary).filter(|&plain| plain > 0);
        let plain = plain.ok_or_else(|| reader.error(key, format!("{length} is not above the {rotary} that turn")))?;
        (plain, reader.size(value)?)
    };
    let q_rank = reader.u32(Q_RANK)?.filter(|&rank| rank > 0).map(|_| reader.size(Q_RANK)).transpose()?;
    Ok(LatentSpec { q_rank, rank, plain, rotary, value })
}

/// `1 / sqrt(plain + rotary)`, with YaRN as much larger as longer contexts make the softmax flatter.
fn attention_scale(reader: &Reader<'_>, rope: &mut RopeConfig, latent: LatentSpec) -> f32 {
    let scale = 1.0 / ((latent.plain + latent.rotary) as f32).sqrt();
    let RopeScaling::Yarn(yarn) = &mut rope.scaling else { return scale };
    if !reader.is_hf() {
        // Files of this architecture hold a tenth of it, and leave the amplitude to attention's scale.
        yarn.all_dims *= 10.0;
        yarn.amplitude = 1.0;
    }
    scale * yarn_amplitude(yarn.factor, yarn.all_dims).powi(2)
}

fn read_experts(reader: &Reader<'_>) -> Result<Option<ExpertsSpec>, LoadError> {
    let Some((num_experts, top_k)) = read_counts(reader)? else { return Ok(None) };
    let is_third = reader.json("architectures").is_some_and(|names| names[0] == "DeepseekV3ForCausalLM");
    let score = match reader.u32(GATING)? {
        None if is_third => RouterScore::Sigmoid,
        None | Some(1) => RouterScore::Softmax,
        Some(2) => RouterScore::Sigmoid,
        Some(other) => return Err(reader.unsupported("router", other.to_string(), "1 (softmax), 2 (sigmoid)")),
    };
    let is_sigmoid = score == RouterScore::Sigmoid;
    let (scoring, methods): (_, &[&str]) =
        if is_sigmoid { ("sigmoid", &["noaux_tc"]) } else { ("softmax", &["greedy", "group_limited_greedy"]) };
    for (key, supported) in [("scoring_func", &[scoring][..]), ("topk_method", methods)] {
        if let Some(given) = reader.json(key).filter(|given| !given.as_str().is_some_and(|it| supported.contains(&it)))
        {
            return Err(reader.unsupported(key, given.to_string(), &supported.join(", ")));
        }
    }
    if let Some(frequency) = reader.u32(FREQUENCY)?.filter(|&frequency| frequency != 1) {
        return Err(reader.unsupported("setting", format!("moe_layer_freq = {frequency}"), "1"));
    }
    let is_greedy = reader.json("topk_method").and_then(|it| it.as_str()) == Some("greedy");
    let groups = if is_greedy { 1 } else { reader.u32(GROUPS)?.unwrap_or(1) };
    let top_groups = if is_greedy { 1 } else { reader.u32(TOP_GROUPS)?.unwrap_or(1) };
    let renormalise = reader.bool(RENORMALISE)?.unwrap_or(is_sigmoid && reader.is_hf());
    let scale = reader.positive(SCALE)?.unwrap_or(1.0);
    if renormalise && !is_sigmoid {
        // The model's own code then leaves the scale out, transformers the division.
        return Err(reader.unsupported("setting", format!("{} = true", reader.name(RENORMALISE)), "false"));
    }
    let intermediate = reader.size(EXPERT_INTERMEDIATE)?;
    let shared = reader.u32(NUM_SHARED)?.filter(|&count| count > 0);
    let shared =
        shared.map(|count| intermediate.checked_mul(count).ok_or_else(|| reader.error(NUM_SHARED, "too many")));
    Ok(Some(ExpertsSpec {
        num_experts,
        intermediate,
        router: Router { top_k, score, groups, top_groups, renormalise, scale },
        layout: ExpertLayout::Separate,
        bias: false,
        correction: is_sigmoid,
        shared: shared.transpose()?,
    }))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;
    use crate::program::{KvDtype, Op};
    use crate::weights::{Container, HostTensor};

    fn checkpoint(name: &str) -> Checkpoint {
        let families = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/families"));
        Checkpoint::open(&families.join(name)).expect("the fixture is sound")
    }

    fn build(checkpoint: &Checkpoint) -> Result<Model, String> {
        load(checkpoint, &KvDtype::F16.into()).map_err(|error| error.to_string())
    }

    fn refusal(name: &str, key: &str, value: Value) -> String {
        let mut checkpoint = checkpoint(name);
        let Container::HuggingFace { config, .. } = &mut checkpoint.container else { panic!("a directory") };
        config[key] = value;
        build(&checkpoint).expect_err("the configuration is bad")
    }

    #[test]
    fn bad_settings_are_named() {
        for (name, key, value, message) in [
            ("deepseek2", "topk_method", json!("noaux_tc"), "topk_method '\"noaux_tc\"' is not supported"),
            ("deepseek2", "scoring_func", json!("sigmoid"), "(supported: softmax)"),
            ("deepseek2", "norm_topk_prob", json!(true), "norm_topk_prob = true"),
            ("deepseek2", "n_group", json!(3), "a choice among 8 experts"),
            ("deepseek3", "n_routed_experts", json!(9), "mlp.gate.weight': expected shape [9, 32], got [8, 32]"),
            ("deepseek3", "n_shared_experts", json!(1), "shared_experts.gate_proj"),
            ("deepseek3", "moe_layer_freq", json!(2), "moe_layer_freq = 2"),
            ("deepseek3", "attention_bias", json!(true), "attention_bias = true"),
            ("deepseek3", "kv_lora_rank", json!(64), "kv_a_proj_with_mqa"),
            ("deepseek3", "kv_lora_rank", json!(null), "kv_lora_rank: missing"),
            ("deepseek3", "q_lora_rank", json!(null), "q_proj"),
            ("deepseek3", "first_k_dense_replace", json!(0), "model.layers.0.mlp.gate.weight"),
        ] {
            let got = refusal(name, key, value.clone());
            assert!(got.contains(message), "{key} = {value}: {got}");
        }
    }

    #[test]
    fn layers_that_predict_further_tokens_are_left_out() {
        let mut checkpoint = checkpoint("deepseek3");
        let name = "model.layers.2.eh_proj.weight";
        checkpoint.tensors.insert(name.into(), HostTensor::from_f32(name, vec![1, 1], &[1.0]));
        build(&checkpoint).expect("the configuration says that there is such a layer");
        let Container::HuggingFace { config, .. } = &mut checkpoint.container else { panic!("a directory") };
        config["num_nextn_predict_layers"] = json!(0);
        assert!(build(&checkpoint).expect_err("nothing says what it is").contains(name));
    }

    /// Both containers, and both ways that GGUF files have had, make the same matrices.
    #[test]
    fn absorbed_matrices_do_not_depend_on_the_container() {
        for name in ["deepseek2", "deepseek3"] {
            let [hf, gguf] = ["", ".gguf"].map(|end| {
                let path = if end.is_empty() { name.to_owned() } else { format!("{name}/{name}{end}") };
                let model = build(&checkpoint(&path)).expect("sound");
                let is_per_head = |op: &Op| {
                    if let Op::MoeLinear { route: None, parts, .. } = op { Some(parts[0].weight) } else { None }
                };
                let weights: Vec<_> = model.program.ops.iter().filter_map(is_per_head).collect();
                let scale = model
                    .program
                    .ops
                    .iter()
                    .find_map(|op| if let Op::Attention { scale, .. } = op { Some(*scale) } else { None });
                let rotary = model
                    .program
                    .ops
                    .iter()
                    .find_map(|op| if let Op::Rope { rotary, .. } = op { Some(rotary.amplitude) } else { None });
                (weights.iter().map(|id| model.weights[id.index()].to_f32()).collect::<Vec<_>>(), scale, rotary)
            });
            assert_eq!(hf.0.len(), 4);
            assert_eq!(hf.0, gguf.0, "{name}");
            assert_eq!(hf.2, gguf.2, "{name}");
            // GGUF holds a tenth of the multiplier in f32.
            let (a, b) = (hf.1.unwrap(), gguf.1.unwrap());
            assert!((a / b - 1.0).abs() < 1e-6, "{name}: {a} and {b}");
        }
    }
}
