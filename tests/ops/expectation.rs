//! The formulas of the ops in f64 over whole rows, without the reference's code: no pages, no panels, no order of sums.
//!
//! Invariant: nothing here is shared with a backend but the rounding of a cached value to its type. Used by `ops.rs`.

use runtime::backend::cases::{AttentionCase, Case, CaseOp, build_case};
use runtime::program::{Activation, KvDtype, Op};

/// The output of a case, or none where nothing here computes it.
pub fn expectation_f64(case: &Case) -> Option<Vec<f64>> {
    let built = build_case(case);
    let wide = |i: usize| built.tensors[i].to_f32().into_iter().map(f64::from).collect::<Vec<f64>>();
    match &case.op {
        CaseOp::RmsNorm { width, .. } => {
            let (x, weight) = (wide(0), wide(1));
            let normed = x.chunks(*width as usize).flat_map(|row| {
                let root = (row.iter().map(|v| v * v).sum::<f64>() / row.len() as f64 + 1e-5).sqrt();
                row.iter().zip(&weight).map(move |(v, w)| v / root * w).collect::<Vec<f64>>()
            });
            Some(normed.collect())
        }
        CaseOp::GatedActivation { width, activation, .. } => {
            let (n, x) = (*width as usize, wide(0));
            let gated = |x: f64, up: f64| match activation {
                Activation::Silu => x / (1.0 + (-x).exp()) * up,
                Activation::GeluTanh => {
                    let inner = (x + 0.044715 * x.powi(3)) * (2.0 / std::f64::consts::PI).sqrt();
                    x / 2.0 * (1.0 + inner.tanh()) * up
                }
                Activation::ClampedSwiglu => {
                    let (x, up) = (x.min(7.0), up.clamp(-7.0, 7.0));
                    x / (1.0 + (-1.702 * x).exp()) * (up + 1.0)
                }
            };
            let row = |row: &[f64]| (0..n).map(|i| gated(row[i], row[n + i])).collect::<Vec<f64>>();
            Some(x.chunks(2 * n).flat_map(row).collect())
        }
        CaseOp::SoftCap { cap, .. } => {
            let cap = f64::from(*cap);
            Some(wide(0).iter().map(|x| cap * (x / cap).tanh()).collect())
        }
        CaseOp::Linear { in_features, .. } => {
            let x = wide(0);
            let Op::Linear { parts, .. } = &built.program.ops[1] else { panic!("the op follows the embed") };
            let mut out = Vec::new();
            for x in x.chunks(*in_features as usize) {
                for part in parts {
                    let weight = wide(part.weight.index());
                    let bias = part.bias.map(|b| wide(b.index()));
                    for (i, row) in weight.chunks(x.len()).enumerate() {
                        let sum: f64 = row.iter().zip(x).map(|(w, x)| w * x).sum();
                        out.push(sum + bias.as_ref().map_or(0.0, |b| b[i]));
                    }
                }
            }
            Some(out)
        }
        CaseOp::Attention(attention) if attention.rope.is_none() => {
            let sinks = attention.sinks.then(|| wide(1));
            Some(attention_f64(attention, &built.tensors[0].to_f32(), sinks.as_deref()))
        }
        _ => None,
    }
}

/// The tokens that a row's token at `index` sees without a window, itself last, by their index in the row.
pub fn path(start: usize, parents: Option<&Vec<Option<u32>>>, index: usize) -> Vec<usize> {
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
fn attention_f64(case: &AttentionCase, qkv: &[f32], sinks: Option<&[f64]>) -> Vec<f64> {
    let (heads, kv_heads, dim) = (case.heads as usize, case.kv_heads as usize, case.head_dim as usize);
    let width = (heads + 2 * kv_heads) * dim;
    let round = |v: f32| match case.dtype {
        KvDtype::F32 => f64::from(v),
        KvDtype::F16 => f64::from(half::f16::from_f32(v).to_f32()),
    };
    let scale = f64::from(6.0 / (case.head_dim as f32).sqrt());
    let (mut out, mut first) = (Vec::new(), 0);
    for (row, &(start, length)) in case.rows.iter().enumerate() {
        let tokens: Vec<&[f32]> =
            (0..(start + length) as usize).map(|p| &qkv[(first + p) * width..][..width]).collect();
        first += tokens.len();
        for index in start as usize..tokens.len() {
            let path = path(start as usize, case.trees.get(row), index);
            let unseen = case.window.map_or(0, |window| path.len().saturating_sub(window as usize));
            let seen: Vec<&[f32]> = path[unseen..].iter().map(|&other| tokens[other]).collect();
            for head in 0..heads {
                let (k_at, v_at) = (heads + head / (heads / kv_heads), heads + kv_heads + head / (heads / kv_heads));
                let q = &tokens[index][head * dim..][..dim];
                let score = |token: &&[f32]| {
                    let k = &token[k_at * dim..][..dim];
                    let score = q.iter().zip(k).map(|(&q, &k)| f64::from(q) * round(k)).sum::<f64>() * scale;
                    case.soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
                };
                let scores: Vec<f64> = seen.iter().map(score).collect();
                let sink = sinks.map(|sinks| sinks[head]);
                let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().copied().chain(sink).map(|s| (s - max).exp()).sum();
                out.extend((0..dim).map(|i| {
                    let values = seen.iter().map(|t| round(t[v_at * dim + i]));
                    scores.iter().zip(values).map(|(s, v)| (s - max).exp() / sum * v).sum::<f64>()
                }));
            }
        }
    }
    out
}
