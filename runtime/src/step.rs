//! The two messages between scheduling and running: a `StepPlan` goes to a `StepRunner`, a `StepOutput` comes back.
//!
//! Invariant: neither side knows the other's world. A plan holds lengths, rows and blocks, no device; it is printable,
//! serialisable and replayable. The scheduler that serves and the one that simulates differ only in the runner.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::DeviceError;
use crate::ids::{BlockId, Row, SeqId, TokenId};
use crate::request::{SamplingParams, TokenLogprobs};

/// What one step computes. Vectors are recycled through `Scheduler::apply`: no allocation in steady state.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepPlan {
    /// Counts planned steps from 0.
    pub step: u64,
    /// Rows whose sequence left since the last plan; the runner forgets them first.
    pub released: Vec<Row>,
    /// Sequences that enter a row with this step.
    pub admitted: Vec<NewRow>,
    /// The batch, in the order of its tokens: decodes first.
    pub work: Vec<RowWork>,
}

/// A sequence that enters a row: everything about it that does not change from step to step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NewRow {
    /// Its place in the batch tables.
    pub row: Row,
    /// Who it is, for traces.
    pub seq: SeqId,
    /// Known tokens: the prompt, and after a preemption the output so far.
    pub tokens: Vec<TokenId>,
    /// How many of them are the prompt.
    pub prompt_len: u32,
    /// How its tokens are drawn.
    pub params: Arc<SamplingParams>,
    /// Key of its noise.
    pub seed: u64,
}

/// What one row computes in one step: positions `start .. start + length`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RowWork {
    /// Whose tokens.
    pub row: Row,
    /// First position computed; everything before it is in the KV cache.
    pub start: u32,
    /// Number of positions, at least 1.
    pub length: u32,
    /// How many of the last positions are drafts (0 without speculation).
    pub num_drafts: u32,
    /// Blocks to append to the row's block table before the step (on admission: the cached prefix too).
    pub new_blocks: Vec<BlockId>,
    /// Which of the positions need logits.
    pub logits: LogitRows,
}

/// Which positions of a row's work need logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LogitRows {
    /// None: a chunk that is not the prompt's last.
    None,
    /// The last one: a token is drawn there.
    Last,
    /// All of them, for prompt log-probabilities; a token is drawn at the last one if `draw`.
    All {
        /// Whether the last position is the last known token.
        draw: bool,
    },
}

/// What a step found, `rows` parallel to `StepPlan::work`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepOutput {
    /// One entry per entry of `StepPlan::work`.
    pub rows: Vec<RowOutput>,
}

/// What a step found for one row.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RowOutput {
    /// Tokens that follow the computed positions: none for an inner chunk, one for a decode, more with speculation.
    pub tokens: Vec<DrawnToken>,
    /// For `LogitRows::All`: entry i belongs to the prompt token at position `start + i + 1`.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// A value of this row was not finite: its blocks must not be committed, and it ends with an error.
    pub corrupt: bool,
}

/// One drawn token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DrawnToken {
    /// The token.
    pub id: TokenId,
    /// Present when the row's parameters ask for it.
    pub logprobs: Option<Box<TokenLogprobs>>,
}

/// Turns plans into outputs: a model on a device, a script in a test, a cost model in the simulator.
///
/// `submit` starts a step and `wait` ends the oldest one started, so that the next step can be planned meanwhile.
pub trait StepRunner {
    /// Starts one step.
    ///
    /// # Errors
    /// The device failed; the engine stops.
    fn submit(&mut self, plan: &StepPlan) -> Result<(), DeviceError>;

    /// Waits for the oldest submitted step and writes its result into `output` (cleared first; buffers are recycled).
    ///
    /// # Errors
    /// The device failed; the engine stops.
    fn wait(&mut self, output: &mut StepOutput) -> Result<(), DeviceError>;
}
