//! `kittiwake bench`: prefill and decode speed of a model on this machine, through the whole engine.
//!
//! Invariant: prefill and decode are measured apart, as llama.cpp's bench tools do: prefill is prompt tokens over the time
//! until every sequence has its first token; decode is the tokens after that over the time they took, all sequences
//! together. Prompts differ from run to run, so that the prefix cache never helps.

use std::io::Write;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Args;
use kittiwake::Loaded;
use runtime::ids::TokenId;
use runtime::request::{Event, Request, SamplingParams};
use serde::Serialize;

use super::{engine_args::EngineArgs, model};

/// Arguments of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// A directory, a .gguf file, `demo`, or `org/name[@revision][:file-or-quant]` of the hub.
    #[arg(default_value = "demo")]
    model: String,
    #[command(flatten)]
    engine: EngineArgs,
    /// Prompt tokens of the prefill measurement; 0 leaves it out.
    #[arg(long, default_value_t = 512, value_parser = tokens(0))]
    prompt_tokens: u32,
    /// Output tokens of the decode measurement; 0 leaves it out.
    #[arg(long, default_value_t = 128, value_parser = tokens(0))]
    output_tokens: u32,
    /// Context that decode starts at.
    #[arg(long, default_value_t = 1, value_parser = tokens(1))]
    depth: u32,
    /// Numbers of parallel sequences to measure.
    #[arg(long, value_delimiter = ',', default_value = "1,8", value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    batch: Vec<u32>,
    /// Repeat each measurement and report the median.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    device: String,
    load_s: f64,
    prompt_tokens: u32,
    output_tokens: u32,
    runs: Vec<Run>,
}

#[derive(Debug, Serialize)]
struct Run {
    batch: u32,
    /// In each sequence's cache when its decode starts.
    decode_context_tokens: u32,
    prefill_tokens_per_s: Option<f64>,
    decode_tokens_per_s: Option<f64>,
    ttft_s: Option<f64>,
}

/// One batch of equal sequences, measured.
struct Measured {
    until_first_tokens_s: f64,
    after_first_tokens_s: f64,
}

/// Bounded, so that sums of lengths cannot overflow; models are far shorter.
fn tokens(least: i64) -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(least..=1 << 24)
}

/// Measures and prints.
pub fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let longest = args.prompt_tokens.max(args.depth + args.output_tokens) + 1;
    let mut options = args.engine.options(&args.model, 0)?;
    let (largest, budget) = (args.batch.iter().copied().max().unwrap_or(1), options.engine.max_num_batched_tokens);
    if largest > budget {
        bail!("--batch {largest}: a step has --max-num-batched-tokens {budget}; raise that too");
    }
    options.engine.max_num_seqs = largest;
    options.engine.max_num_queued_reqs = options.engine.max_num_queued_reqs.max(options.engine.max_num_seqs);
    options.max_model_len = options.max_model_len.or(Some(longest));
    let loaded = model::load(&options).with_context(|| {
        format!("bench needs a context of {longest} tokens (--prompt-tokens, --depth, --output-tokens)")
    })?;

    let mut runs = Vec::new();
    for &batch in &args.batch {
        let prefill = median(args.rounds, args.prompt_tokens, |round| {
            Ok(measure(&loaded, batch, args.prompt_tokens, 1, round)?.until_first_tokens_s)
        })?;
        let decode = median(args.rounds, args.output_tokens, |round| {
            Ok(measure(&loaded, batch, args.depth, args.output_tokens + 1, round)?.after_first_tokens_s)
        })?;
        runs.push(Run {
            batch,
            decode_context_tokens: args.depth,
            prefill_tokens_per_s: prefill.map(|s| f64::from(batch) * f64::from(args.prompt_tokens) / s),
            decode_tokens_per_s: decode.map(|s| f64::from(batch) * f64::from(args.output_tokens) / s),
            ttft_s: prefill,
        });
    }
    let report = Report {
        model: args.model.clone(),
        device: loaded.device.clone(),
        load_s: loaded.load_time.as_secs_f64(),
        prompt_tokens: args.prompt_tokens,
        output_tokens: args.output_tokens,
        runs,
    };
    print(args, &report)
}

