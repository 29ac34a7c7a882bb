//! Flags that say which model runs where and how large: shared by `serve`, `chat`, `generate` and `bench`.
//!
//! Invariant: a flag of vLLM that this build does not serve yet is accepted only with the value that means what happens
//! anyway; any other value is refused by name, never ignored.

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::bail;
use clap::{Args, ValueEnum};
use fancy_regex::Regex;
use kittiwake::{Device, Options};
use runtime::model::QuantisationRules;
use runtime::program::KvDtype;
use runtime::weights::Quantisation;

use super::model;

/// Model, device and sizes.
#[derive(Debug, Args)]
pub struct EngineArgs {
    #[command(flatten)]
    pub source: model::Source,
    /// Where to run: auto, wgpu, wgpu:N, wgpu:NAME, cpu, reference (`kittiwake devices` lists them).
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// CPU worker threads [default: one per available core].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Whether a request's tokens never depend on its batch mates, bit by bit; cpu and reference always do so. `off` allows a
    /// GPU's fastest kernels; auto is on, since it costs less than a tenth.
    #[arg(long, default_value = "auto")]
    pub batch_invariant: BatchInvariantFlag,
    /// Run a WGSL file in the place of a built-in kernel of the wgpu device, e.g. attention=FILE.wgsl (`kittiwake kernel`); read
    /// again when it changes. May be given several times.
    #[cfg(feature = "wgpu")]
    #[arg(long, value_name = "NAME=FILE")]
    pub kernel: Vec<String>,
    #[cfg(feature = "wgpu")]
    #[command(flatten)]
    pub kernel_files: super::kernel_files::KernelFiles,
    /// Tokenizer file or directory, when it is not the model's own.
    #[arg(long, value_name = "PATH")]
    pub tokenizer: Option<PathBuf>,
    /// Chat template: a file, or the template itself.
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<String>,
    /// How the weights are stored.
    #[arg(long, default_value = "auto")]
    pub load_format: LoadFormat,
    /// Type of activations; they are 32-bit floats here whatever the checkpoint's type.
    #[arg(long, default_value = "auto", value_parser = ["auto", "float32", "float"])]
    pub dtype: String,
    /// Round the matrices of a checkpoint of floats when it is loaded: int4 (groups of 128 inputs), int8 (groups of 32), fp8 (a
    /// scale for each output); auto: as the checkpoint has them. Embedding, head and routers stay.
    #[arg(long, short = 'q', default_value = "auto", value_name = "auto|int4|int8|fp8", value_parser = quantization)]
    pub quantization: Quantisation,
    /// Round what matches to something else (or to none): a regular expression over the names of matrices in the program
    /// (`layers.3.mlp.down`, `layers.0.attn.o`); the first match counts.
    #[arg(long, value_name = "REGEX=FORMAT")]
    pub quantization_overrides: Vec<Override>,
    /// Longest context in tokens, prompt and output; `auto` or -1: the model's, or what fits. `32k` is accepted.
    #[arg(long, default_value = "auto")]
    pub max_model_len: MaxModelLen,
    /// Token budget of a step: decodes and prefill chunks.
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub max_num_batched_tokens: u32,
    /// Most sequences that run at a time.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    pub max_num_seqs: u32,
    /// Most requests that wait [default: 4 x max-num-seqs].
    #[arg(long)]
    pub max_num_queued_reqs: Option<u32>,
    /// Most prompt tokens that wait [default: no bound].
    #[arg(long)]
    pub max_num_queued_tokens: Option<u32>,
    /// Reuse the KV cache of shared prefixes.
    #[arg(long, default_value_t = true)]
    pub enable_prefix_caching: bool,
    /// Let long prompts share steps with decodes; always on.
    #[arg(long, default_value_t = true)]
    pub enable_chunked_prefill: bool,
    /// Longest chunk of one prompt in one step; 0: as long as the budget.
    #[arg(long, default_value_t = 0)]
    pub long_prefill_token_threshold: u32,
    /// Who runs first.
    #[arg(long, default_value = "fcfs", value_parser = ["fcfs"])]
    pub scheduling_policy: String,
    /// Tokens per KV block.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub block_size: u32,
    /// Type of cached K and V; auto is f16. fp8 is e4m3 without scales; int8 has a scale per token and head.
    #[arg(long, default_value = "auto")]
    pub kv_cache_dtype: KvCacheDtype,
    /// Memory for the KV cache: bytes, or with a suffix (512M, 4G) [default: what all sequences need, at most 25 % of free memory, on wgpu 1 GiB].
    #[arg(long, value_name = "BYTES")]
    pub kv_cache_memory_bytes: Option<Bytes>,
    /// Fraction of a GPU's memory to use; the CPU backends take --kv-cache-memory-bytes instead.
    #[arg(long, alias = "device-memory-utilization")]
    pub gpu_memory_utilization: Option<f32>,
    /// Override the number of KV blocks.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub num_gpu_blocks_override: Option<u32>,
    /// Devices that share one model: 1 here.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1))]
    pub tensor_parallel_size: u32,
    /// Devices that share the layers: 1 here.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1))]
    pub pipeline_parallel_size: u32,
    /// Replicas of the engine: 1 here.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1))]
    pub data_parallel_size: u32,
    /// Do not record device graphs; the CPU backends never do.
    #[arg(long)]
    pub enforce_eager: bool,
    /// Most alternatives that a request may ask log-probabilities for.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub max_logprobs: u32,
    /// What log-probabilities mean: of the raw logits.
    #[arg(long, default_value = "raw_logprobs", value_parser = ["raw_logprobs"])]
    pub logprobs_mode: String,
}

