//! The reference's attention: one token and one head at a time, over the cached entries that the token sees.
//!
//! Invariant: sums run over these entries in the order of the cache, which is the order of positions for each token, in a
//! tree too; a sink comes last. Called by `Step::attention`.

use super::ops::dot;
use super::state::{Entry, LayerState, Side};
use crate::backend::StepInputs;

/// Attention over one layer's state; the options are those of `Op::Attention`.
pub(super) struct Attend<'a> {
    pub inputs: &'a StepInputs,
    pub layer: &'a LayerState,
    pub scale: f32,
    pub window: Option<u32>,
    pub soft_cap: Option<f32>,
    /// `[heads]`.
    pub sinks: Option<&'a [f32]>,
}

/// One thread's buffers for attention.
#[derive(Default)]
pub(super) struct Scratch {
    /// Cache indices that a token sees, ascending.
    seen: Vec<usize>,
    /// One key or value, `[head_dim]`.
    entry: Vec<f32>,
    /// Scores, then weights, one per entry that is seen.
    weights: Vec<f32>,
}

impl Attend<'_> {
    /// Whether a token of a row sees the row's entry at a cache index.
    fn sees(&self, (token, row): (usize, usize), index: usize) -> bool {
        let inputs = self.inputs;
        let first_token = inputs.row_starts()[row] as usize;
        let num_tokens = inputs.row_starts()[row + 1] as usize - first_token;
        let start = inputs.kv_lens()[row] as usize - num_tokens;
        // What was cached before this step lies in the order of positions; the step's own entries in that of its tokens.
        let (key_position, is_before) = match index.checked_sub(start) {
            None => (index, true),
            Some(other) => {
                let mask = inputs.tree_mask(token);
                let is_before = if mask == 0 { first_token + other <= token } else { mask >> other & 1 == 1 };
                (inputs.positions()[first_token + other] as usize, is_before)
            }
        };
        let position = inputs.positions()[token] as usize;
        is_before && self.window.is_none_or(|window| position - key_position < window as usize)
    }

    /// One token of a row; `q` and `out` are `[heads * head_dim]`, `out` zeroed.
    pub fn token(&self, q: &[f32], (token, row): (usize, usize), scratch: &mut Scratch, out: &mut [f32]) {
        let Self { inputs, layer, scale, .. } = *self;
        let (table, block_size) = (inputs.block_table(row), inputs.layout().block_size as usize);
        let dim = layer.dim();
        let group = q.len() / dim / layer.heads();
        let Scratch { seen, entry, weights } = scratch;
        seen.clear();
        seen.extend((0..inputs.kv_lens()[row] as usize).filter(|&index| self.sees((token, row), index)));
        entry.resize(dim, 0.0);
        weights.resize(seen.len(), 0.0);
        for (head, (q, out)) in q.chunks_exact(dim).zip(out.chunks_exact_mut(dim)).enumerate() {
            let at = |index: usize| Entry {
                slot: table[index / block_size] as usize * block_size + index % block_size,
                head: head / group,
            };
            for (&index, score) in seen.iter().zip(weights.iter_mut()) {
                layer.load(Side::Keys, at(index), entry);
                *score = dot(q, entry) * scale;
                if let Some(cap) = self.soft_cap {
                    *score = cap * (*score / cap).tanh();
                }
            }
            let sink = self.sinks.map(|sinks| sinks[head]);
            let max = weights.iter().copied().chain(sink).fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0.0;
            for weight in weights.iter_mut() {
                *weight = (*weight - max).exp();
                sum += *weight;
            }
            sum += sink.map_or(0.0, |sink| (sink - max).exp());
            for (&index, &weight) in seen.iter().zip(weights.iter()) {
                layer.load(Side::Values, at(index), entry);
                for (out, &value) in out.iter_mut().zip(entry.iter()) {
                    *out += weight / sum * value;
                }
            }
        }
    }
}
