//! Public faults of engines of this kind, reproduced on purpose at the level of scheduler and cache. The numbers are
//! those of the collection that the design cites.

use runtime::request::{Event, FinishReason, SamplingParams};
use runtime::scheduler::SchedulerConfig;

use super::random::endless;
use super::sim::{Sim, Sizes, max_tokens, prompt};

fn with(change: impl FnOnce(&mut Sizes)) -> Sizes {
    let mut sizes = Sizes::default();
    change(&mut sizes);
    sizes
}

#[test]
fn fault_01_cache_state_of_earlier_requests_does_not_show() {
    let (a, b) = (prompt(0..13), prompt((0..9).chain([3, 3, 3])));
    for caching in [true, false] {
        let mut sim = Sim::new(with(|sizes| sizes.caching = caching));
        for request in [&a, &b, &a, &a] {
            let id = sim.add(request, max_tokens(9));
            sim.run();
            sim.expect_alone(id, request, &max_tokens(9));
        }
        let last = sim.add(&a, max_tokens(9));
        sim.run();
        assert_eq!(sim.cached_tokens(last), if caching { 12 } else { 0 });
    }
}

#[test]
fn fault_02_a_hit_computes_from_its_true_position_at_every_chunk_size() {
    for prefix_len in (1..=3).flat_map(|blocks| [4 * blocks - 1, 4 * blocks, 4 * blocks + 1]) {
        for num_new in 1..=9 {
            for chunk in 1..=10 {
                let mut sim = Sim::new(with(|sizes| sizes.scheduler.long_prefill_token_threshold = chunk));
                let prefix = prompt(0..prefix_len);
                sim.add(&prefix, max_tokens(1));
                sim.run();
                let longer = [prefix, prompt(7..7 + num_new)].concat();
                let id = sim.add(&longer, max_tokens(3));
                sim.step();
                let num_cached = prefix_len / 4 * 4;
                let expected = (num_cached, chunk.min(longer.len() as u32 - num_cached));
                assert_eq!((sim.last_plan.work[0].start, sim.last_plan.work[0].length), expected);
                sim.run();
                sim.expect_alone(id, &longer, &max_tokens(3));
            }
        }
    }
}

#[test]
fn fault_03_however_a_request_ends_only_whole_accepted_blocks_are_remembered() {
    for prompt_len in 5..=8 {
        for num_output in 1..=9 {
            for how in 0..3 {
                let mut sim = Sim::new(Sizes::default());
                let first = prompt(0..prompt_len);
                let id = sim.add(&first, max_tokens(if how == 0 { num_output } else { 30 }));
                while sim.num_tokens_heard(id) < num_output as usize {
                    // A stop string matches while the next step runs: what that step draws must not be told.
                    sim.step();
                }
                match how {
                    0 => (),
                    1 => _ = sim.step_with(|sim| sim.finish(id)),
                    _ => sim.abort(id),
                }
                sim.run();
                assert_eq!(sim.num_tokens_heard(id), num_output as usize);
                // The answer so far, as the next turn's prompt.
                let longer = [first, sim.answer(id).tokens].concat();
                let again = sim.add(&longer, max_tokens(6));
                sim.run();
                sim.expect_alone(again, &longer, &max_tokens(6));
                // All but the last token of the answer were computed.
                let num_computed = longer.len() as u32 - 1;
                assert_eq!(sim.cached_tokens(again), num_computed / 4 * 4);
            }
        }
    }
}

#[test]
fn fault_04_an_abort_between_chunks_leaves_no_dangling_prefix() {
    for num_chunks in 1..6 {
        let mut sim = Sim::new(with(|sizes| sizes.scheduler.long_prefill_token_threshold = 3));
        let shared = prompt(0..20);
        let aborted = sim.add(&shared, max_tokens(5));
        (0..num_chunks).for_each(|_| _ = sim.step());
        sim.abort(aborted);
        // Enough other data to reuse every block.
        for other in 1..4 {
            let filler = prompt((0..40).map(|i| i * other % 16));
            let id = sim.add(&filler, max_tokens(20));
            sim.run();
            sim.expect_alone(id, &filler, &max_tokens(20));
        }
        let id = sim.add(&shared, max_tokens(5));
        sim.run();
        sim.expect_alone(id, &shared, &max_tokens(5));
    }
}

