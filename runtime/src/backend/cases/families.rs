//! The rows of the op case table that only some families of models ask for.
//!
//! Invariant: as in `table`, which they follow, so that its rows keep their seeds.

use super::table::{FLOAT, GATED, attention_tolerance, push};
use super::{
    AttentionCase, BlockMoves, Case, CaseOp, FusedCase, FusedEnd, HeadsCase, MoeCase, PartCase, Tolerance, TurnCase,
};
use crate::program::{Activation, KvDtype, RopePairing, Router, RouterScore};
use crate::weights::WeightFormat;

/// What only some families of models ask for: scaled embeddings, other gates, heads that turn in part, capped logits.
pub(super) fn family_cases(cases: &mut Vec<Case>) {
    for format in [WeightFormat::F32, WeightFormat::Q8_0] {
        push(cases, FLOAT, CaseOp::Embed { format, width: 96, tokens: 5, scale: 33.941_124 });
    }
    for (width, tokens) in [(20, 5), (64, 3), (96, 1), (576, 9), (1536, 33)] {
        for activation in [Activation::GeluTanh, Activation::ClampedSwiglu] {
            push(cases, FLOAT, CaseOp::GatedActivation { width, tokens, activation });
        }
        push(cases, FLOAT, CaseOp::SoftCap { width, tokens, cap: 30.0 });
    }
    for (format, tokens, tolerance) in
        [(WeightFormat::F32, 1, FLOAT), (WeightFormat::F32, 9, FLOAT), (WeightFormat::Q4_0, 2, GATED)]
    {
        let part = PartCase { out_features: 64, format, bias: false };
        let (parts, end) = (vec![part, part], FusedEnd::Gate(Activation::GeluTanh));
        push(cases, tolerance, CaseOp::FusedLinear(FusedCase { in_features: 256, parts, norm: true, end, tokens }));
    }
    // Gates and ups in one matrix, the gates in whole panels and not.
    for out_features in [128, 96] {
        let parts = vec![PartCase { out_features, format: WeightFormat::F32, bias: false }];
        let end = FusedEnd::Gate(Activation::Silu);
        push(cases, FLOAT, CaseOp::FusedLinear(FusedCase { in_features: 64, parts, norm: true, end, tokens: 3 }));
    }
    for (width, offset, period, start, tokens) in
        [(20, 4, 3, 0, 7), (32, 0, 1, 0, 1), (64, 32, 100, 95, 9), (576, 0, 8192, 8190, 5), (64, 0, 16, 8190, 33)]
    {
        push(cases, FLOAT, CaseOp::ScaleByPosition { width, offset, period, start, tokens });
    }
    moe_cases(cases);
    for pairing in [RopePairing::Half, RopePairing::Interleaved] {
        for (heads, head_dim, pairs) in [(3, 32, 12), (2, 96, 4), (5, 20, 3)] {
            let turn = TurnCase { pairing, pairs, amplitude: 1.25 };
            push(cases, FLOAT, CaseOp::Rope { heads, head_dim, offset: 4, turn, start: 40, tokens: 5 });
            let rows = vec![(0, 5), (300, 3), (33, 1)];
            let base = AttentionCase::causal(heads, heads, head_dim, KvDtype::F32);
            let case = AttentionCase { rows, rope: Some(turn), ..base };
            push(cases, attention_tolerance(&case), CaseOp::Attention(case));
        }
    }
    latent_cases(cases);
    uneven_cases(cases);
}

/// Rows whose contexts differ so much that their outputs do.
const UNEVEN_ROWS: Tolerance = Tolerance {
    relative_rms: FLOAT.relative_rms,
    relative_max: 2.0 * FLOAT.relative_max,
    reason: "as f32 elsewhere, but a token that averages four values gives two to three times the root mean square of all, which \
             average hundreds, and an error goes with its value",
};

/// A chunk deep in a context beside one at its start, over the types that f32 and f16 do not stand for.
fn uneven_cases(cases: &mut Vec<Case>) {
    for dtype in [KvDtype::Bf16, KvDtype::Fp8E4m3, KvDtype::Int8PerTokenHead] {
        let rows = vec![(563, 37), (3, 1)];
        let case = AttentionCase { rows, ..AttentionCase::causal(3, 1, 64, dtype) };
        push(cases, UNEVEN_ROWS, CaseOp::Attention(case));
    }
}

