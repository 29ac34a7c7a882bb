//! A device that goes away in the middle: the step says so, the engine tells everyone, and nobody is let in after that.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use runtime::engine::{Engine, EngineConfig, Health};
use runtime::error::{DeviceError, RequestError};
use runtime::ids::{BlockId, Row, SeqId, TokenId};
use runtime::request::{Event, EventSink, Request, SamplingParams};
use runtime::step::{LogitRows, NewRow, RowWork, StepOutput, StepPlan, StepRunner};
use shaders::{AdapterChoice, GpuOptions, WgpuDevice};

use crate::gpu;
use crate::memory::{load, tiny};

/// A token of one row, the first with its admission.
fn step(start: u32) -> StepPlan {
    let (row, tokens) = (Row(0), vec![TokenId(1)]);
    let params = Arc::new(SamplingParams { temperature: 0.0, ..SamplingParams::default() });
    let new = NewRow { row, seq: SeqId(0), tokens, prompt_len: 1, params, seed: 0 };
    let is_first = start == 0;
    let new_blocks = if is_first { vec![BlockId(1)] } else { vec![] };
    let work = RowWork { row, start, length: 1, num_drafts: 0, new_blocks, logits: LogitRows::Last };
    StepPlan { admitted: if is_first { vec![new] } else { vec![] }, work: vec![work], ..StepPlan::default() }
}

fn run(runner: &mut dyn StepRunner, plan: &StepPlan, between: impl FnOnce()) -> Result<(), DeviceError> {
    runner.submit(plan)?;
    between();
    runner.wait(&mut StepOutput::default())
}

#[test]
fn a_step_of_a_lost_device_is_an_error() {
    for in_flight in [false, true] {
        let Some(device) = gpu::device(GpuOptions::default()) else { return };
        let mut runner = load(&device, &tiny()).expect("a tiny model fits");
        run(&mut runner, &step(0), || ()).expect("the device works");
        let destroy = device.destroyer();
        let said = if in_flight {
            // What was submitted may still end well; the next step cannot.
            run(&mut runner, &step(1), destroy).and_then(|()| run(&mut runner, &step(2), || ()))
        } else {
            destroy();
            run(&mut runner, &step(1), || ())
        };
        assert!(matches!(said, Err(DeviceError::Failed(_))), "in flight: {in_flight}, {said:?}");
    }
}

fn config() -> EngineConfig {
    EngineConfig {
        vocab_size: 512,
        max_model_len: 128,
        max_num_batched_tokens: 32,
        max_num_seqs: 2,
        block_size: 16,
        num_blocks: 10,
        enable_prefix_caching: true,
        long_prefill_token_threshold: 0,
        max_num_queued_reqs: 8,
        max_num_queued_tokens: 0,
        seed: 0,
        max_logprobs: 0,
        prompt_logprob_chunk: 1,
    }
}

/// A wish for a long answer; `at_token` is called for each of its tokens, between two steps.
fn wish(
    engine: &Engine,
    events: &Sender<(u32, Event)>,
    who: u32,
    at_token: impl Fn() + Send + 'static,
) -> (Request, Box<dyn EventSink>) {
    let params = SamplingParams { temperature: 0.0, ignore_eos: true, max_tokens: 100, ..Default::default() };
    let request = Request { id: engine.next_id(), prompt: vec![TokenId(1 + who); 3].into(), params, cache_salt: None };
    let events = events.clone();
    let sink: Box<dyn EventSink> = Box::new(move |event| {
        if matches!(event, Event::Token { .. }) {
            at_token();
        }
        events.send((who, event)).is_ok()
    });
    (request, sink)
}

#[test]
fn everyone_hears_of_a_lost_device() {
    if !gpu::is_there() {
        return;
    }
    let (sender, destroyer) = channel();
    let engine = Engine::start(move || {
        let options = GpuOptions { self_test: false, ..GpuOptions::default() };
        let device = WgpuDevice::open(&AdapterChoice::Best, options)?;
        sender.send(device.destroyer()).expect("the test waits for it");
        Ok((Box::new(load(&device, &tiny())?), config()))
    });
    let engine = engine.expect("a tiny model fits");
    let destroy = destroyer.recv().expect("the engine has started");
    let (sender, events) = channel();
    // Two rows run, the third request waits for one.
    let all =
        vec![wish(&engine, &sender, 0, destroy), wish(&engine, &sender, 1, || ()), wish(&engine, &sender, 2, || ())];
    engine.submit_all(all).expect("the engine is ready");
    let mut failed = Vec::new();
    while failed.len() < 3 {
        match events.recv_timeout(Duration::from_secs(60)).expect("an answer goes on") {
            (who, Event::Failed(_)) => failed.push(who),
            (who, Event::Finished { .. }) => panic!("{who} ended as if nothing had happened"),
            _ => {}
        }
    }
    failed.sort_unstable();
    assert_eq!(failed, [0, 1, 2]);
    assert!(matches!(engine.health(), Health::Failed(_)), "{:?}", engine.health());
    let refused = engine.submit_all(vec![wish(&engine, &sender, 3, || ())]);
    assert!(matches!(refused, Err(RequestError::Unavailable(_))), "{refused:?}");
    engine.shutdown();
}
