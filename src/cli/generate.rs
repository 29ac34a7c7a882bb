//! `kittiwake generate`: continue one prompt and print the result, as text or as one JSON object.

use std::io::Write;

use anyhow::bail;
use clap::Args;
use runtime::ids::TokenId;

use super::answer::{Question, answer};
use super::engine_args::EngineArgs;
use super::model;
use super::sampling_args::SamplingArgs;

/// Arguments of `generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// A directory, a .gguf file, or `demo`.
    model: String,
    /// Text to continue, as it is (no chat template).
    #[arg(long, conflicts_with = "prompt_ids", required_unless_present = "prompt_ids")]
    prompt: Option<String>,
    /// Token ids to continue.
    #[arg(long, value_delimiter = ',', value_name = "ID,…")]
    prompt_ids: Option<Vec<u32>>,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Report log-probabilities of each output token and of this many alternatives (with --json).
    #[arg(long, value_name = "K", requires = "json")]
    logprobs: Option<u32>,
    /// The same for each prompt token (with --json).
    #[arg(long, value_name = "K", requires = "json")]
    prompt_logprobs: Option<u32>,
    /// Print one JSON object: prompt_ids, token_ids, text, finish_reason, logprobs, device, timings.
    #[arg(long)]
    json: bool,
}

/// Loads, continues, prints.
pub fn run(args: &GenerateArgs) -> anyhow::Result<()> {
    let loaded = model::load(&args.engine.options(&args.model, 0)?)?;
    let prompt: Vec<TokenId> = match (&args.prompt, &args.prompt_ids) {
        (Some(text), _) => loaded.text.encode(text, true, true),
        (None, Some(ids)) => ids.iter().copied().map(TokenId).collect(),
        (None, None) => bail!("--prompt or --prompt-ids is needed"),
    };
    let mut params = args.sampling.params(&loaded.text);
    params.logprobs = args.logprobs;
    params.prompt_logprobs = args.prompt_logprobs;
    let mut out = std::io::stdout();
    let answer = answer(&loaded, Question { prompt, params, stream: args.sampling.stream_options() }, |text| {
        // A closed pipe ends the answer.
        args.json || out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_ok()
    })?;
    if args.json {
        println!("{}", serde_json::to_string(&answer)?);
    } else {
        println!();
    }
    Ok(())
}
