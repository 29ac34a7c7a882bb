//! `kittiwake eval`: the perplexity of a text, through the engine that serves, and how far another model's predictions are.
//!
//! Invariant: what is scored is what llama.cpp's perplexity tool scores, so that figures compare: windows that do not overlap,
//! each with BOS in the place of its first token where the model wants one, the second half of each window counted. The sums are
//! f64; log-probabilities are the engine's, of raw logits.

use std::io::Write;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Args;
use kittiwake::{Loaded, Options};
use runtime::error::LoadError;
use runtime::ids::TokenId;
use runtime::model::QuantisationRules;
use runtime::request::{Event, FinishReason, Request, SamplingParams, TokenLogprobs};
use runtime::text::TextModel;
use serde::Serialize;

use super::engine_args::EngineArgs;
use super::model::{self, Running};

/// Arguments of `eval`.
#[derive(Debug, Args)]
#[command(
    long_about = "Measure the perplexity of a text.\n\nAs llama.cpp's perplexity tool has it: the text's tokens are cut into windows \
                  of --context tokens that do not overlap (what is left at the end is dropped), the first token of each is \
                  replaced by BOS where the model wants one, and the tokens of the second half of each window are scored, each \
                  given all of the window before it. +- is the standard error."
)]
pub struct EvalArgs {
    /// A directory, a .gguf file, `demo`, or `org/name[@revision][:file-or-quant]` of the hub.
    model: String,
    /// The text.
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Tokens of a window [default: the model's context, at most 2048].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(4..=1 << 24))]
    context: Option<u32>,
    /// Compare with another model of the same vocabulary: the mean KL divergence of MODEL's predictions from this one's, and how
    /// often both have the same best token. --quantization is not for the other one. Keeps the distributions of half a window in memory (4 bytes for each token of the
    /// vocabulary).
    #[arg(long, value_name = "MODEL")]
    against: Option<String>,
    #[command(flatten)]
    engine: EngineArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    device: String,
    context: u32,
    windows: usize,
    /// Scored.
    tokens: u64,
    perplexity: f64,
    standard_error: f64,
    seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    against: Option<Against>,
}

#[derive(Debug, Serialize)]
struct Against {
    model: String,
    perplexity: f64,
    standard_error: f64,
    /// Of `model` here as the truth and the other as the estimate, in nats.
    mean_kl_divergence: f64,
    /// Share of tokens, 0 to 1.
    same_top_token: f64,
}

/// Sums of negative log-probabilities.
#[derive(Debug, Default)]
struct Score {
    tokens: u64,
    sum: f64,
    sum_of_squares: f64,
}

impl Score {
    fn add(&mut self, logprob: f32) {
        let surprise = -f64::from(logprob);
        self.tokens += 1;
        self.sum += surprise;
        self.sum_of_squares += surprise * surprise;
    }