/// Latent attention: keys that are values, heads with matrices of their own, and the widths that DeepSeek's files have.
fn latent_cases(cases: &mut Vec<Case>) {
    for dtype in KvDtype::ALL {
        // Heads that end within a register tile, within a vector and, in blocks of other sizes, runs that begin within one.
        for (heads, kv_heads, head_dim, block_size) in [(5, 1, 96, 16), (4, 2, 20, 20), (7, 1, 36, 3)] {
            let rows = vec![(0, 5), (270, 3), (33, 1)];
            let base = AttentionCase { is_shared: true, ..AttentionCase::causal(heads, kv_heads, head_dim, dtype) };
            add_attention(cases, AttentionCase { block_size, rows, ..base });
        }
    }
    let base = AttentionCase { is_shared: true, ..AttentionCase::causal(4, 1, 64, KvDtype::F16) };
    for rows in [vec![(599, 1)], vec![(250, 37), (3, 1)], vec![(0, 300)]] {
        add_attention(cases, AttentionCase { rows, ..base.clone() });
    }
    for (moves, dtype) in [(BlockMoves::Copy, KvDtype::F32), (BlockMoves::ReadWrite, KvDtype::Int8PerTokenHead)] {
        add_attention(cases, AttentionCase { moves, dtype, rows: vec![(20, 1), (7, 5)], ..base.clone() });
    }
    let trees = vec![vec![], vec![None, Some(0), Some(0), Some(1), Some(1), Some(2), Some(2)]];
    let rows = vec![(599, 1), (250, 7)];
    add_attention(cases, AttentionCase { window: Some(100), trees, rows, ..base.clone() });
    add_attention(cases, AttentionCase { heads: 16, head_dim: 576, rows: vec![(300, 2)], ..base });
    for (format, tolerance) in [(WeightFormat::F32, FLOAT), (WeightFormat::Bf16, FLOAT), (WeightFormat::Q8_0, GATED)] {
        for (heads, in_features, out_features, tokens) in [(1, 64, 33, 1), (3, 96, 64, 5), (16, 192, 576, 2)] {
            let case = HeadsCase { heads, in_features, out_features, format, tokens };
            push(cases, tolerance, CaseOp::Heads(case));
        }
    }
}

fn add_attention(cases: &mut Vec<Case>, case: AttentionCase) {
    push(cases, attention_tolerance(&case), CaseOp::Attention(case));
}

/// Routers of both scores with and without groups; experts of few rows and of many, that one token chooses and that all do.
fn moe_cases(cases: &mut Vec<Case>) {
    let router =
        Router { top_k: 2, score: RouterScore::Softmax, groups: 1, top_groups: 1, renormalise: true, scale: 1.0 };
    for (experts, router, bias) in [
        (4, router, false),
        (128, Router { top_k: 8, renormalise: false, ..router }, false),
        (16, Router { top_k: 4, score: RouterScore::Sigmoid, scale: 2.5, ..router }, true),
        (32, Router { top_k: 6, groups: 8, top_groups: 3, scale: 16.0, renormalise: false, ..router }, false),
        (64, Router { top_k: 8, score: RouterScore::Sigmoid, groups: 8, top_groups: 4, ..router }, true),
    ] {
        for tokens in [1, 9] {
            push(cases, FLOAT, CaseOp::MoeRoute { experts, router, bias, tokens });
        }
    }
    let base = MoeCase {
        hidden: 64,
        intermediate: 96,
        experts: 4,
        top_k: 2,
        format: WeightFormat::F32,
        activation: Activation::Silu,
        bias: false,
        tokens: 1,
    };
    for format in [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Q4_0, WeightFormat::Mxfp4] {
        let tolerance = if format.block_len() == 1 { FLOAT } else { GATED };
        for tokens in [1, 5, 40] {
            push(cases, tolerance, CaseOp::Moe(MoeCase { format, tokens, ..base }));
        }
        let activation = Activation::ClampedSwiglu;
        let wide = MoeCase { intermediate: 32, experts: 16, top_k: 5, bias: true, activation, tokens: 7, ..base };
        push(cases, tolerance, CaseOp::Moe(MoeCase { format, ..wide }));
    }
}
