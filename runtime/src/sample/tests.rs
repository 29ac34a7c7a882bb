//! The sampler against a naive one that sorts everything and works in f64, and its promises.

use proptest::prelude::*;

use super::*;
use crate::error::RequestError;

const VOCAB: usize = 96;

fn noise_row(len: usize, seed: u32, spread: f32) -> Vec<f32> {
    let hash = |i: u32| {
        (i ^ seed.wrapping_mul(0x9E37_79B9)).wrapping_mul(0x85EB_CA6B).rotate_left(13).wrapping_mul(0xC2B2_AE35)
    };
    (0..len as u32).map(|i| (hash(i) >> 8) as f32 / (1 << 24) as f32 * spread - spread / 2.0).collect()
}

fn tokens(ids: &[u32]) -> Vec<TokenId> {
    ids.iter().map(|&id| TokenId(id)).collect()
}

fn draw(sampler: &mut Sampler, logits: &[f32], params: &SamplingParams, seed: u64, history: &[TokenId]) -> TokenId {
    sampler.draw(logits, &DrawContext { params, seed, history, prompt_len: history.len().min(3) }).id
}

/// What the options leave of a row: kept tokens with their probabilities. `None` when an edge is too near to call.
fn naive_distribution(logits: &[f32], context: &DrawContext<'_>) -> Option<Vec<(TokenId, f64)>> {
    let p = context.params;
    let (prompt, output) = context.history.split_at(context.prompt_len);
    let mut row: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
    for (id, logit) in row.iter_mut().enumerate() {
        let id = TokenId(id as u32);
        if p.allowed_token_ids.as_ref().is_some_and(|allowed| !allowed.contains(&id)) {
            *logit = f64::NEG_INFINITY;
        }
        let with_it = [output, &[id]].concat();
        if p.bad_words.iter().any(|word| with_it.ends_with(word)) {
            *logit = f64::NEG_INFINITY;
        }
        if output.len() < p.min_tokens as usize && p.is_stop(id) {
            *logit = f64::NEG_INFINITY;
        }
        for &(biased, bias) in &p.logit_bias {
            if biased == id {
                *logit += f64::from(bias).clamp(-100.0, 100.0);
            }
        }
        let repetition = f64::from(p.repetition_penalty);
        if prompt.contains(&id) || output.contains(&id) {
            *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
        }
        let count = output.iter().filter(|&&token| token == id).count();
        *logit -= f64::from(p.frequency_penalty) * count as f64;
        *logit -= if count > 0 { f64::from(p.presence_penalty) } else { 0.0 };
    }
    let mut ids: Vec<usize> = (0..row.len()).filter(|&id| row[id] > f64::NEG_INFINITY).collect();
    ids.sort_by(|&a, &b| row[b].partial_cmp(&row[a]).unwrap().then(a.cmp(&b)));
    if p.is_greedy() {
        let tie = ids.len() > 1 && (row[ids[0]] - row[ids[1]]).abs() < 1e-4 && logits[ids[0]] != logits[ids[1]];
        return (!tie).then(|| vec![(TokenId(ids[0] as u32), 1.0)]);
    }
    let temperature = f64::from(p.temperature.max(0.01));
    let weight = |id: usize| ((row[id] - row[ids[0]]) / temperature).exp();
    let near = |a: f64, b: f64| (a - b).abs() < 1e-4 * b.abs().max(1e-3);

    let mut kept = ids.clone();
    let min_p = f64::from(p.min_p);
    if p.min_p > 0.0 && kept.iter().skip(1).any(|&id| near(weight(id), min_p)) {
        return None;
    }
    kept.retain(|&id| weight(id) >= min_p);
    if p.top_k > 0 && kept.len() > p.top_k as usize {
        let (last, next) = (kept[p.top_k as usize - 1], kept[p.top_k as usize]);
        if row[last] != row[next] && near(row[last], row[next]) {
            return None;
        }
        kept.truncate(p.top_k as usize);
    }
    if p.top_p < 1.0 {
        let total: f64 = kept.iter().map(|&id| weight(id)).sum();
        let mut sum = 0.0;
        let mut needed = 0;
        while needed < kept.len() && sum < f64::from(p.top_p) * total {
            sum += weight(kept[needed]);
            needed += 1;
            if near(sum, f64::from(p.top_p) * total) {
                return None;
            }
        }
        kept.truncate(needed);
    }
    let total: f64 = kept.iter().map(|&id| weight(id)).sum();
    Some(kept.iter().map(|&id| (TokenId(id as u32), weight(id) / total)).collect())
}

