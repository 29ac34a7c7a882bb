//! The engine thread through its handle: overload, aborts, device failures, panics, drain and the end of the last handle.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use runtime::engine::{Engine, EngineConfig, Health};
use runtime::error::{DeviceError, LoadError, RequestError};
use runtime::ids::{SeqId, TokenId};
use runtime::request::{Event, FinishReason, Request, SamplingParams};
use runtime::step::{StepOutput, StepPlan, StepRunner};

use super::scripted::ScriptedRunner;
use super::sim::{Answer, Sizes, max_tokens, prompt};

/// Only a bug makes a test wait this long.
const PATIENCE: Duration = Duration::from_secs(20);

fn config() -> EngineConfig {
    EngineConfig {
        vocab_size: 16,
        max_model_len: 64,
        max_num_batched_tokens: 8,
        max_num_seqs: 2,
        block_size: 4,
        num_blocks: 33,
        enable_prefix_caching: true,
        long_prefill_token_threshold: 0,
        max_num_queued_reqs: 3,
        max_num_queued_tokens: 0,
        seed: 0,
        max_logprobs: 20,
        prompt_logprob_chunk: 4,
    }
}

/// What a gated step does once it is let through.
enum Gate {
    Run,
    FailDevice,
    Panic,
}

/// A scripted runner that takes one step per message, so that a test knows what the thread is doing.
struct GatedRunner {
    inner: ScriptedRunner,
    gate: Receiver<Gate>,
    /// Told before each step waits at the gate.
    arrived: Sender<StepPlan>,
}

impl StepRunner for GatedRunner {
    fn submit(&mut self, plan: &StepPlan) -> Result<(), DeviceError> {
        drop(self.arrived.send(plan.clone()));
        match self.gate.recv() {
            Ok(Gate::FailDevice) => Err(DeviceError::Failed("unplugged".to_owned())),
            Ok(Gate::Panic) => panic!("a bug in the runner"),
            // Without a test at the gate, steps run freely.
            Ok(Gate::Run) | Err(_) => self.inner.submit(plan),
        }
    }

    fn wait(&mut self, output: &mut StepOutput) -> Result<(), DeviceError> {
        self.inner.wait(output)
    }
}

struct Gated {
    engine: Engine,
    gate: Sender<Gate>,
    steps: Receiver<StepPlan>,
}

fn gated(config: EngineConfig) -> Gated {
    let (gate, gate_receiver) = channel();
    let (arrived, steps) = channel();
    let engine = Engine::start(move || {
        let inner = ScriptedRunner::new(config.vocab_size, config.block_size, config.num_blocks, config.max_num_seqs);
        let runner = GatedRunner { inner, gate: gate_receiver, arrived };
        Ok((Box::new(runner) as Box<dyn StepRunner>, config))
    });
    Gated { engine: engine.expect("starts"), gate, steps }
}

/// An engine that nothing holds up.
fn free_running() -> Engine {
    gated(config()).engine
}

impl Gated {
    /// Waits until the engine stands at the gate with a planned step.
    fn next_step(&self) -> StepPlan {
        self.steps.recv_timeout(PATIENCE).expect("a step is planned")
    }

    fn let_through(&self, gate: Gate) {
        self.gate.send(gate).expect("the engine stands at the gate");
    }
}

fn request(engine: &Engine, ids: Vec<TokenId>, params: SamplingParams) -> Request {
    Request { id: engine.next_id(), prompt: ids.into(), params, cache_salt: None }
}

/// Submits and returns the id and what it will hear.
fn submit(
    engine: &Engine,
    ids: Vec<TokenId>,
    params: SamplingParams,
) -> Result<(SeqId, Receiver<Event>), RequestError> {
    let (sender, events) = channel();
    let request = request(engine, ids, params);
    let id = request.id;
    engine.submit(request, Box::new(move |event| sender.send(event).is_ok()))?;
    Ok((id, events))
}

