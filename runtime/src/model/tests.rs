//! Programs from checkpoints made in memory: what is refused and how, and the shape of what is built.

use std::collections::HashMap;
use std::path::PathBuf;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{LoadOptions, Model, QuantisationRules, load};
use crate::program::{KvDtype, Op, RopePairing};
use crate::weights::gguf::{MetaValue, Metadata};
use crate::weights::{Checkpoint, Container, HostTensor, Quantised};

const HIDDEN: usize = 16;
const INTERMEDIATE: usize = 24;
pub(crate) const VOCAB: usize = 20;

fn config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": INTERMEDIATE, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": true,
    })
}

fn tensors(names: &[(&str, &[usize])]) -> HashMap<String, HostTensor> {
    let tensor = |name: String, shape: &[usize]| {
        // Values of both signs that differ from place to place and from tensor to tensor.
        let seed = name.bytes().map(f32::from).sum::<f32>();
        let values: Vec<f32> = (0..shape.iter().product()).map(|i| (seed + 1.7 * i as f32).sin()).collect();
        (name.clone(), HostTensor::from_f32(name, shape.to_vec(), &values))
    };
    let mut all = HashMap::new();
    for (name, shape) in names {
        for layer in ["0", "1"] {
            all.extend([tensor(name.replace("{i}", layer), shape)]);
        }
    }
    all
}

fn hf(config: Value) -> Checkpoint {
    let tensors = tensors(&[
        ("model.embed_tokens.weight", &[VOCAB, HIDDEN]),
        ("model.norm.weight", &[HIDDEN]),
        ("model.layers.{i}.input_layernorm.weight", &[HIDDEN]),
        ("model.layers.{i}.post_attention_layernorm.weight", &[HIDDEN]),
        ("model.layers.{i}.self_attn.q_proj.weight", &[HIDDEN, HIDDEN]),
        ("model.layers.{i}.self_attn.k_proj.weight", &[HIDDEN / 2, HIDDEN]),
        ("model.layers.{i}.self_attn.v_proj.weight", &[HIDDEN / 2, HIDDEN]),
        ("model.layers.{i}.self_attn.o_proj.weight", &[HIDDEN, HIDDEN]),
        ("model.layers.{i}.mlp.gate_proj.weight", &[INTERMEDIATE, HIDDEN]),
        ("model.layers.{i}.mlp.up_proj.weight", &[INTERMEDIATE, HIDDEN]),
        ("model.layers.{i}.mlp.down_proj.weight", &[HIDDEN, INTERMEDIATE]),
    ]);
    let container = Container::HuggingFace { config, generation_config: None };
    Checkpoint { path: PathBuf::from("model"), container, tensors, quantised: Quantised::default(), dummy: false }
}

fn gguf() -> Checkpoint {
    let mut tensors = tensors(&[
        ("token_embd.weight", &[VOCAB, HIDDEN]),
        ("output_norm.weight", &[HIDDEN]),
        ("blk.{i}.attn_norm.weight", &[HIDDEN]),
        ("blk.{i}.ffn_norm.weight", &[HIDDEN]),
        ("blk.{i}.attn_q.weight", &[HIDDEN, HIDDEN]),
        ("blk.{i}.attn_k.weight", &[HIDDEN / 2, HIDDEN]),
        ("blk.{i}.attn_v.weight", &[HIDDEN / 2, HIDDEN]),
        ("blk.{i}.attn_output.weight", &[HIDDEN, HIDDEN]),
        ("blk.{i}.ffn_gate.weight", &[INTERMEDIATE, HIDDEN]),
        ("blk.{i}.ffn_up.weight", &[INTERMEDIATE, HIDDEN]),
        ("blk.{i}.ffn_down.weight", &[HIDDEN, INTERMEDIATE]),
    ]);
    tensors.insert("rope_freqs.weight".into(), HostTensor::from_f32("rope_freqs.weight", vec![2], &[1.0, 8.0]));
    let mut values = HashMap::new();
    let mut set = |key: &str, value: MetaValue| values.insert(key.to_string(), value);
    set("general.architecture", MetaValue::Str("llama".into()));
    for (key, value) in [
        ("llama.embedding_length", HIDDEN as i64),
        ("llama.block_count", 2),
        ("llama.feed_forward_length", INTERMEDIATE as i64),
        ("llama.attention.head_count", 4),
        ("llama.attention.head_count_kv", 2),
        ("llama.context_length", 64),
    ] {
        set(key, MetaValue::Int(value));
    }
    set("llama.attention.layer_norm_rms_epsilon", MetaValue::Float(1e-5));
    let metadata = Metadata { path: PathBuf::from("m.gguf"), values };
    let (path, container) = (PathBuf::from("m.gguf"), Container::Gguf(metadata));
    Checkpoint { path, container, tensors, quantised: Quantised::default(), dummy: false }
}