fn any_params() -> impl Strategy<Value = SamplingParams> {
    let id = || (0..VOCAB as u32).prop_map(TokenId);
    let or_off = |off: f32, on: std::ops::Range<f32>| prop_oneof![Just(off), on];
    (
        (or_off(0.0, 0.05..2.0), or_off(1.0, 0.05..1.0), prop_oneof![Just(0u32), 1..120u32], or_off(0.0, 0.001..0.9)),
        (or_off(1.0, 0.5..2.0), or_off(0.0, -2.0..2.0), or_off(0.0, -2.0..2.0)),
        prop::collection::vec((id(), -150.0f32..150.0), 0..3),
        (prop::collection::vec(id(), 0..4), prop::collection::vec(id(), 0..3), 0u32..12, any::<bool>()),
        (prop::option::weighted(0.3, prop::collection::btree_set(id(), 1..60)), any_bad_words()),
    )
        .prop_map(
            |(
                (temperature, top_p, top_k, min_p),
                penalties,
                logit_bias,
                (stop, eos, min_tokens, ignore_eos),
                (allowed, bad_words),
            )| {
                SamplingParams {
                    temperature,
                    top_p,
                    top_k,
                    min_p,
                    repetition_penalty: penalties.0,
                    presence_penalty: penalties.1,
                    frequency_penalty: penalties.2,
                    allowed_token_ids: allowed.map(|ids| ids.into_iter().collect()),
                    bad_words,
                    logit_bias,
                    stop_token_ids: stop,
                    eos_token_ids: eos,
                    min_tokens,
                    ignore_eos,
                    max_tokens: 100,
                    ..SamplingParams::default()
                }
            },
        )
        .prop_filter("refused", |params| params.validate(VOCAB as u32, 20).is_ok())
}