/// All events until the sink is dropped.
fn hear(events: &Receiver<Event>) -> Vec<Event> {
    let mut heard = Vec::new();
    while let Ok(event) = events.recv_timeout(PATIENCE) {
        heard.push(event);
    }
    heard
}

fn alone(ids: &[TokenId], params: &SamplingParams) -> Answer {
    Answer::alone(ids, params, &Sizes::default())
}

fn reason(events: &Receiver<Event>) -> Option<FinishReason> {
    Answer::heard(&hear(events)).reason
}

#[test]
fn requests_hear_their_answers() {
    let engine = free_running();
    let asked: Vec<_> = (0..5)
        .map(|i| {
            let (ids, params) = (prompt(i..i + 9), max_tokens(5 + i));
            (submit(&engine, ids.clone(), params.clone()).expect("accepted").1, ids, params)
        })
        .collect();
    for (events, ids, params) in asked {
        assert_eq!(Answer::heard(&hear(&events)), alone(&ids, &params));
    }
    let stats = engine.stats();
    assert_eq!((stats.num_running, stats.num_waiting, stats.num_used_blocks, stats.num_total_blocks), (0, 0, 0, 32));
    assert_eq!((stats.counters.prompt_tokens, stats.counters.generation_tokens), (45, 5 + 6 + 7 + 8 + 9));
    assert_eq!(stats.counters.step_tokens_histogram.iter().sum::<u64>(), stats.counters.num_steps);
    engine.shutdown();
}

#[test]
fn fault_15_aborts_while_queued_in_prefill_and_in_decode_free_everything_within_a_step() {
    let gated = gated(config());
    let engine = &gated.engine;
    let (decoding, decoding_events) = submit(engine, prompt(0..3), max_tokens(50)).expect("accepted");
    gated.next_step();
    let (prefilling, prefilling_events) = submit(engine, prompt(0..16).repeat(2), max_tokens(50)).expect("accepted");
    let (queued, queued_events) = submit(engine, prompt(4..9), max_tokens(50)).expect("accepted");
    gated.let_through(Gate::Run);
    let plan = gated.next_step();
    assert_eq!(plan.work.iter().map(|work| work.length).collect::<Vec<_>>(), [1, 7], "a decode and a chunk");
    let stats = engine.stats();
    assert_eq!((stats.num_running, stats.num_waiting), (2, 1));
    [queued, prefilling, decoding].into_iter().for_each(|id| engine.abort(id));
    gated.let_through(Gate::Run);
    for events in [queued_events, prefilling_events, decoding_events] {
        assert_eq!(reason(&events), Some(FinishReason::Abort));
    }
    let stats = engine.stats();
    assert_eq!((stats.num_running, stats.num_waiting, stats.num_used_blocks), (0, 0, 0));
    assert_eq!(stats.counters.num_steps, 2, "no step ran for requests that were gone");
}

#[test]
fn a_sink_that_nobody_reads_aborts_its_request() {
    let gated = gated(config());
    let (_, events) = submit(&gated.engine, prompt(0..3), max_tokens(50)).expect("accepted");
    let (_, witness) = submit(&gated.engine, prompt(5..9), max_tokens(2)).expect("accepted");
    gated.next_step();
    drop(events);
    drop(gated.gate);
    assert_eq!(Answer::heard(&hear(&witness)), alone(&prompt(5..9), &max_tokens(2)));
    let stats = gated.engine.stats();
    assert_eq!((stats.num_running, stats.num_used_blocks), (0, 0));
}

#[test]
fn a_stop_string_ends_a_request_with_stop() {
    let gated = gated(config());
    let (id, events) = submit(&gated.engine, prompt(0..3), max_tokens(50)).expect("accepted");
    gated.next_step();
    gated.let_through(Gate::Run);
    gated.next_step();
    gated.engine.finish(id);
    gated.engine.finish(SeqId(999));
    gated.engine.abort(SeqId(999));
    gated.let_through(Gate::Run);
    let answer = Answer::heard(&hear(&events));
    assert_eq!(answer.reason, Some(FinishReason::Stop));
    assert_eq!(answer.tokens, alone(&prompt(0..3), &max_tokens(2)).tokens);
}

