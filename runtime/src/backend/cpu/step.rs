//! Runs a lowered plan: every thread of the team walks the same phases, with a barrier between two of them.
//!
//! Invariant: what a thread does depends on the plan, the step's inputs and its number only, so that all agree on who owns
//! what without talking. Called by `CpuBackend::submit`, as one job of the pool.

use super::attention::{Attend, Attention, Merge, splits_positions};
use super::experts::ExpertsPhase;
use super::linear::{Linear, Out, RowMap};
use super::memory::{Arena, Shared};
use super::repack::Matrix;
use super::rows::{Columns, RowOp, Rows};
use super::simd::Vectors;
use super::state::LayerState;
use crate::backend::StepInputs;
use crate::backend::pool::{Abandoned, Team};
use crate::program::RowDim;

/// A weight as uploaded.
pub(super) enum Weight {
    Matrix(Matrix),
    Vector(Vec<f32>),
}

/// All weights, by `WeightId`.
#[derive(Default)]
pub(super) struct Weights {
    pub(super) arena: Arena,
    pub(super) entries: Vec<Option<Weight>>,
}

impl Weights {
    /// # Panics
    /// When it is not a matrix: `lower` has checked.
    #[inline(always)]
    pub(super) fn matrix(&self, index: usize) -> &Matrix {
        match &self.entries[index] {
            Some(Weight::Matrix(matrix)) => matrix,
            _ => panic!("weight {index} is not a matrix"),
        }
    }

    /// # Panics
    /// When it is not a vector: `lower` has checked.
    #[inline(always)]
    pub(super) fn vector(&self, index: usize) -> &[f32] {
        match &self.entries[index] {
            Some(Weight::Vector(vector)) => vector,
            _ => panic!("weight {index} is not a vector"),
        }
    }
}

/// One matrix of a linear phase.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) matrix: usize,
    pub(super) bias: Option<usize>,
    /// First column of its output.
    pub(super) column: usize,
}

/// A linear op with its operands resolved.
#[derive(Clone, Debug)]
pub(super) struct LinearPhase {
    pub(super) rows: RowDim,
    pub(super) x: Columns,
    /// Byte where the 8-bit activations are.
    pub(super) quantised_start: usize,
    pub(super) parts: Vec<Part>,
    pub(super) out: Columns,
}

/// What lies between two barriers.
#[derive(Clone, Debug)]
pub(super) enum Phase {
    /// Row-wise ops; threads share out the rows.
    Rows { rows: RowDim, ops: Vec<RowOp> },
    /// A linear; threads share out the panels of all its parts.
    Linear(LinearPhase),
    /// A linear of chosen experts; threads share out the panels of each expert.
    Experts(ExpertsPhase),
    /// Attention; threads share out tiles by cost, then tokens where partial results are to be merged.
    Attention(Attention),
}

/// Everything that the kernels of one step read, and the memory that they write.
pub(super) struct Step<'a> {
    pub(super) memory: Shared,
    pub(super) inputs: &'a StepInputs,
    pub(super) weights: &'a Weights,
    pub(super) layers: &'a [LayerState],
    pub(super) vectors: Vectors,
}

impl Step<'_> {
    fn num_rows(&self, rows: RowDim) -> usize {
        match rows {
            RowDim::Tokens => self.inputs.num_tokens(),
            RowDim::LogitRows => self.inputs.num_logit_rows(),
        }
    }

    /// One thread's part of the step.
    ///
    /// # Errors
    /// Another thread has panicked.
    pub(super) fn run(&self, phases: &[Phase], team: &Team<'_>) -> Result<(), Abandoned> {
        for phase in phases {
            match phase {
                Phase::Rows { rows, ops } => {
                    self.vectors.run(Rows { step: self, ops, rows: team.share(self.num_rows(*rows)) });
                }
                Phase::Linear(phase) => self.linear(phase, team),
                Phase::Experts(phase) => self.experts(phase, team),
                Phase::Attention(op) => {
                    self.vectors.run(Attend { step: self, op, thread: team.thread, num_threads: team.threads() });
                    if splits_positions(self) {
                        team.barrier()?;
                        self.vectors.run(Merge { step: self, op, tokens: team.share(self.inputs.num_tokens()) });
                    }
                }
            }
            team.barrier()?;
        }
        Ok(())
    }

    /// This thread's panels of every part.
    fn linear(&self, phase: &LinearPhase, team: &Team<'_>) {
        let num_rows = self.num_rows(phase.rows);
        let num_panels = phase.parts.iter().map(|part| self.weights.matrix(part.matrix).num_panels()).sum();
        let share = team.share(num_panels);
        let mut before = 0;
        for part in &phase.parts {
            let matrix = self.weights.matrix(part.matrix);
            let all = before..before + matrix.num_panels();
            before = all.end;
            let panels =
                share.start.clamp(all.start, all.end) - all.start..share.end.clamp(all.start, all.end) - all.start;
            if panels.is_empty() {
                continue;
            }
            let (plain, groups) = if matrix.kind.is_quantised() {
                (0, num_rows * matrix.cols / super::repack::GROUP)
            } else {
                (num_rows * matrix.cols, 0)
            };
            let linear = Linear {
                arena: &self.weights.arena,
                matrix,
                panels,
                bias: part.bias.map(|bias| self.weights.vector(bias)),
                // SAFETY: both kinds of activations were written before the last barrier.
                x: unsafe { self.memory.slice(phase.x.start, plain) },
                // SAFETY: as above.
                quantised_x: unsafe { self.memory.slice(phase.quantised_start, groups) },
                rows: RowMap::All(num_rows),
                out: Out { memory: self.memory, start: phase.out.start, stride: phase.out.stride, column: part.column },
            };
            linear.run(self.vectors);
        }
    }
}