/// Short words over few tokens, so that histories have begun some of them.
fn any_bad_words() -> impl Strategy<Value = Vec<Vec<TokenId>>> {
    let word = prop_oneof![
        prop::collection::vec((0..4u32).prop_map(TokenId), 1..3),
        prop::collection::vec((0..VOCAB as u32).prop_map(TokenId), 1..3),
    ];
    prop::collection::vec(word, 0..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    /// Each drawn token is one that the naive sampler keeps, and over many seeds all that it keeps with a good
    /// probability are drawn.
    #[test]
    fn options_keep_what_a_naive_sampler_keeps(
        params in any_params(),
        row_seed: u32,
        spread in prop_oneof![Just(0.0f32), 1.0f32..40.0],
        history in prop::collection::vec(prop_oneof![0..VOCAB as u32, 0..4u32].prop_map(TokenId), 3..30),
    ) {
        let logits = noise_row(VOCAB, row_seed, spread);
        let context = DrawContext { params: &params, seed: 0, history: &history, prompt_len: 3 };
        let Some(expected) = naive_distribution(&logits, &context) else { return Ok(()) };
        let mut sampler = Sampler::new(VOCAB);
        let mut drawn = std::collections::HashSet::new();
        for seed in 0..100 {
            let id = sampler.draw(&logits, &DrawContext { seed, ..context }).id;
            prop_assert!(expected.iter().any(|&(kept, _)| kept == id), "{} is not among {:?}", id, expected);
            drawn.insert(id);
        }
        // 100 draws miss a token of probability 0.2 with probability 2e-10.
        for &(id, probability) in &expected {
            prop_assert!(probability < 0.2 || drawn.contains(&id), "{} of {:?} was never drawn", id, expected);
        }
    }

    #[test]
    fn kept_sets_are_exactly_the_naive_ones(
        params in any_params(),
        row_seed: u32,
        spread in prop_oneof![Just(0.0f32), 1.0f32..40.0],
        len in 1usize..600,
    ) {
        let params = SamplingParams {
            temperature: params.temperature.max(0.1),
            allowed_token_ids: None,
            bad_words: vec![],
            logit_bias: vec![],
            min_tokens: 0,
            ..params
        };
        let logits = noise_row(len, row_seed, spread);
        let context = DrawContext { params: &params, seed: 0, history: &[], prompt_len: 0 };
        let Some(expected) = naive_distribution(&logits, &context) else { return Ok(()) };
        let mut list = Vec::new();
        let best = argmax::argmax(&logits);
        let mut kept = Kept::all_of(temperature::scale(&logits, best, params.temperature), &mut list);
        for filter in FILTERS.iter().filter(|filter| (filter.is_on)(&params)) {
            (filter.apply)(&mut kept, &params);
        }
        let mut got: Vec<u32> = kept.candidates().iter().map(|candidate| candidate.id).collect();
        let mut expected: Vec<u32> = expected.iter().map(|&(id, _)| id.0).collect();
        got.sort_unstable();
        expected.sort_unstable();
        prop_assert_eq!(got, expected);
    }

    #[test]
    fn logprobs_are_those_of_an_f64_softmax(row_seed: u32, spread in 0.0f32..300.0, len in 1usize..700, pick: u32, num_top in 0u32..25) {
        let mut logits = noise_row(len, row_seed, spread);
        if pick.is_multiple_of(2) {
            logits.iter_mut().for_each(|logit| *logit = logit.round()); // equal ones
        }
        let token = TokenId(pick / 2 % len as u32);
        let got = Sampler::new(len).logprobs_of(&logits, token, num_top);
        let max = logits.iter().copied().fold(f32::MIN, f32::max);
        let above_max = |logit: f32| f64::from(logit) - f64::from(max);
        let sum: f64 = logits.iter().map(|&logit| above_max(logit).exp()).sum();
        let logprob = |id: usize| above_max(logits[id]) - sum.ln();
        // Half a step of an f32 near -300 is 1.5e-5; the sum of approximate exponentials adds about 1e-6.
        let close = |got: f32, expected: f64| (f64::from(got) - expected).abs() < 2e-5;
        let mut order: Vec<usize> = (0..len).collect();
        order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));

        prop_assert!(close(got.logprob, logprob(token.index())), "{} {}", got.logprob, logprob(token.index()));
        prop_assert_eq!(order[got.rank as usize - 1], token.index());
        prop_assert_eq!(got.top.len(), len.min(num_top as usize));
        for (&(id, value), &expected) in got.top.iter().zip(&order) {
            prop_assert_eq!(id.index(), expected);
            prop_assert!(close(value, logprob(expected)));
        }
    }

    /// The way over a device's sample gives what the host's sampler gives, in every bit.
    #[test]
    fn a_sampled_row_is_drawn_as_on_the_host(
        row_seed: u32,
        spread in prop_oneof![Just(0.0f32), 0.5f32..40.0],
        len in 1usize..300,
        temperature in prop_oneof![Just(0.0f32), 0.001f32..2.0],
        logprobs in prop::option::of(0u32..=20),
        seed: u64,
        position in 0usize..3000,
        is_rounded: bool,
    ) {
        let mut logits = noise_row(len, row_seed, spread);
        if is_rounded {
            logits.iter_mut().for_each(|logit| *logit = logit.round());
        }
        let params = SamplingParams { temperature, logprobs, ..SamplingParams::default() };
        let history = vec![TokenId(0); position];
        let expected = Sampler::new(len).draw(&logits, &DrawContext { params: &params, seed, history: &history, prompt_len: 0 });
        let draw = Draw::of(&params, seed, position).expect("nothing but a temperature");
        prop_assert_eq!(Draw::from_words(draw.to_words()), draw);
        let sample = sample_row(&logits, &draw);
        prop_assert_eq!(sample.drawn(&draw), Some(expected.clone()));

        // A device may name more tokens than the drawn one, in any order.
        let mut named = sample;
        let others = (0..len as u32).filter(|&id| id != expected.id.0).take(MAX_CONTENDERS - 1);
        let contenders = others.map(|id| Contender { id, logit: logits[id as usize], rank: 0 }).chain([sample.contenders[0]]);
        for (place, contender) in named.contenders.iter_mut().zip(contenders) {
            *place = contender;
        }
        named.num_contenders = len.min(MAX_CONTENDERS) as u32;
        if !draw.is_greedy() {
            prop_assert_eq!(named.chosen(&draw), sample.chosen(&draw));
        }
    }

    #[test]
    fn exp_is_within_two_steps(x in -87.0f32..=0.0) {
        let exact = f64::from(x).exp();
        let step = exact * 2f64.powi(-23);
        prop_assert!((f64::from(exp::exp(x)) - exact).abs() <= 2.0 * step);
    }
}

