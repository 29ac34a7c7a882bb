//! Metamorphic tests: what surrounds a request never changes its answer, bitwise on `cpu`, `reference` and `wgpu`.
//!
//! Batch mates, order of arrival, chunk size, prefix-cache hits and preemption are varied; tokens and the bits of their
//! log-probabilities must not move. The baseline is each request alone in a fresh engine.

mod support;

use kittiwake::{Device, Options};
use runtime::program::KvDtype;
use runtime::request::SamplingParams;
use shaders::AdapterChoice;
use support::{Ask, Heard, ask_all, ask_each, fixture, gpu, load, options};

/// Unquantised, with q/k norms, two quantised formats, experts, windows and sinks, and latent attention: every kind of kernel
/// takes part.
const MODELS: [&str; 6] = [
    "llama-tiny",
    "qwen3-tiny",
    "gguf/llama-q4_1.gguf",
    "gguf/llama-q4_k.gguf",
    "families/gpt-oss-mxfp4",
    "families/deepseek3",
];

/// Those of them that take part on wgpu, where a step of software Vulkan takes milliseconds.
const WGPU_MODELS: [&str; 4] = ["qwen3-tiny", "gguf/llama-q4_1.gguf", "families/gpt-oss-mxfp4", "families/deepseek3"];

/// The devices of this machine, each with its models.
fn devices() -> Vec<(Device, &'static [&'static str])> {
    let mut all: Vec<(Device, &[&str])> = vec![(Device::Cpu, &MODELS), (Device::Reference, &MODELS)];
    if gpu::is_there() {
        all.push((Device::Wgpu(AdapterChoice::Best), &WGPU_MODELS));
    }
    all
}

/// Requests of several kinds and lengths, some with a common prefix; ids stay below the fixtures' special tokens.
fn asks() -> Vec<Ask> {
    let prompt = |seed: u32, len: u32| (0..len).map(|i| (seed * 37 + i * i * 11 + i * 5) % 500).collect::<Vec<u32>>();
    let base = SamplingParams { max_tokens: 12, ignore_eos: true, logprobs: Some(2), ..SamplingParams::default() };
    let greedy = SamplingParams { temperature: 0.0, ..base.clone() };
    let warm = SamplingParams { temperature: 0.8, seed: Some(7), top_k: 40, top_p: 0.9, ..base.clone() };
    let penalised = SamplingParams {
        repetition_penalty: 1.3,
        presence_penalty: 0.5,
        frequency_penalty: 0.2,
        seed: Some(9),
        ..base
    };
    let shared = prompt(3, 40);
    let with_tail = |tail: &[u32]| [shared.as_slice(), tail].concat();
    vec![
        (prompt(1, 1), greedy.clone()),
        (prompt(2, 17), warm.clone()),
        (prompt(4, 65), penalised.clone()),
        (with_tail(&[1, 2, 3]), greedy.clone()),
        (with_tail(&[9]), warm),
        (with_tail(&[]), penalised),
        (prompt(5, 33), greedy),
    ]
}

/// What must not move: tokens, bits of log-probabilities, reasons.
fn answers(heard: &[Heard]) -> Vec<Heard> {
    heard.iter().map(|heard| Heard { cached_tokens: 0, ..heard.clone() }).collect()
}

/// Each request alone in an engine that has no cached prefix of it.
fn baseline(options: &Options) -> Vec<Heard> {
    let mut alone = options.clone();
    alone.engine.enable_prefix_caching = false;
    answers(&ask_each(&load(&alone).engine, &asks()))
}

fn for_each_model(check: impl Fn(Options, Vec<Heard>, String)) {
    for (device, models) in devices() {
        for model in models {
            let options = options(fixture(model), device.clone());
            let expected = baseline(&options);
            let distinct: std::collections::HashSet<u32> = expected.iter().flat_map(Heard::ids).collect();
            assert!(distinct.len() > 10, "{model}: the answers are too alike to tell anything");
            check(options, expected, format!("{model} on {device}"));
        }
    }
}

#[test]
fn batch_mates_do_not_change_tokens() {
    for_each_model(|options, expected, what| {
        assert_eq!(answers(&ask_all(&load(&options).engine, &asks())), expected, "{what}");
    });
}

#[test]
fn order_of_arrival_does_not_change_tokens() {
    for_each_model(|options, expected, what| {
        let reversed: Vec<Ask> = asks().into_iter().rev().collect();
        let mut heard = answers(&ask_all(&load(&options).engine, &reversed));
        heard.reverse();
        assert_eq!(heard, expected, "{what}");
    });
}

#[test]
fn chunk_size_does_not_change_tokens() {
    for_each_model(|options, expected, what| {
        for chunk in [1, 2, 3, 5, 8, 13, 16, 17, 32, 63, 64] {
            let mut chunked = options.clone();
            chunked.engine.long_prefill_token_threshold = chunk;
            chunked.engine.max_num_batched_tokens = chunk.max(16);
            assert_eq!(answers(&ask_all(&load(&chunked).engine, &asks())), expected, "{what}, chunks of {chunk}");
        }
    });
}

