//! The engine handle, and the one thread that folds schedule, run, apply.
//!
//! Invariant: one thread (`worker`) owns scheduler, cache and runner; everyone else talks to it by messages and never
//! waits on it. What is refused is refused here, synchronously and typed: bad values by `validate`, overload by counting.

mod validate;
mod worker;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use serde::Serialize;

use self::worker::{Command, Worker};
use crate::error::{DeviceError, LoadError, RequestError};
use crate::ids::SeqId;
use crate::request::{EventSink, Request};
use crate::scheduler::{Counters, SchedulerConfig};
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
    /// Most requests beyond those that `max_num_seqs` rows hold.
    pub max_num_queued_reqs: u32,
    /// Most prompt tokens of waiting requests; 0: no bound. A lone request may be longer.
    pub max_num_queued_tokens: u32,
    /// Where requests without a seed get theirs from.
    pub seed: u64,
    /// Most alternatives a request may ask log-probabilities for.
    pub max_logprobs: u32,
    /// Prompt log-probabilities are computed this many positions at a time, or one per row that asks, if that is more.
    pub prompt_logprob_chunk: u32,
}

impl EngineConfig {
    /// Refuses sizes that no step could keep, and lowers `max_model_len` to what the cache holds for one sequence alone,
    /// so that a request which validation admits can always be finished.
    ///
    /// # Errors
    /// `Limit` naming the flag.
    pub fn fit(mut self) -> Result<Self, LoadError> {
        let at_least = |flag: &str, needed: u32, got: u32| match got >= needed {
            true => Ok(()),
            false => Err(LoadError::Limit {
                what: flag.to_owned(),
                needed: format!("at least {needed}"),
                limit: got.to_string(),
            }),
        };
        at_least("vocab_size", 1, self.vocab_size)?;
        at_least("block_size", 1, self.block_size)?;
        at_least("num_blocks", 2, self.num_blocks)?;
        at_least("max_num_seqs", 1, self.max_num_seqs)?;
        at_least("max_model_len", 2, self.max_model_len)?;
        at_least("max_num_batched_tokens", self.max_num_seqs, self.max_num_batched_tokens)?;
        at_least("prompt_logprob_chunk", 1, self.prompt_logprob_chunk)?;
        // The KV of the last token is never needed.
        let cache_tokens = u64::from(self.num_blocks - 1) * u64::from(self.block_size) + 1;
        if u64::from(self.max_model_len) > cache_tokens {
            tracing::warn!(
                max_model_len = self.max_model_len,
                cache_tokens,
                "the KV cache is smaller than one context"
            );
            self.max_model_len = cache_tokens as u32;
        }
        Ok(self)
    }

    /// Most logit rows of one step: one per sequence, and those that prompt log-probabilities need beyond it.
    pub fn max_logit_rows(&self) -> u32 {
        self.max_num_seqs.saturating_add(self.prompt_logprob_chunk - 1)
    }

