//! `kittiwake generate`: continue one prompt and print the result, as text or as one JSON object.

use std::io::Write;

use anyhow::bail;
use clap::Args;
use runtime::ids::TokenId;
use runtime::request::SamplingParams;

use super::answer::{Question, answer};
use super::engine_args::EngineArgs;
use super::model;
use super::sampling_args::SamplingArgs;

/// Arguments of `generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// A directory, a .gguf file, `demo`, or `org/name[@revision][:file-or-quant]` of the hub.
    model: String,
    /// Text to continue, as it is (no chat template).
    #[arg(long, allow_hyphen_values = true, conflicts_with = "prompt_ids", required_unless_present = "prompt_ids")]
    prompt: Option<String>,
    /// Token ids to continue.
    #[arg(long, value_delimiter = ',', value_name = "ID,…")]
    prompt_ids: Vec<u32>,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Report log-probabilities of each output token and of this many alternatives (with --json).
    #[arg(long, value_name = "K")]
    logprobs: Option<u32>,
    /// The same for each prompt token (with --json).
    #[arg(long, value_name = "K")]
    prompt_logprobs: Option<u32>,
    /// Print one JSON object: prompt_ids, token_ids, text, finish_reason, logprobs, device, timings.
    #[arg(long)]
    json: bool,
}

/// Loads, continues, prints.
pub fn run(args: &GenerateArgs) -> anyhow::Result<()> {
    if !args.json && (args.logprobs.is_some() || args.prompt_logprobs.is_some()) {
        bail!("--logprobs and --prompt-logprobs are reported with --json only");
    }
    args.sampling.check()?;
    let loaded = model::load(&args.engine.options(&args.model, 0)?)?;
    let text = &loaded.text;
    let prompt = match &args.prompt {
        Some(prompt) => text.encode(prompt, true, true),
        None => args.prompt_ids.iter().copied().map(TokenId).collect(),
    };
    let params = SamplingParams {
        logprobs: args.logprobs,
        prompt_logprobs: args.prompt_logprobs,
        ..args.sampling.params(text)?
    };
    let mut out = std::io::stdout();
    let answer = answer(&loaded, Question { prompt, params, stream: args.sampling.stream_options() }, |text| {
        // A closed pipe ends the answer.
        args.json || out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_ok()
    })?;
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&answer)?)?;
    } else {
        writeln!(out)?;
    }
    Ok(())
}
