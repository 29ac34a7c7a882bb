//! What the command line decides for the server. Names are vLLM's flags with `_` for `-`.
//!
//! Invariant: read once at start-up and never changed; a default here is the default of the flag.

use std::time::Duration;

use runtime::engine::EngineConfig;
use runtime::text::GenerationDefaults;
use serde_json::{Map, Value};

/// Everything that `kittiwake serve` can set about the HTTP side.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Address to listen on.
    pub host: String,
    /// Port to listen on; 0 takes a free one.
    pub port: u16,
    /// Names that requests may use for the model; the first is the one that answers carry.
    pub served_model_names: Vec<String>,
    /// Keys that open `/v1`; none: no check.
    pub api_keys: Vec<String>,
    /// Origins that browsers may call from; `*` is all, none is no CORS headers.
    pub allowed_origins: Vec<String>,
    /// Longest request body; more is 413.
    pub max_body_bytes: usize,
    /// Silence after which a stream carries a comment line; 0 is never.
    pub sse_keep_alive_s: u64,
    /// Tokens per stream chunk after the first.
    pub stream_interval: u32,
    /// How long a client may take over the head of a request, may send nothing of its body, or may take nothing of an
    /// answer: then its connection is closed and its request aborted.
    pub socket_timeout_s: u64,
    /// How long running requests may go on after SIGTERM.
    pub shutdown_timeout_s: u64,
    /// Echo (or make) `X-Request-Id`.
    pub enable_request_id_headers: bool,
    /// Send the usage chunk of a stream without being asked.
    pub enable_force_include_usage: bool,
    /// Report `usage.prompt_tokens_details.cached_tokens`.
    pub enable_prompt_tokens_details: bool,
    /// Serve `POST /reset_prefix_cache`.
    pub enable_admin: bool,
    /// Log each prompt and its parameters at info level.
    pub enable_log_requests: bool,
    /// Characters of a prompt that are logged; `None` is all.
    pub max_log_len: Option<usize>,
    /// What every metric's name begins with.
    pub metrics_prefix: String,
    /// Most choices of one request, over all its prompts.
    pub max_n: u32,
    /// Whether a request may bring its own chat template.
    pub trust_request_chat_template: bool,
    /// Template variables that a request's `chat_template_kwargs` override.
    pub default_chat_template_kwargs: Map<String, Value>,
    /// Role of the answer's message.
    pub response_role: String,
    /// Sampling defaults where a request says nothing (the model's `generation_config.json`, with overrides).
    pub generation_defaults: GenerationDefaults,
    /// Threads for tokenising and template rendering.
    pub num_blocking_threads: usize,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".into(),
            port: 8000,
            served_model_names: Vec::new(),
            api_keys: Vec::new(),
            allowed_origins: Vec::new(),
            max_body_bytes: 32 << 20,
            sse_keep_alive_s: 15,
            stream_interval: 1,
            socket_timeout_s: 30,
            shutdown_timeout_s: 30,
            enable_request_id_headers: false,
            enable_force_include_usage: false,
            enable_prompt_tokens_details: true,
            enable_admin: false,
            enable_log_requests: false,
            max_log_len: None,
            metrics_prefix: "vllm:".into(),
            max_n: 128,
            trust_request_chat_template: false,
            default_chat_template_kwargs: Map::new(),
            response_role: "assistant".into(),
            generation_defaults: GenerationDefaults::default(),
            num_blocking_threads: 4,
        }
    }
}

impl ServerConfig {
    /// `socket_timeout_s`, at least a second.
    pub(crate) fn socket_timeout(&self) -> Duration {
        Duration::from_secs(self.socket_timeout_s.max(1))
    }

    /// The most choices of one request: more could never be queued at once.
    pub(crate) fn max_choices(&self, engine: &EngineConfig) -> u32 {
        self.max_n.min(engine.max_num_seqs.saturating_add(engine.max_num_queued_reqs))
    }
}

/// The model behind the names.
#[derive(Clone, Debug)]
pub struct ServedModel {
    /// Where it was loaded from, as `/v1/models` shows it.
    pub root: String,
    /// More labels of `cache_config_info` (`cache_dtype`, …); the engine's own are added to them.
    pub cache_labels: Vec<(String, String)>,
    /// Kernels that run slower than they should, because another was wrong on this device, and why: `/health` and a gauge.
    pub replaced_kernels: Vec<String>,
}
