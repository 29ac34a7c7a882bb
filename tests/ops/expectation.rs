//! The formulas of the ops in f64 over whole rows, without the reference's code: no pages, no panels, no order of sums.
//!
//! Invariant: nothing here is shared with a backend. Attention's is in `cache`. Used by `ops.rs`.

use runtime::backend::cases::{Case, CaseOp, build_case};
use runtime::program::{Activation, Op, RopePairing};

use super::cache::attention_f64;

/// The angle of a position. An op's formula has it as an f32, as the models were trained: at position 8190 that is up to 5e-4 off.
fn angle(position: usize, frequency: f64) -> f64 {
    f64::from((position as f64 * frequency) as f32)
}

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
        CaseOp::Rope { heads, head_dim, offset, turn, start, tokens } => {
            let (dim, pairs) = (*head_dim as usize, turn.pairs as usize);
            let mut x = wide(0);
            // The table in f32 is the model's; sines of angles in f64.
            let frequencies = wide(1);
            let width = x.len() / *tokens as usize;
            for (t, row) in x.chunks_mut(width).enumerate() {
                let heads = &mut row[*offset as usize..][..*heads as usize * dim];
                for head in heads.chunks_mut(dim) {
                    for (i, frequency) in frequencies.iter().enumerate() {
                        let (a, b) = match turn.pairing {
                            RopePairing::Half => (i, i + pairs),
                            RopePairing::Interleaved => (2 * i, 2 * i + 1),
                        };
                        let (sin, cos) = angle(*start as usize + t, *frequency).sin_cos();
                        let amplitude = f64::from(turn.amplitude);
                        let (x, y) = (head[a], head[b]);
                        head[a] = amplitude * (x * cos - y * sin);
                        head[b] = amplitude * (x * sin + y * cos);
                    }
                }
            }
            Some(x)
        }
        CaseOp::ScaleByPosition { width, offset, period, start, tokens } => {
            let mut x = wide(0);
            let row_width = x.len() / *tokens as usize;
            for (t, row) in x.chunks_mut(row_width).enumerate() {
                let periods = ((*start as usize + t) / *period as usize) as f64;
                let factor = 1.0 + f64::from(0.1f32) * periods.ln_1p();
                row[*offset as usize..][..*width as usize].iter_mut().for_each(|x| *x *= factor);
            }
            Some(x)
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
