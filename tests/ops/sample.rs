//! Sampling on a device: what the host's sampler draws from the same logits, for every seed, position and temperature, while
//! no logits cross the bus.
//!
//! Invariant: tokens, ranks and alternatives are exact on every backend; log-probabilities are bitwise where the sum runs on
//! the host.

use runtime::backend::cases::{BuiltCase, Case, CaseOp, FLOAT, SampleCase, build_case, run_built};
use runtime::backend::{Backend, StepInputs};
use runtime::ids::{PlanId, TokenId};
use runtime::request::SamplingParams;
use runtime::sample::{Draw, DrawContext, Sample, Sampler, WINDOW};
use runtime::step::DrawnToken;

use super::backends;

const ROWS: u32 = 32;

/// Logits of `ROWS` tokens, some with many equal ones, some not finite.
fn built(vocab: u32) -> BuiltCase {
    let op = CaseOp::Sample(SampleCase { vocab, rows: ROWS, temperature: 1.0, logprobs: None });
    build_case(&Case { op, tolerance: FLOAT, seed: u64::from(vocab) })
}

/// A step of all tokens with some logit rows.
fn step(built: &BuiltCase, choose: impl FnOnce(&mut StepInputs)) -> StepInputs {
    let mut step = StepInputs::new(*built.step.layout());
    step.clear();
    step.push_row(0..ROWS, 0, built.step.block_table(0));
    choose(&mut step);
    step
}

/// The logits as this backend computes them, read back.
fn logits(backend: &mut dyn Backend, built: &BuiltCase) -> Vec<f32> {
    let step = step(built, |step| (0..ROWS).for_each(|token| step.push_logit_row(token)));
    let ticket = backend.submit(PlanId(0), &step).expect("it ran before");
    let output = backend.wait(ticket).expect("it ran before");
    assert!(output.samples.is_empty());
    output.logits.to_vec()
}

/// Samples of `(token, draw)` pairs in one step, which reads no logits.
fn samples(backend: &mut dyn Backend, built: &BuiltCase, draws: &[(u32, Draw)]) -> Vec<Sample> {
    let step = step(built, |step| draws.iter().for_each(|&(token, draw)| step.push_sampled_row(token, draw)));
    let ticket = backend.submit(PlanId(0), &step).expect("it ran before");
    let output = backend.wait(ticket).expect("it ran before");
    assert!(output.logits.is_empty(), "nobody has asked for logits");
    output.samples.to_vec()
}

fn on_host(logits: &[f32], params: &SamplingParams, seed: u64, position: usize) -> Option<DrawnToken> {
    let history = vec![TokenId(0); position];
    let context = DrawContext { params, seed, history: &history, prompt_len: 0 };
    logits.iter().all(|logit| logit.is_finite()).then(|| Sampler::new(logits.len()).draw(logits, &context))
}

fn same(got: Option<DrawnToken>, expected: Option<DrawnToken>, tolerance: f32) -> Result<(), String> {
    let problem = format!("got {got:?}, expected {expected:?}");
    let (Some(got), Some(expected)) = (&got, &expected) else {
        return (got.is_none() && expected.is_none()).then_some(()).ok_or(problem);
    };
    let is_same = match (&got.logprobs, &expected.logprobs) {
        (None, None) => true,
        (Some(got), Some(expected)) => {
            let near = |a: f32, b: f32| (a - b).abs() <= tolerance * b.abs().max(1.0);
            near(got.logprob, expected.logprob)
                && got.rank == expected.rank
                && got.top.len() == expected.top.len()
                && got.top.iter().zip(&expected.top).all(|(a, b)| a.0 == b.0 && near(a.1, b.1))
        }
        _ => false,
    };
    if is_same && got.id == expected.id { Ok(()) } else { Err(problem) }
}

/// Bitwise but for the sum on a device, which is f32 in another order.
fn tolerance(name: &str) -> f32 {
    if name == "wgpu" { 1e-6 } else { 0.0 }
}

