//! `ModelRunner`: a `StepPlan` becomes step inputs, a submitted program, drawn tokens.
//!
//! Invariant: only this module sees both the plan's world and the backend's. Rows keep their tokens, block table and
//! sampling parameters here from admission to release, so that a plan says only what changed.

use crate::backend::Backend;
use crate::error::{DeviceError, LoadError};
use crate::model::Model;
use crate::step::{StepOutput, StepPlan, StepRunner};

/// The sizes that a runner is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunnerConfig {
    /// Most tokens of one step.
    pub max_num_batched_tokens: u32,
    /// Most rows of one step.
    pub max_num_seqs: u32,
    /// Longest context in tokens.
    pub max_model_len: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// KV blocks, block 0 included.
    pub num_blocks: u32,
    /// The most logit rows that one row may ask for in one step (prompt log-probabilities come in chunks of it).
    pub max_logit_rows_per_row: u32,
}

/// Runs a model's program on a backend and draws tokens.
pub struct ModelRunner {}

impl ModelRunner {
    /// Uploads the weights, allocates the state, compiles the buckets. `progress(done_bytes, total_bytes)` is told of uploads.
    ///
    /// # Errors
    /// A limit of the device is passed, out of memory, or the device failed.
    pub fn new(
        backend: Box<dyn Backend>,
        model: &Model,
        config: RunnerConfig,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, LoadError> {
        let _ = (backend, model, config, progress);
        todo!("helper program")
    }
}

impl StepRunner for ModelRunner {
    fn submit(&mut self, _plan: &StepPlan) -> Result<(), DeviceError> {
        todo!("helper program")
    }

    fn wait(&mut self, _output: &mut StepOutput) -> Result<(), DeviceError> {
        todo!("helper program")
    }
}
