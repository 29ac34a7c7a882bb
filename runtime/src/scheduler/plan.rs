//! Making a step: one token budget, spent on decodes, then on prompts that run, then on prompts that wait.
//!
//! Invariant: a planned row's block table covers every position that it computes, and a sequence is never preempted once
//! it is in the plan. A prompt gets all its blocks when it is admitted, so that only decodes can meet an empty pool.

use super::{Scheduler, SeqSlot};
use crate::ids::Row;
use crate::kv::KvCacheManager;
use crate::request::Event;
use crate::sequence::Sequence;
use crate::step::{LogitRows, NewRow, RowWork, StepPlan};

/// A plan being made.
struct Draft<'a> {
    kv: &'a mut KvCacheManager,
    plan: StepPlan,
    budget_tokens: u32,
    /// Logit rows that prompts may still ask for, beyond the one that every row has.
    spare_logit_rows: u32,
    now_us: u64,
}

impl Scheduler {
    /// Plans the next step. Without work the plan has no rows and must not be run; otherwise it goes to `apply`.
    ///
    /// # Panics
    /// When the last plan has not been applied, or when sequences exist but none can go on (a broken invariant).
    pub fn schedule(&mut self, kv: &mut KvCacheManager, now_us: u64) -> StepPlan {
        assert_eq!(self.in_flight, None, "a step is planned after the last one was applied");
        let plan = std::mem::take(&mut self.spare_plan);
        let mut draft = Draft {
            kv,
            plan,
            budget_tokens: self.config.max_num_batched_tokens,
            spare_logit_rows: self.config.prompt_logprob_chunk - 1,
            now_us,
        };
        let was_preempted = self.plan_decodes(&mut draft);
        self.plan_prefills(&mut draft);
        if !was_preempted {
            self.admit(&mut draft);
        }
        let mut plan = draft.plan;
        if plan.work.is_empty() {
            assert!(!self.has_work(), "sequences wait but none can go on");
            return plan;
        }
        plan.step = self.next_step;
        plan.released.append(&mut self.released_rows);
        self.in_flight = Some(plan.step);
        self.next_step += 1;
        plan
    }

    /// Gives each sequence that lacks one token its token, oldest first, preempting the youngest where blocks run out.
    /// Returns whether a sequence was preempted.
    fn plan_decodes(&mut self, draft: &mut Draft<'_>) -> bool {
        let mut was_preempted = false;
        let mut next = 0;
        while next < self.running.len() && draft.budget_tokens > 0 {
            let slot = self.running[next];
            let sequence = self.slab[slot.index()].as_mut().expect("queues name live sequences only");
            if sequence.num_remaining() > 1 {
                next += 1;
                continue;
            }
            let (num_planned, num_known) = (sequence.table.blocks().len(), sequence.num_known());
            if draft.kv.reserve(&mut sequence.table, num_known).is_ok() {
                self.push_work(draft, slot, num_planned);
                next += 1;
            } else {
                // The youngest is this one or one after it: nothing that is in the plan.
                was_preempted = true;
                self.preempt_youngest(draft.kv);
            }
        }
        was_preempted
    }

    /// Goes on with prompts that are partly computed, oldest first.
    fn plan_prefills(&mut self, draft: &mut Draft<'_>) {
        for next in 0..self.running.len() {
            if draft.budget_tokens == 0 {
                return;
            }
            let slot = self.running[next];
            let sequence = self.sequence(slot);
            if sequence.num_remaining() > 1 {
                let num_planned = sequence.table.blocks().len();
                self.push_work(draft, slot, num_planned);
            }
        }
    }

    /// Lets waiting sequences in, oldest first, while there are rows, blocks and budget; the first that cannot enter stops it.
    fn admit(&mut self, draft: &mut Draft<'_>) {
        while draft.budget_tokens > 0
            && let Some(&slot) = self.waiting.front()
            && let Some(&row) = self.free_rows.last()
            && self.open_table(draft.kv, slot)
        {
            self.waiting.pop_front();
            self.free_rows.pop();
            self.running.push(slot);
            self.row_slots[row.index()] = Some(slot);
            let sequence = self.sequence_mut(slot);
            sequence.row = Some(row);
            draft.plan.admitted.push(NewRow {
                row,
                seq: sequence.id,
                tokens: sequence.tokens.clone(),
                prompt_len: sequence.prompt_len,
                params: sequence.params.clone(),
                seed: sequence.seed,
            });
            if !std::mem::replace(&mut sequence.is_started, true) {
                sequence.times.scheduled_us = draft.now_us;
                let cached_tokens = sequence.num_computed;
                self.send(slot, Event::Started { cached_tokens });
            }
            self.push_work(draft, slot, 0);
        }
    }

