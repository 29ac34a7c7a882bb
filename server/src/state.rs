//! What every handler shares.
//!
//! Invariant: nothing here changes after start-up but counters; the engine is the only owner of a request's state.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use runtime::engine::{Engine, Health};
use runtime::ids::TokenId;
use runtime::text::TextModel;

use crate::auth::ApiKeys;
use crate::config::{ServedModel, ServerConfig};
use crate::error::ApiError;
use crate::id::IdSource;
use crate::limits::WorkPool;
use crate::metrics::Metrics;

/// The server's parts.
#[derive(Debug)]
pub struct AppState {
    pub(crate) engine: Engine,
    pub(crate) text: TextModel,
    pub(crate) model: ServedModel,
    pub(crate) config: ServerConfig,
    pub(crate) metrics: Metrics,
    pub(crate) pool: WorkPool,
    pub(crate) keys: ApiKeys,
    pub(crate) ids: IdSource,
    pub(crate) started_unix_s: u64,
    pub(crate) draining: AtomicBool,
    pub(crate) num_in_flight: AtomicUsize,
    /// No text of more bytes than this times its number of tokens exists.
    pub(crate) longest_token_bytes: usize,
}

impl AppState {
    /// Puts a server together. Without served names the model's root is its name.
    pub fn new(mut config: ServerConfig, engine: Engine, text: TextModel, model: ServedModel) -> Arc<Self> {
        if config.served_model_names.is_empty() {
            config.served_model_names.push(model.root.clone());
        }
        let name = &config.served_model_names[0];
        let metrics = Metrics::new(&config.metrics_prefix, name, engine.clone(), &model);
        let bounds = engine.config();
        let max_waiting = bounds.max_num_queued_reqs as usize + bounds.max_num_seqs as usize;
        Arc::new(Self {
            metrics,
            pool: WorkPool::new(config.num_blocking_threads, max_waiting),
            keys: ApiKeys::new(&config.api_keys),
            ids: IdSource::default(),
            started_unix_s: unix_now_s(),
            draining: AtomicBool::new(false),
            num_in_flight: AtomicUsize::new(0),
            longest_token_bytes: longest_token_bytes(&text),
            engine,
            text,
            model,
            config,
        })
    }

    /// The names that requests may use; never empty.
    pub(crate) fn names(&self) -> &[String] {
        &self.config.served_model_names
    }

    /// The name that an answer carries for a request that named `model`.
    pub(crate) fn model_name(&self, model: Option<&str>) -> Result<String, ApiError> {
        match model {
            None => Ok(self.names()[0].clone()),
            Some(model) if self.names().iter().any(|name| name == model) => Ok(model.to_owned()),
            Some(model) => Err(ApiError::unknown_model(model)),
        }
    }

    /// The interval of comment lines in a silent stream.
    pub(crate) fn keep_alive(&self) -> Option<Duration> {
        (self.config.sse_keep_alive_s > 0).then(|| Duration::from_secs(self.config.sse_keep_alive_s))
    }

    /// Whether new requests are taken; if not, why.
    pub(crate) fn ready(&self) -> Result<(), ApiError> {
        match self.engine.health() {
            Health::Failed(why) => Err(ApiError::unavailable(format!("the engine has failed: {why}"))),
            Health::Draining => Err(ApiError::unavailable("the server is shutting down")),
            Health::Ready if self.draining.load(Ordering::Relaxed) => {
                Err(ApiError::unavailable("the server is shutting down"))
            }
            Health::Ready => Ok(()),
        }
    }
}

fn longest_token_bytes(text: &TextModel) -> usize {
    let ids = 0..u32::try_from(text.vocab_size()).unwrap_or(u32::MAX);
    ids.map(|id| text.token_bytes(TokenId(id)).len()).max().unwrap_or(0).max(1)
}

/// Seconds since 1970; 0 with a clock before that.
pub(crate) fn unix_now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
