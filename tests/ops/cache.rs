//! What the paged cache holds: rounding to each type, written down a second time, and the bytes of blocks on every backend.
//!
//! Invariant: nothing here calls the code that backends round with. Part of `ops`, whose table of cases it runs.

use runtime::backend::Backend;
use runtime::backend::cases::{AttentionCase, BuiltCase, Case, CaseOp, all_cases, build_case, run_built};
use runtime::ids::{BlockId, Layer};
use runtime::program::KvDtype;
use runtime::weights::HostTensor;

use super::{backends, for_all, reference, share};

/// One token's K or V of one head as a cache of some type gives it back.
fn rounded(dtype: KvDtype, head: &[f32]) -> Vec<f64> {
    let largest = head.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
    let one = |x: f32| match dtype {
        KvDtype::F32 => f64::from(x),
        KvDtype::F16 => f64::from(half::f16::from_f32(x).to_f32()),
        KvDtype::Bf16 => f64::from(half::bf16::from_f32(x).to_f32()),
        KvDtype::Fp8E4m3 => e4m3(f64::from(x)),
        KvDtype::Int8PerTokenHead if largest == 0.0 => 0.0,
        KvDtype::Int8PerTokenHead => f64::from((x * (127.0 / largest)).round_ties_even()) * f64::from(largest / 127.0),
    };
    head.iter().map(|&x| one(x)).collect()
}

/// The nearest of all values that 1 + 4 + 3 bits have, found by looking at each; of two, the one with an even fraction.
fn e4m3(x: f64) -> f64 {
    let value = |code: i32| match code {
        0..8 => f64::from(code) / 512.0,
        _ => f64::from(8 + code % 8) * 2f64.powi(code / 8 - 10),
    };
    let magnitude = x.abs();
    let distance = |code: &i32| (value(*code) - magnitude).abs();
    let nearest = (0..127).min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2))));
    value(nearest.expect("a code")).copysign(x)
}

/// The tokens that a row's token at `index` sees without a window, itself last, by their index in the row.
pub(super) fn path(start: usize, parents: Option<&Vec<Option<u32>>>, index: usize) -> Vec<usize> {
    let Some(parents) = parents.filter(|parents| !parents.is_empty() && index >= start) else {
        return (0..=index).collect();
    };
    let mut own = vec![index];
    while let Some(parent) = parents[own[own.len() - 1] - start] {
        own.push(start + parent as usize);
    }
    (0..start).chain(own.into_iter().rev()).collect()
}

/// Attention without pages: `qkv` holds every row's tokens one after the other.
pub(super) fn attention_f64(case: &AttentionCase, qkv: &[f32], sinks: Option<&[f64]>) -> Vec<f64> {
    let (heads, kv_heads, dim) = (case.heads as usize, case.kv_heads as usize, case.head_dim as usize);
    let values = if case.is_shared { heads } else { heads + kv_heads };
    let width = (values + kv_heads) * dim;
    let scale = f64::from(6.0 / (case.head_dim as f32).sqrt());
    let (mut out, mut first) = (Vec::new(), 0);
    for (row, &(start, length)) in case.rows.iter().enumerate() {
        let tokens: Vec<&[f32]> =
            (0..(start + length) as usize).map(|p| &qkv[(first + p) * width..][..width]).collect();
        let cached: Vec<Vec<f64>> = tokens
            .iter()
            .map(|token| token.chunks_exact(dim).flat_map(|head| rounded(case.dtype, head)).collect())
            .collect();
        first += tokens.len();
        for (index, token) in tokens.iter().enumerate().skip(start as usize) {
            let path = path(start as usize, case.trees.get(row), index);
            let unseen = case.window.map_or(0, |window| path.len().saturating_sub(window as usize));
            let seen: Vec<&[f64]> = path[unseen..].iter().map(|&other| cached[other].as_slice()).collect();
            for head in 0..heads {
                let kv_head = head / (heads / kv_heads);
                let (k_at, v_at) = (heads + kv_head, values + kv_head);
                let q = &token[head * dim..][..dim];
                let score = |entry: &&[f64]| {
                    let k = &entry[k_at * dim..][..dim];
                    let score = q.iter().zip(k).map(|(&q, &k)| f64::from(q) * k).sum::<f64>() * scale;
                    case.soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
                };
                let scores: Vec<f64> = seen.iter().map(score).collect();
                let sink = sinks.map(|sinks| sinks[head]);
                let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().copied().chain(sink).map(|s| (s - max).exp()).sum();
                out.extend((0..dim).map(|i| {
                    let values = seen.iter().map(|t| t[v_at * dim + i]);
                    scores.iter().zip(values).map(|(s, v)| (s - max).exp() / sum * v).sum::<f64>()
                }));
            }
        }
    }
    out
}