#[test]
fn a_row_that_is_not_finite_is_not_drawn_from() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let draw = Draw { inverse_temperature: 1.0, logprobs: Some(2), ..Draw::default() };
        assert_eq!(sample_row(&[0.0, bad, 1.0], &draw).drawn(&draw), None);
    }
}

/// By the parameters alone: whatever needs the history or narrows the choice is the host's.
#[test]
fn devices_sample_what_depends_on_the_temperature_only() {
    let plain = SamplingParams { max_tokens: 9, ..SamplingParams::default() };
    let greedy = SamplingParams { temperature: 0.0, ..plain.clone() };
    let is_for_devices = |params: &SamplingParams| Draw::of(params, 1, 2).is_some();
    for params in [
        plain.clone(),
        greedy.clone(),
        SamplingParams { logprobs: Some(20), prompt_logprobs: Some(20), ..plain.clone() },
        SamplingParams { stop_token_ids: tokens(&[1]), eos_token_ids: tokens(&[2]), ..plain.clone() },
        // Greedy takes the best token, which every filter keeps.
        SamplingParams { top_k: 3, top_p: 0.5, min_p: 0.1, ..greedy.clone() },
    ] {
        assert!(is_for_devices(&params), "{params:?}");
    }
    for params in [
        SamplingParams { logprobs: Some(21), ..plain.clone() },
        SamplingParams { top_k: 3, ..plain.clone() },
        SamplingParams { top_p: 0.9, ..plain.clone() },
        SamplingParams { min_p: 0.1, ..plain },
        SamplingParams { repetition_penalty: 1.1, ..greedy.clone() },
        SamplingParams { presence_penalty: 0.1, ..greedy.clone() },
        SamplingParams { frequency_penalty: 0.1, ..greedy.clone() },
        SamplingParams { logit_bias: vec![(TokenId(0), 0.0)], ..greedy.clone() },
        SamplingParams { allowed_token_ids: Some(tokens(&[1])), ..greedy.clone() },
        SamplingParams { bad_words: vec![tokens(&[1])], ..greedy.clone() },
        SamplingParams { min_tokens: 1, ..greedy },
    ] {
        assert!(!is_for_devices(&params), "{params:?}");
    }
}

#[test]
fn exp_at_its_ends() {
    assert_eq!(exp::exp(0.0), 1.0);
    assert_eq!(exp::exp(-87.5), 0.0);
    assert_eq!(exp::exp(f32::NEG_INFINITY), 0.0);
}

#[test]
fn greedy_takes_the_lowest_of_equal_ids() {
    for len in [1, 2, 17, 255, 256, 257, 1000, 49_152] {
        for first in [0, len / 3, len - 1] {
            let mut logits = noise_row(len, 5, 10.0);
            logits[first] = 50.0;
            logits[len - 1] = 50.0;
            assert_eq!(argmax::argmax(&logits), TokenId(first as u32), "{len} {first}");
        }
    }
    assert_eq!(argmax::argmax(&[f32::NEG_INFINITY, -0.0, 0.0]), TokenId(1));
}

/// Pearson's test of 40,000 draws at positions of one sequence and of 40,000 seeds; deterministic.
#[test]
fn draws_follow_the_softmax() {
    let logits = [2.0, 0.0, -1.0, 1.5, f32::NEG_INFINITY, 0.5, -3.0, 1.0, 1.0];
    let params = SamplingParams { temperature: 0.8, ..SamplingParams::default() };
    let weights = logits.map(|logit| (f64::from(logit) / 0.8).exp());
    let total: f64 = weights.iter().sum();
    const DRAWS: usize = 40_000;
    let history = vec![TokenId(0); DRAWS];
    let mut sampler = Sampler::new(logits.len());
    let runs: [&dyn Fn(usize) -> (u64, usize); 2] = [&|i| (42, i), &|i| (i as u64, 100)];
    for run in runs {
        let mut counts = [0usize; 9];
        for i in 0..DRAWS {
            let (seed, position) = run(i);
            counts[draw(&mut sampler, &logits, &params, seed, &history[..position]).index()] += 1;
        }
        assert_eq!(counts[4], 0, "masked tokens are never drawn");
        let chi_square: f64 = (0..9)
            .filter(|&id| id != 4)
            .map(|id| {
                let expected = weights[id] / total * DRAWS as f64;
                (counts[id] as f64 - expected).powi(2) / expected
            })
            .sum();
        // 7 degrees of freedom: above 24.3 with probability 0.001.
        assert!(chi_square < 24.3, "{chi_square}: {counts:?}");
    }
}

