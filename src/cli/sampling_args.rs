//! Flags that say how tokens are drawn and when an answer ends: shared by `generate` and `chat`.
//!
//! Invariant: one flag per field of `SamplingParams`, under the name that requests use over HTTP. What a flag leaves open
//! comes from the model's generation config, then from vLLM's defaults.

use std::str::FromStr;

use clap::Args;
use runtime::error::RequestError;
use runtime::ids::TokenId;
use runtime::request::SamplingParams;
use runtime::text::{GenerationDefaults, TextModel, TextStreamOptions};

/// Sampling options.
#[derive(Debug, Args)]
pub struct SamplingArgs {
    /// At most this many output tokens [default: 256].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: Option<u32>,
    /// 0 is greedy; up to 2.
    #[arg(long)]
    pub temperature: Option<f32>,
    /// Keep the most probable tokens that sum to this probability.
    #[arg(long)]
    pub top_p: Option<f32>,
    /// Keep this many most probable tokens; 0 or -1: all.
    #[arg(long, value_parser = clap::value_parser!(i64).range(-1..=i64::from(u32::MAX)))]
    pub top_k: Option<i64>,
    /// Keep tokens with at least this fraction of the top probability.
    #[arg(long)]
    pub min_p: Option<f32>,
    /// Above 1 discourages tokens of prompt and output.
    #[arg(long)]
    pub repetition_penalty: Option<f32>,
    /// Above 0 discourages tokens of the output.
    #[arg(long, default_value_t = 0.0)]
    pub presence_penalty: f32,
    /// Above 0 discourages frequent tokens of the output.
    #[arg(long, default_value_t = 0.0)]
    pub frequency_penalty: f32,
    /// Add to one token's logit: ID=BIAS; may be given several times.
    #[arg(long, value_name = "ID=BIAS")]
    pub logit_bias: Vec<LogitBias>,
    /// Draw from these tokens only.
    #[arg(long, value_delimiter = ',', value_name = "ID,…")]
    pub allowed_token_ids: Vec<u32>,
    /// Never write this word; may be given several times.
    #[arg(long, allow_hyphen_values = true, value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub bad_words: Vec<String>,
    /// Key of the noise: the same seed gives the same answer [default: the same one at every start].
    #[arg(long)]
    pub seed: Option<u64>,
    /// End the answer at this text; may be given several times.
    #[arg(long, allow_hyphen_values = true, value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
    /// Leave the stop text in the answer.
    #[arg(long)]
    pub include_stop_str_in_output: bool,
    /// End the answer at one of these tokens.
    #[arg(long, value_delimiter = ',', value_name = "ID,…")]
    pub stop_token_ids: Vec<u32>,
    /// No end before this many output tokens.
    #[arg(long, default_value_t = 0)]
    pub min_tokens: u32,
    /// Go on past the model's end-of-sequence tokens.
    #[arg(long)]
    pub ignore_eos: bool,
}

/// `ID=BIAS`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitBias(pub TokenId, pub f32);

impl FromStr for LogitBias {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed =
            text.split_once('=').and_then(|(id, bias)| Some(Self(TokenId(id.parse().ok()?), bias.parse().ok()?)));
        parsed.ok_or_else(|| format!("'{text}' is not ID=BIAS"))
    }
}

impl SamplingArgs {
    /// How the answer becomes text.
    pub fn stream_options(&self) -> TextStreamOptions {
        TextStreamOptions {
            stop: self.stop.clone(),
            include_stop: self.include_stop_str_in_output,
            min_tokens: self.min_tokens,
            skip_special: true,
        }
    }

    /// The parameters of a request, where the model fills in what no flag says. Ids are checked by the engine, which knows
    /// the vocabulary.
    ///
    /// # Errors
    /// A bad word without text.
    pub fn params(&self, text: &TextModel) -> Result<SamplingParams, RequestError> {
        let mut params = self.params_without_text(text.generation_defaults());
        params.eos_token_ids = text.eos_token_ids().to_vec();
        params.ban_words(&self.bad_words, |word| text.encode(word, false, true))?;
        Ok(params)
    }

    fn params_without_text(&self, model: &GenerationDefaults) -> SamplingParams {
        let base = model.params();
        let mut params = SamplingParams {
            temperature: self.temperature.unwrap_or(base.temperature),
            top_p: self.top_p.unwrap_or(base.top_p),
            top_k: self.top_k.map_or(base.top_k, |k| u32::try_from(k).unwrap_or(0)),
            min_p: self.min_p.unwrap_or(base.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(base.repetition_penalty),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.iter().map(|bias| (bias.0, bias.1)).collect(),
            seed: self.seed,
            max_tokens: self.max_tokens.or(model.max_new_tokens).unwrap_or(256),
            min_tokens: self.min_tokens,
            stop_token_ids: self.stop_token_ids.iter().copied().map(TokenId).collect(),
            ignore_eos: self.ignore_eos,
            ..base
        };
        if !self.allowed_token_ids.is_empty() {
            params.allow_only(self.allowed_token_ids.iter().copied().map(TokenId));
        }
        params
    }

    /// Refuses what no model could serve, before one is loaded.
    ///
    /// # Errors
    /// Names the option and its range.
    pub fn check(&self) -> Result<(), RequestError> {
        self.params_without_text(&GenerationDefaults::default()).validate(u32::MAX, u32::MAX)
    }
}