#[test]
fn a_device_draws_what_the_host_draws() {
    // Rows that start at every place of a four; one share and many.
    for (vocab, rounds) in [(5, 24), (37, 24), (2049, 24), (5002, 12), (49_152, 3)] {
        let built = built(vocab);
        for (name, make) in backends() {
            let mut backend = make();
            run_built(backend.as_mut(), &built).expect(name);
            let logits = logits(backend.as_mut(), &built);
            let rows: Vec<&[f32]> = logits.chunks_exact(vocab as usize).collect();
            assert!(rows.iter().any(|row| row.iter().any(|logit| !logit.is_finite())));
            for round in 0..rounds {
                let of = |token: u32| {
                    let mixed = (u64::from(round * ROWS + token) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                    let params = SamplingParams {
                        temperature: [0.0, 0.01, 0.3, 0.8, 1.0, 1.7, 2.0][(mixed >> 40) as usize % 7],
                        logprobs: [None, Some(0), Some(3), Some(20)][(mixed >> 50) as usize % 4],
                        ..SamplingParams::default()
                    };
                    (params, mixed, (mixed >> 20) as usize % 3000)
                };
                let draw = |token| {
                    let (params, seed, position) = of(token);
                    (token, Draw::of(&params, seed, position).expect("nothing but a temperature"))
                };
                let draws: Vec<(u32, Draw)> = (0..ROWS).map(draw).collect();
                for (sample, (token, draw)) in samples(backend.as_mut(), &built, &draws).iter().zip(draws) {
                    let (params, seed, position) = of(token);
                    let expected = on_host(rows[token as usize], &params, seed, position);
                    same(sample.drawn(&draw), expected, tolerance(name))
                        .unwrap_or_else(|e| panic!("{name}, {vocab} logits, row {token}, {draw:?}: {e}"));
                }
            }
        }
    }
}

/// The largest two scores of a row at temperature 2, in f64 and without the sampler's code.
fn best_two(logits: &[f32], seed: u64) -> [f64; 2] {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    let mut best = [f64::MIN; 2];
    for (first, four) in (0u32..).zip(logits.chunks(4)) {
        let (mut words, mut key) = ([first, 0, 0, 0], [seed as u32, (seed >> 32) as u32]);
        for _ in 0..10 {
            let products = [u64::from(words[0]) * 0xd251_1f53, u64::from(words[2]) * 0xcd9e_8d57];
            let [a, b] = products.map(|product| ((product >> 32) as u32, product as u32));
            words = [b.0 ^ words[1] ^ key[0], b.1, a.0 ^ words[3] ^ key[1], a.1];
            key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
        }
        for (&logit, word) in four.iter().zip(words) {
            let u = (f64::from(word) + 0.5) / 4_294_967_296.0;
            let score = f64::from((logit - max) * 0.5) - (-(-u).ln_1p()).ln();
            if score > best[0] {
                best = [score, best[0]];
            } else {
                best[1] = best[1].max(score);
            }
        }
    }
    best
}

/// Where two scores are too near for f32, a device names both tokens, and f64 decides.
#[test]
fn near_ties_are_decided_in_f64() {
    let built = built(37);
    let params = SamplingParams { temperature: 2.0, ..SamplingParams::default() };
    // Row 1 is the flattest.
    let row_of = |logits: Vec<f32>| logits[37..74].to_vec();
    let mut reference = super::reference();
    run_built(&mut reference, &built).expect("the oracle runs");
    let row = row_of(logits(&mut reference, &built));
    let is_tie = |seed: &u64| {
        let [first, second] = best_two(&row, *seed);
        first - second < f64::from(WINDOW) / 2.0
    };
    let seeds: Vec<u64> = (0..1_000_000).filter(is_tie).take(ROWS as usize).collect();
    assert!(seeds.len() > 4, "{} of a million", seeds.len());
    let draw = |&seed: &u64| (1, Draw::of(&params, seed, 0).expect("nothing but a temperature"));
    let draws: Vec<(u32, Draw)> = seeds.iter().map(draw).collect();
    for (name, make) in backends() {
        let mut backend = make();
        run_built(backend.as_mut(), &built).expect(name);
        assert_eq!(row_of(logits(backend.as_mut(), &built)), row, "{name}");
        for (sample, (_, draw)) in samples(backend.as_mut(), &built, &draws).iter().zip(&draws) {
            assert_eq!(sample.num_contenders, if name == "wgpu" { 2 } else { 1 }, "{name}, {draw:?}");
            let expected = on_host(&row, &params, draw.seed, 0);
            same(sample.drawn(draw), expected, 0.0).unwrap_or_else(|e| panic!("{name}, {draw:?}: {e}"));
        }
    }
}
