//! The linear of chosen experts: tokens are gathered by expert, and each expert's matrix is multiplied with its own.
//!
//! Invariant: every thread sorts the choices for itself, in the same way, so that all agree without talking; a row's sums are
//! those of `linear`, whatever rows it is gathered with: a result never depends on the batch, bitwise. Called by `step`.

use super::linear::{Linear, Out, RowMap};
use super::repack::GROUP;
use super::rows::Columns;
use super::simd::LANES;
use super::step::Step;
use crate::backend::pool::Team;

/// One matrix per expert.
#[derive(Clone, Debug)]
pub(super) struct ExpertPart {
    pub(super) matrix: usize,
    /// `[experts * rows]`.
    pub(super) bias: Option<usize>,
    /// Rows of each matrix.
    pub(super) rows: usize,
    /// First column of its output.
    pub(super) column: usize,
}

/// `Op::MoeLinear` with its operands resolved.
#[derive(Clone, Debug)]
pub(super) struct ExpertsPhase {
    pub(super) x: Columns,
    /// Byte where the 8-bit activations are.
    pub(super) quantised_start: usize,
    /// None: choice j is matrix j.
    pub(super) route: Option<Columns>,
    pub(super) num_experts: usize,
    /// Experts of a token.
    pub(super) top_k: usize,
    pub(super) parts: Vec<ExpertPart>,
    pub(super) out: Columns,
    pub(super) scratch: ExpertsScratch,
}

/// Where threads sort choices: per thread the end of each expert's choices, then the choices.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ExpertsScratch {
    /// In bytes.
    pub(super) start: usize,
    /// Words of one thread.
    pub(super) thread_len: usize,
}

impl Step<'_> {
    /// This thread's panels of every expert that some token has chosen.
    pub(super) fn experts(&self, phase: &ExpertsPhase, team: &Team<'_>) {
        let (num_tokens, top_k) = (self.inputs.num_tokens(), phase.top_k);
        let ExpertsScratch { start, thread_len } = phase.scratch;
        let own = start + team.thread * thread_len * size_of::<u32>();
        // SAFETY: each thread has an area of its own.
        let (ends, choices) = unsafe { self.memory.slice_mut::<u32>(own, thread_len) }.split_at_mut(phase.num_experts);
        let choices = &mut choices[..num_tokens * top_k];
        match phase.route {
            Some(route) => {
                // SAFETY: routes were written before the last barrier.
                let route = unsafe { self.memory.slice::<f32>(route.start, num_tokens * route.stride) };
                sort_choices(route, top_k, ends, choices);
            }
            None => list_choices(num_tokens, ends, choices),
        }
        let mut start = 0;
        for expert in 0..phase.num_experts {
            let index = &choices[start..ends[expert] as usize];
            start += index.len();
            if !index.is_empty() {
                self.expert(phase, expert, index, team);
            }
        }
    }

    fn expert(&self, phase: &ExpertsPhase, expert: usize, index: &[u32], team: &Team<'_>) {
        let (num_tokens, top_k) = (self.inputs.num_tokens(), phase.top_k);
        for part in &phase.parts {
            let all = self.weights.matrix(part.matrix);
            let matrix = all.part(expert, phase.num_experts, part.rows);
            let panels = team.share(part.rows.div_ceil(LANES));
            let num_inputs = num_tokens * (phase.x.width / matrix.cols);
            let (plain, groups) = match matrix.kind.is_quantised() {
                true => (0, num_inputs * matrix.cols / GROUP),
                false => (num_inputs * matrix.cols, 0),
            };
            let bias = part.bias.map(|bias| &self.weights.vector(bias)[expert * part.rows..][..part.rows]);
            let linear = Linear {
                arena: &self.weights.arena,
                matrix: &matrix,
                panels,
                bias,
                // SAFETY: both kinds of activations were written before the last barrier.
                x: unsafe { self.memory.slice(phase.x.start, plain) },
                // SAFETY: as above.
                quantised_x: unsafe { self.memory.slice(phase.quantised_start, groups) },
                // A token's row serves all its choices, or each has its own.
                rows: RowMap::Chosen { index, per_row: if phase.x.width == matrix.cols { top_k } else { 1 } },
                out: Out {
                    memory: self.memory,
                    start: phase.out.start,
                    stride: phase.out.width / top_k,
                    column: part.column,
                },
            };
            linear.run(self.vectors);
        }
    }
}

/// Sorts the choices `token * top_k + j` by expert, those of one expert in order; `ends[e]` is the end of expert e's. `route` is
/// `[tokens, 2 * top_k]`.
fn sort_choices(route: &[f32], top_k: usize, ends: &mut [u32], choices: &mut [u32]) {
    let experts = || route.chunks_exact(2 * top_k).flat_map(|row| row[..top_k].iter().map(|&expert| expert as usize));
    ends.fill(0);
    experts().for_each(|expert| ends[expert] += 1);
    let mut start = 0;
    for end in ends.iter_mut() {
        // Where the expert's next choice goes: in the end, where they end.
        start += std::mem::replace(end, start);
    }
    for (choice, expert) in experts().enumerate() {
        choices[ends[expert] as usize] = choice as u32;
        ends[expert] += 1;
    }
}

/// As `sort_choices`, where choice j is matrix j.
fn list_choices(num_tokens: usize, ends: &mut [u32], choices: &mut [u32]) {
    let top_k = ends.len();
    for (expert, end) in ends.iter_mut().enumerate() {
        let own = &mut choices[expert * num_tokens..][..num_tokens];
        own.iter_mut().enumerate().for_each(|(token, choice)| *choice = (token * top_k + expert) as u32);
        *end = ((expert + 1) * num_tokens) as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_sorted_by_expert_in_order() {
        let route = [2.0, 0.0, 9.0, 9.0, 0.0, 2.0, 9.0, 9.0, 3.0, 2.0, 9.0, 9.0];
        let (mut ends, mut choices) = ([7; 4], [9; 6]);
        sort_choices(&route, 2, &mut ends, &mut choices);
        assert_eq!((ends, choices), ([2, 2, 5, 6], [1, 2, 0, 3, 5, 4]));
    }
}
