//! `ModelRunner`: a `StepPlan` becomes step inputs, a submitted program, drawn tokens.
//!
//! Invariant: only this module sees both the plan's world and the backend's. Rows keep their tokens, block table and
//! sampling parameters here from admission to release, so that a plan says only what changed. A row's index never
//! changes while it runs. Buffers are sized once; a step allocates only where a row outgrows what it reserved. A row is
//! sampled on the device or on the host for life (`Draw::of`); logits cross the bus for the host's rows only.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::backend::{Backend, Bucket, Buckets, Caps, DeviceOutput, InputLayout, MemoryReport, StepInputs, Ticket};
use crate::error::{DeviceError, LoadError};
use crate::ids::{PlanId, Row, TokenId, WeightId};
use crate::model::Model;
use crate::program::check::{Sizes, check_limits};
use crate::request::SamplingParams;
use crate::sample::{Draw, DrawContext, Sampler};
use crate::step::{DrawnToken, LogitRows, NewRow, RowOutput, RowWork, StepOutput, StepPlan, StepRunner};

/// Input ranges start at multiples of this many words: 256 bytes, the strictest binding offset of any device.
const ALIGN_WORDS: usize = 64;

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
    /// Most logit rows of one step.
    pub max_logit_rows: u32,
}

/// How far a model's loading is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Weights go to the device.
    Upload {
        /// Bytes uploaded.
        done_bytes: u64,
        /// Bytes in all.
        total_bytes: u64,
    },
    /// The device's kernels are made.
    Compile {
        /// Kernels compiled, and tests of them run.
        done: u32,
        /// Both in all.
        total: u32,
    },
}

/// Runs a model's program on a backend and draws tokens.
pub struct ModelRunner {
    backend: Box<dyn Backend>,
    config: RunnerConfig,
    /// By tokens, ascending; one of the largest size where the backend pads nothing.
    plans: Vec<(Bucket, PlanId)>,
    inputs: StepInputs,
    /// Indexed by `Row`.
    rows: Vec<Option<RowState>>,
    /// Emptied row states, for their buffers.
    spare: Vec<RowState>,
    work: Vec<Pending>,
    in_flight: InFlight,
    sampler: Sampler,
}

/// Whether a step has been submitted and not waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InFlight {
    Nothing,
    /// A plan without work: nothing runs on the device.
    Empty,
    Step(Ticket),
}

/// What the runner knows of a sequence while it is in a row.
#[derive(Debug, Default)]
struct RowState {
    /// Known tokens: prompt, then output.
    tokens: Vec<TokenId>,
    prompt_len: usize,
    block_table: Vec<u32>,
    params: Arc<SamplingParams>,
    seed: u64,
}

/// One row's share of the step in flight.
#[derive(Clone, Copy, Debug)]
struct Pending {
    row: Row,
    start: usize,
    length: usize,
    /// Index of its first token in the step.
    first_token: usize,
    logits: LogitRows,
    /// How many of its positions, up to the last, have their logits read back.
    num_read: usize,
    /// What the device draws at its last position.
    draw: Option<Draw>,
}