#[test]
fn overload_is_refused_at_once_with_the_flag_that_set_the_bound() {
    let gated = gated(EngineConfig { max_num_queued_tokens: 20, ..config() });
    let engine = &gated.engine;
    let mut accepted = vec![submit(engine, prompt(0..3), max_tokens(5)).expect("a free row").1];
    gated.next_step();
    // A lone request may be longer than the queue's bound on tokens, but then nothing else may wait.
    let (long, long_events) = submit(engine, prompt(0..16).repeat(2), max_tokens(5)).expect("nothing waits");
    let refused = submit(engine, prompt(0..1), max_tokens(5)).expect_err("too many tokens wait");
    assert!(matches!(refused, RequestError::Overloaded { reason: "max_num_queued_tokens", .. }), "{refused:?}");
    engine.abort(long);
    gated.let_through(Gate::Run);
    assert_eq!(reason(&long_events), Some(FinishReason::Abort));
    gated.next_step();
    accepted.extend((0..3).map(|i| submit(engine, prompt(i..i + 2), max_tokens(5)).expect("room").1));
    let choices = |engine: &Engine| {
        let sink = || Box::new(|_| true);
        (0..2).map(|_| (request(engine, prompt(0..2), max_tokens(5)), sink() as _)).collect::<Vec<_>>()
    };
    let refused = engine.submit_all(choices(engine)).expect_err("two rows and three places hold five");
    assert!(matches!(refused, RequestError::Overloaded { reason: "max_num_queued_reqs", .. }), "{refused:?}");
    accepted.push(submit(engine, prompt(7..9), max_tokens(5)).expect("none of the two was taken").1);
    drop(gated.gate);
    for events in accepted {
        assert_eq!(reason(&events), Some(FinishReason::Length));
    }
    assert_eq!(gated.engine.stats().num_waiting, 0);
    gated.engine.submit_all(choices(&gated.engine)).expect("there is room again");
}

#[test]
fn a_device_failure_is_heard_by_every_request_and_ends_the_service() {
    for gate in [Gate::FailDevice, Gate::Panic] {
        let expected = if matches!(gate, Gate::Panic) { "a bug in the runner" } else { "unplugged" };
        let gated = gated(config());
        let engine = &gated.engine;
        let mut all = vec![submit(engine, prompt(0..3), max_tokens(5)).expect("accepted").1];
        gated.next_step();
        // One that the thread has not even seen.
        all.push(submit(engine, prompt(0..3), max_tokens(5)).expect("accepted").1);
        gated.let_through(gate);
        for events in all {
            let last = hear(&events).pop();
            assert!(matches!(&last, Some(Event::Failed(message)) if message.contains(expected)), "{last:?}");
        }
        assert!(matches!(engine.health(), Health::Failed(message) if message.contains(expected)));
        let refused = submit(engine, prompt(0..3), max_tokens(5)).expect_err("failed");
        assert!(matches!(&refused, RequestError::Unavailable(message) if message.contains(expected)), "{refused:?}");
        engine.abort(SeqId(0));
        engine.shutdown();
        let stats = engine.stats();
        assert_eq!((stats.num_running, stats.num_waiting, stats.num_used_blocks), (0, 0, 0));
        assert!(matches!(engine.reset_prefix_cache(), Err(RequestError::Unavailable(_))));
    }
}

#[test]
fn a_drain_refuses_new_requests_and_finishes_the_old() {
    let gated = gated(config());
    let all: Vec<_> =
        (0..3).map(|i| submit(&gated.engine, prompt(i..i + 3), max_tokens(4)).expect("accepted").1).collect();
    gated.engine.drain();
    assert_eq!(gated.engine.health(), Health::Draining);
    assert!(gated.engine.stats().num_running + gated.engine.stats().num_waiting > 0, "accepted requests show at once");
    let refused = submit(&gated.engine, prompt(0..3), max_tokens(4)).expect_err("draining");
    assert!(matches!(refused, RequestError::Unavailable(_)));
    drop(gated.gate);
    for events in all {
        assert_eq!(reason(&events), Some(FinishReason::Length));
    }
    gated.engine.shutdown();
    gated.engine.shutdown();
}

