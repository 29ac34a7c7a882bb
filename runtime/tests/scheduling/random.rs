//! Random arrivals, aborts, stop strings, salts and prompt log-probabilities over tiny pools and two tokens: everyone
//! hears what it would have heard alone, everyone ends within the bound, nothing leaks, and a run repeats exactly.

use std::sync::Arc;

use proptest::prelude::*;
use runtime::ids::{SeqId, TokenId};
use runtime::request::{FinishReason, SamplingParams};
use runtime::scheduler::SchedulerConfig;

use super::sim::{Answer, Sim, Sizes, prompt};

#[derive(Clone, Debug)]
enum Action {
    Add {
        bits: u32,
        family: u8,
        length: u32,
        salt: u8,
        max_tokens: u32,
        stop: bool,
        logprobs: bool,
        prompt_logprobs: bool,
    },
    Abort(prop::sample::Index),
    AbortInFlight(prop::sample::Index),
    Finish(prop::sample::Index),
    Steps(u8),
}

fn action() -> impl Strategy<Value = Action> {
    let add = (
        (any::<u32>(), 0u8..2, 1u32..40, 0u8..3),
        (1u32..20, prop::bool::weighted(0.2), any::<bool>(), prop::bool::weighted(0.25)),
    );
    prop_oneof![
        6 => add.prop_map(|((bits, family, length, salt), (max_tokens, stop, logprobs, prompt_logprobs))| Action::Add {
            bits, family, length, salt, max_tokens, stop, logprobs, prompt_logprobs
        }),
        1 => any::<prop::sample::Index>().prop_map(Action::Abort),
        1 => any::<prop::sample::Index>().prop_map(Action::AbortInFlight),
        1 => any::<prop::sample::Index>().prop_map(Action::Finish),
        4 => (1u8..6).prop_map(Action::Steps),
    ]
}

prop_compose! {
    fn sizes()(
        block_size in prop::sample::select(vec![1u32, 3, 4, 16]),
        max_model_len in 8u32..60,
        extra_blocks in 0u32..20,
        max_num_seqs in 1u32..6,
        extra_tokens in 0u32..20,
        long_prefill_token_threshold in prop::sample::select(vec![0u32, 1, 5]),
        prompt_logprob_chunk in prop::sample::select(vec![1u32, 3, 64]),
        caching in prop::bool::weighted(0.85),
    ) -> Sizes {
        let scheduler = SchedulerConfig {
            max_model_len,
            max_num_batched_tokens: max_num_seqs + extra_tokens,
            max_num_seqs,
            long_prefill_token_threshold,
            prompt_logprob_chunk,
            seed: 1,
        };
        Sizes { vocab_size: 2, block_size, num_blocks: (max_model_len - 1).div_ceil(block_size) + extra_blocks, caching, scheduler }
    }
}

/// Prompts of a family share a beginning, so that paths meet and part at every offset.
fn family_prompt(bits: u32, family: u8, length: u32) -> Vec<TokenId> {
    let shared = length * 3 / 4;
    prompt((0..length).map(|i| if i < shared { u32::from(family) } else { bits.rotate_left(i) & 1 }))
}

struct Asked {
    id: SeqId,
    prompt: Vec<TokenId>,
    params: SamplingParams,
    /// What ended it from outside.
    cut: Option<FinishReason>,
    /// The step by which it must have ended.
    last_step: u64,
}