    /// The perplexity and its standard error.
    fn perplexity(&self) -> (f64, f64) {
        let n = self.tokens as f64;
        let (mean, mean_of_squares) = (self.sum / n, self.sum_of_squares / n);
        let of_mean = ((mean_of_squares - mean * mean).max(0.0) / (n - 1.0).max(1.0)).sqrt();
        (mean.exp(), of_mean * mean.exp())
    }
}

/// How the predictions of two models differ.
#[derive(Debug, Default)]
struct Divergence {
    sum: f64,
    same_top: u64,
}

impl Divergence {
    /// `truth` is `[vocab]` log-probabilities.
    fn add(&mut self, truth: &[f32], estimate: &TokenLogprobs) {
        let terms = estimate.top.iter().map(|&(token, estimated)| {
            let true_logprob = f64::from(truth[token.index()]);
            true_logprob.exp() * (true_logprob - f64::from(estimated))
        });
        self.sum += terms.sum::<f64>();
        let best = truth.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        self.same_top += u64::from(estimate.top.first().is_some_and(|&(token, _)| truth[token.index()] == best));
    }
}

/// Measures and prints.
pub fn run(args: &EvalArgs) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(&args.text).with_context(|| format!("--text {}", args.text.display()))?;
    let options = args.engine.options(&args.model, 0)?;
    let mut models = vec![load(args, options)?];
    if let Some(other) = &args.against {
        // As its files have it: so a model is compared with itself in fewer bits.
        let options = Options { quantization: QuantisationRules::default(), ..args.engine.options(other, 0)? };
        models.push(load(args, options)?);
        check_same_vocabulary(&models[0], &models[1], other)?;
    }
    let loaded = &models[0];
    let windows = windows(&loaded.text, &text, loaded.engine.config().max_model_len as usize)
        .context("give a longer text or a smaller --context")?;
    let start = Instant::now();
    let (mut score, mut other_score, mut divergence) = (Score::default(), Score::default(), Divergence::default());
    for window in &windows {
        match models.get(1) {
            None => predict(loaded, window, 0, |entry| score.add(entry.logprob))?,
            Some(other) => {
                let vocab = loaded.info.vocab_size;
                let mut truths: Vec<Vec<f32>> = Vec::new();
                predict(other, window, vocab, |entry| {
                    other_score.add(entry.logprob);
                    truths.push(dense(&entry, vocab));
                })?;
                let mut truths = truths.into_iter();
                predict(loaded, window, vocab, |entry| {
                    score.add(entry.logprob);
                    divergence.add(&truths.next().expect("both score the same tokens"), &entry);
                })?;
            }
        }
    }
    let (perplexity, standard_error) = score.perplexity();
    let against = args.against.clone().map(|model| {
        let (perplexity, standard_error) = other_score.perplexity();
        let share = |sum: f64| sum / score.tokens as f64;
        let (mean_kl_divergence, same_top_token) = (share(divergence.sum), share(divergence.same_top as f64));
        Against { model, perplexity, standard_error, mean_kl_divergence, same_top_token }
    });
    print(
        args,
        &Report {
            model: args.model.clone(),
            device: loaded.device.clone(),
            context: loaded.engine.config().max_model_len,
            windows: windows.len(),
            tokens: score.tokens,
            perplexity,
            standard_error,
            seconds: start.elapsed().as_secs_f64(),
            against,
        },
    )
}

fn print(args: &EvalArgs, report: &Report) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(report)?)?;
        return Ok(());
    }
    let Report { model, device, context, windows, tokens, perplexity, standard_error, seconds, against } = report;
    writeln!(out, "{model} on {device}")?;
    writeln!(
        out,
        "perplexity {perplexity:.4} +- {standard_error:.4} over {tokens} tokens ({windows} windows of {context}) in {seconds:.1} s"
    )?;
    if let Some(Against { model, perplexity, standard_error, mean_kl_divergence, same_top_token }) = against {
        writeln!(out, "against {model}, perplexity {perplexity:.4} +- {standard_error:.4}")?;
        let percent = 100.0 * same_top_token;
        writeln!(out, "mean KL divergence {mean_kl_divergence:.6}, the same top token in {percent:.2} %")?;
    }
    Ok(())
}

/// The most tokens of a window when no flag says otherwise.
const MAX_DEFAULT_CONTEXT: u32 = 2048;

/// A model that takes one window at a time.
fn load(args: &EvalArgs, mut options: Options) -> anyhow::Result<Running> {
    options.engine.max_num_seqs = 1;
    options.engine.max_logprobs = u32::MAX;
    let context = match args.context {
        Some(context) => context,
        None => kittiwake::info(&options)?.max_position.min(MAX_DEFAULT_CONTEXT),
    };
    options.max_model_len = options.max_model_len.or(Some(context));
    model::load(&options).with_context(|| format!("eval needs a context of {context} tokens (--context)"))
}

/// A text's tokens in windows of a length, each with BOS in the place of its first token where the model wants one.
///
/// # Errors
/// The text is shorter than a window.
pub fn windows(tokenizer: &TextModel, text: &str, len: usize) -> anyhow::Result<Vec<Vec<TokenId>>> {
    let ids = tokenizer.encode(text, true, false);
    let bos = tokenizer.bos_token_id().filter(|bos| tokenizer.encode("", true, false).first() == Some(bos));
    let windows: Vec<Vec<TokenId>> = ids
        .chunks_exact(len)
        .map(|window| {
            let mut window = window.to_vec();
            window[0] = bos.unwrap_or(window[0]);
            window
        })
        .collect();
    if windows.is_empty() {
        bail!("the text has {} tokens, a window {len}", ids.len());
    }
    Ok(windows)
}

