//! The tokens that the filters have left: all of a row at first, a list once one of them has narrowed it.
//!
//! Invariant: tokens are ordered by logit, largest first, then by id, lowest first: a total order, so that the set does
//! not depend on how it was selected. Nothing sorts the vocabulary.

use std::cmp::Ordering;

use super::exp::{exp, sum_of_exp};
use super::temperature::ScaledRow;

/// Logits that are tested together.
const CHUNK: usize = 64;

/// A token that may be drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub(super) logit: f32,
    pub(super) id: u32,
}

impl Candidate {
    /// Best first.
    pub(super) fn order(&self, other: &Self) -> Ordering {
        other.logit.total_cmp(&self.logit).then(self.id.cmp(&other.id))
    }
}

pub(super) struct Kept<'a> {
    row: ScaledRow<'a>,
    list: &'a mut Vec<Candidate>,
    is_list: bool,
}

impl<'a> Kept<'a> {
    /// Every token of `row` that is not masked; `list` is scratch.
    pub(super) fn all_of(row: ScaledRow<'a>, list: &'a mut Vec<Candidate>) -> Self {
        Self { row, list, is_list: false }
    }

    /// The row that tokens are kept of.
    pub(super) fn row(&self) -> ScaledRow<'a> {
        self.row
    }

    /// Number of tokens, in a row that no filter has narrowed the masked ones included.
    pub(super) fn len(&self) -> usize {
        if self.is_list { self.list.len() } else { self.row.logits.len() }
    }

    /// The kept tokens in no particular order.
    pub(super) fn candidates(&mut self) -> &mut Vec<Candidate> {
        if !self.is_list {
            self.retain_at_least(f32::MIN);
        }
        self.list
    }

    /// Sum over the kept tokens of e^scaled, the softmax's denominator.
    pub(super) fn total_weight(&self) -> f64 {
        let row = self.row;
        if self.is_list {
            self.list.iter().map(|candidate| f64::from(exp(row.scaled(candidate.logit)))).sum()
        } else {
            sum_of_exp(row.logits, row.max, row.inverse_temperature)
        }
    }

    /// Keeps tokens whose scaled logit is at least `floor`.
    pub(super) fn retain_at_least(&mut self, floor: f32) {
        let row = self.row;
        if self.is_list {
            self.list.retain(|candidate| row.scaled(candidate.logit) >= floor);
            return;
        }
        self.is_list = true;
        self.list.clear();
        for (index, chunk) in row.logits.chunks(CHUNK).enumerate() {
            push_passing(self.list, index, chunk, |logit| row.scaled(logit) >= floor);
        }
    }

    /// Keeps the best `count` tokens.
    pub(super) fn keep_best(&mut self, count: usize) {
        if self.is_list {
            truncate_to_best(self.list, count);
        } else if count < self.row.logits.len() {
            self.is_list = true;
            best_of(self.row.logits, count, self.list);
        }
    }
}

/// Writes the best `count` of `logits` into `list`, in no particular order, masked ones left out.
///
/// A pass with a rising floor: whenever twice as many as needed are there, the worse half goes, and what does not beat the
/// worst kept one is not looked at any more. Later equals lose, as their ids are higher.
pub(super) fn best_of(logits: &[f32], count: usize, list: &mut Vec<Candidate>) {
    list.clear();
    let room = count.saturating_mul(2).max(CHUNK);
    let mut floor = f32::NEG_INFINITY;
    for (index, chunk) in logits.chunks(CHUNK).enumerate() {
        push_passing(list, index, chunk, |logit| logit > floor);
        if list.len() > room {
            floor = truncate_to_best(list, count);
        }
    }
    truncate_to_best(list, count);
}

/// Adds the tokens of a chunk whose logits pass. Most chunks have none, and that test is SIMD.
#[inline(always)]
fn push_passing(list: &mut Vec<Candidate>, index: usize, chunk: &[f32], passes: impl Fn(f32) -> bool) {
    if !chunk.iter().fold(false, |any, &logit| any | passes(logit)) {
        return;
    }
    for (id, &logit) in ((index * CHUNK) as u32..).zip(chunk) {
        if passes(logit) {
            list.push(Candidate { logit, id });
        }
    }
}

/// Keeps the best `count`; returns the logit of the worst of them (-inf if there are fewer).
fn truncate_to_best(list: &mut Vec<Candidate>, count: usize) -> f32 {
    if list.len() < count {
        return f32::NEG_INFINITY;
    }
    let Some(last) = count.checked_sub(1) else {
        list.clear();
        return f32::INFINITY;
    };
    let worst = list.select_nth_unstable_by(last, Candidate::order).1.logit;
    list.truncate(count);
    worst
}
