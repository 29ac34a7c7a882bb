//! Kittiwake as a library: pick a device, load a model, return an engine.
//!
//! ```no_run
//! let options = kittiwake::Options::new("models/SmolLM2-135M-Instruct.Q4_1.gguf");
//! let model = kittiwake::load(&options, &mut |_| ()).expect("a model");
//! println!("{} on {}", model.info.architecture, model.device);
//! ```
//!
//! Invariant: everything is sized here, once, before the first request: context, blocks, batch. The engine's own thread
//! constructs the backend; this thread only waits for it.

pub mod device;
#[cfg(feature = "hub")]
pub mod hub;
pub mod sizing;

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

pub use device::{Device, DeviceOptions};
use runtime::backend::{Caps, MemoryReport};
use runtime::engine::{Engine, EngineConfig};
use runtime::error::{DeviceError, LoadError};
use runtime::model::{self, LoadOptions, Model, ModelInfo, QuantisationRules};
use runtime::program::KvDtype;
pub use runtime::runner::Progress;
use runtime::runner::{ModelRunner, RunnerConfig};
use runtime::step::StepRunner;
use runtime::text::TextModel;
use runtime::weights::Checkpoint;

/// How a model is to be loaded and served. Field names are vLLM's flags where one exists.
#[derive(Clone, Debug)]
pub struct Options {
    /// A `.gguf` file or a Hugging Face directory.
    pub model: PathBuf,
    /// Where to run; `None` takes the best device there is.
    pub device: Option<Device>,
    /// How that device is used.
    pub device_options: DeviceOptions,
    /// Tokenizer file or directory, when it is not the model's own.
    pub tokenizer: Option<PathBuf>,
    /// Chat template: a file, or the template itself.
    pub chat_template: Option<String>,
    /// Type of cached K and V.
    pub kv_cache_dtype: KvDtype,
    /// What matrices that are floats in the file are rounded to.
    pub quantization: QuantisationRules,
    /// Memory for the KV cache in bytes; `None`: see `sizing::kv_cache_bytes`.
    pub kv_cache_memory_bytes: Option<u64>,
    /// Overrides the number of KV blocks (tests force preemption with it).
    pub num_gpu_blocks_override: Option<u32>,
    /// Longest context in tokens; `None`: the model's own, or what fits.
    pub max_model_len: Option<u32>,
    /// Random weights instead of the checkpoint's.
    pub dummy_weights: bool,
    /// Engine bounds; `vocab_size`, `max_model_len` and `num_blocks` are filled in at load.
    pub engine: EngineConfig,
}

impl Options {
    /// The defaults for a model.
    pub fn new(model: impl Into<PathBuf>) -> Self {
        Self {
            model: model.into(),
            device: None,
            device_options: DeviceOptions::default(),
            tokenizer: None,
            chat_template: None,
            kv_cache_dtype: KvDtype::F16,
            quantization: QuantisationRules::default(),
            kv_cache_memory_bytes: None,
            num_gpu_blocks_override: None,
            max_model_len: None,
            dummy_weights: false,
            engine: EngineConfig {
                vocab_size: 0,
                max_model_len: 0,
                max_num_batched_tokens: 2048,
                max_num_seqs: 128,
                block_size: 16,
                num_blocks: 0,
                enable_prefix_caching: true,
                long_prefill_token_threshold: 0,
                max_num_queued_reqs: 4 * 128,
                max_num_queued_tokens: 0,
                seed: 0,
                max_logprobs: 20,
                prompt_logprob_chunk: 64,
            },
        }
    }
}

/// A model that answers.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// Takes requests.
    pub engine: Engine,
    /// Text on both sides of it.
    pub text: TextModel,
    /// What the model is.
    pub info: ModelInfo,
    /// The device in words.
    pub device: String,
    /// Kernels that the start-up self-test has replaced by slower ones, and why.
    pub replaced_kernels: Vec<String>,
    /// Device memory after loading.
    pub memory: MemoryReport,
    /// From opening the file to the engine being ready.
    pub load_time: Duration,
}