/// A llama of two layers and a vocabulary of 20 for tests elsewhere.
pub(crate) fn tiny_model() -> Model {
    load(&hf(config()), KvDtype::F16).expect("the checkpoint is sound")
}

fn build(checkpoint: &Checkpoint) -> Result<Model, String> {
    load(checkpoint, KvDtype::F16).map_err(|error| error.to_string())
}

fn frequencies(model: &Model) -> Vec<f32> {
    let at = model.program.weights.iter().position(|w| w.name == "rope.inv_freq").expect("every model has it");
    model.weights[at].to_f32()
}

/// The message when `key` of the config is `value`.
fn refusal(key: &str, value: Value) -> String {
    let mut config = config();
    config[key] = value;
    build(&hf(config)).expect_err("the configuration is bad")
}

#[test]
fn a_sound_checkpoint_loads() {
    let model = build(&hf(config())).expect("sound");
    assert_eq!(model.program.weights.len(), model.weights.len());
    assert_eq!(model.info.num_parameters, (320 + 16 + 2 * (32 + 2 * 256 + 2 * 128 + 3 * 384)) as u64);
    assert_eq!((model.info.head_dim, model.info.vocab_size, model.info.max_position), (4, 20, 64));
    assert_eq!(model.program.states.len(), 2);
}

#[test]
fn gguf_pairs_are_interleaved_and_rope_freqs_divide() {
    let model = build(&gguf()).expect("sound");
    let rope = model.program.ops.iter().find_map(|op| match op {
        Op::RopeStoreKv { rotary, .. } => Some((rotary.pairing, model.weights[rotary.inv_freq.index()].to_f32())),
        _ => None,
    });
    assert_eq!(rope, Some((RopePairing::Interleaved, vec![1.0, 0.01 / 8.0])));
}

#[test]
fn both_generations_of_rope_keys_mean_the_same() {
    let inv_freq = |change: fn(&mut Value)| {
        let mut config = config();
        change(&mut config);
        frequencies(&build(&hf(config)).expect("sound"))
    };
    let old = inv_freq(|config| {
        config["rope_theta"] = json!(5000);
        config["rope_scaling"] = json!({"type": "linear", "factor": 4.0});
    });
    let new = inv_freq(|config| {
        config["rope_parameters"] = json!({"rope_theta": 5000.0, "rope_type": "linear", "factor": 4.0});
    });
    assert_eq!(old, new);
    assert_eq!(old[0], 0.25);
}

