//! `Scheduler`: pure policy. Who gets how many tokens this step, and what the results mean.
//!
//! Invariants: running sequences, then waiting ones, are in order of arrival; a preempted sequence is always the youngest
//! running one, so that the oldest gets at least one token in every step (the bound on starvation). No IO, no device, no
//! clock of its own: the engine and the simulator drive the same code. `plan` makes a step, `apply` reads its results.

mod apply;
mod plan;

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use crate::ids::{Row, SeqId};
use crate::kv::{BlockTable, KvCacheManager};
use crate::request::{Event, FinishReason, Request};
use crate::sequence::{SeqSlot, Sequence};
use crate::step::{RowWork, StepPlan};

/// The bounds of scheduling; see `EngineConfig` for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Most tokens of one sequence. At most one more than the cache holds: the last token's KV is never needed.
    pub max_model_len: u32,
    /// The one token budget of a step; at least `max_num_seqs`.
    pub max_num_batched_tokens: u32,
    /// Most running sequences.
    pub max_num_seqs: u32,
    /// Longest chunk of one prompt in one step; 0: as long as the budget.
    pub long_prefill_token_threshold: u32,
    /// Most positions of one step whose prompt log-probabilities are computed; each row that asks has one in any case.
    pub prompt_logprob_chunk: u32,
    /// Where requests without a seed get theirs from.
    pub seed: u64,
}

/// Something that a request hears, and where the caller keeps what belongs to it.
#[derive(Clone, Debug, PartialEq)]
pub struct SeqEvent {
    /// What `add` returned; free for another sequence once its last event has been drained.
    pub slot: SeqSlot,
    /// The request.
    pub id: SeqId,
    /// What it hears.
    pub event: Event,
}

/// Counts since the start; they only grow.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counters {
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_cache_queries_tokens: u64,
    /// Prompt tokens found there.
    pub prefix_cache_hits_tokens: u64,
    /// Sequences thrown back to the queue.
    pub num_preemptions: u64,
    /// Prompt tokens computed or found, each once.
    pub prompt_tokens: u64,
    /// Tokens drawn for sequences that were still wanted.
    pub generation_tokens: u64,
    /// Steps run.
    pub num_steps: u64,
    /// Tokens computed by all steps.
    pub step_tokens: u64,
    /// Sequences that ended because their values were not finite.
    pub num_corrupted: u64,
    /// Entry i counts steps of at most `2^i` tokens and more than `2^(i-1)`.
    pub step_tokens_histogram: Vec<u64>,
}

/// All sequences, and the queues that they stand in.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    /// Indexed by `SeqSlot`.
    slab: Vec<Option<Sequence>>,
    free_slots: Vec<SeqSlot>,
    /// Slots whose last event has not been drained.
    ended_slots: Vec<SeqSlot>,
    slots_by_id: FxHashMap<SeqId, SeqSlot>,
    /// Oldest first; all older than the waiting ones.
    running: Vec<SeqSlot>,
    /// Oldest first.
    waiting: VecDeque<SeqSlot>,
    /// Indexed by `Row`.
    row_slots: Vec<Option<SeqSlot>>,
    free_rows: Vec<Row>,
    /// Rows that the runner has not been told to forget.
    released_rows: Vec<Row>,
    events: Vec<SeqEvent>,
    next_step: u64,
    /// The step that was planned and not applied.
    in_flight: Option<u64>,
    num_added: u64,
    counters: Counters,
    spare_plan: StepPlan,
    spare_work: Vec<RowWork>,
}