impl ModelRunner {
    /// Uploads the weights, allocates the state, compiles the buckets. `progress` hears of what takes long.
    ///
    /// # Errors
    /// A limit of the device is passed, out of memory, or the device failed.
    pub fn new(
        mut backend: Box<dyn Backend>,
        model: &Model,
        config: RunnerConfig,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self, LoadError> {
        let largest = largest_bucket(&config);
        let sizes = Sizes { bucket: largest, num_blocks: config.num_blocks, block_size: config.block_size };
        check_limits(&model.program, sizes, backend.caps())?;
        check_slot_map(&config)?;
        let buckets = buckets(&backend.caps().buckets, largest)?;

        let total_bytes = model.weights.iter().map(|tensor| tensor.num_bytes() as u64).sum();
        let mut done_bytes = 0;
        for (i, tensor) in model.weights.iter().enumerate() {
            backend.upload(WeightId(i as u32), tensor)?;
            done_bytes += tensor.num_bytes() as u64;
            progress(Progress::Upload { done_bytes, total_bytes });
        }
        backend.alloc_state(&model.program.states, config.num_blocks, config.block_size)?;
        // One layout for all buckets: a step is written before its bucket is known.
        let most = *buckets.last().expect("buckets are never empty");
        let blocks_per_row = config.max_model_len.div_ceil(config.block_size);
        let layout = InputLayout::new(most, blocks_per_row, config.block_size, ALIGN_WORDS);
        let mut plans = Vec::with_capacity(buckets.len());
        for bucket in buckets {
            let mut compiled = |done, total| progress(Progress::Compile { done, total });
            plans.push((bucket, backend.compile(&model.program, bucket, &layout, &mut compiled)?));
        }
        Ok(Self {
            backend,
            config,
            plans,
            inputs: StepInputs::new(layout),
            rows: (0..config.max_num_seqs).map(|_| None).collect(),
            spare: Vec::new(),
            work: Vec::with_capacity(config.max_num_seqs as usize),
            in_flight: InFlight::Nothing,
            sampler: Sampler::new(model.info.vocab_size as usize),
        })
    }

    /// What the backend can do.
    pub fn caps(&self) -> &Caps {
        self.backend.caps()
    }

    /// What the backend holds and what is left.
    pub fn memory(&self) -> MemoryReport {
        self.backend.memory()
    }

    fn release(&mut self, row: Row) {
        if let Some(mut state) = self.rows[row.index()].take() {
            state.tokens.clear();
            state.block_table.clear();
            self.spare.push(state);
        }
    }

    fn admit(&mut self, new: &NewRow) {
        assert!(self.rows[new.row.index()].is_none(), "row {} is taken", new.row);
        let mut state = self.spare.pop().unwrap_or_default();
        // Room for all it may draw, so that decoding does not grow the vectors.
        let most_tokens = self.config.max_model_len as usize;
        let room = (new.tokens.len() + new.params.max_tokens as usize).min(most_tokens).max(new.tokens.len());
        state.tokens.reserve(room);
        state.tokens.extend_from_slice(&new.tokens);
        state.block_table.reserve(room.div_ceil(self.config.block_size as usize));
        state.prompt_len = new.prompt_len as usize;
        state.params = Arc::clone(&new.params);
        state.seed = new.seed;
        self.rows[new.row.index()] = Some(state);
    }

    /// Writes one row's tokens and table into the step inputs, and settles who samples it.
    fn push_work(&mut self, work: &RowWork) {
        assert_eq!(work.num_drafts, 0, "no proposer runs in this runner");
        let state = self.rows[work.row.index()].as_mut().expect("a plan names admitted rows only");
        state.block_table.extend(work.new_blocks.iter().map(|block| block.0));
        let (start, length) = (work.start as usize, work.length as usize);
        let tokens = &state.tokens[start..start + length];
        let first_token = self.inputs.num_tokens();
        self.inputs.push_row(tokens.iter().map(|token| token.0), work.start, &state.block_table);
        let (draws, num_wanted) = match work.logits {
            LogitRows::None => (false, 0),
            LogitRows::Last => (true, 1),
            LogitRows::All { draw } => (draw, length),
        };
        let draw = if draws { Draw::of(&state.params, state.seed, state.tokens.len()) } else { None };
        let num_read = num_wanted - usize::from(draw.is_some());
        self.work.push(Pending { row: work.row, start, length, first_token, logits: work.logits, num_read, draw });
    }

    /// Asks for logits: those that are read back come first, so that they are one range.
    fn push_logit_rows(&mut self) {
        for pending in &self.work {
            let end = pending.first_token + pending.length - usize::from(pending.draw.is_some());
            (end - pending.num_read..end).for_each(|token| self.inputs.push_logit_row(token as u32));
        }
        for pending in &self.work {
            if let Some(draw) = pending.draw {
                self.inputs.push_sampled_row((pending.first_token + pending.length - 1) as u32, draw);
            }
        }
    }

    /// The smallest plan that holds the step.
    fn pick(&self) -> (Bucket, PlanId) {
        let holds = |bucket: &Bucket| {
            self.inputs.num_tokens() <= bucket.tokens as usize
                && self.inputs.num_rows() <= bucket.rows as usize
                && self.inputs.num_logit_rows() <= bucket.logit_rows as usize
        };
        *self.plans.iter().find(|(bucket, _)| holds(bucket)).expect("the largest bucket holds every step")
    }
}

impl StepRunner for ModelRunner {
    fn submit(&mut self, plan: &StepPlan) -> Result<(), DeviceError> {
        assert_eq!(self.in_flight, InFlight::Nothing, "one step runs at a time");
        for &row in &plan.released {
            self.release(row);
        }
        for new in &plan.admitted {
            self.admit(new);
        }
        self.inputs.clear();
        self.work.clear();
        for work in &plan.work {
            self.push_work(work);
        }
        self.push_logit_rows();
        self.in_flight = InFlight::Empty;
        if !plan.work.is_empty() {
            let (bucket, plan) = self.pick();
            if matches!(self.backend.caps().buckets, Buckets::Padded(_)) {
                self.inputs.pad(bucket);
            }
            self.in_flight = InFlight::Step(self.backend.submit(plan, &self.inputs)?);
        }
        Ok(())
    }

