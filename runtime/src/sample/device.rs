//! What a device samples by itself, so that a row of logits need not cross the bus: what is asked for (`Draw`), what comes
//! back (`Sample`), and which requests take this way.
//!
//! Invariant: the drawn token is bit for bit that of `Sampler::draw` on the same logits, on every device. Noise is computed
//! in f64, which GPUs lack: they hand back every token whose f32 score is within `WINDOW` of the best, and `Sample::chosen`
//! decides among those in f64. Backends whose memory is the host's call `sample_row`. The way of a request is chosen by its
//! parameters alone, for life.

use bytemuck::{Pod, Zeroable};

use super::argmax::argmax;
use super::draw::{self, Noise};
use super::exp::sum_of_exp;
use super::kept::{Candidate, best_of};
use super::logprobs::{Softmax, rank};
use super::temperature::{self, ScaledRow};
use super::{EDITS, FILTERS};
use crate::ids::TokenId;
use crate::request::{SamplingParams, TokenLogprobs};
use crate::step::DrawnToken;

/// Most alternatives of which a device reports log-probabilities; who asks for more is sampled on the host.
pub const MAX_TOP: usize = 20;
/// Most tokens that a device may leave to be decided among: a ninth within `WINDOW` comes up less than once in 1e27 draws.
pub const MAX_CONTENDERS: usize = 8;
/// A token may win only if its f32 score is at most this far below the best f32 score. Twice the error of a device's scores
/// must be less: noise is at most 23 and is off by 5e-6, and sums of this size are rounded by 2e-6.
pub const WINDOW: f32 = 1e-4;

/// What is wanted of one sampled row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Draw {
    /// Multiplies logits; 0 is greedy.
    pub inverse_temperature: f32,
    /// Key of the noise.
    pub seed: u64,
    /// Absolute position of the drawn token.
    pub position: u32,
    /// Whether log-probabilities are wanted, and those of how many alternatives: at most `MAX_TOP`.
    pub logprobs: Option<u32>,
}

/// What a device found in one row of logits: words as its kernels write them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Sample {
    /// How many of `contenders` there are; 0 where a logit is not finite.
    pub num_contenders: u32,
    /// How many of `top` there are.
    pub num_top: u32,
    /// The largest logit.
    pub max: f32,
    /// The f64 sum of `e^(logit - max)`, low word first, where log-probabilities are wanted.
    pub sum: [u32; 2],
    /// The tokens that may be the drawn one, in no order.
    pub contenders: [Contender; MAX_CONTENDERS],
    /// The largest logits, best first, of equal ones the lowest id first.
    pub top: [Ranked; MAX_TOP],
}

/// A token that may be the drawn one.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Contender {
    /// The token.
    pub id: u32,
    /// Its logit.
    pub logit: f32,
    /// 1 for the largest logit, where log-probabilities are wanted.
    pub rank: u32,
}

/// A token with one of the largest logits.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Ranked {
    /// The token.
    pub id: u32,
    /// Its logit.
    pub logit: f32,
}

impl Draw {
    /// Words of a row's draw in the step inputs.
    pub const WORDS: usize = 5;

    /// As the step inputs hold it: 1 + the number of alternatives or 0, inverse temperature, seed (low word first), position.
    pub fn to_words(self) -> [u32; Self::WORDS] {
        let wanted = self.logprobs.map_or(0, |num_top| num_top + 1);
        [wanted, self.inverse_temperature.to_bits(), self.seed as u32, (self.seed >> 32) as u32, self.position]
    }

    /// The inverse of `to_words`.
    pub fn from_words([wanted, inverse_temperature, low, high, position]: [u32; Self::WORDS]) -> Self {
        Self {
            inverse_temperature: f32::from_bits(inverse_temperature),
            seed: u64::from(high) << 32 | u64::from(low),
            position,
            logprobs: wanted.checked_sub(1),
        }
    }

    /// What a request's token at `position` needs; `None` where the host samples it.
    pub fn of(params: &SamplingParams, seed: u64, position: usize) -> Option<Self> {
        let position = u32::try_from(position).expect("contexts are shorter than 2^32 tokens");
        let inverse_temperature = if params.is_greedy() { 0.0 } else { temperature::inverse(params.temperature) };
        is_for_devices(params).then_some(Self { inverse_temperature, seed, position, logprobs: params.logprobs })
    }

