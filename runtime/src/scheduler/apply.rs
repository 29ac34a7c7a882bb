//! Reading a step's results: computed tokens advance, full blocks are committed, drawn tokens are told, sequences end.
//!
//! Invariant: only KV that was computed, finite and of known tokens is committed; nothing is told twice, and nothing of a
//! row whose sequence has left since the step was planned.

use super::{Scheduler, SeqSlot, histogram_bucket};
use crate::kv::KvCacheManager;
use crate::request::{Event, FinishReason};
use crate::sequence::Sequence;
use crate::step::{DrawnToken, LogitRows, RowOutput, RowWork, StepOutput, StepPlan};

impl Scheduler {
    /// Takes the results of a plan; what requests must hear waits in `drain_events`. Takes the log-probabilities out of
    /// `output`, and keeps the plan's buffers for the next one.
    ///
    /// # Panics
    /// When the output is not of this plan.
    pub fn apply(&mut self, kv: &mut KvCacheManager, plan: StepPlan, output: &mut StepOutput, now_us: u64) {
        assert_eq!(self.in_flight.take(), Some(plan.step), "a plan is applied once, in order");
        assert_eq!(plan.work.len(), output.rows.len(), "one result per row of the plan");
        let mut num_tokens = 0;
        let mut has_ended = false;
        for (work, result) in plan.work.iter().zip(&mut output.rows) {
            num_tokens += work.length;
            // Empty: the sequence was ended while the step ran. Nobody else can have the row before the next plan.
            let Some(slot) = self.row_slots[work.row.index()] else { continue };
            if let Some(reason) = self.apply_row(kv, slot, (work, result), now_us) {
                self.retire(kv, slot, reason, now_us);
                has_ended = true;
            }
        }
        if has_ended {
            let slab = &self.slab;
            self.running.retain(|slot| slab[slot.index()].is_some());
        }
        self.counters.num_steps += 1;
        self.counters.step_tokens += u64::from(num_tokens);
        self.counters.step_tokens_histogram[histogram_bucket(num_tokens)] += 1;
        self.recycle(plan);
    }

    /// Advances one sequence; `Some` says why it ends.
    fn apply_row(
        &mut self,
        kv: &mut KvCacheManager,
        slot: SeqSlot,
        (work, result): (&RowWork, &mut RowOutput),
        now_us: u64,
    ) -> Option<FinishReason> {
        if result.corrupt {
            self.counters.num_corrupted += 1;
            return Some(FinishReason::Error);
        }
        let sequence = self.slab[slot.index()].as_mut().expect("queues name live sequences only");
        debug_assert_eq!(work.start, sequence.num_computed, "a step computes what comes next");
        sequence.num_computed = work.start + work.length;
        kv.commit(&mut sequence.table, &sequence.tokens, sequence.num_computed);
        let num_prompt_done = sequence.num_computed.min(sequence.prompt_len);
        if num_prompt_done > sequence.num_prompt_counted {
            self.counters.prompt_tokens += u64::from(num_prompt_done - sequence.num_prompt_counted);
            sequence.num_prompt_counted = num_prompt_done;
        }
        if matches!(work.logits, LogitRows::All { .. }) {
            self.send_prompt_logprobs(slot, work, result);
        }
        result.tokens.drain(..).find_map(|drawn| self.add_token(slot, drawn, now_us))
    }

    /// Tells the log-probabilities of the prompt tokens after the computed positions; the first token has none.
    fn send_prompt_logprobs(&mut self, slot: SeqSlot, work: &RowWork, result: &mut RowOutput) {
        let sequence = self.sequence_mut(slot);
        let first_token = work.start + 1;
        let num_wanted = (sequence.prompt_len - first_token).min(work.length) as usize;
        assert!(result.prompt_logprobs.len() >= num_wanted, "one entry per prompt token after a computed position");
        let is_first = sequence.num_prompt_logprobs_sent == 0;
        debug_assert!(is_first || sequence.num_prompt_logprobs_sent == first_token, "entries come in order, once");
        sequence.num_prompt_logprobs_sent = first_token + num_wanted as u32;
        let entries = result.prompt_logprobs.drain(..).take(num_wanted).map(Some);
        let entries: Vec<_> = is_first.then_some(None).into_iter().chain(entries).collect();
        if !entries.is_empty() {
            self.send(slot, Event::PromptLogprobs(entries));
        }
    }

    /// Adds one drawn token to a sequence and tells it; `Some` says why the sequence ends with it.
    fn add_token(&mut self, slot: SeqSlot, drawn: DrawnToken, now_us: u64) -> Option<FinishReason> {
        let max_model_len = self.config.max_model_len;
        let sequence = self.sequence_mut(slot);
        sequence.tokens.push(drawn.id);
        if sequence.num_output() == 1 {
            sequence.times.first_token_us = now_us;
        }
        let reason = end_after(sequence, max_model_len);
        self.counters.generation_tokens += 1;
        self.send(slot, Event::Token { id: drawn.id, logprobs: drawn.logprobs });
        reason
    }

    fn recycle(&mut self, mut plan: StepPlan) {
        plan.released.clear();
        plan.admitted.clear();
        for mut work in plan.work.drain(..) {
            work.new_blocks.clear();
            self.spare_work.push(work);
        }
        self.spare_plan = plan;
    }
}

/// Whether a sequence ends with the token it has just got.
fn end_after(sequence: &Sequence, max_model_len: u32) -> Option<FinishReason> {
    let last = *sequence.tokens.last()?;
    if sequence.params.is_stop(last) {
        Some(FinishReason::Stop)
    } else if sequence.num_output() >= sequence.params.max_tokens || sequence.num_known() >= max_model_len {
        Some(FinishReason::Length)
    } else {
        None
    }
}