/// `auto`, and vLLM's name for files that say so themselves, are none.
fn quantization(name: &str) -> Result<Quantisation, String> {
    if ["auto", "gguf"].contains(&name) { Ok(Quantisation::None) } else { name.parse() }
}

/// A rule of `--quantization-overrides`.
#[derive(Clone, Debug)]
pub struct Override(Regex, Quantisation);

impl FromStr for Override {
    type Err = String;

    fn from_str(rule: &str) -> Result<Self, String> {
        let (pattern, format) = rule.rsplit_once('=').ok_or("expected REGEX=FORMAT")?;
        let pattern = Regex::new(pattern).map_err(|error| format!("'{pattern}': {error}"))?;
        Ok(Self(pattern, format.parse()?))
    }
}

impl EngineArgs {
    /// The options of `kittiwake::load` for `MODEL`.
    ///
    /// # Errors
    /// The model is not there, or a flag asks for what this build does not have.
    pub fn options(&self, model: &str, seed: u64) -> anyhow::Result<Options> {
        if self.gpu_memory_utilization.is_some() {
            bail!(
                "--gpu-memory-utilization: the CPU backends have no device memory of their own; use --kv-cache-memory-bytes"
            );
        }
        if !self.enable_chunked_prefill {
            bail!(
                "--no-enable-chunked-prefill: prompts are always computed in chunks; raise --max-num-batched-tokens for larger ones"
            );
        }
        if self.max_num_batched_tokens < self.max_num_seqs {
            bail!(
                "--max-num-batched-tokens {}: a step has a token for each of --max-num-seqs {} sequences; lower that too",
                self.max_num_batched_tokens,
                self.max_num_seqs
            );
        }
        let path = self.source.locate(model)?;
        let is_gguf = path.is_file();
        match self.load_format {
            LoadFormat::Gguf if !is_gguf => bail!("--load-format gguf: {} is not a file", path.display()),
            LoadFormat::Safetensors if is_gguf => {
                bail!("--load-format safetensors: {} is not a directory", path.display())
            }
            _ => {}
        }
        let mut options = Options::new(path);
        options.device = match self.device.as_str() {
            "auto" => None,
            name => Some(Device::from_str(name)?),
        };
        options.device_options.threads = self.threads.map(|threads| threads as usize);
        #[cfg(feature = "wgpu")]
        {
            options.device_options.gpu.batch_invariant = self.batch_invariant.into();
            options.device_options.gpu.kernels = self.users_kernels()?;
            options.device_options.gpu.cache_dir = self.kernel_files.dir();
            if matches!(options.device, None | Some(Device::Wgpu(_))) {
                options.device_options.gpu.tuning = self.kernel_files.tuning()?;
            }
            if !self.kernel.is_empty() && !matches!(options.device, Some(Device::Wgpu(_))) {
                bail!("--kernel: kernels run on the wgpu device; say --device wgpu");
            }
        }
        options.tokenizer.clone_from(&self.tokenizer);
        options.chat_template.clone_from(&self.chat_template);
        options.dummy_weights = matches!(self.load_format, LoadFormat::Dummy);
        options.kv_cache_dtype = self.kv_cache_dtype.into();
        let overrides =
            self.quantization_overrides.iter().map(|Override(pattern, to)| (pattern.clone(), *to)).collect();
        options.quantization = QuantisationRules { default: self.quantization, overrides };
        options.kv_cache_memory_bytes = self.kv_cache_memory_bytes.map(|bytes| bytes.0);
        options.num_gpu_blocks_override = self.num_gpu_blocks_override;
        options.max_model_len = self.max_model_len.0;
        let engine = &mut options.engine;
        engine.max_num_batched_tokens = self.max_num_batched_tokens;
        engine.max_num_seqs = self.max_num_seqs;
        engine.block_size = self.block_size;
        engine.enable_prefix_caching = self.enable_prefix_caching;
        engine.long_prefill_token_threshold = self.long_prefill_token_threshold;
        engine.max_num_queued_reqs = self.max_num_queued_reqs.unwrap_or(4 * self.max_num_seqs);
        engine.max_num_queued_tokens = self.max_num_queued_tokens.unwrap_or(0);
        engine.max_logprobs = self.max_logprobs;
        engine.seed = seed;
        Ok(options)
    }