/// What the engine thread tells this one while it loads.
enum Message {
    Progress(Progress),
    Ready { caps: Box<Caps>, memory: MemoryReport },
}

/// What a model is, without loading its weights.
///
/// # Errors
/// Whatever is wrong with the files.
pub fn info(options: &Options) -> Result<ModelInfo, LoadError> {
    Ok(model::load(&open(options)?, options.kv_cache_dtype)?.info)
}

fn open(options: &Options) -> Result<Checkpoint, LoadError> {
    match options.dummy_weights {
        false => Checkpoint::open(&options.model),
        true => Checkpoint::open_dummy(&options.model),
    }
}

/// Loads a model and starts its engine. `progress` is called on this thread.
///
/// # Errors
/// Whatever is wrong with the files, the flags or the device; nothing keeps running then.
pub fn load(options: &Options, progress: &mut dyn FnMut(Progress)) -> Result<Loaded, LoadError> {
    let start = Instant::now();
    let checkpoint = open(options)?;
    let text = TextModel::load(&checkpoint, options.tokenizer.as_deref(), options.chat_template.as_deref())?;
    let load_options = LoadOptions {
        kv_dtype: options.kv_cache_dtype,
        max_model_len: options.max_model_len,
        quantisation: options.quantization.clone(),
    };
    let model = model::load(&checkpoint, load_options)?;
    let info = model.info.clone();
    let device = device::choose(options.device.clone());
    check_vocabulary(&options.model, &text, &info)?;

    let (sender, messages) = mpsc::channel();
    let options = options.clone();
    let starting = std::thread::spawn(move || Engine::start(move || start_runner(&device, &options, &model, &sender)));
    let mut ready = None;
    for message in messages {
        match message {
            Message::Progress(p) => progress(p),
            Message::Ready { caps, memory } => ready = Some((*caps, memory)),
        }
    }
    let engine = starting.join().map_err(|_| DeviceError::Failed("loading panicked".into()))??;
    let (caps, memory) = ready.expect("a runner that started has reported");
    let Caps { device, replaced_kernels, .. } = caps;
    Ok(Loaded { engine, text, info, device, replaced_kernels, memory, load_time: start.elapsed() })
}

/// Runs on the engine thread: the backend is made where it will be used.
fn start_runner(
    device: &Device,
    options: &Options,
    model: &Model,
    messages: &mpsc::Sender<Message>,
) -> Result<(Box<dyn StepRunner>, EngineConfig), LoadError> {
    let backend = device::open(device, options.device_options.clone())?;
    let config = sizing::engine_config(options, device, model, backend.caps())?;
    let sizes = RunnerConfig {
        max_num_batched_tokens: config.max_num_batched_tokens,
        max_num_seqs: config.max_num_seqs,
        max_model_len: config.max_model_len,
        block_size: config.block_size,
        num_blocks: config.num_blocks,
        max_logit_rows: config.max_logit_rows(),
    };
    let mut report = |progress| {
        // The receiver lives until this thread's sender is dropped; losing a progress report would be harmless.
        let _ = messages.send(Message::Progress(progress));
    };
    let runner = ModelRunner::new(backend, model, sizes, &mut report)?;
    let caps = Box::new(runner.caps().clone());
    let _ = messages.send(Message::Ready { caps, memory: runner.memory() });
    Ok((Box::new(runner), config))
}

/// A tokenizer that makes ids the model does not have would be refused request by request: say it once, at load.
fn check_vocabulary(path: &Path, text: &TextModel, info: &ModelInfo) -> Result<(), LoadError> {
    if text.vocab_size() > info.vocab_size as usize {
        return Err(LoadError::Config {
            path: path.to_owned(),
            key: "vocab_size".into(),
            problem: format!("the tokenizer has {} ids, the model {}", text.vocab_size(), info.vocab_size),
        });
    }
    Ok(())
}