impl Scheduler {
    /// A scheduler without sequences.
    pub fn new(config: SchedulerConfig) -> Self {
        assert!(config.max_num_seqs > 0, "there must be a row to run in");
        assert!(config.prompt_logprob_chunk > 0, "prompt log-probabilities need at least one logit row");
        assert!(config.max_num_batched_tokens >= config.max_num_seqs, "a step must hold one token per row");
        let max_num_seqs = config.max_num_seqs as usize;
        let num_buckets = histogram_bucket(config.max_num_batched_tokens) + 1;
        Self {
            config,
            slab: Vec::new(),
            free_slots: Vec::new(),
            ended_slots: Vec::new(),
            slots_by_id: FxHashMap::default(),
            running: Vec::with_capacity(max_num_seqs),
            waiting: VecDeque::new(),
            row_slots: vec![None; max_num_seqs],
            free_rows: (0..config.max_num_seqs).rev().map(Row).collect(),
            released_rows: Vec::new(),
            events: Vec::new(),
            next_step: 0,
            in_flight: None,
            num_added: 0,
            counters: Counters { step_tokens_histogram: vec![0; num_buckets], ..Counters::default() },
            spare_plan: StepPlan::default(),
            spare_work: Vec::new(),
        }
    }

    /// Queues a request. Its prompt has at least one token and is shorter than `max_model_len`; its id is new.
    pub fn add(&mut self, request: Request, now_us: u64) -> SeqSlot {
        let prompt_len = request.prompt.len();
        assert!(prompt_len > 0 && prompt_len < self.config.max_model_len as usize, "validation lets this prompt pass");
        let seed = request.params.seed.unwrap_or_else(|| derive_seed(self.config.seed, self.num_added));
        self.num_added += 1;
        let sequence = Sequence::new(request, seed, now_us);
        let id = sequence.id;
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            self.slab.push(None);
            SeqSlot(self.slab.len() as u32 - 1)
        });
        self.slab[slot.index()] = Some(sequence);
        let previous = self.slots_by_id.insert(id, slot);
        assert!(previous.is_none(), "request id {id} is in use");
        self.waiting.push_back(slot);
        slot
    }

    /// Ends a sequence whose client went away. Its blocks are free at once; an unknown id is ignored.
    pub fn abort(&mut self, kv: &mut KvCacheManager, id: SeqId, now_us: u64) {
        self.end(kv, id, FinishReason::Abort, now_us);
    }

    /// Ends a sequence whose stop string matched. What a step in flight draws for it is dropped.
    pub fn finish(&mut self, kv: &mut KvCacheManager, id: SeqId, now_us: u64) {
        self.end(kv, id, FinishReason::Stop, now_us);
    }

    /// Aborts everything.
    pub fn abort_all(&mut self, kv: &mut KvCacheManager, now_us: u64) {
        for index in 0..self.slab.len() {
            if let Some(id) = self.slab[index].as_ref().map(|sequence| sequence.id) {
                self.abort(kv, id, now_us);
            }
        }
    }

    /// What requests must hear, in order, since the last call.
    pub fn drain_events(&mut self) -> std::vec::Drain<'_, SeqEvent> {
        self.free_slots.append(&mut self.ended_slots);
        self.events.drain(..)
    }

    /// Whether there is a sequence that has not ended.
    pub fn has_work(&self) -> bool {
        !self.slots_by_id.is_empty()
    }

    /// Whether a request is queued or running.
    pub fn contains(&self, id: SeqId) -> bool {
        self.slots_by_id.contains_key(&id)
    }

    /// Sequences in rows.
    pub fn num_running(&self) -> u32 {
        self.running.len() as u32
    }

    /// Sequences that wait for a row.
    pub fn num_waiting(&self) -> u32 {
        self.waiting.len() as u32
    }

    /// Places for sequences that were ever made: as many as ever lived at once.
    pub fn num_slots(&self) -> usize {
        self.slab.len()
    }

    /// The step that the next plan will be.
    pub fn next_step(&self) -> u64 {
        self.next_step
    }

    /// Counts since the start.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The block tables of all sequences, for `KvCacheManager::check_invariants`.
    pub fn tables(&self) -> impl Iterator<Item = &BlockTable> + Clone {
        self.slab.iter().flatten().map(|sequence| &sequence.table)
    }

    /// Checks the scheduler's queues and tables, and the cache against them.
    ///
    /// # Panics
    /// When they disagree.
    pub fn check_invariants(&self, kv: &KvCacheManager) {
        let queue = || self.running.iter().chain(&self.waiting);
        let arrivals = || queue().map(|&slot| self.sequence(slot).times.arrived_us);
        assert!(arrivals().is_sorted(), "the queues are not in order of arrival");
        assert_eq!(queue().count(), self.slots_by_id.len(), "a sequence stands in no queue, or in two");
        assert_eq!(self.slab.iter().flatten().count(), self.slots_by_id.len(), "sequences and names");
        let num_in_rows = self.row_slots.iter().flatten().count();
        assert_eq!(num_in_rows, self.running.len(), "rows and running sequences");
        assert_eq!(num_in_rows + self.free_rows.len(), self.row_slots.len(), "free and taken rows");
        for &slot in queue() {
            let sequence = self.sequence(slot);
            assert!(sequence.num_computed < sequence.num_known(), "a sequence has nothing left to compute");
            assert!(sequence.num_known() < self.config.max_model_len, "a sequence outgrew the context");
            let covered = sequence.table.blocks().len() as u64 * u64::from(kv.block_size());
            assert!(u64::from(sequence.num_computed) <= covered, "computed tokens without blocks");
            match sequence.row {
                Some(row) => assert_eq!(self.row_slots[row.index()], Some(slot), "row of {}", sequence.id),
                None => assert!(sequence.table.blocks().is_empty(), "{} waits but holds blocks", sequence.id),
            }
        }
        kv.check_invariants(self.tables());
    }

    fn sequence(&self, slot: SeqSlot) -> &Sequence {
        self.slab[slot.index()].as_ref().expect("queues name live sequences only")
    }

    fn sequence_mut(&mut self, slot: SeqSlot) -> &mut Sequence {
        self.slab[slot.index()].as_mut().expect("queues name live sequences only")
    }

    fn send(&mut self, slot: SeqSlot, event: Event) {
        let id = self.sequence(slot).id;
        self.events.push(SeqEvent { slot, id, event });
    }

    fn end(&mut self, kv: &mut KvCacheManager, id: SeqId, reason: FinishReason, now_us: u64) {
        let Some(&slot) = self.slots_by_id.get(&id) else { return };
        let was_running = self.sequence(slot).row.is_some();
        self.retire(kv, slot, reason, now_us);
        if was_running {
            self.running.retain(|&other| other != slot);
        } else {
            self.waiting.retain(|&other| other != slot);
        }
    }

    /// Takes a sequence out of everything but the queue that it stands in.
    fn retire(&mut self, kv: &mut KvCacheManager, slot: SeqSlot, reason: FinishReason, now_us: u64) {
        self.leave_row(kv, slot);
        let mut sequence = self.slab[slot.index()].take().expect("a sequence ends once");
        self.slots_by_id.remove(&sequence.id);
        self.ended_slots.push(slot);
        sequence.times.finished_us = now_us;
        let (times, num_preemptions) = (sequence.times, sequence.num_preemptions);
        let event = Event::Finished { reason, times, num_preemptions };
        self.events.push(SeqEvent { slot, id: sequence.id, event });
    }

    /// Gives a sequence's blocks and row back.
    fn leave_row(&mut self, kv: &mut KvCacheManager, slot: SeqSlot) {
        let sequence = self.sequence_mut(slot);
        kv.release(&mut sequence.table);
        if let Some(row) = sequence.row.take() {
            self.row_slots[row.index()] = None;
            self.free_rows.push(row);
            self.released_rows.push(row);
        }
    }
}

/// The bucket of `Counters::step_tokens_histogram` that a step of `num_tokens >= 1` belongs to.
fn histogram_bucket(num_tokens: u32) -> usize {
    num_tokens.next_power_of_two().trailing_zeros() as usize
}

/// The seed of the `counter`-th request: output `counter` of SplitMix64 (Steele, Lea and Flood 2014) started at `seed`.
fn derive_seed(seed: u64, counter: u64) -> u64 {
    let mut z = seed.wrapping_add(counter.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