#[test]
fn bad_settings_are_named() {
    for (key, value, message) in [
        ("hidden_size", json!(0), "hidden_size: 0 is not within"),
        ("hidden_size", json!(-1), "hidden_size: expected a 32-bit number, got -1"),
        ("hidden_size", json!(1u64 << 40), "hidden_size: expected a 32-bit number"),
        ("num_attention_heads", json!(null), "num_attention_heads: missing"),
        ("num_attention_heads", json!(3), "num_attention_heads: 3 heads do not divide hidden size 16"),
        ("num_key_value_heads", json!(3), "num_key_value_heads: 4 heads are not a multiple of 3"),
        ("head_dim", json!(4_000_000), "head_dim: 4 heads of 4000000 elements are out of range"),
        ("head_dim", json!(5), "head_dim: 4 heads of 5 elements are out of range"),
        ("rms_norm_eps", json!("small"), "rms_norm_eps: expected a number, got \"small\""),
        ("rms_norm_eps", json!(0.0), "rms_norm_eps: 0 is not a positive number"),
        ("vocab_size", json!(21), "'model.embed_tokens.weight': expected 21 rows (vocab_size), got [20, 16]"),
        ("hidden_act", json!("gelu"), "hidden_act '\"gelu\"' is not supported (supported: silu)"),
        ("rope_scaling", json!({"rope_type": "ntk", "factor": 2}), "rope type 'ntk' is not supported"),
        ("rope_scaling", json!({"rope_type": "yarn", "factor": 0}), "rope: values out of range"),
        ("rope_scaling", json!({"rope_type": "longrope"}), "short_factor: expected 2 numbers"),
        (
            "rope_scaling",
            json!({"rope_type": "longrope", "short_factor": [1], "long_factor": [1, 2]}),
            "short_factor: expected",
        ),
        ("rope_scaling", json!({"rope_type": "linear"}), "factor: missing"),
        ("rope_scaling", json!({"rope_type": "linear", "factor": 0}), "rope: values out of range"),
        ("rope_parameters", json!({"full_attention": {"rope_type": "default"}}), "rope parameters"),
        ("rope_scaling", json!({"rope_type": "linear", "factor": 1e39}), "factor: expected a number"),
        ("rope_scaling", json!({"rope_type": "linear", "factor": 1e-40}), "make a frequency inf"),
        ("rope_scaling", json!({"rope_type": 7}), "rope type '' is not supported"),
        ("rope_theta", json!(-1), "rope: values out of range"),
        ("use_sliding_window", json!(true), "use_sliding_window = true"),
        ("sliding_window", json!(4096), "sliding_window = 4096"),
        ("layer_types", json!(["full_attention", "sliding_attention"]), "layer_types '[\"full_attention\",\"sliding"),
        ("partial_rotary_factor", json!(0.25), "rope: values out of range"),
        ("partial_rotary_factor", json!(2), "rope: values out of range"),
        ("final_logit_softcapping", json!(30.0), "final_logit_softcapping = 30"),
        ("attn_logit_softcapping", json!("x"), "attn_logit_softcapping = \"x\""),
        ("logits_scaling", json!(8), "logits_scaling = 8"),
        ("mlp_bias", json!(true), "gate_proj.bias': expected shape [24], got nothing"),
        ("mlp_bias", json!("no"), "mlp_bias: expected true or false"),
        ("tie_word_embeddings", json!(false), "'lm_head.weight': expected shape [20, 16], got nothing"),
        ("attention_bias", json!(true), "q_proj.bias': expected shape [16], got nothing"),
        (
            "architectures",
            json!(["BertModel"]),
            "architecture 'BertModel' is not supported (supported: LlamaForCausalLM",
        ),
        ("architectures", json!([]), "architectures: expected a list"),
        ("intermediate_size", json!(25), "gate_proj.weight': expected shape [25, 16], got [24, 16]"),
        ("num_hidden_layers", json!(3), "'model.layers.2.input_layernorm.weight': expected shape [16], got nothing"),
        ("num_hidden_layers", json!(1), "tensor 'model.layers.1."),
    ] {
        let got = refusal(key, value.clone());
        assert!(got.contains(message), "{key} = {value}: {got}");
    }
}

