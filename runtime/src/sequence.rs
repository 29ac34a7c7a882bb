//! `Sequence`: the engine's state of one answer.
//!
//! Invariant: computed tokens chase known tokens, and that is all the progress there is. Prefill, chunk, cache hit and
//! resume after preemption are the same subtraction, `num_remaining`. Owned by the scheduler's slab; nobody else sees it.

use std::sync::Arc;

use crate::ids::{Row, SeqId, TokenId};
use crate::kv::BlockTable;
use crate::request::{Request, SamplingParams, Times};

/// Where a live sequence lies in the scheduler's slab. Reused once its `Finished` event has been drained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqSlot(pub u32);

impl SeqSlot {
    /// The index as a `usize`, for slices.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One answer, from arrival to its last token.
#[derive(Debug)]
pub struct Sequence {
    /// Its name outside.
    pub id: SeqId,
    /// Known tokens: the prompt, then the output.
    pub tokens: Vec<TokenId>,
    /// How many of them are the prompt.
    pub prompt_len: u32,
    /// How many of them have their KV in the cache; always fewer than all.
    pub num_computed: u32,
    /// Where that KV is.
    pub table: BlockTable,
    /// Its place in the batch while it runs; `None`: it waits.
    pub row: Option<Row>,
    /// Which cached prefixes it may share.
    pub cache_salt: Option<Arc<str>>,
    /// How its tokens are drawn and when it ends.
    pub params: Arc<SamplingParams>,
    /// Key of its noise.
    pub seed: u64,
    /// For the latency histograms.
    pub times: Times,
    /// `Started` has been sent.
    pub is_started: bool,
    /// Prompt positions whose log-probabilities have been sent.
    pub num_prompt_logprobs_sent: u32,
    /// Prompt tokens that the statistics have counted.
    pub num_prompt_counted: u32,
    /// How often it was thrown back to the queue.
    pub num_preemptions: u32,
}

impl Sequence {
    /// A sequence that waits.
    pub fn new(request: Request, seed: u64, now_us: u64) -> Self {
        Self {
            id: request.id,
            prompt_len: request.prompt.len() as u32,
            tokens: request.prompt.to_vec(),
            num_computed: 0,
            table: BlockTable::default(),
            row: None,
            cache_salt: request.cache_salt,
            params: Arc::new(request.params),
            seed,
            times: Times { arrived_us: now_us, ..Times::default() },
            is_started: false,
            num_prompt_logprobs_sent: 0,
            num_prompt_counted: 0,
            num_preemptions: 0,
        }
    }

    /// Known tokens.
    pub fn num_known(&self) -> u32 {
        self.tokens.len() as u32
    }

    /// Known tokens that are not computed.
    pub fn num_remaining(&self) -> u32 {
        self.num_known() - self.num_computed
    }

    /// Output tokens.
    pub fn num_output(&self) -> u32 {
        self.num_known() - self.prompt_len
    }

    /// Whether log-probabilities of the prompt are still to be computed.
    pub fn wants_prompt_logprobs(&self) -> bool {
        self.params.prompt_logprobs.is_some() && self.num_prompt_logprobs_sent < self.prompt_len
    }

    /// The first position whose logits are needed for prompt log-probabilities: position p gives those of token p + 1.
    /// Everything before it may come from the prefix cache.
    pub fn first_prompt_logit(&self) -> u32 {
        self.num_prompt_logprobs_sent.saturating_sub(1)
    }
}
