//! Shared by the engine-level tests: load a fixture, run requests, collect what they heard.
#![allow(dead_code)] // each test binary uses its part

pub mod gpu;

use std::path::{Path, PathBuf};
use std::sync::mpsc;

use kittiwake::{Device, Loaded, Options};
use runtime::engine::Engine;
use runtime::ids::TokenId;
use runtime::request::{Event, EventSink, FinishReason, Request, SamplingParams, TokenLogprobs};

/// A path below `tests/fixtures`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The demo model, which `tests/run.sh` fetches.
pub fn demo() -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.is_file(), "{} is missing: tests/run.sh or examples/fetch_demo.py fetches it", path.display());
    path
}

/// Options for a small engine.
pub fn options(model: PathBuf, device: Device) -> Options {
    // The models of families have no text of their own.
    let tokenizer = model.components().any(|part| part.as_os_str() == "families").then(|| fixture("llama-tiny"));
    let mut options = Options::new(model);
    options.tokenizer = tokenizer;
    options.device = Some(device);
    options.device_options.threads = Some(2);
    options.engine.max_num_seqs = 16;
    options.engine.max_num_queued_reqs = 64;
    options.kv_cache_memory_bytes = Some(64 << 20);
    options
}

/// Loads or says why not.
pub fn load(options: &Options) -> Loaded {
    kittiwake::load(options, &mut |_| ()).unwrap_or_else(|error| panic!("{}: {error}", options.model.display()))
}

/// What one request heard.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Heard {
    /// Output tokens with the bits of their log-probability (0 where none was asked for).
    pub tokens: Vec<(TokenId, u32)>,
    /// Log-probabilities of the prompt.
    pub prompt_logprobs: Vec<Option<TokenLogprobs>>,
    /// Prompt tokens from the prefix cache.
    pub cached_tokens: u32,
    /// Why it ended.
    pub reason: Option<FinishReason>,
}

impl Heard {
    /// The tokens alone.
    pub fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|(id, _)| id.0).collect()
    }
}

/// A prompt and how to go on.
pub type Ask = (Vec<u32>, SamplingParams);

/// Submits all requests at once and waits for all of them.
pub fn ask_all(engine: &Engine, asks: &[Ask]) -> Vec<Heard> {
    let (sender, events) = mpsc::channel();
    let requests = asks
        .iter()
        .enumerate()
        .map(|(index, (prompt, params))| {
            let prompt: Vec<TokenId> = prompt.iter().copied().map(TokenId).collect();
            let request =
                Request { id: engine.next_id(), prompt: prompt.into(), params: params.clone(), cache_salt: None };
            let sender = sender.clone();
            (request, Box::new(move |event| sender.send((index, event)).is_ok()) as Box<dyn EventSink>)
        })
        .collect();
    drop(sender);
    engine.submit_all(requests).expect("the requests are valid");
    let mut heard = vec![Heard::default(); asks.len()];
    for (index, event) in events {
        let heard = &mut heard[index];
        match event {
            Event::Started { cached_tokens } => heard.cached_tokens = cached_tokens,
            Event::PromptLogprobs(entries) => heard.prompt_logprobs.extend(entries),
            Event::Token { id, logprobs } => heard.tokens.push((id, logprobs.map_or(0, |l| l.logprob.to_bits()))),
            Event::Finished { reason, .. } => heard.reason = Some(reason),
            Event::Failed(message) => panic!("the engine failed: {message}"),
        }
    }
    assert!(heard.iter().all(|heard| heard.reason.is_some()), "a request never ended");
    heard
}

/// Runs each request alone, one after the other.
pub fn ask_each(engine: &Engine, asks: &[Ask]) -> Vec<Heard> {
    asks.iter().flat_map(|ask| ask_all(engine, std::slice::from_ref(ask))).collect()
}