#[test]
fn gguf_settings_that_change_the_answer_are_refused() {
    for (key, value, message) in [
        ("llama.expert_count", MetaValue::Int(8), "llama.expert_used_count: missing"),
        ("llama.rope.dimension_count", MetaValue::Int(6), "rope: values out of range"),
        ("llama.rope.scaling.type", MetaValue::Str("dynamic".into()), "rope scaling 'dynamic'"),
        ("llama.rope.scaling.attn_factor", MetaValue::Float(0.5), "llama.rope.scaling.attn_factor = 0.5"),
        ("llama.attention.causal", MetaValue::Bool(false), "llama.attention.causal = false"),
        ("llama.attention.scale", MetaValue::Float(0.25), "llama.attention.scale = 0.25"),
        ("llama.final_logit_softcapping", MetaValue::Float(30.0), "llama.final_logit_softcapping = 30"),
        ("llama.logit_scale", MetaValue::Str("1".into()), "llama.logit_scale: expected an integer"),
        ("llama.block_count", MetaValue::Int(-2), "llama.block_count: -2 is negative"),
        ("llama.rope.freq_base", MetaValue::Float(0.0), "values out of range"),
        ("general.architecture", MetaValue::Str("mamba".into()), "architecture 'mamba' is not supported"),
    ] {
        let mut checkpoint = gguf();
        let Container::Gguf(metadata) = &mut checkpoint.container else { unreachable!("made above") };
        metadata.values.insert(key.into(), value);
        let got = build(&checkpoint).expect_err("refused");
        assert!(got.contains(message), "{key}: {got}");
    }
}

/// What says "off" loads: `null`, and the neutral value.
#[test]
fn settings_that_are_off_load() {
    for (key, value) in [
        ("sliding_window", json!(null)),
        ("layer_types", json!(["full_attention", "full_attention"])),
        ("partial_rotary_factor", json!(1)),
        ("final_logit_softcapping", json!(null)),
        ("use_sliding_window", json!(false)),
    ] {
        let mut config = config();
        config[key] = value;
        build(&hf(config)).unwrap_or_else(|error| panic!("{key}: {error}"));
    }
    // Qwen writes a window and turns it off beside it.
    let mut config = config();
    config["sliding_window"] = json!(4096);
    config["use_sliding_window"] = json!(false);
    build(&hf(config)).expect("off");
}

#[test]
fn a_gguf_factor_is_linear_whatever_its_key_and_type() {
    let frequency = |values: &[(&str, MetaValue)]| {
        let mut checkpoint = gguf();
        checkpoint.tensors.remove("rope_freqs.weight");
        let Container::Gguf(metadata) = &mut checkpoint.container else { unreachable!("made above") };
        metadata.values.extend(values.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
        frequencies(&build(&checkpoint).expect("sound"))[0]
    };
    let (factor, old) = ("llama.rope.scaling.factor", "llama.rope.scale_linear");
    let kind = |name: &str| ("llama.rope.scaling.type", MetaValue::Str(name.into()));
    assert_eq!(frequency(&[]), 1.0);
    assert_eq!(
        frequency(&[(factor, MetaValue::Float(4.0))]),
        0.25,
        "llama.cpp takes a factor without a type as linear"
    );
    assert_eq!(frequency(&[(old, MetaValue::Float(4.0))]), 0.25);
    assert_eq!(frequency(&[kind("linear"), (factor, MetaValue::Float(2.0)), (old, MetaValue::Float(4.0))]), 0.5);
    assert_eq!(frequency(&[kind("none"), (factor, MetaValue::Float(4.0))]), 1.0);
}

#[test]
fn the_original_context_of_llama3_has_a_default() {
    let slowest = |change: fn(&mut Value)| {
        let mut config = config();
        config["rope_scaling"] =
            json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4});
        change(&mut config);
        frequencies(&build(&hf(config)).expect("sound"))[1]
    };
    let of_whole_context = slowest(|config| config["rope_scaling"]["original_max_position_embeddings"] = json!(64));
    let of_more = slowest(|config| config["rope_scaling"]["original_max_position_embeddings"] = json!(8192));
    assert_ne!(of_whole_context, of_more);
    assert_eq!(slowest(|_| ()), of_whole_context);
    assert_eq!(slowest(|config| config["original_max_position_embeddings"] = json!(8192)), of_more);
}