    /// Whether the most probable token is taken.
    pub fn is_greedy(&self) -> bool {
        self.inverse_temperature == 0.0
    }

    fn noise(&self) -> Noise {
        Noise::new(self.seed, self.position as usize)
    }
}

/// Whether nothing but the temperature changes which token is drawn, and few enough alternatives are reported.
fn is_for_devices(params: &SamplingParams) -> bool {
    let is_plain = !EDITS.iter().any(|edit| (edit.is_on)(params));
    let is_unfiltered = params.is_greedy() || !FILTERS.iter().any(|filter| (filter.is_on)(params));
    is_plain && is_unfiltered && params.logprobs.unwrap_or(0) <= MAX_TOP as u32
}

impl Sample {
    /// The drawn token; `None` where a logit is not finite.
    pub fn chosen(&self, draw: &Draw) -> Option<Contender> {
        let contenders = &self.contenders[..(self.num_contenders as usize).min(MAX_CONTENDERS)];
        if contenders.len() < 2 {
            return contenders.first().copied();
        }
        let mut candidates = [Candidate { logit: 0.0, id: 0 }; MAX_CONTENDERS];
        for (candidate, contender) in candidates.iter_mut().zip(contenders) {
            *candidate = Candidate { logit: contender.logit, id: contender.id };
        }
        let row = ScaledRow { logits: &[], max: self.max, inverse_temperature: draw.inverse_temperature };
        let chosen = draw::from_candidates(&row, &candidates[..contenders.len()], draw.noise());
        contenders.iter().find(|contender| contender.id == chosen.0).copied()
    }

    /// Sum of `e^(logit - max)`.
    pub fn sum_of_exp(&self) -> f64 {
        f64::from_bits(u64::from(self.sum[1]) << 32 | u64::from(self.sum[0]))
    }

    /// The best tokens, as many as were asked for and are there.
    pub fn top(&self) -> &[Ranked] {
        &self.top[..(self.num_top as usize).min(MAX_TOP)]
    }

    /// The drawn token with its log-probabilities; `None` where a logit is not finite.
    pub fn drawn(&self, draw: &Draw) -> Option<DrawnToken> {
        let Contender { id, logit, rank } = self.chosen(draw)?;
        let logprobs = draw.logprobs.map(|_| {
            let softmax = Softmax::new(self.max, self.sum_of_exp());
            let top = self.top().iter().map(|best| (TokenId(best.id), softmax.logprob(best.logit))).collect();
            Box::new(TokenLogprobs { logprob: softmax.logprob(logit), rank, top })
        });
        Some(DrawnToken { id: TokenId(id), logprobs })
    }
}

/// Samples a row, `[vocab]`, in host memory. Allocates only where log-probabilities are wanted.
pub fn sample_row(logits: &[f32], draw: &Draw) -> Sample {
    let mut sample = Sample::zeroed();
    if !logits.iter().fold(true, |finite, logit| finite & logit.is_finite()) {
        return sample;
    }
    let best = argmax(logits);
    let max = logits[best.index()];
    let row = ScaledRow { logits, max, inverse_temperature: draw.inverse_temperature };
    let id = if draw.is_greedy() { best } else { draw::from_row(&row, best, draw.noise()) };
    sample.num_contenders = 1;
    sample.max = max;
    sample.contenders[0] = Contender { id: id.0, logit: logits[id.index()], rank: 0 };
    if let Some(num_top) = draw.logprobs {
        let sum = sum_of_exp(logits, max, 1.0).to_bits();
        sample.sum = [sum as u32, (sum >> 32) as u32];
        sample.contenders[0].rank = rank(logits, id);
        let mut top = Vec::new();
        best_of(logits, (num_top as usize).min(MAX_TOP), &mut top);
        top.sort_unstable_by(Candidate::order);
        sample.num_top = top.len() as u32;
        for (ranked, &Candidate { logit, id }) in sample.top.iter_mut().zip(&top) {
            *ranked = Ranked { id, logit };
        }
    }
    sample
}