    /// Finds a waiting sequence's cached prefix and reserves the blocks of all its known tokens. Where it must wait
    /// longer, nothing has changed.
    fn open_table(&mut self, kv: &mut KvCacheManager, slot: SeqSlot) -> bool {
        // One block for each running sequence is left over, so that a newcomer is not thrown out again by the next decode.
        let headroom_blocks = self.running.len() as u32;
        if kv.num_available_blocks() <= headroom_blocks {
            return false;
        }
        let max_model_len = self.config.max_model_len;
        let sequence = self.slab[slot.index()].as_mut().expect("queues name live sequences only");
        // Room for all that it can come to, so that no later step allocates.
        let capacity = sequence.prompt_len.saturating_add(sequence.params.max_tokens).min(max_model_len);
        sequence.tokens.reserve_exact(capacity as usize - sequence.tokens.len());
        sequence.table.reserve_capacity(capacity.div_ceil(kv.block_size()) as usize);
        let max_cached = if sequence.wants_prompt_logprobs() { sequence.first_prompt_logit() } else { u32::MAX };
        let salt = sequence.cache_salt.as_ref();
        let num_cached = kv.match_prefix(&mut sequence.table, salt, &sequence.tokens, max_cached as usize);
        sequence.num_computed = num_cached;
        let num_blocks = sequence.num_known().div_ceil(kv.block_size());
        let num_new_blocks = num_blocks - sequence.table.blocks().len() as u32;
        if num_new_blocks + headroom_blocks > kv.num_available_blocks() || self.is_prefix_on_its_way(kv, slot) {
            let sequence = self.sequence_mut(slot);
            kv.release(&mut sequence.table);
            sequence.num_computed = 0;
            return false;
        }
        let sequence = self.slab[slot.index()].as_mut().expect("queues name live sequences only");
        let num_known = sequence.num_known();
        kv.reserve(&mut sequence.table, num_known).expect("the blocks were counted");
        if !sequence.is_started && kv.is_prefix_caching() && sequence.params.prompt_logprobs.is_none() {
            self.counters.prefix_cache_queries_tokens += u64::from(sequence.prompt_len);
            self.counters.prefix_cache_hits_tokens += u64::from(num_cached);
        }
        true
    }

    /// Whether a running sequence is computing the next block that this one could have from the cache: then it is cheaper
    /// to wait for it (the `n` choices of one prompt, a burst behind one system prompt). It ends with that prefill.
    fn is_prefix_on_its_way(&self, kv: &KvCacheManager, slot: SeqSlot) -> bool {
        let sequence = self.sequence(slot);
        let prefix_len = (sequence.num_computed + kv.block_size()) as usize;
        if !kv.is_prefix_caching() || sequence.wants_prompt_logprobs() || prefix_len >= sequence.tokens.len() {
            return false;
        }
        let prefix = &sequence.tokens[..prefix_len];
        self.running.iter().map(|&other| self.sequence(other)).any(|other| {
            other.num_remaining() > 1
                && !other.table.is_private()
                && !other.wants_prompt_logprobs()
                && other.cache_salt == sequence.cache_salt
                && other.tokens.starts_with(prefix)
        })
    }

    /// Throws the youngest running sequence back to the head of the queue. Its committed blocks stay in the cache.
    fn preempt_youngest(&mut self, kv: &mut KvCacheManager) {
        let slot = self.running.pop().expect("a sequence lacks blocks, so one runs");
        assert!(!self.running.is_empty(), "a sequence does not fit into the cache alone");
        self.leave_row(kv, slot);
        let sequence = self.sequence_mut(slot);
        sequence.num_computed = 0;
        sequence.num_preemptions += 1;
        self.counters.num_preemptions += 1;
        self.waiting.push_front(slot);
    }

    /// Puts a running sequence's next positions into the plan; its blocks from `first_new_block` on are new to the runner.
    fn push_work(&mut self, draft: &mut Draft<'_>, slot: SeqSlot, first_new_block: usize) {
        let mut work = self.spare_work.pop().unwrap_or_else(empty_work);
        let sequence = self.sequence(slot);
        let (length, logits) = self.next_chunk(sequence, draft);
        let covered = sequence.table.blocks().len() as u64 * u64::from(draft.kv.block_size());
        debug_assert!(u64::from(sequence.num_computed + length) <= covered, "positions without a block");
        work.row = sequence.row.expect("only running sequences are planned");
        work.start = sequence.num_computed;
        work.length = length;
        work.logits = logits;
        work.new_blocks.extend_from_slice(&sequence.table.blocks()[first_new_block..]);
        draft.budget_tokens -= length;
        if let LogitRows::All { .. } = logits {
            draft.spare_logit_rows -= length - 1;
        }
        draft.plan.work.push(work);
    }

    /// How many positions a sequence computes next, and which of them need logits.
    fn next_chunk(&self, sequence: &Sequence, draft: &Draft<'_>) -> (u32, LogitRows) {
        let num_remaining = sequence.num_remaining();
        let threshold = match self.config.long_prefill_token_threshold {
            0 => u32::MAX,
            threshold => threshold,
        };
        let length = num_remaining.min(draft.budget_tokens).min(threshold);
        if !sequence.wants_prompt_logprobs() {
            return (length, if length == num_remaining { LogitRows::Last } else { LogitRows::None });
        }
        let num_before = sequence.first_prompt_logit().saturating_sub(sequence.num_computed);
        if num_before > 0 {
            return (length.min(num_before), LogitRows::None);
        }
        let length = length.min(1 + draft.spare_logit_rows);
        (length, LogitRows::All { draw: length == num_remaining })
    }
}

fn empty_work() -> RowWork {
    RowWork { row: Row(0), start: 0, length: 0, num_drafts: 0, new_blocks: Vec::new(), logits: LogitRows::None }
}