/// Blocks are rounded, what they read from and what logits come from is not; a rule may say otherwise.
#[test]
fn floats_are_rounded_by_rules() {
    use crate::weights::{Quantisation, WeightFormat};
    let mut wide = config();
    wide["hidden_size"] = json!(32);
    wide["head_dim"] = json!(8);
    wide["intermediate_size"] = json!(64);
    let dummy = Checkpoint { tensors: HashMap::new(), dummy: true, ..hf(wide) };
    let pattern = fancy_regex::Regex::new(r"mlp\.down$").expect("a pattern");
    let mut options = LoadOptions::from(KvDtype::F16);
    options.quantisation =
        QuantisationRules { default: Quantisation::Int4, overrides: vec![(pattern, Quantisation::Int8)] };
    let model = load(&dummy, options).expect("sound");
    let format = |name: &str| {
        let at = model.program.weights.iter().position(|weight| weight.name == name).expect("it is there");
        model.weights[at].format
    };
    assert_eq!(format("layers.1.attn.q"), WeightFormat::Q4_0);
    assert_eq!(format("layers.1.mlp.down"), WeightFormat::Q8_0);
    assert_eq!(format("layers.0.attn.norm"), WeightFormat::Bf16);
    assert_eq!(format("embed"), WeightFormat::Bf16);
}

#[test]
fn a_tensor_that_nothing_reads_is_refused() {
    let mut checkpoint = hf(config());
    let extra = "model.layers.0.self_attn.q_proj.bias";
    checkpoint.tensors.insert(extra.into(), HostTensor::from_f32(extra, vec![HIDDEN], &[0.0; HIDDEN]));
    let got = build(&checkpoint).expect_err("refused");
    assert!(got.contains("tensor 'model.layers.0.self_attn.q_proj.bias' is not supported"), "{got}");
    // What says nothing new may stay.
    let mut checkpoint = hf(config());
    for name in ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"] {
        checkpoint.tensors.insert(name.into(), HostTensor::from_f32(name, vec![1], &[0.0]));
    }
    assert!(build(&checkpoint).is_ok());
}

fn any_json() -> impl Strategy<Value = Value> {
    let number = prop_oneof![
        Just(json!(null)),
        any::<bool>().prop_map(Value::from),
        (-3i64..70).prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop_oneof![Just("llama3"), Just("linear"), Just("LlamaForCausalLM"), Just("")].prop_map(Value::from),
    ];
    number.prop_recursive(2, 8, 4, |inner| {
        let key =
            prop_oneof![Just("rope_type"), Just("factor"), Just("rope_theta"), Just("low_freq_factor"), Just("x")];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::vec((key, inner), 0..4).prop_map(|fields| {
                Value::Object(fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
            }),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// Whatever a configuration says, the answer is a model with finite frequencies or an error that names a key.
    #[test]
    fn any_configuration_is_a_model_or_an_error(
        edits in prop::collection::vec((prop::sample::select(KEYS), any_json()), 1..4), dummy in any::<bool>(),
    ) {
        let mut config = config();
        for (key, value) in edits {
            config[key] = value;
        }
        let mut checkpoint = hf(config.clone());
        // Weights that are made up take the memory that the sizes ask for.
        let is_small = |key: &str| config[key].as_u64().is_none_or(|size| size < 100);
        checkpoint.dummy = dummy && KEYS.iter().all(|key| is_small(key));
        match load(&checkpoint, KvDtype::F16) {
            Ok(model) => {
                prop_assert!(frequencies(&model).iter().all(|frequency| frequency.is_finite()));
            }
            Err(error) => prop_assert!(error.to_string().starts_with("model"), "{error}"),
        }
    }
}

const KEYS: &[&str] = &[
    "architectures",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "hidden_act",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "sliding_window",
    "layer_types",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "quantization_config",
];
