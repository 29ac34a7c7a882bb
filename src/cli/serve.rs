//! `kittiwake serve`: load a model and answer over HTTP until told to stop.

use anyhow::{Context, bail};
use clap::Args;
use runtime::text::GenerationDefaults;
use server::{ServedModel, ServerConfig};

use super::engine_args::EngineArgs;
use super::model;

/// Arguments of `serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// A directory, a .gguf file, `demo`, or `org/name[@revision][:file-or-quant]` of the hub.
    model: String,
    #[command(flatten)]
    engine: EngineArgs,
    /// Names that requests may use for the model; the first is the one answers carry [default: MODEL].
    #[arg(long, num_args = 1..)]
    served_model_name: Vec<String>,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes a free one and logs it.
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// Where requests without a seed get theirs from.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Key that opens the API; may be given several times.
    #[arg(long)]
    api_key: Vec<String>,
    /// Origins that browsers may call from: a JSON list, or the flag several times.
    #[arg(long, default_value = "[\"*\"]")]
    allowed_origins: Vec<String>,
    /// Longest request body in bytes; more is 413.
    #[arg(long, default_value_t = 32 << 20)]
    max_body_bytes: usize,
    /// Sampling defaults: `auto` reads the model's generation_config.json, `vllm` nothing.
    #[arg(long, default_value = "auto", value_parser = ["auto", "vllm"])]
    generation_config: String,
    /// JSON object over the model's sampling defaults, e.g. '{"temperature": 0.5}'.
    #[arg(long)]
    override_generation_config: Option<String>,
    /// How message content reaches the template: `auto` and `string` flatten text parts.
    #[arg(long, default_value = "auto", value_parser = ["auto", "string"])]
    chat_template_content_format: String,
    /// JSON object of template variables that a request's chat_template_kwargs override.
    #[arg(long)]
    default_chat_template_kwargs: Option<String>,
    /// Let requests bring their own chat template.
    #[arg(long)]
    trust_request_chat_template: bool,
    /// Role of the answer's message.
    #[arg(long, default_value = "assistant")]
    response_role: String,
    /// Tokens per chunk of a stream after the first.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    stream_interval: u32,
    /// Seconds of silence after which a stream carries a comment line; 0: never.
    #[arg(long, default_value_t = 15)]
    sse_keep_alive_interval: u64,
    /// Echo, or make, X-Request-Id.
    #[arg(long)]
    enable_request_id_headers: bool,
    /// Report usage.prompt_tokens_details.cached_tokens.
    #[arg(long, default_value_t = true)]
    enable_prompt_tokens_details: bool,
    /// Send the usage chunk of a stream without being asked.
    #[arg(long)]
    enable_force_include_usage: bool,
    /// Serve POST /reset_prefix_cache.
    #[arg(long)]
    enable_admin: bool,
    /// Log each prompt and its parameters.
    #[arg(long)]
    enable_log_requests: bool,
    /// Characters of a prompt that are logged [default: all].
    #[arg(long)]
    max_log_len: Option<usize>,
    /// What every metric's name begins with.
    #[arg(long, default_value = "vllm:")]
    metrics_prefix: String,
    /// Most choices of one request.
    #[arg(long, default_value_t = 128)]
    max_n: u32,
    /// Seconds that a client may take over the head of a request, send nothing of its body or read nothing of an answer.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..))]
    socket_timeout: u64,
    /// Seconds that running requests may go on after SIGTERM.
    #[arg(long, default_value_t = 30)]
    shutdown_timeout: u64,
}

/// Loads and serves.
pub fn run(args: ServeArgs) -> anyhow::Result<()> {
    let options = args.engine.options(&args.model, args.seed)?;
    let mut config = server_config(&args)?;
    let loaded = model::load(&options)?;
    if args.generation_config == "auto" {
        config.generation_defaults = config.generation_defaults.over(loaded.text.generation_defaults());
    }
    // Said once, at start: otherwise every request that leaves it to the model would be refused.
    let defaults = config.generation_defaults.params().validate(u32::MAX, u32::MAX);
    defaults.context("the sampling defaults (--generation-config, --override-generation-config)")?;
    let memory = loaded.memory;
    tracing::info!(
        model = %options.model.display(),
        device = %loaded.device,
        load_s = loaded.load_time.as_secs_f64(),
        weights_mib = memory.weights_bytes >> 20,
        kv_cache_mib = memory.state_bytes >> 20,
        num_blocks = loaded.engine.config().num_blocks - 1,
        max_model_len = loaded.engine.config().max_model_len,
        "model loaded"
    );
    let model = ServedModel {
        root: options.model.display().to_string(),
        cache_labels: vec![("cache_dtype".into(), options.kv_cache_dtype.to_string())],
        replaced_kernels: loaded.replaced_kernels.clone(),
    };
    server::run(config, loaded.engine.clone(), loaded.text.clone(), model).context("serving")
}

fn server_config(args: &ServeArgs) -> anyhow::Result<ServerConfig> {
    let names = match args.served_model_name.as_slice() {
        [] => vec![model::default_name(&args.model)],
        names => names.to_vec(),
    };
    Ok(ServerConfig {
        host: args.host.clone(),
        port: args.port,
        served_model_names: names,
        api_keys: args.api_key.clone(),
        allowed_origins: origins(&args.allowed_origins)?,
        max_body_bytes: args.max_body_bytes,
        sse_keep_alive_s: args.sse_keep_alive_interval,
        stream_interval: args.stream_interval,
        socket_timeout_s: args.socket_timeout,
        shutdown_timeout_s: args.shutdown_timeout,
        enable_request_id_headers: args.enable_request_id_headers,
        enable_force_include_usage: args.enable_force_include_usage,
        enable_prompt_tokens_details: args.enable_prompt_tokens_details,
        enable_admin: args.enable_admin,
        enable_log_requests: args.enable_log_requests,
        max_log_len: args.max_log_len,
        max_n: args.max_n,
        metrics_prefix: args.metrics_prefix.clone(),
        trust_request_chat_template: args.trust_request_chat_template,
        default_chat_template_kwargs: match &args.default_chat_template_kwargs {
            Some(text) => json_object("--default-chat-template-kwargs", text)?,
            None => serde_json::Map::new(),
        },
        response_role: args.response_role.clone(),
        generation_defaults: match &args.override_generation_config {
            Some(text) => serde_json::from_str(text).context("--override-generation-config")?,
            None => GenerationDefaults::default(),
        },
        ..ServerConfig::default()
    })
}

/// vLLM takes a JSON list; several flags are easier to type.
fn origins(given: &[String]) -> anyhow::Result<Vec<String>> {
    let mut all = Vec::new();
    for text in given {
        match text.starts_with('[') {
            true => all.extend(serde_json::from_str::<Vec<String>>(text).context("--allowed-origins")?),
            false => all.push(text.clone()),
        }
    }
    Ok(all)
}

fn json_object(flag: &str, text: &str) -> anyhow::Result<serde_json::Map<String, serde_json::Value>> {
    match serde_json::from_str(text).with_context(|| format!("{flag}: not JSON"))? {
        serde_json::Value::Object(map) => Ok(map),
        _ => bail!("{flag}: expected a JSON object"),
    }
}