#[test]
fn fault_05_pool_totals_hold_for_10_000_steps() {
    for block_size in [1, 3, 16] {
        let sizes = with(|sizes| {
            (sizes.vocab_size, sizes.block_size) = (2, block_size);
            sizes.num_blocks = 63_u32.div_ceil(block_size) + 16 / block_size;
        });
        let sim = endless(sizes, 10_000, u64::from(block_size));
        let counters = sim.scheduler.counters();
        assert!(counters.num_preemptions > 20, "the pool was never short: {counters:?}");
        assert!(counters.prefix_cache_hits_tokens > 1000, "the cache was never hit: {counters:?}");
        assert!(sim.kv.num_evicted_blocks() > 100, "nothing was evicted");
    }
}

#[test]
fn fault_07_what_waits_holds_no_row_and_no_block() {
    // Three choices of one prompt wait for the first to fill the cache; the last one then finds it there.
    let mut sim = Sim::new(with(|sizes| sizes.scheduler.long_prefill_token_threshold = 4));
    let shared = prompt(0..18);
    let ids: Vec<_> = (0..4).map(|_| sim.add(&shared, max_tokens(3))).collect();
    sim.step();
    assert_eq!((sim.scheduler.num_running(), sim.scheduler.num_waiting()), (1, 3));
    assert_eq!(sim.kv.num_used_blocks(), 5, "the blocks of one prompt");
    sim.run();
    for id in ids {
        sim.expect_alone(id, &shared, &max_tokens(3));
    }
    // One whole prompt, and two tokens of each other.
    assert_eq!(sim.scheduler.counters().prefix_cache_hits_tokens, 3 * 16);
    // Another salt shares nothing, so that there is nothing to wait for.
    let mut sim = Sim::new(with(|sizes| sizes.scheduler.long_prefill_token_threshold = 4));
    sim.add(&shared, max_tokens(3));
    sim.add_salted(&shared, max_tokens(3), Some("tenant".into()));
    sim.step();
    assert_eq!(sim.scheduler.num_running(), 2);
    sim.run();
}

/// Forces preemptions by a pool that is too small for all.
#[test]
fn fault_08_a_resumed_request_replays_prompt_and_output_and_tells_nothing_twice() {
    for num_output in 1..12 {
        let mut sim = Sim::new(with(|sizes| {
            sizes.scheduler.long_prefill_token_threshold = 3;
            sizes.num_blocks = 16;
        }));
        let prompts: Vec<_> = (0..3).map(|i| prompt((0..11).map(|j| (i + 1) * j % 16))).collect();
        let params = SamplingParams { logprobs: Some(1), ..max_tokens(30 + num_output) };
        let ids: Vec<_> = prompts.iter().map(|prompt| sim.add(prompt, params.clone())).collect();
        sim.run();
        for (&id, prompt) in ids.iter().zip(&prompts) {
            sim.expect_alone(id, prompt, &params);
        }
        let num_preemptions = sim.heard[&ids[2]].iter().find_map(|event| match event {
            Event::Finished { num_preemptions, .. } => Some(*num_preemptions),
            _ => None,
        });
        assert!(num_preemptions > Some(0), "nothing was preempted");
        let counters = sim.scheduler.counters();
        assert_eq!(counters.prompt_tokens, 33, "prompt tokens are counted once");
        assert_eq!(counters.generation_tokens, 3 * (30 + u64::from(num_output)));
    }
}

#[test]
fn fault_14_prompt_logprobs_are_complete_when_asked_again_and_after_preemption() {
    let params = SamplingParams { prompt_logprobs: Some(1), ..max_tokens(25) };
    let text = prompt((0..22).map(|i| i * 5 % 16));
    let mut sim = Sim::new(with(|sizes| sizes.scheduler.prompt_logprob_chunk = 4));
    for _ in 0..2 {
        let id = sim.add(&text, params.clone());
        sim.run();
        sim.expect_alone(id, &text, &params);
        assert_eq!(sim.cached_tokens(id), 0, "the cache is not read");
    }
    // Two older ones grow until the pool is short while the third is at its prompt, or after it.
    for chunk in [1, 2, 4] {
        let mut sim = Sim::new(with(|sizes| {
            sizes.scheduler.prompt_logprob_chunk = chunk;
            sizes.num_blocks = 16;
        }));
        let older: Vec<_> =
            [prompt(0..10), prompt(3..13)].into_iter().map(|p| (sim.add(&p, max_tokens(40)), p)).collect();
        let id = sim.add(&text, params.clone());
        sim.run();
        sim.expect_alone(id, &text, &params);
        for (id, prompt) in older {
            sim.expect_alone(id, &prompt, &max_tokens(40));
        }
        assert!(sim.scheduler.counters().num_preemptions > 0, "nothing was preempted");
    }
}

