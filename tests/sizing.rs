//! What the flags about context and KV memory give: the longest context that fits, or a refusal with the numbers.

mod support;

use kittiwake::{Device, Options, sizing};
use runtime::backend::reference::ReferenceBackend;
use runtime::backend::{Backend, Caps};
use runtime::error::LoadError;
use runtime::program::KvDtype;
use runtime::request::{FinishReason, SamplingParams};
use runtime::weights::Checkpoint;
use support::{ask_all, fixture, load, options};

/// KV of 16 tokens: K and V of 2 layers, 2 KV heads of 16 values in f16.
const BLOCK_BYTES: u64 = 16 * 2 * 2 * 2 * 16 * 2;

fn tiny() -> Options {
    options(fixture("llama-tiny"), Device::Cpu)
}

#[test]
fn an_unset_context_adapts_to_the_blocks_and_is_usable_to_its_last_token() {
    let loaded = load(&Options { num_gpu_blocks_override: Some(3), ..tiny() });
    let context = loaded.engine.config().max_model_len;
    assert_eq!(context, 3 * 16 + 1, "the last token needs no KV");
    let params = SamplingParams { max_tokens: 1000, ignore_eos: true, ..SamplingParams::default() };
    let heard = &ask_all(&loaded.engine, &[(vec![1; 20], params)])[0];
    assert_eq!((heard.tokens.len(), heard.reason), (29, Some(FinishReason::Length)));
}

#[test]
fn a_context_that_was_asked_for_is_given_or_refused() {
    let asked = |max_model_len, blocks| Options {
        max_model_len: Some(max_model_len),
        kv_cache_memory_bytes: Some(blocks * BLOCK_BYTES),
        ..tiny()
    };
    assert_eq!(load(&asked(49, 3)).engine.config().max_model_len, 49);
    let refusal = |options: &Options| match kittiwake::load(options, &mut |_| ()) {
        Err(LoadError::Limit { what, needed, limit }) => format!("{what}: {needed}, {limit}"),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        refusal(&asked(50, 3)),
        format!("--max-model-len: {} bytes of KV cache for 50 tokens, {} bytes", 4 * BLOCK_BYTES, 3 * BLOCK_BYTES)
    );
    assert_eq!(refusal(&asked(513, 1000)), "--max-model-len: 513 tokens, 512 tokens (the model's)");
    assert!(refusal(&Options { max_model_len: None, ..asked(0, 0) }).starts_with("KV cache: "));
    let mut starved = tiny();
    starved.engine.max_num_batched_tokens = 15;
    assert!(refusal(&starved).starts_with("max_num_batched_tokens: "), "16 rows need 16 tokens");
}

/// A device binds a plane of a layer whole: 16 tokens of one are 2 KV heads of 16 values in f16.
#[test]
fn the_number_of_blocks_that_nobody_asked_for_fits_a_binding() {
    const PLANE_BYTES: u64 = 16 * 2 * 16 * 2;
    let checkpoint = Checkpoint::open(&fixture("llama-tiny")).expect("a fixture");
    let model = runtime::model::load(&checkpoint, KvDtype::F16).expect("a fixture");
    let mut caps = ReferenceBackend::new(1).caps().clone();
    let blocks = |options: &Options, caps: &Caps| {
        let config = sizing::engine_config(options, &Device::Cpu, &model, caps);
        config.map(|config| (config.num_blocks, config.max_model_len))
    };
    let unset = Options { kv_cache_memory_bytes: None, ..tiny() };
    let all = blocks(&unset, &caps).expect("it fits");
    assert_eq!(all, (16 * 32 + 1, 512), "16 sequences of 512 tokens, and block 0");
    caps.max_binding_bytes = 8 * PLANE_BYTES - 1;
    assert_eq!(blocks(&unset, &caps).expect("it adapts"), (7, 6 * 16 + 1), "block 0 is one of seven");
    caps.max_binding_bytes = PLANE_BYTES;
    assert!(matches!(blocks(&unset, &caps), Err(LoadError::Limit { .. })), "block 0 alone is not enough");
    // What was asked for stays, and is refused later if it does not fit.
    let asked = Options { kv_cache_memory_bytes: Some(20 * BLOCK_BYTES), ..tiny() };
    assert_eq!(blocks(&asked, &caps).expect("as asked").0, 21);
    let asked = Options { num_gpu_blocks_override: Some(30), ..unset };
    assert_eq!(blocks(&asked, &caps).expect("as asked").0, 31);
}
