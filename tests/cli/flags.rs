//! Which flags there are, where their values may come from, and which of them wins.

use std::collections::BTreeSet;

use runtime::request::SamplingParams;

use super::{Said, Scratch, command, kittiwake, tiny};

/// Flags of vLLM that users of `serve` rely on, by vLLM's name.
const EXPECTED_OF_SERVE: &[&str] = &[
    "served-model-name",
    "host",
    "port",
    "tokenizer",
    "revision",
    "download-dir",
    "load-format",
    "dtype",
    "max-model-len",
    "max-num-batched-tokens",
    "max-num-seqs",
    "enable-prefix-caching",
    "enable-chunked-prefill",
    "long-prefill-token-threshold",
    "block-size",
    "gpu-memory-utilization",
    "kv-cache-memory-bytes",
    "num-gpu-blocks-override",
    "kv-cache-dtype",
    "quantization",
    "enforce-eager",
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "data-parallel-size",
    "scheduling-policy",
    "max-num-queued-reqs",
    "max-num-queued-tokens",
    "max-logprobs",
    "logprobs-mode",
    "seed",
    "generation-config",
    "override-generation-config",
    "chat-template",
    "chat-template-content-format",
    "default-chat-template-kwargs",
    "trust-request-chat-template",
    "api-key",
    "allowed-origins",
    "stream-interval",
    "sse-keep-alive-interval",
    "enable-request-id-headers",
    "enable-prompt-tokens-details",
    "enable-force-include-usage",
    "enable-log-requests",
    "max-log-len",
    "shutdown-timeout",
    "config",
    "device",
    "threads",
];

/// The long flags in a subcommand's help.
fn flags(subcommand: &str) -> BTreeSet<String> {
    let help = kittiwake([subcommand, "--help"]).ok();
    let words = help.lines().filter_map(|line| line.trim_start().strip_prefix('-'));
    let longs = words.flat_map(|line| line.split([' ', '=', '[', ','])).filter_map(|word| {
        let word = word.strip_prefix("--").or(word.strip_prefix('-'))?;
        (!word.is_empty()).then(|| word.to_owned())
    });
    longs.collect()
}

#[test]
fn every_sampling_option_is_a_flag() {
    let params = serde_json::to_value(SamplingParams::default()).expect("JSON");
    let generate = flags("generate");
    for field in params.as_object().expect("an object").keys() {
        // The model's own end tokens are no choice of the user's; `--ignore-eos` and `--stop-token-ids` are.
        let is_flag = generate.contains(&field.replace('_', "-"));
        assert!(is_flag || field == "eos_token_ids", "generate has no flag for {field}: {generate:?}");
    }
}

