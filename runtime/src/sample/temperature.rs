//! `temperature`: logits relative to the largest, divided by it. Never stored: whoever needs one computes it.

use crate::ids::TokenId;

/// Temperatures below are raised to it (vLLM's rule): logits must stay in range.
const LEAST: f32 = 0.01;

/// A row of logits at a temperature: `(logit - max) / temperature`, 0 for the best, never NaN, -inf where masked.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScaledRow<'a> {
    /// `[vocab]`.
    pub(super) logits: &'a [f32],
    pub(super) max: f32,
    pub(super) inverse_temperature: f32,
}

/// `logits` at `temperature`; `best` is their argmax.
pub(super) fn scale(logits: &[f32], best: TokenId, temperature: f32) -> ScaledRow<'_> {
    ScaledRow { logits, max: logits[best.index()], inverse_temperature: inverse(temperature) }
}

/// What logits are multiplied by.
pub(super) fn inverse(temperature: f32) -> f32 {
    1.0 / temperature.max(LEAST)
}

impl ScaledRow<'_> {
    /// The value that `logit` has in this row.
    #[inline(always)]
    pub(super) fn scaled(&self, logit: f32) -> f32 {
        (logit - self.max) * self.inverse_temperature
    }
}