    fn scheduler(&self) -> SchedulerConfig {
        SchedulerConfig {
            max_model_len: self.max_model_len,
            max_num_batched_tokens: self.max_num_batched_tokens,
            max_num_seqs: self.max_num_seqs,
            long_prefill_token_threshold: self.long_prefill_token_threshold,
            prompt_logprob_chunk: self.prompt_logprob_chunk,
            seed: self.seed,
        }
    }
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
    /// What was counted since the start.
    #[serde(flatten)]
    pub counters: Counters,
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

/// What submitting threads and the engine thread both count. Locked for a few instructions, never across a step.
#[derive(Debug)]
struct Admission {
    health: Health,
    /// Requests that were accepted and have not ended.
    num_live: u32,
    /// Those of them that have never been in a row.
    num_queued: u32,
    /// Prompt tokens of the queued ones.
    num_queued_tokens: u64,
}

/// What the handle and the engine thread share: numbers to read, no engine state.
#[derive(Debug)]
struct Shared {
    admission: Mutex<Admission>,
    stats: Mutex<Stats>,
}

impl Shared {
    fn admission(&self) -> MutexGuard<'_, Admission> {
        self.admission.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stats(&self) -> MutexGuard<'_, Stats> {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The handle: cheap to clone, safe to use from any thread. The engine thread ends when `shutdown` is called or the last
/// handle is dropped. A process calls `shutdown` before it ends: the driver of a device that is still at work then may crash.
#[derive(Clone, Debug)]
pub struct Engine {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    config: EngineConfig,
    shared: Arc<Shared>,
    commands: Sender<Command>,
    next_id: AtomicU64,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Engine {
    /// Starts the engine thread. `make_runner` runs on that thread, so that a backend never crosses threads; this call
    /// returns when the runner is there. The constructor may lower `config` to what fits (`num_blocks`, `max_model_len`).
    ///
    /// # Errors
    /// What `make_runner` says; `Limit` when its configuration cannot be kept.
    pub fn start<F>(make_runner: F) -> Result<Self, LoadError>
    where
        F: FnOnce() -> Result<(Box<dyn StepRunner>, EngineConfig), LoadError> + Send + 'static,
    {
        let (commands, receiver) = std::sync::mpsc::channel();
        let (ready, started) = sync_channel(1);
        let thread = std::thread::Builder::new().name("engine".to_owned()).spawn(move || {
            let made = make_runner().and_then(|(runner, config)| Ok((runner, config.fit()?)));
            let (runner, config) = match made {
                Ok(made) => made,
                Err(error) => return drop(ready.send(Err(error))),
            };
            let worker = Worker::new(runner, &config, receiver);
            if ready.send(Ok((config, worker.shared()))).is_ok() {
                worker.run();
            }
        });
        let failed = |problem: String| LoadError::Device(DeviceError::Failed(problem));
        let thread = thread.map_err(|error| failed(format!("cannot start the engine thread: {error}")))?;
        let (config, shared) =
            started.recv().map_err(|_| failed("the engine thread panicked while loading".to_owned()))??;
        let (next_id, thread) = (AtomicU64::new(0), Mutex::new(Some(thread)));
        Ok(Self { inner: Arc::new(Inner { config, shared, commands, next_id, thread }) })
    }

    /// The bounds in force.
    pub fn config(&self) -> &EngineConfig {
        &self.inner.config
    }

    /// A fresh request id.
    pub fn next_id(&self) -> SeqId {
        SeqId(self.inner.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// Checks a request against the parameters' ranges and the engine's bounds without submitting it.
    ///
    /// # Errors
    /// `Invalid` naming the parameter.
    pub fn validate(&self, request: &Request) -> Result<(), RequestError> {
        validate::validate(request, &self.inner.config)
    }

    /// Validates a request and queues it. Its events go to `sink` until `Finished` or `Failed`.
    ///
    /// # Errors
    /// `Invalid`, `Overloaded` when a queue bound is met, `Unavailable` while draining or after a failure.
    pub fn submit(&self, request: Request, sink: Box<dyn EventSink>) -> Result<(), RequestError> {
        self.submit_all(vec![(request, sink)])
    }

    /// Queues several requests (the choices of `n`) or none of them.
    ///
    /// # Errors
    /// As `submit`.
    pub fn submit_all(&self, requests: Vec<(Request, Box<dyn EventSink>)>) -> Result<(), RequestError> {
        let Inner { config, shared, commands, .. } = &*self.inner;
        requests.iter().try_for_each(|(request, _)| self.validate(request))?;
        let num_new = u32::try_from(requests.len()).unwrap_or(u32::MAX);
        let num_new_tokens = requests.iter().map(|(request, _)| request.prompt.len() as u64).sum::<u64>();
        // The lock is held until the command is sent: what is accepted comes before a shutdown, and a failure tells it.
        let mut admission = shared.admission();
        match &admission.health {
            Health::Ready => (),
            Health::Draining => return Err(RequestError::Unavailable("the engine is shutting down".to_owned())),
            Health::Failed(problem) => {
                return Err(RequestError::Unavailable(format!("the engine has failed: {problem}")));
            }
        }
        let max_live = config.max_num_seqs.saturating_add(config.max_num_queued_reqs);
        if admission.num_live.saturating_add(num_new) > max_live {
            let message = format!("{} requests run or wait; at most {max_live} may", admission.num_live);
            return Err(RequestError::Overloaded { message, reason: "max_num_queued_reqs" });
        }
        let num_queued_tokens = admission.num_queued_tokens + num_new_tokens;
        let max_queued_tokens = u64::from(config.max_num_queued_tokens);
        if max_queued_tokens > 0 && admission.num_queued_tokens > 0 && num_queued_tokens > max_queued_tokens {
            let waiting = admission.num_queued_tokens;
            let message = format!("{waiting} prompt tokens wait; at most {max_queued_tokens} may");
            return Err(RequestError::Overloaded { message, reason: "max_num_queued_tokens" });
        }
        let sent = commands.send(Command::Submit(requests));
        sent.map_err(|_| RequestError::Unavailable("the engine has stopped".to_owned()))?;
        admission.num_live += num_new;
        admission.num_queued += num_new;
        admission.num_queued_tokens = num_queued_tokens;
        Ok(())
    }

    /// Ends a request whose client went away; its blocks are free before the next step. Unknown ids are ignored.
    pub fn abort(&self, id: SeqId) {
        self.tell(Command::Abort(id));
    }

    /// Ends a request whose stop string matched: it finishes with reason `Stop`. Unknown ids are ignored.
    pub fn finish(&self, id: SeqId) {
        self.tell(Command::Finish(id));
    }

    /// The current gauges and counters; never waits for a step.
    pub fn stats(&self) -> Stats {
        // In this order, what starts in between may be counted twice, but never not at all.
        let num_queued = self.inner.shared.admission().num_queued;
        let mut stats = self.inner.shared.stats().clone();
        stats.num_waiting = stats.num_waiting.max(num_queued);
        stats
    }

    /// Whether the engine takes requests.
    pub fn health(&self) -> Health {
        self.inner.shared.admission().health.clone()
    }

    /// Forgets every cached prefix that no running sequence holds.
    ///
    /// # Errors
    /// `Unavailable` when the engine has stopped.
    pub fn reset_prefix_cache(&self) -> Result<(), RequestError> {
        let sent = self.inner.commands.send(Command::ResetPrefixCache);
        sent.map_err(|_| RequestError::Unavailable("the engine has stopped".to_owned()))
    }

    /// Refuses new requests from now on; running and waiting ones finish.
    pub fn drain(&self) {
        let mut admission = self.inner.shared.admission();
        if admission.health == Health::Ready {
            admission.health = Health::Draining;
        }
    }

    /// Aborts what is left and joins the engine thread.
    pub fn shutdown(&self) {
        self.drain();
        self.tell(Command::Shutdown);
        let thread = self.inner.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            // A panic of the thread has been told to every request; there is nobody left to hear it here.
            drop(thread.join());
        }
    }

    /// A stopped engine has no requests to end, so that a command which nobody takes is no loss.
    fn tell(&self, command: Command) {
        drop(self.inner.commands.send(command));
    }
}
