//! The command line: one file per subcommand, flags shared through `engine_args` and `sampling_args`.
//!
//! Invariant: flags carry vLLM's names and defaults where one exists; each has an environment twin `KITTIWAKE_<FLAG>`, and
//! `--config FILE.yaml` may set any of them (command line over environment over file over default). Standard output carries the
//! answer only, everything else goes to standard error.

mod answer;
mod args;
mod bench;
mod chat;
mod devices;
mod engine_args;
mod eval;
mod generate;
#[cfg(feature = "hub")]
mod hub_args;
#[cfg(feature = "wgpu")]
mod kernel;
#[cfg(feature = "wgpu")]
mod kernel_files;
mod model;
#[cfg(feature = "hub")]
mod pull;
mod quantize;
mod sampling_args;
mod serve;

use std::ffi::OsString;
use std::fmt;
use std::io::{self, IsTerminal, Write};

use clap::{Args, Parser, Subcommand};

const LAYERS: &str = "\
Every flag has an environment twin (--max-model-len is KITTIWAKE_MAX_MODEL_LEN) and a key in --config FILE.
The command line wins over the environment, the environment over the file.";

/// LLM inference and serving for any GPU, and for the CPU where there is none.
#[derive(Debug, Parser)]
#[command(name = "kittiwake", version, args_override_self = true, propagate_version = true, after_help = LAYERS)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Args)]
struct Global {
    /// What to log: error, warn, info, debug, trace, or a filter such as `warn,server=debug`.
    #[arg(long, global = true, default_value = "info", value_name = "LEVEL")]
    log_level: String,
    /// YAML file with flags of the subcommand, e.g. `max-model-len: 2048`.
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<std::path::PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a model over HTTP with the OpenAI protocol.
    Serve(Box<serve::ServeArgs>),
    /// Talk to a model in the terminal.
    Chat(Box<chat::ChatArgs>),
    /// Continue one prompt and print the result.
    Generate(Box<generate::GenerateArgs>),
    /// Measure prefill and decode speed.
    Bench(Box<bench::BenchArgs>),
    /// Fetch a model from the hub into its cache and print where it is.
    #[cfg(feature = "hub")]
    Pull(pull::PullArgs),
    /// Measure the perplexity of a text, alone or against another model.
    Eval(Box<eval::EvalArgs>),
    /// Write a checkpoint of floats in fewer bits.
    Quantize(Box<quantize::QuantizeArgs>),
    /// List the devices that models can run on.
    Devices(devices::DevicesArgs),
    /// Write, check, measure and translate WGSL kernels.
    #[cfg(feature = "wgpu")]
    Kernel(kernel::KernelArgs),
}

/// Parses the command line and runs the subcommand.
///
/// # Errors
/// Whatever the subcommand says; usage errors exit with code 2 at once, as clap does.
pub fn run(arguments: impl Iterator<Item = OsString>, environment: args::Environment) -> anyhow::Result<()> {
    let mut found = Vec::new();
    #[cfg(feature = "wgpu")]
    found.extend(kernel_files::default_dir(environment).map(|dir| (kernel_files::DIR_FLAG, dir)));
    #[cfg(feature = "hub")]
    found.extend(hub_args::found(environment));
    let cli = match args::parse::<Cli>(arguments, environment, &found) {
        Ok(cli) => cli,
        Err(args::ArgsError::Usage(error)) => error.exit(),
        Err(args::ArgsError::Layer(error)) => return Err(error),
    };
    start_logging(&cli.global.log_level)?;
    match cli.command {
        Command::Serve(args) => serve::run(*args),
        Command::Chat(args) => chat::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Bench(args) => bench::run(&args),
        #[cfg(feature = "hub")]
        Command::Pull(args) => pull::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Quantize(args) => quantize::run(&args),
        Command::Devices(args) => devices::run(&args),
        #[cfg(feature = "wgpu")]
        Command::Kernel(args) => kernel::run(&args),
    }
}

/// Whether the reader of our output went away.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// Writes to standard error; that nobody reads it is no reason to stop.
pub fn note(text: fmt::Arguments) {
    let _ = io::stderr().write_fmt(text);
}

/// Logs go to standard error: standard output belongs to the answer.
fn start_logging(filter: &str) -> anyhow::Result<()> {
    // A bare word would be taken for the name of a module, and everything else silenced.
    let levels = ["off", "error", "warn", "info", "debug", "trace"];
    if let Some(word) =
        filter.split(',').find(|part| !part.contains('=') && !levels.contains(&part.to_lowercase().as_str()))
    {
        anyhow::bail!("--log-level: '{word}' is none of {}, and not of the form module=level", levels.join(", "));
    }
    let filter = tracing_subscriber::EnvFilter::try_new(filter)
        .map_err(|error| anyhow::anyhow!("--log-level '{filter}': {error}"))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .init();
    Ok(())
}