    /// `--kernel NAME=FILE`, each kernel once.
    #[cfg(feature = "wgpu")]
    fn users_kernels(&self) -> anyhow::Result<Vec<shaders::lab::KernelFile>> {
        let mut files: Vec<shaders::lab::KernelFile> = Vec::new();
        for text in &self.kernel {
            let Some((kernel, file)) = text.split_once('=') else {
                bail!("--kernel {text}: expected NAME=FILE, e.g. attention=mine.wgsl")
            };
            if files.iter().any(|known| known.kernel == kernel) {
                bail!("--kernel {text}: there is a file for '{kernel}' already");
            }
            files.push(shaders::lab::KernelFile { kernel: kernel.into(), file: file.into() });
        }
        Ok(files)
    }
}

/// `--load-format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LoadFormat {
    /// By what MODEL is.
    Auto,
    /// A Hugging Face directory.
    Safetensors,
    /// A GGUF file.
    Gguf,
    /// Random weights of the model's shapes.
    Dummy,
}

/// `--batch-invariant`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BatchInvariantFlag {
    /// On where it costs less than a tenth.
    Auto,
    /// One order of sums for every batch.
    On,
    /// The fastest order for each batch.
    Off,
}

#[cfg(feature = "wgpu")]
impl From<BatchInvariantFlag> for shaders::BatchInvariant {
    fn from(flag: BatchInvariantFlag) -> Self {
        match flag {
            BatchInvariantFlag::Auto => Self::Auto,
            BatchInvariantFlag::On => Self::On,
            BatchInvariantFlag::Off => Self::Off,
        }
    }
}

/// `--kv-cache-dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvCacheDtype {
    /// f16.
    Auto,
    /// 16-bit float.
    #[value(alias = "float16")]
    F16,
    /// bfloat16.
    #[value(alias = "bfloat16")]
    Bf16,
    /// 32-bit float.
    #[value(alias = "float32")]
    F32,
    /// fp8_e4m3.
    Fp8,
    /// 8-bit float of 4 bits of exponent and 3 of fraction, without a scale: beyond ±448 values are cut off.
    #[value(name = "fp8_e4m3")]
    Fp8E4m3,
    /// 8-bit integer with one 32-bit scale per token and head.
    #[value(name = "int8_per_token_head", alias = "int8")]
    Int8PerTokenHead,
}

impl From<KvCacheDtype> for KvDtype {
    fn from(dtype: KvCacheDtype) -> Self {
        match dtype {
            KvCacheDtype::Auto | KvCacheDtype::F16 => Self::F16,
            KvCacheDtype::Bf16 => Self::Bf16,
            KvCacheDtype::F32 => Self::F32,
            KvCacheDtype::Fp8 | KvCacheDtype::Fp8E4m3 => Self::Fp8E4m3,
            KvCacheDtype::Int8PerTokenHead => Self::Int8PerTokenHead,
        }
    }
}

/// `--max-model-len`: tokens, `32k`, or `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxModelLen(pub Option<u32>);

impl FromStr for MaxModelLen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if matches!(text, "auto" | "-1") {
            return Ok(Self(None));
        }
        match u32::try_from(scaled(text)?) {
            Ok(0) | Err(_) => Err("expected 1 to 4294967295 tokens, or auto".into()),
            Ok(tokens) => Ok(Self(Some(tokens))),
        }
    }
}

/// A number of bytes: `1073741824`, `1G`, `1GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        scaled(text.strip_suffix("iB").unwrap_or(text)).map(Self)
    }
}

/// A whole number with vLLM's suffixes: lower case is decimal (k = 1000), upper case binary (K = 1024).
fn scaled(text: &str) -> Result<u64, String> {
    let (digits, factor) = match text.char_indices().next_back() {
        Some((at, suffix)) if suffix.is_ascii_alphabetic() => {
            let power =
                "kmgt".find(suffix.to_ascii_lowercase()).ok_or(format!("unknown suffix '{suffix}'"))? as u32 + 1;
            let base: u64 = if suffix.is_ascii_lowercase() { 1000 } else { 1024 };
            (&text[..at], base.pow(power))
        }
        _ => (text, 1),
    };
    let number: u64 =
        digits.parse().map_err(|_| format!("'{text}' is not a whole number with an optional suffix k, m, g, t"))?;
    number.checked_mul(factor).ok_or(format!("'{text}' is too large"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_take_suffixes_and_refuse_the_rest() {
        assert_eq!("32k".parse(), Ok(MaxModelLen(Some(32_000))));
        assert_eq!("4K".parse(), Ok(MaxModelLen(Some(4096))));
        assert_eq!("auto".parse(), Ok(MaxModelLen(None)));
        assert_eq!("2GiB".parse(), Ok(Bytes(2 << 30)));
        for bad in ["", "0", "-2", "k", "5x", "99999999999999999999", "9999999T"] {
            assert!(bad.parse::<MaxModelLen>().is_err(), "{bad}");
        }
    }
}