fn print(args: &BenchArgs, report: &Report) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(report)?)?;
        return Ok(());
    }
    writeln!(out, "{} on {}, loaded in {:.2} s", report.model, report.device, report.load_s)?;
    writeln!(out, "{:>6} {:>16} {:>16} {:>10}", "batch", "prefill tok/s", "decode tok/s", "TTFT s")?;
    let cell = |value: Option<f64>, digits: usize| value.map_or("-".into(), |value| format!("{value:.digits$}"));
    for run in &report.runs {
        let (prefill, decode) = (cell(run.prefill_tokens_per_s, 1), cell(run.decode_tokens_per_s, 1));
        writeln!(out, "{:>6} {prefill:>16} {decode:>16} {:>10}", run.batch, cell(run.ttft_s, 3))?;
    }
    Ok(())
}

/// The median of `rounds` measurements after one that is thrown away; `None` when there is nothing to measure.
fn median(
    rounds: u32,
    tokens: u32,
    mut measure: impl FnMut(u32) -> anyhow::Result<f64>,
) -> anyhow::Result<Option<f64>> {
    if tokens == 0 {
        return Ok(None);
    }
    let mut seconds = (0..=rounds).map(&mut measure).skip(1).collect::<anyhow::Result<Vec<f64>>>()?;
    seconds.sort_by(f64::total_cmp);
    Ok(Some(seconds[seconds.len() / 2]))
}

/// Runs `batch` sequences of `prompt` tokens to `output` tokens each.
fn measure(loaded: &Loaded, batch: u32, prompt: u32, output: u32, round: u32) -> anyhow::Result<Measured> {
    let engine = &loaded.engine;
    engine.reset_prefix_cache()?;
    let (sender, events) = mpsc::channel();
    let params = SamplingParams { temperature: 0.0, max_tokens: output, ignore_eos: true, ..SamplingParams::default() };
    let mut requests: Vec<(Request, Box<dyn runtime::request::EventSink>)> = Vec::new();
    for sequence in 0..batch {
        let id = engine.next_id();
        let prompt: Arc<[TokenId]> =
            (0..prompt).map(|i| scrambled(round, sequence, i, loaded.info.vocab_size)).collect();
        let request = Request { id, prompt, params: params.clone(), cache_salt: None };
        let sender = sender.clone();
        requests.push((
            request,
            Box::new(move |event: Event| sender.send((sequence as usize, Instant::now(), event)).is_ok()),
        ));
    }
    drop(sender);
    let start = Instant::now();
    engine.submit_all(requests)?;

    let (mut waiting, mut first, mut last) = (vec![true; batch as usize], start, start);
    for (sequence, at, event) in events {
        match event {
            Event::Token { .. } => {
                if std::mem::take(&mut waiting[sequence]) {
                    first = at;
                }
                last = at;
            }
            Event::Failed(message) => bail!("the engine failed: {message}"),
            Event::Started { .. } | Event::PromptLogprobs(_) | Event::Finished { .. } => {}
        }
    }
    if waiting.contains(&true) {
        bail!("a sequence ended without a token");
    }
    Ok(Measured {
        until_first_tokens_s: (first - start).as_secs_f64(),
        after_first_tokens_s: (last - first).as_secs_f64(),
    })
}

/// A token id that differs by round, sequence and place: a hash, so that no two prompts share a prefix.
fn scrambled(round: u32, sequence: u32, place: u32, vocab_size: u32) -> TokenId {
    let mixed =
        (u64::from(round) << 40 ^ u64::from(sequence) << 20 ^ u64::from(place)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    TokenId((mixed >> 33) as u32 % vocab_size)
}