#[test]
fn serve_has_the_flags_that_users_know() {
    let serve = flags("serve");
    let missing: Vec<_> = EXPECTED_OF_SERVE.iter().filter(|flag| !serve.contains(**flag)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn versions_and_help_are_answers() {
    for arguments in [&["--version"][..], &["serve", "--version"]] {
        let version = kittiwake(arguments).ok();
        assert!(version.starts_with("kittiwake") && version.contains(env!("CARGO_PKG_VERSION")), "{version}");
    }
    for subcommand in ["serve", "chat", "generate", "bench", "quantize", "devices"] {
        assert!(kittiwake(["--help"]).ok().contains(&format!("\n  {subcommand} ")), "{subcommand}");
        assert!(flags(subcommand).contains("config"), "{subcommand}");
    }
    kittiwake(["fly"]).refused(&["fly"]);
    kittiwake(["generate"]).refused(&["MODEL"]);
}

/// `generate` with nothing but MODEL, `environment` and `arguments`.
fn generate(environment: &[(&str, &str)], arguments: &[&str]) -> Said {
    let mut command = command();
    command.arg("generate").args(arguments).envs(environment.iter().copied());
    command.output().expect("the binary runs").into()
}

fn num_tokens(said: Said) -> usize {
    said.json()["token_ids"].as_array().expect("ids").len()
}

#[test]
fn the_command_line_wins_over_the_environment_and_that_over_the_file() {
    let scratch = Scratch::new("layers");
    let text = format!("model: {}\nprompt: a\nmax_tokens: 3\nignore-eos: true\njson: true\nthreads: 1\n", tiny());
    let config = scratch.file("flags of mine.yaml", text);
    let environment = [("KITTIWAKE_MAX_TOKENS", "4")];
    assert_eq!(num_tokens(generate(&[], &["--config", &config])), 3);
    assert_eq!(num_tokens(generate(&environment, &["--config", &config])), 4);
    assert_eq!(num_tokens(generate(&environment, &["--config", &config, "--max_tokens", "5"])), 5);
    assert_eq!(num_tokens(generate(&[("KITTIWAKE_CONFIG", &config)], &[])), 3);
    let text = generate(&[("KITTIWAKE_JSON", "false")], &["--config", &config]).ok();
    assert!(serde_json::from_str::<serde_json::Value>(&text).is_err(), "the environment turned JSON off: {text}");
    assert!(!generate(&[], &["--config", &config, "--no-json"]).ok().starts_with("{\"prompt_ids\""));
}

#[test]
fn what_a_layer_cannot_mean_is_refused_by_name() {
    let scratch = Scratch::new("bad layers");
    let refused = |text: &str, words: &[&str]| {
        let config = scratch.file("bad.yaml", text);
        generate(&[], &[&tiny(), "--prompt=a", "--config", &config]).refused(&[&["bad.yaml"][..], words].concat());
    };
    refused("max-num-birds: 3", &["'max-num-birds' is not a flag of 'generate'"]);
    refused("port: 8000", &["'port' is not a flag of 'generate'"]);
    refused("max-tokens: many", &["invalid value 'many'", "--max-tokens"]);
    refused("{", &[]);
    let said = generate(&[("KITTIWAKE_THREADS", "-3")], &[&tiny(), "--prompt=a"]);
    said.refused(&["KITTIWAKE_THREADS", "-3"]);
    generate(&[], &[&tiny(), "--prompt=a", "--config", "/no/such.yaml"]).refused(&["/no/such.yaml"]);
    generate(&[], &[&tiny(), "--prompt=a", "--log-level", "loud"]).refused(&["--log-level", "'loud'", "debug"]);
}

#[test]
fn a_flag_that_is_not_served_yet_is_refused_not_ignored() {
    let refused = |flag: &str, value: &str, named: &str| {
        generate(&[], &[&tiny(), "--prompt=a", &format!("--{flag}{value}")]).refused(&[named]);
    };
    refused("gpu-memory-utilization", "=0.9", "--gpu-memory-utilization");
    refused("device_memory_utilization", "=0.9", "--gpu-memory-utilization");
    // Less than a token per sequence: the two flags contradict each other.
    refused("max-num-batched-tokens", "=127", "--max-num-seqs 128");
    refused("no-enable-chunked-prefill", "", "--no-enable-chunked-prefill");
    for (flag, value) in [
        ("tensor-parallel-size", "=2"),
        ("quantization", "=awq"),
        ("dtype", "=bfloat16"),
        ("revision", "=v2"),
        ("scheduling-policy", "=priority"),
        ("logprobs-mode", "=processed_logprobs"),
        ("kv-cache-dtype", "=fp8_e5m2"),
    ] {
        refused(flag, value, &format!("--{flag}"));
    }
}

#[test]
fn every_type_of_the_cache_has_its_names() {
    for name in [
        "auto",
        "f16",
        "float16",
        "bf16",
        "bfloat16",
        "f32",
        "float32",
        "fp8",
        "fp8_e4m3",
        "int8",
        "int8_per_token_head",
    ] {
        generate(&[], &[&tiny(), "--prompt=a", "--max-tokens=1", "--device=cpu", "--kv-cache-dtype", name]).ok();
    }
    let said = generate(&[], &[&tiny(), "--prompt=a", "--kv-cache-dtype=int4"]);
    said.refused(&["int4", "bf16", "fp8_e4m3", "int8_per_token_head"]);
}

#[test]
fn sampling_defaults_that_no_request_could_keep_end_serve_at_its_start() {
    let serve = |defaults: &str| kittiwake(["serve", &tiny(), "--port=0", "--override-generation-config", defaults]);
    serve(r#"{"temperature": 5}"#).refused(&["--override-generation-config", "temperature must be between 0 and 2"]);
    serve(r#"{"temprature": 1}"#).refused(&["--override-generation-config", "temprature"]);
}