#[test]
fn a_shutdown_aborts_what_is_left() {
    let gated = gated(config());
    let all: Vec<_> =
        (0..4).map(|i| submit(&gated.engine, prompt(i..i + 3), max_tokens(40)).expect("accepted").1).collect();
    gated.next_step();
    gated.let_through(Gate::Run);
    let engine = gated.engine.clone();
    let stopping = std::thread::spawn(move || engine.shutdown());
    drop(gated.gate);
    stopping.join().expect("shuts down");
    for events in all {
        assert!(matches!(hear(&events).pop(), Some(Event::Finished { .. })));
    }
    assert!(submit(&gated.engine, prompt(0..3), max_tokens(4)).is_err());
}

#[test]
fn the_thread_ends_with_the_last_handle() {
    let Gated { engine, gate, steps } = gated(config());
    let other = engine.clone();
    drop(engine);
    let (_, events) = submit(&other, prompt(0..3), max_tokens(50)).expect("one handle is left");
    steps.recv_timeout(PATIENCE).expect("a step is planned");
    drop(other);
    drop(gate);
    assert_eq!(reason(&events), Some(FinishReason::Abort));
    // The runner, and its end of this channel, is dropped by the thread's end.
    while steps.recv_timeout(PATIENCE).is_ok() {}
    assert!(matches!(steps.try_recv(), Err(std::sync::mpsc::TryRecvError::Disconnected)));
}

#[test]
fn a_runner_that_cannot_be_made_is_an_error_of_start() {
    let failed = Engine::start(|| Err(DeviceError::Absent("cuda".to_owned(), "no driver".to_owned()).into()));
    assert!(matches!(failed, Err(LoadError::Device(DeviceError::Absent(..)))));
    let failed = Engine::start(|| panic!("a bug while loading"));
    assert!(matches!(failed, Err(LoadError::Device(DeviceError::Failed(_)))));
    for broken in [
        EngineConfig { num_blocks: 1, ..config() },
        EngineConfig { block_size: 0, ..config() },
        EngineConfig { max_num_batched_tokens: 1, ..config() },
    ] {
        assert!(matches!(broken.clone().fit(), Err(LoadError::Limit { .. })), "{broken:?}");
    }
}

#[test]
fn fault_06_a_prompt_that_can_never_fit_is_refused_and_others_go_on() {
    // 16 blocks of 4 tokens under a context of 1,000: the context is lowered to what the cache holds.
    let engine = gated(EngineConfig { num_blocks: 17, max_model_len: 1000, ..config() }).engine;
    assert_eq!(engine.config().max_model_len, 65);
    let refused = submit(&engine, prompt(0..16).repeat(5)[..68].to_vec(), max_tokens(1)).expect_err("17 blocks");
    assert!(matches!(&refused, RequestError::Invalid { param: Some(param), .. } if param == "prompt"), "{refused:?}");
    let (_, longest) = submit(&engine, prompt(0..16).repeat(4), max_tokens(9)).expect("16 blocks fit");
    let (_, other) = submit(&engine, prompt(0..3), max_tokens(9)).expect("fits");
    assert_eq!(reason(&longest), Some(FinishReason::Length));
    assert_eq!(reason(&other), Some(FinishReason::Length));
}

#[test]
fn fault_16_prompts_up_to_one_below_the_context_are_taken() {
    let engine = free_running();
    for (length, taken) in [(62, true), (63, true), (64, false), (65, false)] {
        for limit in [1, 2, u32::MAX] {
            let ids = prompt((0..length).map(|i| i % 16));
            match submit(&engine, ids, max_tokens(limit)) {
                Ok((_, events)) => {
                    let answer = Answer::heard(&hear(&events));
                    assert_eq!((answer.tokens.len() as u32, taken), (limit.min(64 - length), true));
                }
                Err(error) => assert!(matches!(error, RequestError::Invalid { .. }) && !taken, "{error:?}"),
            }
        }
    }
}