#[test]
fn fault_02_cache_hits_do_not_change_tokens() {
    for_each_model(|mut options, expected, what| {
        for block_size in [1, 3, 16] {
            options.engine.block_size = block_size;
            let loaded = load(&options);
            for round in 0..3 {
                let heard = ask_each(&loaded.engine, &asks());
                assert_eq!(answers(&heard), expected, "{what}, blocks of {block_size}, round {round}");
                let hits: u32 = heard.iter().map(|heard| heard.cached_tokens).sum();
                assert!(round == 0 || hits > 100, "{what}: round {round} has only {hits} cached tokens");
            }
        }
    });
}

#[test]
fn fault_08_preemption_does_not_change_tokens() {
    for_each_model(|mut options, expected, what| {
        options.engine.block_size = 4;
        options.engine.long_prefill_token_threshold = 3;
        options.max_model_len = Some(80);
        options.num_gpu_blocks_override = Some(25); // one full sequence and a little more
        let loaded = load(&options);
        assert_eq!(answers(&ask_all(&loaded.engine, &asks())), expected, "{what}");
        assert!(loaded.engine.stats().counters.num_preemptions > 0, "{what}: nothing was preempted");
    });
}

#[test]
fn fault_14_prompt_logprobs_are_complete_and_the_same_with_a_warm_cache() {
    for_each_model(|mut options, _, what| {
        options.engine.prompt_logprob_chunk = 4;
        let loaded = load(&options);
        let asks: Vec<Ask> = asks()
            .into_iter()
            .map(|(prompt, params)| (prompt, SamplingParams { prompt_logprobs: Some(1), ..params }))
            .collect();
        let cold = answers(&ask_each(&loaded.engine, &asks));
        for (heard, (prompt, _)) in cold.iter().zip(&asks) {
            assert_eq!(heard.prompt_logprobs.len(), prompt.len(), "{what}");
            assert!(
                heard.prompt_logprobs[0].is_none() && heard.prompt_logprobs[1..].iter().all(Option::is_some),
                "{what}"
            );
        }
        assert_eq!(answers(&ask_all(&loaded.engine, &asks)), cold, "{what}");
    });
}

#[test]
fn fault_25_a_seeded_request_does_not_see_unseeded_mates() {
    for (device, models) in devices() {
        let loaded = load(&options(fixture(models[0]), device.clone()));
        let seeded: Ask =
            ((1..20).collect(), SamplingParams { seed: Some(3), max_tokens: 16, ..SamplingParams::default() });
        let alone = ask_all(&loaded.engine, std::slice::from_ref(&seeded))[0].ids();
        for mates in 1..6 {
            for place in 0..=mates {
                let mut asks: Vec<Ask> = (0..mates as u32)
                    .map(|mate| ((mate + 30..mate + 50).collect(), SamplingParams { seed: None, ..seeded.1.clone() }))
                    .collect();
                asks.insert(place, seeded.clone());
                assert_eq!(
                    ask_all(&loaded.engine, &asks)[place].ids(),
                    alone,
                    "{mates} mates, place {place}, {device}"
                );
            }
        }
    }
}

#[test]
fn fault_01_answers_do_not_depend_on_what_was_asked_before() {
    for_each_model(|options, _, what| {
        let (a, b) = (asks()[1].clone(), asks()[3].clone());
        let fresh = |ask: &Ask| answers(&ask_all(&load(&options).engine, std::slice::from_ref(ask)));
        let (alone_a, alone_b) = (fresh(&a), fresh(&b));
        let loaded = load(&options);
        let heard = answers(&ask_each(&loaded.engine, &[a.clone(), b, a.clone(), a]));
        assert_eq!(heard, [&alone_a[..], &alone_b, &alone_a, &alone_a].concat(), "{what}");
    });
}

/// Every type of the cache at once under batch mates, chunks, preemption and cache hits; the tests above have f16.
#[test]
fn no_type_of_the_cache_lets_surroundings_change_tokens() {
    for (device, models) in devices() {
        let mut bits = Vec::new();
        for dtype in KvDtype::ALL {
            let mut options = options(fixture(models[0]), device.clone());
            options.kv_cache_dtype = dtype;
            let expected = baseline(&options);
            options.engine.block_size = 4;
            options.engine.long_prefill_token_threshold = 3;
            options.max_model_len = Some(80);
            options.num_gpu_blocks_override = Some(25);
            let loaded = load(&options);
            assert_eq!(answers(&ask_all(&loaded.engine, &asks())), expected, "{dtype} on {device}");
            assert!(loaded.engine.stats().counters.num_preemptions > 0, "{dtype} on {device}: nothing was preempted");
            let warm = ask_each(&loaded.engine, &asks()[3..6]);
            assert_eq!(answers(&warm), expected[3..6], "{dtype} on {device}, from the cache");
            assert!(warm.iter().any(|heard| heard.cached_tokens > 30), "{dtype} on {device}: no hits");
            bits.push(expected);
        }
        for (i, one) in bits.iter().enumerate() {
            assert!(!bits[..i].contains(one), "{device}: {} answers as another type", KvDtype::ALL[i]);
        }
    }
}
