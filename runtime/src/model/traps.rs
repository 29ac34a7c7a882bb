//! Checkpoints whose configuration says one thing and whose tensors say another, made of the fixtures: each is refused, and
//! the message names the file, the tensor or key, what was expected and what is there.

use std::path::Path;

use serde_json::{Value, json};

use super::load;
use crate::program::{KvDtype, Op};
use crate::weights::gguf::MetaValue;
use crate::weights::{Checkpoint, Container, HostTensor};

fn open(fixture: &str) -> Checkpoint {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(fixture);
    Checkpoint::open(&path).expect("a sound fixture")
}

/// A fixture whose config.json has this value at a JSON pointer.
fn with(fixture: &str, pointer: &str, value: Value) -> Checkpoint {
    let mut checkpoint = open(fixture);
    let Container::HuggingFace { config, .. } = &mut checkpoint.container else { panic!("{fixture} is no directory") };
    let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
    config.pointer_mut(parent).expect("the parent is there")[key] = value;
    checkpoint
}

fn with_metadata(fixture: &str, key: &str, value: i64) -> Checkpoint {
    let mut checkpoint = open(fixture);
    let Container::Gguf(metadata) = &mut checkpoint.container else { panic!("{fixture} is no GGUF file") };
    metadata.values.insert(key.into(), MetaValue::Int(value));
    checkpoint
}

/// Renames tensors; a name that becomes empty goes.
fn renamed(mut checkpoint: Checkpoint, rename: impl Fn(&str) -> String) -> Checkpoint {
    let tensors = checkpoint.tensors.into_iter().map(|(name, tensor)| (rename(&name), tensor));
    checkpoint.tensors = tensors.filter(|(name, _)| !name.is_empty()).collect();
    checkpoint
}

fn refusal(checkpoint: &Checkpoint) -> String {
    match load(checkpoint, KvDtype::F16) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("{} must be refused", checkpoint.path.display()),
    }
}

#[test]
fn as_many_experts_as_the_configuration_says() {
    let cases = [
        // A matrix per expert: one is missing, one too many.
        (
            with("families/mixtral", "/num_local_experts", json!(8)),
            "router",
            "gate.weight': expected shape [8, 32], got [4, 32]",
        ),
        (
            with("families/qwen3moe", "/num_experts", json!(4)),
            "two counts",
            "num_experts: 4, but num_local_experts is 8",
        ),
        // All of them in one.
        (
            with("families/gpt-oss", "/num_local_experts", json!(8)),
            "router",
            "router.weight': expected shape [8, 32], got [4, 32]",
        ),
        (
            with_metadata("families/mixtral/mixtral.gguf", "llama.expert_count", 3),
            "router",
            "ffn_gate_inp.weight': expected shape [3, 32], got [4, 32]",
        ),
    ];
    for (checkpoint, what, message) in cases {
        let got = refusal(&checkpoint);
        assert!(got.contains(message) && got.contains("families/"), "{what}: {got}");
    }
    let missing =
        renamed(
            open("families/mixtral"),
            |name| if name.contains("experts.3.w2") { String::new() } else { name.into() },
        );
    assert!(
        refusal(&missing).contains("experts.3.w2.weight': expected shape [32, 32], got nothing"),
        "{}",
        refusal(&missing)
    );
    for (pointer, value) in [("/num_experts_per_tok", json!(0)), ("/num_experts_per_tok", json!(5))] {
        let got = refusal(&with("families/mixtral", pointer, value.clone()));
        let message =
            if value == 0 { "num_experts_per_tok: 0 is not within" } else { "4 experts, of which a token has 5" };
        assert!(got.contains(message), "{value}: {got}");
    }
}

const SEEING: [&str; 2] = ["families/gemma3-seeing", "families/mistral3-seeing"];

/// Both places in which versions of the library keep the text model hold the same model.
#[test]
fn the_text_part_is_found_wherever_it_lies() {
    for fixture in SEEING {
        let checkpoint = open(fixture);
        assert!(checkpoint.tensors.keys().any(|name| name.starts_with("vision_tower.")), "{fixture} has a tower");
        let expected = load(&checkpoint, KvDtype::F16).expect("sound");
        let moved = renamed(checkpoint, |name| match name.strip_prefix("language_model.") {
            Some(head) if head.starts_with("lm_head") => head.into(),
            Some(body) => body.replacen("model.", "model.language_model.", 1),
            None => format!("model.{name}"),
        });
        let model = load(&moved, KvDtype::F16).expect("the other layout");
        assert_eq!(model.program.to_string(), expected.program.to_string(), "{fixture}");
        let floats = |model: &super::Model| model.weights.iter().map(HostTensor::to_f32).collect::<Vec<_>>();
        assert_eq!(floats(&model), floats(&expected), "{fixture}");
    }
}