#[test]
fn fault_18_values_out_of_range_are_refused_by_name_and_witnesses_are_untouched() {
    let engine = free_running();
    let default = || max_tokens(4);
    let ids = |id: u32| vec![TokenId(id)];
    let mut cases = vec![
        ("temperature", SamplingParams { temperature: -0.1, ..default() }),
        ("temperature", SamplingParams { temperature: f32::NAN, ..default() }),
        ("top_p", SamplingParams { top_p: 0.0, ..default() }),
        ("top_p", SamplingParams { top_p: f32::NAN, ..default() }),
        ("min_p", SamplingParams { min_p: 1.1, ..default() }),
        ("repetition_penalty", SamplingParams { repetition_penalty: 0.0, ..default() }),
        ("presence_penalty", SamplingParams { presence_penalty: 2.1, ..default() }),
        ("frequency_penalty", SamplingParams { frequency_penalty: -2.1, ..default() }),
        ("max_tokens", SamplingParams { max_tokens: 0, ..default() }),
        ("min_tokens", SamplingParams { min_tokens: 5, ..default() }),
        ("logprobs", SamplingParams { logprobs: Some(21), ..default() }),
        ("prompt_logprobs", SamplingParams { prompt_logprobs: Some(21), ..default() }),
        ("logit_bias", SamplingParams { logit_bias: vec![(TokenId(1), f32::INFINITY)], ..default() }),
    ];
    for id in [16, 17, 1 << 31, u32::MAX] {
        cases.push(("stop_token_ids", SamplingParams { stop_token_ids: ids(id), ..default() }));
        cases.push(("logit_bias", SamplingParams { logit_bias: vec![(TokenId(id), 1.0)], ..default() }));
    }
    let (_, witness) = submit(&engine, prompt(0..5), max_tokens(30)).expect("accepted");
    for (name, params) in cases {
        let refused = submit(&engine, prompt(0..3), params.clone()).expect_err(name);
        assert!(matches!(&refused, RequestError::Invalid { param: Some(param), .. } if param == name), "{refused:?}");
    }
    for bad_prompt in [Vec::new(), ids(16), ids(u32::MAX)] {
        let refused = submit(&engine, bad_prompt, default()).expect_err("prompt");
        assert!(
            matches!(&refused, RequestError::Invalid { param: Some(param), .. } if param == "prompt"),
            "{refused:?}"
        );
    }
    assert_eq!(Answer::heard(&hear(&witness)), alone(&prompt(0..5), &max_tokens(30)));
}

#[test]
fn a_request_id_in_use_is_refused_without_harm() {
    let gated = gated(config());
    let first = request(&gated.engine, prompt(0..3), max_tokens(2));
    let (sender, events) = channel();
    for _ in 0..2 {
        let sender = sender.clone();
        gated.engine.submit(first.clone(), Box::new(move |event| sender.send(event).is_ok())).expect("queued");
    }
    drop((sender, gated.gate));
    let heard = hear(&events);
    assert_eq!(heard.iter().filter(|event| matches!(event, Event::Failed(_))).count(), 1);
    assert_eq!(heard.iter().filter(|event| matches!(event, Event::Finished { .. })).count(), 1);
}

#[test]
fn a_cache_reset_forgets_prefixes() {
    let engine = free_running();
    let cached = || {
        let (_, events) = submit(&engine, prompt(0..9), max_tokens(1)).expect("accepted");
        hear(&events).into_iter().find_map(|event| match event {
            Event::Started { cached_tokens } => Some(cached_tokens),
            _ => None,
        })
    };
    assert_eq!((cached(), cached()), (Some(0), Some(8)));
    engine.reset_prefix_cache().expect("runs");
    assert_eq!(cached(), Some(0));
}