/// The same request draws the same token whatever was drawn before it and whoever shares the sampler.
#[test]
fn fault_25_a_seeded_draw_depends_on_nothing_else() {
    let logits = noise_row(VOCAB, 1, 6.0);
    let other = noise_row(VOCAB, 2, 6.0);
    let history = tokens(&[1, 2, 3, 4, 4]);
    let plain = SamplingParams { temperature: 0.9, ..SamplingParams::default() };
    let busy = SamplingParams {
        top_p: 0.9,
        top_k: 40,
        min_p: 0.01,
        repetition_penalty: 1.3,
        frequency_penalty: 0.5,
        presence_penalty: 0.5,
        logit_bias: vec![(TokenId(7), 3.0)],
        logprobs: Some(5),
        ..plain.clone()
    };
    for params in [&plain, &busy] {
        let fresh: Vec<_> =
            (0..50).map(|seed| draw(&mut Sampler::new(VOCAB), &logits, params, seed, &history)).collect();
        let mut shared = Sampler::new(VOCAB);
        for seed in (0..50).rev() {
            draw(&mut shared, &other, &busy, 1000 + seed, &tokens(&[9; 40]));
            draw(&mut shared, &other, &plain, seed, &history);
            assert_eq!(draw(&mut shared, &logits, params, seed, &history), fresh[seed as usize]);
        }
        let distinct: std::collections::HashSet<_> = fresh.iter().collect();
        assert!(distinct.len() > 5, "seeds matter: {fresh:?}");
    }
}

/// A masked, a banned and an impossible token: every reported value is a number of at least -9999.
#[test]
fn fault_13_logprobs_are_finite() {
    let mut logits = noise_row(VOCAB, 3, 4.0);
    logits[5] = -3e38;
    logits[6] = 3e4;
    logits[7] = -1e5;
    let params = SamplingParams {
        temperature: 0.0,
        logit_bias: vec![(TokenId(6), -100.0)],
        stop_token_ids: tokens(&[6]),
        min_tokens: 3,
        logprobs: Some(VOCAB as u32),
        ..SamplingParams::default()
    };
    let history = tokens(&[1, 2, 3]);
    let drawn =
        Sampler::new(VOCAB).draw(&logits, &DrawContext { params: &params, seed: 0, history: &history, prompt_len: 3 });
    assert_ne!(drawn.id, TokenId(6), "masked");
    let logprobs = drawn.logprobs.unwrap();
    assert_eq!(logprobs.top[0], (TokenId(6), 0.0), "raw: before mask and bias");
    assert_eq!(logprobs.top.len(), VOCAB);
    for &(id, value) in logprobs.top.iter().chain(&[(drawn.id, logprobs.logprob)]) {
        assert!((-9999.0..=0.0).contains(&value), "{id}: {value}");
    }
    assert_eq!(logprobs.logprob, -9999.0);
}

#[test]
fn min_tokens_masks_until_the_output_is_long_enough() {
    let mut logits = noise_row(VOCAB, 4, 2.0);
    logits[10] = 50.0;
    logits[11] = 40.0;
    let params = SamplingParams {
        temperature: 0.0,
        min_tokens: 2,
        eos_token_ids: tokens(&[10, 5_000]),
        stop_token_ids: tokens(&[11]),
        ..SamplingParams::default()
    };
    let mut sampler = Sampler::new(VOCAB);
    let mut at = |params: &SamplingParams, num_output: usize| {
        draw(&mut sampler, &logits, params, 0, &vec![TokenId(0); 3 + num_output])
    };
    assert!(!params.is_stop(at(&params, 1)));
    assert_eq!(at(&params, 2), TokenId(10));
    let ignoring = SamplingParams { ignore_eos: true, ..params };
    assert_eq!(at(&ignoring, 1), TokenId(10), "ignored ids are not masked");
}