/// Hears the log-probabilities of each scored token of a window, in order, with those of the `top` most probable at its place.
///
/// The last token is not fed, since nothing comes after it: it is the one that may be drawn.
fn predict(loaded: &Loaded, window: &[TokenId], top: u32, mut hear: impl FnMut(TokenLogprobs)) -> anyhow::Result<()> {
    let (&last, prompt) = window.split_last().expect("a window has tokens");
    let params = SamplingParams {
        temperature: 0.0,
        max_tokens: 1,
        ignore_eos: true,
        allowed_token_ids: Some(vec![last]),
        logprobs: Some(top),
        prompt_logprobs: Some(top),
        ..SamplingParams::default()
    };
    let (sender, events) = mpsc::channel();
    let request = Request { id: loaded.engine.next_id(), prompt: prompt.into(), params, cache_salt: None };
    loaded.engine.submit(request, Box::new(move |event: Event| sender.send(event).is_ok()))?;
    let first_scored = window.len() / 2 + 1;
    let mut position = 0;
    for event in events {
        match event {
            Event::PromptLogprobs(entries) => {
                for entry in entries {
                    if position >= first_scored {
                        hear(entry.context("a prompt token without log-probabilities")?);
                    }
                    position += 1;
                }
            }
            Event::Token { logprobs, .. } => hear(*logprobs.context("a token without log-probabilities")?),
            Event::Finished { reason: FinishReason::Error, .. } => bail!("the model's logits were not finite"),
            Event::Failed(message) => bail!("the engine failed: {message}"),
            Event::Started { .. } | Event::Finished { .. } => {}
        }
    }
    Ok(())
}

/// `[vocab]` log-probabilities, by token.
fn dense(entry: &TokenLogprobs, vocab: u32) -> Vec<f32> {
    let mut row = vec![f32::NAN; vocab as usize];
    for &(token, logprob) in &entry.top {
        row[token.index()] = logprob;
    }
    row
}

/// # Errors
/// `Config` naming the first token that differs.
fn check_same_vocabulary(model: &Loaded, other: &Loaded, name: &str) -> Result<(), LoadError> {
    let differs = |problem: String| LoadError::Config { path: name.into(), key: "vocabulary".into(), problem };
    let sizes = |loaded: &Loaded| (loaded.info.vocab_size, loaded.text.vocab_size());
    if sizes(model) != sizes(other) {
        let ((logits, tokens), (other_logits, other_tokens)) = (sizes(model), sizes(other));
        return Err(differs(format!(
            "--against has {other_tokens} tokens ({other_logits} logits), MODEL {tokens} ({logits})"
        )));
    }
    let mut ids = (0..model.text.vocab_size() as u32).map(TokenId);
    match ids.find(|&id| model.text.token_str(id) != other.text.token_str(id)) {
        None => Ok(()),
        Some(id) => {
            let (own, others) = (model.text.token_str(id), other.text.token_str(id));
            Err(differs(format!("token {id} is {others:?}, of MODEL {own:?}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fair_coin_has_a_perplexity_of_two_and_no_error() {
        let mut score = Score::default();
        (0..10).for_each(|_| score.add(0.5_f32.ln()));
        let (perplexity, error) = score.perplexity();
        assert!((perplexity - 2.0).abs() < 1e-6 && error < 1e-4, "{perplexity} +- {error}");
        // Two of one kind and two of another: the mean is ln 4, a deviation ln 2.
        let mut score = Score::default();
        [0.5_f32, 0.5, 0.125, 0.125].into_iter().for_each(|p| score.add(p.ln()));
        let (perplexity, error) = score.perplexity();
        assert!((perplexity - 4.0).abs() < 1e-5, "{perplexity}");
        assert!((error - 4.0 * 2f64.ln() / 3f64.sqrt()).abs() < 1e-5, "{error}");
    }

    #[test]
    fn divergence_is_zero_of_the_same_and_ln_2_of_a_coin_from_certainty() {
        let entry = |top: &[(u32, f32)]| {
            let top = top.iter().map(|&(id, p)| (TokenId(id), p.ln())).collect();
            TokenLogprobs { logprob: 0.0, rank: 1, top }
        };
        let coin = entry(&[(1, 0.5), (0, 0.5)]);
        let mut same = Divergence::default();
        same.add(&dense(&coin, 2), &coin);
        assert_eq!((same.sum, same.same_top), (0.0, 1));
        let mut certain = Divergence::default();
        certain.add(&[0.0, -9999.0], &coin);
        assert!((certain.sum - 2f64.ln()).abs() < 1e-6, "{}", certain.sum);
        assert_eq!(certain.same_top, 0, "the other's best is the second token");
    }
}