#[test]
fn what_belongs_to_images_is_left_out_by_name_only() {
    for fixture in SEEING {
        let other = renamed(open(fixture), |name| name.replacen("vision_tower.", "audio_tower.", 1));
        let got = refusal(&other);
        assert!(got.contains("tensor 'audio_tower.") && got.contains("' is not supported"), "{got}");
        let gone =
            renamed(
                open(fixture),
                |name| if name.ends_with("model.norm.weight") { String::new() } else { name.into() },
            );
        let got = refusal(&gone);
        assert!(got.contains("'language_model.model.norm.weight': expected shape [32], got nothing"), "{got}");
    }
    // A text model has no tower.
    let mut text = open("families/gemma3");
    text.tensors.insert("vision_tower.x.weight".into(), HostTensor::from_f32("x", vec![1], &[0.0]));
    assert!(refusal(&text).contains("tensor 'vision_tower.x.weight' is not supported"));
}

#[test]
fn the_text_part_says_what_it_is() {
    for (fixture, pointer, value, message) in [
        (SEEING[0], "/text_config", json!(null), "text_config: expected an object"),
        (
            SEEING[0],
            "/text_config/model_type",
            json!("gemma2"),
            "text_config.model_type 'gemma2' is not supported (supported: gemma3_text)",
        ),
        (
            SEEING[1],
            "/text_config/model_type",
            json!("qwen2"),
            "'qwen2' is not supported (supported: mistral, ministral3)",
        ),
        (SEEING[0], "/text_config/use_bidirectional_attention", json!(true), "use_bidirectional_attention = true"),
        // The whole model's word about the head counts.
        (
            SEEING[0],
            "/tie_word_embeddings",
            json!(false),
            "'language_model.lm_head.weight': expected shape [512, 32], got nothing",
        ),
    ] {
        let got = refusal(&with(fixture, pointer, value));
        assert!(got.contains(message), "{got}");
    }
    // Where nobody says: what the file has.
    for fixture in SEEING {
        let mut silent = open(fixture);
        let Container::HuggingFace { config, .. } = &mut silent.container else { panic!("{fixture} is a directory") };
        config.as_object_mut().expect("an object").remove("tie_word_embeddings");
        config["text_config"].as_object_mut().expect("an object").remove("tie_word_embeddings");
        load(&silent, KvDtype::F16).expect("sound");
    }
}

/// Google's files leave out what is as in the library's class.
#[test]
fn gemma_3_leaves_out_what_its_class_says() {
    let mut checkpoint = open(SEEING[0]);
    let Container::HuggingFace { config, .. } = &mut checkpoint.container else { panic!("a directory") };
    config["text_config"] = json!({"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1,
        "vocab_size": 512, "sliding_window": 12});
    checkpoint.tensors.clear();
    checkpoint.dummy = true;
    let info = load(&checkpoint, KvDtype::F16).expect("sound").info;
    assert_eq!((info.heads, info.kv_heads, info.head_dim, info.max_position), (8, 4, 256, 131_072));
}

/// The factors of short contexts and of long ones: what the engine is built for decides, else what the file says.
#[test]
fn long_rope_takes_the_factors_of_the_context() {
    let original = 512;
    let long_config = with("families/phi3", "/max_position_embeddings", json!(4096));
    let long_file = with_metadata("families/phi3/phi3.gguf", "phi3.context_length", 4096);
    let short = (0..6).map(|i| 1.0 + 0.1 * i as f32).collect::<Vec<_>>();
    let long = (0..6).map(|i| 1.0 + 0.5 * i as f32).collect::<Vec<_>>();
    for checkpoint in [&long_config, &long_file] {
        for (max_model_len, factors) in [
            (None, &long),
            (Some(4096), &long),
            (Some(original + 1), &long),
            (Some(original), &short),
            (Some(16), &short),
        ] {
            let options = super::LoadOptions { max_model_len, ..KvDtype::F16.into() };
            let model = load(checkpoint, options).expect("sound");
            let rotary = model.program.ops.iter().find_map(|op| match op {
                Op::Rope { rotary, .. } | Op::RopeStoreKv { rotary, .. } => Some(*rotary),
                _ => None,
            });
            let got = model.weights[rotary.expect("a turn").inv_freq.index()].to_f32();
            assert_eq!(got.len(), factors.len());
            for (i, (got, factor)) in got.iter().zip(factors).enumerate() {
                let expected = 10_000f64.powf(-(i as f64) / 6.0) / f64::from(*factor);
                let place = format!("{}, context {max_model_len:?}, frequency {i}", checkpoint.path.display());
                assert!((f64::from(*got) / expected - 1.0).abs() < 1e-6, "{place}: {got}, not {expected}");
            }
        }
    }
    // The file's own context is no longer than the original one.
    let plain = load(&open("families/phi3"), KvDtype::F16).expect("sound");
    let asked = super::LoadOptions { max_model_len: Some(original), ..KvDtype::F16.into() };
    let asked = load(&long_config, asked).expect("sound");
    let floats = |model: &super::Model| model.weights.iter().map(HostTensor::to_f32).collect::<Vec<_>>();
    assert_eq!(floats(&plain), floats(&asked));
}
