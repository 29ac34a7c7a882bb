//! The engine handle, and the one thread that folds schedule, run, apply.
//!
//! Invariant: one thread owns scheduler, cache and runner; everyone else talks to it by messages and never waits on it.

use serde::Serialize;

use crate::error::{LoadError, RequestError};
use crate::ids::SeqId;
use crate::request::{EventSink, Request};
use crate::step::StepRunner;

/// The bounds that the engine keeps. Names are vLLM's flags.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EngineConfig {
    /// Token ids are below this.
    pub vocab_size: u32,
    /// Most tokens of one sequence, prompt and output.
    pub max_model_len: u32,
    /// The one token budget of a step: decode and prefill chunks.
    pub max_num_batched_tokens: u32,
    /// Most running sequences.
    pub max_num_seqs: u32,
    /// Tokens per KV block.
    pub block_size: u32,
    /// KV blocks, the reserved block 0 included.
    pub num_blocks: u32,
    /// Whether prompts may share cached prefixes.
    pub enable_prefix_caching: bool,
    /// Longest chunk of one prompt in one step; 0: as long as the budget.
    pub long_prefill_token_threshold: u32,
    /// Most waiting requests.
    pub max_num_queued_reqs: u32,
    /// Most prompt tokens of waiting requests; 0: no bound.
    pub max_num_queued_tokens: u32,
    /// Where requests without a seed get theirs from.
    pub seed: u64,
    /// Most alternatives a request may ask log-probabilities for.
    pub max_logprobs: u32,
    /// Prompt log-probabilities are computed this many rows at a time.
    pub prompt_logprob_chunk: u32,
}

/// A snapshot of the engine's gauges and counters; counters only grow.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Stats {
    /// Sequences in rows.
    pub num_running: u32,
    /// Sequences that wait for a row.
    pub num_waiting: u32,
    /// Blocks held by sequences or by the prefix cache with references.
    pub num_used_blocks: u32,
    /// Blocks that sequences can have, block 0 excluded.
    pub num_total_blocks: u32,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_cache_queries_tokens: u64,
    /// Prompt tokens found there.
    pub prefix_cache_hits_tokens: u64,
    /// Sequences thrown back to the queue under memory pressure.
    pub num_preemptions: u64,
    /// Prompt tokens computed or found.
    pub prompt_tokens: u64,
    /// Tokens drawn.
    pub generation_tokens: u64,
    /// Steps run.
    pub num_steps: u64,
    /// Tokens computed by all steps.
    pub step_tokens: u64,
    /// Requests that ended because their logits were not finite.
    pub num_corrupted: u64,
    /// Steps by size: entry i counts steps of at most `2^i` tokens and more than `2^(i-1)`.
    pub step_tokens_histogram: Vec<u64>,
}

/// Whether the engine takes requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// It does.
    Ready,
    /// It finishes what it has and refuses new ones.
    Draining,
    /// The device failed; the message says how.
    Failed(String),
}

/// The handle: cheap to clone, safe to use from any thread. The engine thread ends when `shutdown` is called or the last
/// handle is dropped.
#[derive(Clone, Debug)]
pub struct Engine {}

impl Engine {
    /// Starts the engine thread. `make_runner` runs on that thread, so that a backend never crosses threads; this call
    /// returns when the runner is there. The constructor may lower `config` to what fits (`num_blocks`, `max_model_len`).
    ///
    /// # Errors
    /// What `make_runner` says.
    pub fn start<F>(make_runner: F) -> Result<Self, LoadError>
    where
        F: FnOnce() -> Result<(Box<dyn StepRunner>, EngineConfig), LoadError> + Send + 'static,
    {
        let _ = make_runner;
        todo!("helper engine")
    }

    /// The bounds in force.
    pub fn config(&self) -> &EngineConfig {
        todo!("helper engine")
    }

    /// A fresh request id.
    pub fn next_id(&self) -> SeqId {
        todo!("helper engine")
    }

    /// Checks a request against the parameters' ranges and the engine's bounds without submitting it.
    ///
    /// # Errors
    /// `Invalid` naming the parameter.
    pub fn validate(&self, request: &Request) -> Result<(), RequestError> {
        let _ = request;
        todo!("helper engine")
    }

    /// Validates a request and queues it. Its events go to `sink` until `Finished` or `Failed`.
    ///
    /// # Errors
    /// `Invalid`, `Overloaded` when a queue bound is met, `Unavailable` while draining or after a failure.
    pub fn submit(&self, request: Request, sink: Box<dyn EventSink>) -> Result<(), RequestError> {
        let _ = (request, sink);
        todo!("helper engine")
    }

    /// Queues several requests (the choices of `n`) or none of them.
    ///
    /// # Errors
    /// As `submit`.
    pub fn submit_all(&self, requests: Vec<(Request, Box<dyn EventSink>)>) -> Result<(), RequestError> {
        let _ = requests;
        todo!("helper engine")
    }

    /// Ends a request whose client went away; its blocks are free before the next step. Unknown ids are ignored.
    pub fn abort(&self, id: SeqId) {
        let _ = id;
        todo!("helper engine")
    }

    /// Ends a request whose stop string matched: it finishes with reason `Stop`. Unknown ids are ignored.
    pub fn finish(&self, id: SeqId) {
        let _ = id;
        todo!("helper engine")
    }

    /// The current gauges and counters; never waits for a step.
    pub fn stats(&self) -> Stats {
        todo!("helper engine")
    }

    /// Whether the engine takes requests.
    pub fn health(&self) -> Health {
        todo!("helper engine")
    }

    /// Forgets every cached prefix that no running sequence holds.
    ///
    /// # Errors
    /// `Unavailable` when the engine has stopped.
    pub fn reset_prefix_cache(&self) -> Result<(), RequestError> {
        todo!("helper engine")
    }

    /// Refuses new requests from now on; running and waiting ones finish.
    pub fn drain(&self) {
        todo!("helper engine")
    }

    /// Aborts what is left and joins the engine thread.
    pub fn shutdown(&self) {
        todo!("helper engine")
    }
}