#[test]
fn a_bad_word_is_not_ended_and_may_be_begun() {
    let mut params = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let encode = |text: &str| text.bytes().map(|byte| TokenId(u32::from(byte) % VOCAB as u32)).collect::<Vec<_>>();
    params.ban_words(&[" ab"], encode).unwrap();
    let [a, b, space] = ["a", "b", " "].map(|text| encode(text)[0]);
    assert_eq!(params.bad_words, [vec![space, a, b], vec![a, b]]);
    let mut logits = noise_row(VOCAB, 6, 2.0);
    (logits[b.index()], logits[a.index()]) = (50.0, 40.0);
    let mut sampler = Sampler::new(VOCAB);
    let mut after = |history: &[TokenId]| draw(&mut sampler, &logits, &params, 0, history);
    assert_eq!(after(&[space, space, space, space, a]), a, "b would end the word");
    assert_eq!(after(&[space, space, space, a, space]), b);
    assert_eq!(after(&[space, space, a]), b, "the prompt began it");
    for wordless in ["", "  "] {
        assert!(params.ban_words(&[wordless], encode).is_err());
    }
    assert!(params.ban_words(&["x"], |_| Vec::new()).is_err());
}

#[test]
fn only_allowed_ids_are_drawn_and_logprobs_stay_raw() {
    let logits = noise_row(VOCAB, 7, 8.0);
    let best = argmax::argmax(&logits);
    let allowed: Vec<TokenId> = [0, 17, 95].into_iter().map(TokenId).filter(|&id| id != best).collect();
    let allow = |temperature| SamplingParams {
        temperature,
        allowed_token_ids: Some(allowed.clone()),
        logprobs: Some(1),
        ..SamplingParams::default()
    };
    let mut sampler = Sampler::new(VOCAB);
    for (params, seed) in [(allow(0.0), 0), (allow(2.0), 1), (allow(2.0), 2)] {
        let context = DrawContext { params: &params, seed, history: &[], prompt_len: 0 };
        let drawn = sampler.draw(&logits, &context);
        assert!(allowed.contains(&drawn.id));
        let logprobs = drawn.logprobs.unwrap();
        assert_eq!(logprobs.top[0].0, best, "alternatives are the model's own");
        assert!(logprobs.logprob < logprobs.top[0].1);
    }
}

#[test]
fn a_request_that_would_mask_every_token_is_refused() {
    let ok = SamplingParams { max_tokens: 9, eos_token_ids: tokens(&[1, 5_000]), ..SamplingParams::default() };
    let allow = |ids: &[u32]| SamplingParams { allowed_token_ids: Some(tokens(ids)), ..ok.clone() };
    for bad in [allow(&[]), allow(&[2, 1]), allow(&[2, 2]), allow(&[VOCAB as u32])] {
        assert_eq!(refused(&bad), "allowed_token_ids");
    }
    assert_eq!(refused(&SamplingParams { min_tokens: 1, ..allow(&[1]) }), "allowed_token_ids");
    assert_eq!(refused(&SamplingParams { bad_words: vec![tokens(&[3, 4])], ..allow(&[4]) }), "allowed_token_ids");
    let ban = |words: Vec<Vec<TokenId>>| SamplingParams { bad_words: words, ..ok.clone() };
    assert_eq!(refused(&ban(vec![vec![]])), "bad_words");
    assert_eq!(refused(&ban(vec![tokens(&[1, VOCAB as u32])])), "bad_words");
    assert_eq!(refused(&ban((0..VOCAB as u32).map(|id| tokens(&[id])).collect())), "bad_words");
    assert_eq!(refused(&ban(vec![tokens(&[1]); 1025])), "bad_words");
    for good in [
        allow(&[1]),
        SamplingParams { min_tokens: 1, ..allow(&[1, 2]) },
        SamplingParams { min_tokens: 1, ignore_eos: true, ..allow(&[1]) },
        SamplingParams { bad_words: vec![tokens(&[4, 3])], ..allow(&[4]) },
    ] {
        assert_eq!(good.validate(VOCAB as u32, 20), Ok(()));
    }
}