    fn wait(&mut self, output: &mut StepOutput) -> Result<(), DeviceError> {
        output.rows.truncate(self.work.len());
        for row in &mut output.rows {
            row.tokens.clear();
            row.prompt_logprobs.clear();
            row.corrupt = false;
        }
        output.rows.resize_with(self.work.len(), RowOutput::default);
        let in_flight = std::mem::replace(&mut self.in_flight, InFlight::Nothing);
        let ticket = match in_flight {
            InFlight::Nothing => panic!("wait without a submitted step"),
            InFlight::Empty => return Ok(()),
            InFlight::Step(ticket) => ticket,
        };
        let DeviceOutput { mut logits, samples, non_finite } = self.backend.wait(ticket)?;
        let mut samples = samples.iter();
        for (pending, output) in self.work.iter().zip(&mut output.rows) {
            let state = self.rows[pending.row.index()].as_mut().expect("rows stay while their step runs");
            let (read, others) = logits.split_at(pending.num_read * self.sampler.vocab_size());
            logits = others;
            let flags = &non_finite[pending.first_token..][..pending.length];
            let drawn = match pending.draw {
                Some(draw) => samples.next().expect("a sample per sampled row").drawn(&draw).map(Some),
                None => Some(None),
            };
            let is_finite = flags.iter().all(|&flag| flag == 0) && read.iter().all(|logit| logit.is_finite());
            match drawn {
                Some(drawn) if is_finite => state.read(pending, read, drawn, &mut self.sampler, output),
                _ => output.corrupt = true,
            }
        }
        Ok(())
    }
}

impl RowState {
    /// Prompt log-probabilities from the logits that were read back, `[num_read, vocab]`, and the token that the device has
    /// drawn, or one that is drawn here.
    fn read(
        &mut self,
        pending: &Pending,
        logits: &[f32],
        drawn: Option<DrawnToken>,
        sampler: &mut Sampler,
        output: &mut RowOutput,
    ) {
        let vocab_size = sampler.vocab_size();
        if let LogitRows::All { .. } = pending.logits {
            let num_top = self.params.prompt_logprobs.unwrap_or(0);
            let following = &self.tokens[..self.prompt_len][(pending.start + 1).min(self.prompt_len)..];
            for (logits, &token) in logits.chunks_exact(vocab_size).zip(following) {
                output.prompt_logprobs.push(sampler.logprobs_of(logits, token, num_top));
            }
        }
        if matches!(pending.logits, LogitRows::None | LogitRows::All { draw: false }) {
            return;
        }
        assert_eq!(pending.start + pending.length, self.tokens.len(), "a token is drawn after the last known one");
        let drawn = drawn.unwrap_or_else(|| {
            let (params, seed) = (&*self.params, self.seed);
            let context = DrawContext { params, seed, history: &self.tokens, prompt_len: self.prompt_len };
            sampler.draw(&logits[logits.len() - vocab_size..], &context)
        });
        self.tokens.push(drawn.id);
        output.tokens.push(drawn);
    }
}

/// The largest step: a row asks for at least one token.
fn largest_bucket(config: &RunnerConfig) -> Bucket {
    let tokens = config.max_num_batched_tokens;
    Bucket { tokens, rows: config.max_num_seqs.min(tokens), logit_rows: config.max_logit_rows.min(tokens) }
}

/// The buckets to compile, ascending; the last holds every step.
fn buckets(wanted: &Buckets, largest: Bucket) -> Result<Vec<Bucket>, LoadError> {
    let sizes = match wanted {
        Buckets::Exact => return Ok(vec![largest]),
        Buckets::Padded(sizes) => sizes,
    };
    let of =
        |&tokens: &u32| Bucket { tokens, rows: largest.rows.min(tokens), logit_rows: largest.logit_rows.min(tokens) };
    let first_that_holds = sizes.iter().position(|&tokens| tokens >= largest.tokens);
    let Some(last) = first_that_holds else {
        return Err(LoadError::Limit {
            what: "max_num_batched_tokens".into(),
            needed: format!("{} tokens", largest.tokens),
            limit: format!("{} tokens (the device's largest bucket)", sizes.last().unwrap_or(&0)),
        });
    };
    Ok(sizes[..=last].iter().map(of).collect())
}

/// KV slots are named by 32-bit numbers.
fn check_slot_map(config: &RunnerConfig) -> Result<(), LoadError> {
    if config.num_blocks.checked_mul(config.block_size).is_some() {
        return Ok(());
    }
    Err(LoadError::Limit {
        what: "KV cache".into(),
        needed: format!("{} blocks of {} tokens", config.num_blocks, config.block_size),
        limit: format!("{} tokens", u32::MAX),
    })
}