#[test]
fn fault_15_an_abort_while_a_step_runs_drops_what_it_draws() {
    let mut sim = Sim::new(Sizes::default());
    let witness = sim.add(&prompt(0..6), max_tokens(12));
    let gone = sim.add(&prompt(5..14), max_tokens(12));
    (0..4).for_each(|_| _ = sim.step());
    let (told, counted) = (sim.num_tokens_heard(gone), sim.scheduler.counters().generation_tokens);
    sim.step_with(|sim| sim.abort(gone));
    assert_eq!(sim.num_tokens_heard(gone), told);
    assert_eq!(sim.scheduler.counters().generation_tokens, counted + 1, "only the witness's token counts");
    assert_eq!((sim.scheduler.num_running(), sim.kv.num_used_blocks()), (1, 3));
    // The row goes to somebody else in the next step.
    let next = sim.add(&prompt(1..8), max_tokens(12));
    sim.run();
    sim.expect_alone(witness, &prompt(0..6), &max_tokens(12));
    sim.expect_alone(next, &prompt(1..8), &max_tokens(12));
}

#[test]
fn fault_16_a_sequence_ends_with_length_at_the_context_and_never_passes_it() {
    for block_size in [1, 3, 4, 16] {
        for prompt_len in [30, 31] {
            for limit in [1, 2, u32::MAX] {
                let mut sim = Sim::new(with(|sizes| {
                    sizes.block_size = block_size;
                    sizes.num_blocks = 31_u32.div_ceil(block_size);
                    sizes.scheduler.max_model_len = 32;
                }));
                let text = prompt((0..prompt_len).map(|i| i % 16));
                let id = sim.add(&text, max_tokens(limit));
                sim.run();
                sim.expect_alone(id, &text, &max_tokens(limit));
                assert_eq!(sim.answer(id).reason, Some(FinishReason::Length));
                assert_eq!(sim.num_tokens_heard(id), limit.min(32 - prompt_len) as usize);
            }
        }
    }
}

#[test]
fn fault_23_finished_requests_leave_nothing_behind() {
    let mut sim = Sim::new(Sizes::default());
    for round in 0..200 {
        for i in 0..10 {
            let salt = Some(format!("tenant {round} {i}").into());
            sim.add_salted(&prompt([i, round % 16, 3, 4, 5, 6]), max_tokens(10), salt);
        }
        sim.run();
        sim.heard.clear();
        sim.trace.clear();
    }
    assert!(sim.scheduler.num_slots() <= 10, "the slab grows");
    assert!(sim.kv.num_salts() <= 16, "salts outlive their blocks");
}

#[test]
fn fault_25_seeds_depend_on_the_order_of_arrival_only() {
    let seeds = |config: SchedulerConfig| {
        let mut sim = Sim::new(with(|sizes| sizes.scheduler = config));
        let seeded = SamplingParams { seed: Some(99), ..max_tokens(2) };
        for params in [max_tokens(2), seeded, max_tokens(2), max_tokens(2)] {
            sim.add(&prompt(0..3), params);
        }
        let mut seeds = Vec::new();
        while sim.step() {
            seeds.extend(sim.last_plan.admitted.iter().map(|new| (new.seq, new.seed)));
        }
        seeds
    };
    let config = Sizes::default().scheduler;
    let all = seeds(config);
    assert_eq!(all[1].1, 99);
    assert_eq!(all, seeds(SchedulerConfig { max_num_seqs: 1, ..config }), "the batch changes a seed");
    let mut distinct: Vec<_> = all.iter().map(|&(_, seed)| seed).collect();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), 4);
    assert_ne!(all[0], seeds(SchedulerConfig { seed: config.seed + 1, ..config })[0]);
}
