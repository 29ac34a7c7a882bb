//! A `StepRunner` without a model. The KV of a position is a hash of the whole path of tokens up to it; the next token and
//! the log-probabilities are functions of that hash. It checks every plan as a device cannot: what a row reads must be its
//! own path, and what a row writes must belong to nobody else.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::sync::Arc;

use runtime::error::DeviceError;
use runtime::ids::{BlockId, SeqId, TokenId};
use runtime::request::{SamplingParams, TokenLogprobs};
use runtime::step::{DrawnToken, LogitRows, NewRow, RowOutput, RowWork, StepOutput, StepPlan, StepRunner};

/// The hash of a path that is `token` longer than the path with hash `path`.
pub fn extend(path: u64, token: TokenId) -> u64 {
    let z = (path ^ u64::from(token.0).wrapping_add(0x51_7c_c1)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (z ^ (z >> 29)).wrapping_add(1)
}

pub fn path_of(tokens: &[TokenId]) -> u64 {
    tokens.iter().fold(0, |path, &token| extend(path, token))
}

/// What the script draws after a path.
pub fn next_token(path: u64, vocab_size: u32) -> TokenId {
    TokenId(((path >> 32) % u64::from(vocab_size)) as u32)
}

/// The script's log-probability of `token` after a path.
pub fn logprob(path: u64, token: TokenId) -> TokenLogprobs {
    let rank = (extend(path, token) % 7) as u32 + 1;
    TokenLogprobs { logprob: -(rank as f32), rank, top: vec![(token, -1.0)] }
}

struct RowState {
    tokens: Vec<TokenId>,
    prompt_len: usize,
    params: Arc<SamplingParams>,
    blocks: Vec<BlockId>,
    seq: SeqId,
}

pub struct ScriptedRunner {
    vocab_size: u32,
    block_size: usize,
    rows: Vec<Option<RowState>>,
    /// `[num_blocks * block_size]`: the path that the KV in a slot stands for.
    kv: Vec<Option<u64>>,
    outputs: VecDeque<StepOutput>,
    /// Sequences whose values are not finite from this position on.
    pub corrupt_from: Vec<(SeqId, u32)>,
    /// Most tokens of one step.
    pub max_tokens: u32,
    /// Most logit rows of one step.
    pub max_logit_rows: u32,
}

impl ScriptedRunner {
    pub fn new(vocab_size: u32, block_size: u32, num_blocks: u32, num_rows: u32) -> Self {
        Self {
            vocab_size,
            block_size: block_size as usize,
            rows: (0..num_rows).map(|_| None).collect(),
            kv: vec![None; (block_size * num_blocks) as usize],
            outputs: VecDeque::new(),
            corrupt_from: Vec::new(),
            max_tokens: u32::MAX,
            max_logit_rows: u32::MAX,
        }
    }

    fn admit(&mut self, new: &NewRow) {
        let place = &mut self.rows[new.row.index()];
        assert!(place.is_none(), "row {} is given away twice", new.row);
        let (tokens, params) = (new.tokens.clone(), new.params.clone());
        *place =
            Some(RowState { tokens, prompt_len: new.prompt_len as usize, params, blocks: Vec::new(), seq: new.seq });
    }

    /// No block that is written in this step is in another row's table or written twice.
    fn check_writes(&self, plan: &StepPlan) {
        let mut written = HashSet::new();
        for work in &plan.work {
            let row = self.rows[work.row.index()].as_ref().expect("work for a row that nobody entered");
            let end = (work.start + work.length) as usize;
            assert!(row.blocks.len() * self.block_size >= end, "the block table does not cover the step");
            let first = work.start as usize / self.block_size;
            for &block in &row.blocks[first..end.div_ceil(self.block_size)] {
                assert_ne!(block, BlockId(0), "a write into the reserved block");
                assert!(written.insert(block), "two rows write {block}");
                let owners = self.rows.iter().flatten().filter(|row| row.blocks.contains(&block)).count();
                assert_eq!(owners, 1, "{block} is written but shared");
            }
        }
    }

    fn run_row(&mut self, work: &RowWork) -> RowOutput {
        let row = self.rows[work.row.index()].as_mut().expect("checked");
        let (start, end) = (work.start as usize, (work.start + work.length) as usize);
        assert!(end <= row.tokens.len(), "positions of unknown tokens");
        assert!(work.length > 0, "work without positions");
        let slot = |position: usize| {
            row.blocks[position / self.block_size].index() * self.block_size + position % self.block_size
        };
        let mut path = 0;
        for (position, &token) in row.tokens[..end].iter().enumerate() {
            path = extend(path, token);
            if position >= start {
                self.kv[slot(position)] = Some(path);
            } else {
                assert_eq!(self.kv[slot(position)], Some(path), "{} reads KV of other tokens at {position}", row.seq);
            }
        }
        let corrupt = self.corrupt_from.iter().any(|&(seq, from)| seq == row.seq && end > from as usize);
        let mut output = RowOutput { corrupt, ..RowOutput::default() };
        let draw = match work.logits {
            LogitRows::None => false,
            LogitRows::Last => true,
            LogitRows::All { draw } => {
                let last = end.min(row.prompt_len - 1);
                let entry = |position: usize| logprob(path_of(&row.tokens[..=position]), row.tokens[position + 1]);
                output.prompt_logprobs = (start..last).map(entry).collect();
                draw
            }
        };
        assert_eq!(draw, end == row.tokens.len(), "a token is drawn exactly where the known ones end");
        if draw {
            let id = next_token(path, self.vocab_size);
            row.tokens.push(id);
            let logprobs = row.params.logprobs.map(|_| Box::new(logprob(path, id)));
            output.tokens.push(DrawnToken { id, logprobs });
        }
        output
    }
}

fn num_logit_rows(work: &RowWork) -> u32 {
    match work.logits {
        LogitRows::None => 0,
        LogitRows::Last => 1,
        LogitRows::All { .. } => work.length,
    }
}

impl StepRunner for ScriptedRunner {
    fn submit(&mut self, plan: &StepPlan) -> Result<(), DeviceError> {
        let num_tokens: u32 = plan.work.iter().map(|work| work.length).sum();
        assert!(!plan.work.is_empty() && num_tokens <= self.max_tokens, "a step of {num_tokens} tokens");
        let num_logit_rows: u32 = plan.work.iter().map(num_logit_rows).sum();
        assert!(num_logit_rows <= self.max_logit_rows, "a step of {num_logit_rows} logit rows");
        let rows: BTreeSet<_> = plan.work.iter().map(|work| work.row).collect();
        assert_eq!(rows.len(), plan.work.len(), "a row is in the plan twice");
        for row in &plan.released {
            assert!(self.rows[row.index()].take().is_some(), "row {row} is released twice");
        }
        plan.admitted.iter().for_each(|new| self.admit(new));
        for work in &plan.work {
            let row = self.rows[work.row.index()].as_mut().expect("work for a row that nobody entered");
            row.blocks.extend_from_slice(&work.new_blocks);
        }
        self.check_writes(plan);
        let rows = plan.work.iter().map(|work| self.run_row(work)).collect();
        self.outputs.push_back(StepOutput { rows });
        Ok(())
    }

    fn wait(&mut self, output: &mut StepOutput) -> Result<(), DeviceError> {
        *output = self.outputs.pop_front().expect("a step was submitted");
        Ok(())
    }
}