fn play(sizes: Sizes, actions: &[Action]) -> (Sim, Vec<Asked>) {
    let mut sim = Sim::new(sizes);
    let mut asked: Vec<Asked> = Vec::new();
    let salts: [Option<Arc<str>>; 3] = [None, Some("a".into()), Some("b".into())];
    for action in actions {
        match action {
            Action::Add { bits, family, length, salt, max_tokens, stop, logprobs, prompt_logprobs } => {
                let prompt = family_prompt(*bits, *family, (*length).min(sizes.scheduler.max_model_len - 1));
                let params = SamplingParams {
                    max_tokens: *max_tokens,
                    stop_token_ids: if *stop { vec![TokenId(1)] } else { Vec::new() },
                    logprobs: logprobs.then_some(1),
                    prompt_logprobs: prompt_logprobs.then_some(1),
                    ..SamplingParams::default()
                };
                let id = sim.add_salted(&prompt, params.clone(), salts[*salt as usize].clone());
                // The oldest gets a token in every step: after those before it have had theirs, it is the oldest.
                let own_steps = prompt.len() as u64 + u64::from(*max_tokens) + 1;
                let before = asked.iter().map(|asked| asked.last_step).max().unwrap_or(0).max(sim.now_us);
                asked.push(Asked { id, prompt, params, cut: None, last_step: before + own_steps });
            }
            Action::Steps(count) => (0..*count).for_each(|_| _ = sim.step()),
            Action::Abort(pick) | Action::AbortInFlight(pick) | Action::Finish(pick) if !asked.is_empty() => {
                let place = pick.index(asked.len());
                let asked = &mut asked[place];
                let reason = match action {
                    Action::Finish(_) => FinishReason::Stop,
                    _ => FinishReason::Abort,
                };
                let mut cut = |sim: &mut Sim| {
                    if sim.scheduler.contains(asked.id) {
                        asked.cut = Some(reason);
                        if reason == FinishReason::Stop {
                            sim.finish(asked.id)
                        } else {
                            sim.abort(asked.id)
                        }
                        assert_eq!(sim.answer(asked.id).reason, Some(reason));
                    }
                };
                match action {
                    Action::AbortInFlight(_) => _ = sim.step_with(cut),
                    _ => cut(&mut sim),
                }
            }
            _ => (),
        }
    }
    sim.run();
    (sim, asked)
}

fn check(sim: &Sim, asked: &[Asked]) {
    for Asked { id, prompt, params, cut, last_step } in asked {
        let answer = sim.answer(*id);
        let alone = Answer::alone(prompt, params, &sim.sizes);
        assert!(sim.ended_in_step[id] <= *last_step, "request {id} ended after step {last_step}");
        if cut.is_none() {
            assert_eq!(answer, alone, "request {id}");
        } else {
            assert_eq!(answer.reason, *cut);
            assert!(alone.tokens.starts_with(&answer.tokens), "request {id}");
            assert!(alone.prompt_logprobs.starts_with(&answer.prompt_logprobs), "request {id}");
        }
    }
    let counters = sim.scheduler.counters();
    let num_heard: usize = asked.iter().map(|asked| sim.num_tokens_heard(asked.id)).sum();
    assert_eq!(counters.generation_tokens, num_heard as u64, "tokens counted but not told");
    assert_eq!(counters.step_tokens_histogram.iter().sum::<u64>(), counters.num_steps);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn everyone_hears_what_it_would_hear_alone(sizes in sizes(), actions in prop::collection::vec(action(), 1..40)) {
        let (mut sim, asked) = play(sizes, &actions);
        check(&sim, &asked);
        sim.kv.reset();
        prop_assert_eq!(sim.kv.num_cached_blocks(), 0);
        sim.scheduler.check_invariants(&sim.kv);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn the_same_actions_give_the_same_trace(sizes in sizes(), actions in prop::collection::vec(action(), 1..40)) {
        prop_assert_eq!(play(sizes, &actions).0.trace, play(sizes, &actions).0.trace);
    }
}

/// A workload that never pauses; returns the simulation after `num_steps` steps.
pub fn endless(sizes: Sizes, num_steps: u64, seed: u64) -> Sim {
    let mut sim = Sim::new(sizes);
    let mut asked = Vec::new();
    let mut random = seed;
    let mut draw = |bound: u32| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((random >> 33) % u64::from(bound)) as u32
    };
    while sim.now_us < num_steps {
        while sim.scheduler.num_waiting() < 2 {
            let length = 1 + draw(sizes.scheduler.max_model_len - 1);
            let (prompt, max_tokens) = (family_prompt(draw(u32::MAX), draw(2) as u8, length), 1 + draw(30));
            let prompt_logprobs = (draw(8) == 0).then_some(1);
            let params = SamplingParams { max_tokens, prompt_logprobs, ..SamplingParams::default() };
            asked.push((sim.add(&prompt, params.clone()), prompt, params));
        }
        sim.step();
        if draw(16) == 0 {
            let (id, ..) = asked.swap_remove(draw(asked.len() as u32) as usize);
            sim.abort(id);
        }
        asked.retain(|(id, prompt, params)| {
            let live = sim.scheduler.contains(*id);
            if !live {
                sim.expect_alone(*id, prompt, params);
                sim.heard.get_mut(id).expect("known").clear();
            }
            live
        });
        sim.trace.clear();
    }
    asked.iter().for_each(|(id, ..)| sim.abort(*id));
    sim.run();
    sim
}
