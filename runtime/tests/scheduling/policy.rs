//! The scheduling policy, named case by case: who is served when, and what a step looks like.

use runtime::ids::SeqId;
use runtime::request::{FinishReason, SamplingParams};
use runtime::step::{LogitRows, RowWork};

use super::sim::{Answer, Sim, Sizes, max_tokens, prompt};

fn with(change: impl FnOnce(&mut Sizes)) -> Sizes {
    let mut sizes = Sizes { num_blocks: 64, ..Sizes::default() };
    change(&mut sizes);
    sizes
}

/// (row, start, length) of each row of the last step.
fn shape(sim: &Sim) -> Vec<(u32, u32, u32)> {
    sim.last_plan.work.iter().map(|RowWork { row, start, length, .. }| (row.0, *start, *length)).collect()
}

#[test]
fn decodes_come_first_then_running_prompts_then_waiting_ones() {
    let mut sim = Sim::new(with(|_| ()));
    sim.add(&prompt(0..4), max_tokens(9));
    sim.step();
    sim.add(&prompt(5..14).repeat(3), max_tokens(9));
    sim.add(&prompt(1..9), max_tokens(9));
    sim.step();
    assert_eq!(shape(&sim), [(0, 4, 1), (1, 0, 15)]);
    assert_eq!(sim.last_plan.work[1].logits, LogitRows::None, "an inner chunk draws nothing");
    sim.step();
    assert_eq!(shape(&sim), [(0, 5, 1), (1, 15, 12), (2, 0, 3)]);
    assert_eq!(sim.last_plan.work[1].logits, LogitRows::Last);
    sim.step();
    assert_eq!(shape(&sim), [(0, 6, 1), (1, 27, 1), (2, 3, 5)]);
    sim.run();
}

#[test]
fn a_long_prompt_leaves_budget_to_others() {
    let mut sim = Sim::new(with(|sizes| sizes.scheduler.long_prefill_token_threshold = 6));
    sim.add(&prompt(0..16).repeat(2), max_tokens(2));
    sim.add(&prompt(3..8), max_tokens(2));
    sim.step();
    assert_eq!(shape(&sim), [(0, 0, 6), (1, 0, 5)]);
    sim.run();
}

#[test]
fn no_more_sequences_run_than_there_are_rows() {
    let mut sim = Sim::new(with(|sizes| sizes.scheduler.max_num_seqs = 2));
    let ids: Vec<SeqId> = (0..5).map(|i| sim.add(&prompt([i, 1, 2]), max_tokens(3))).collect();
    sim.step();
    assert_eq!((sim.scheduler.num_running(), sim.scheduler.num_waiting()), (2, 3));
    sim.run();
    assert!(ids.iter().map(|id| sim.ended_in_step[id]).is_sorted(), "first come, first served");
}

#[test]
fn a_row_with_non_finite_values_ends_with_an_error_and_commits_nothing() {
    let mut sim = Sim::new(with(|_| ()));
    let (bad, good) = (prompt(0..12), prompt(4..16));
    let bad_id = sim.add(&bad, max_tokens(5));
    let good_id = sim.add(&good, max_tokens(5));
    sim.runner.corrupt_from.push((bad_id, 3));
    sim.run();
    assert_eq!(sim.answer(bad_id), Answer { reason: Some(FinishReason::Error), ..Answer::default() });
    sim.expect_alone(good_id, &good, &max_tokens(5));
    assert_eq!(sim.scheduler.counters().num_corrupted, 1);
    sim.runner.corrupt_from.clear();
    let again = sim.add(&bad, max_tokens(5));
    sim.run();
    assert_eq!(sim.cached_tokens(again), 0, "a corrupt block was remembered");
    sim.expect_alone(again, &bad, &max_tokens(5));
}

#[test]
fn corruption_in_decode_keeps_what_was_committed_before() {
    let mut sim = Sim::new(with(|_| ()));
    let text = prompt(0..9);
    let id = sim.add(&text, max_tokens(9));
    sim.runner.corrupt_from.push((id, 11));
    sim.run();
    assert_eq!(sim.answer(id).reason, Some(FinishReason::Error));
    assert_eq!(sim.num_tokens_heard(id), 3, "tokens of positions 9, 10 and 11 were sound");
    let longer = [text, sim.answer(id).tokens, prompt([1])].concat();
    let again = sim.add(&longer, max_tokens(1));
    sim.run();
    assert_eq!(sim.cached_tokens(again), 8, "position 11 was in the corrupt step");
}

#[test]
fn prompt_logprobs_ask_for_logits_in_chunks_and_skip_the_cache() {
    let mut sim = Sim::new(with(|sizes| sizes.scheduler.prompt_logprob_chunk = 5));
    let text = prompt(0..12);
    sim.add(&text, max_tokens(1));
    sim.run();
    let params = SamplingParams { prompt_logprobs: Some(1), ..max_tokens(1) };
    let id = sim.add(&text, params.clone());
    let mut chunks = Vec::new();
    while sim.step() {
        let work = &sim.last_plan.work[0];
        chunks.push((work.start, work.length, work.logits));
    }
    let all = |draw| LogitRows::All { draw };
    assert_eq!(chunks, [(0, 5, all(false)), (5, 5, all(false)), (10, 2, all(true))]);
    sim.expect_alone(id, &text, &params);
}

#[test]
fn prompt_logprobs_of_many_share_one_bound_of_logit_rows() {
    let mut sim = Sim::new(with(|sizes| sizes.scheduler.prompt_logprob_chunk = 5));
    let params = SamplingParams { prompt_logprobs: Some(1), ..max_tokens(2) };
    let texts = [prompt(0..7), prompt(1..8), prompt(2..9)];
    let ids = texts.each_ref().map(|text| sim.add(text, params.clone()));
    sim.step();
    let lengths = |sim: &Sim| sim.last_plan.work.iter().map(|work| work.length).collect::<Vec<_>>();
    assert_eq!(lengths(&sim), [5, 1, 1], "the oldest takes the chunk, none stands still");
    sim.step();
    assert_eq!(lengths(&sim), [2, 4, 1], "what it leaves goes to the next");
    sim.run();
    for (id, text) in ids.iter().zip(&texts) {
        sim.expect_alone(*id, text, &params);
    }
}

#[test]
fn the_oldest_makes_progress_in_every_step_however_many_come_after_it() {
    let mut sim = Sim::new(Sizes::default());
    let text = prompt(0..16).repeat(2);
    let first = sim.add(&text, max_tokens(20));
    let mut steps = 0;
    while sim.scheduler.contains(first) {
        sim.add(&prompt([steps % 16, 9, 8, 7, 6]), max_tokens(15));
        sim.step();
        steps += 1;
        assert!(steps <= 32 + 20, "the oldest starves");
    }
    sim.expect_alone(first, &text, &max_tokens(20));
    assert!(sim.scheduler.counters().num_preemptions > 0, "there was no pressure");
}

#[test]
fn a_reset_forgets_what_nobody_holds() {
    let mut sim = Sim::new(with(|_| ()));
    let (old, held) = (prompt(0..9), prompt(3..12));
    sim.add(&old, max_tokens(1));
    sim.run();
    let running = sim.add(&held, max_tokens(9));
    sim.step();
    sim.kv.reset();
    sim.scheduler.check_invariants(&sim.kv);
    let (again, shared) = (sim.add(&old, max_tokens(1)), sim.add(&held, max_tokens(1)));
    sim.run();
    assert_eq!((sim.cached_tokens(again), sim.cached_tokens(shared)), (0, 8));
    sim.expect_alone(running, &held, &max_tokens(9));
}