#[test]
fn extreme_penalties_keep_a_token_to_draw() {
    let logits = [-3.0, 5.0, 1.0];
    let history = tokens(&[0, 1, 2, 0, 1, 2]);
    for repetition_penalty in [f32::MAX, f32::MIN_POSITIVE] {
        for temperature in [0.0, 1e-4, 2.0] {
            let params = SamplingParams { repetition_penalty, temperature, top_p: 0.9, ..SamplingParams::default() };
            draw(&mut Sampler::new(3), &logits, &params, 1, &history);
        }
    }
}

#[test]
fn tiny_temperatures_are_raised() {
    // At 0.01 the second token is e^-0.5 as likely as the first; at 1e-4 it would never be drawn.
    let params = SamplingParams { temperature: 1e-4, ..SamplingParams::default() };
    let mut sampler = Sampler::new(2);
    let second = (0..200).filter(|&seed| draw(&mut sampler, &[1.0, 0.995], &params, seed, &[]) == TokenId(1)).count();
    assert!((50..110).contains(&second), "{second} of 200, 75.5 expected");
}

fn refused(params: &SamplingParams) -> String {
    match params.validate(VOCAB as u32, 20) {
        Err(RequestError::Invalid { param: Some(param), message }) => {
            assert!(message.starts_with(&param) || message.contains("stop ids"), "{message}");
            param
        }
        other => panic!("expected Invalid, got {other:?}"),
    }
}

#[test]
fn ranges_are_checked() {
    let ok = SamplingParams { logprobs: Some(20), prompt_logprobs: Some(0), ..SamplingParams::default() };
    assert_eq!(ok.validate(VOCAB as u32, 20), Ok(()));
    type Set = fn(&mut SamplingParams, f32);
    let floats: [(&str, Set, &[f32], &[f32]); 6] = [
        ("temperature", |p, v| p.temperature = v, &[-0.1, 2.1], &[0.0, 2.0]),
        ("top_p", |p, v| p.top_p = v, &[0.0, -0.5, 1.01], &[1e-6, 1.0]),
        ("min_p", |p, v| p.min_p = v, &[-0.01, 1.01], &[0.0, 1.0]),
        ("repetition_penalty", |p, v| p.repetition_penalty = v, &[0.0, -1.0], &[0.01, 100.0]),
        ("presence_penalty", |p, v| p.presence_penalty = v, &[-2.1, 2.1], &[-2.0, 2.0]),
        ("frequency_penalty", |p, v| p.frequency_penalty = v, &[-2.1, 2.1], &[-2.0, 2.0]),
    ];
    for (param, set, bad, good) in floats {
        let mut params = ok.clone();
        for &value in bad.iter().chain(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]) {
            set(&mut params, value);
            assert_eq!(refused(&params), param, "{value}");
        }
        for &value in good {
            set(&mut params, value);
            assert_eq!(params.validate(VOCAB as u32, 20), Ok(()), "{param} {value}");
        }
    }
    assert_eq!(refused(&SamplingParams { max_tokens: 0, ..ok.clone() }), "max_tokens");
    assert_eq!(refused(&SamplingParams { min_tokens: 17, ..ok.clone() }), "min_tokens");
    assert_eq!(refused(&SamplingParams { logprobs: Some(21), ..ok.clone() }), "logprobs");
    assert_eq!(refused(&SamplingParams { prompt_logprobs: Some(21), ..ok.clone() }), "prompt_logprobs");
    assert_eq!(refused(&SamplingParams { logit_bias: vec![(TokenId(1), f32::NAN)], ..ok.clone() }), "logit_bias");
    let all = SamplingParams { min_tokens: 1, stop_token_ids: (0..VOCAB as u32).map(TokenId).collect(), ..ok };
    assert_eq!(refused(&all), "stop_token_ids");
}

/// Ids past the vocabulary never reach the logits.
#[test]
fn fault_18_out_of_vocabulary_ids_are_refused() {
    for id in [VOCAB as u32, VOCAB as u32 + 1, 1 << 31, u32::MAX] {
        let stop = SamplingParams { stop_token_ids: tokens(&[0, id]), ..SamplingParams::default() };
        assert_eq!(refused(&stop), "stop_token_ids");
        let bias = SamplingParams { logit_bias: vec![(TokenId(id), 1.0)], ..SamplingParams::default() };
        assert_eq!(refused(&bias), "logit_bias");
    }
}