/// The bytes of all blocks but block 0, which is for padding.
fn blocks(backend: &mut dyn Backend, built: &BuiltCase) -> Result<Vec<u8>, String> {
    run_built(backend, built).map_err(|e| e.to_string())?;
    let (mut all, mut bytes) = (Vec::new(), Vec::new());
    for block in (1..built.num_blocks).map(BlockId) {
        backend.read_block(Layer(0), block, &mut bytes).map_err(|e| e.to_string())?;
        all.append(&mut bytes);
    }
    Ok(all)
}

/// A stored block reads as the reference's bytes whatever a backend's own layout is: blocks may be kept outside or moved.
#[test]
fn blocks_read_as_planes() {
    // Keys that are not turned before they are rounded are the same everywhere.
    let is_plain = |case: &Case| matches!(&case.op, CaseOp::Attention(case) if case.rope.is_none());
    let cases: Vec<Case> = all_cases().into_iter().filter(is_plain).collect();
    for (name, make) in backends() {
        for_all(&share(name, &cases), |case| {
            let built = build_case(case);
            let same = blocks(make().as_mut(), &built)? == blocks(&mut reference(), &built)?;
            if same { Ok(()) } else { Err(format!("{name}: other bytes")) }
        });
    }
}

/// Values at and around every border of the types: ties, subnormals, the largest, rows of zeros and of values too small for a
/// scale. Bytes must be those of the reference.
#[test]
fn odd_values_are_stored_alike() {
    let (heads, kv_heads, head_dim) = (1, 1, 64);
    for dtype in KvDtype::ALL {
        let rows = vec![(0, 60)];
        let case = AttentionCase { rows, ..AttentionCase::causal(heads, kv_heads, head_dim, dtype) };
        let mut case = Case { op: CaseOp::Attention(case), ..all_cases().remove(0) };
        case.seed = 1;
        let mut built = build_case(&case);
        let mut values = built.tensors[0].to_f32();
        let width = values.len() / 60;
        for (token, row) in values.chunks_exact_mut(width).enumerate() {
            row[head_dim as usize..].iter_mut().enumerate().for_each(|(i, x)| *x = odd_value(token, i));
        }
        built.tensors[0] = HostTensor::from_f32("qkv", built.tensors[0].shape.clone(), &values);
        let expected = blocks(&mut reference(), &built).expect("the oracle runs");
        for (name, make) in backends() {
            let got = blocks(make().as_mut(), &built).unwrap_or_else(|problem| panic!("{name}: {problem}"));
            let differ = got.iter().zip(&expected).position(|(a, b)| a != b);
            assert_eq!(differ, None, "{name}, {dtype}: other bytes");
            assert_eq!(got.len(), expected.len(), "{name}, {dtype}");
        }
    }
}

fn odd_value(token: usize, i: usize) -> f32 {
    let sign = if i.is_multiple_of(2) { 1.0 } else { -1.0 };
    let borders = [448.0, 464.0, 65504.0, 65520.0, 3e38, 0.015_625, 2f32.powi(-9), 2f32.powi(-10), 6.1e-5, 6e-8, 1.0];
    sign * match token % 6 {
        0 => 0.0,
        1 => 2f32.powi(-110),
        // Neighbours of a border, in steps of its last bit.
        2 => f32::from_bits(borders[token / 6 % borders.len()].to_bits() + i as u32 - 32),
        // Every tie of three, seven and ten bits of fraction, and its neighbours.
        3 => f32::from_bits(((127 - (token as u32 % 20)) << 23 | (i as u32) << 19) + i as u32 % 3 - 1),
        4 => f32::from_bits((127 << 23 | (i as u32 * 1031 % 1024) << 13) + (1 << 12) + i as u32 % 3 - 1),
        // Halves of a code, and the scale that belongs to them.
        _ => (i as f32 + 0.5) * 2f32.powi(token as i32 - 30) * if token % 12 == 5 { 1.0 } else { 1.1 },
    }
}
