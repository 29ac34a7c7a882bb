//! The rows of the op case table.
//!
//! Invariant: every op and every weight format is here, with shapes that fit no tile, and each tolerance says why it is
//! what it is. Adding an op or a format means adding its rows here.

use super::families::family_cases;
use super::{AttentionCase, BlockMoves, Case, CaseOp, FusedCase, FusedEnd, PartCase, SampleCase, Tolerance, TurnCase};
use crate::program::{Activation, KvDtype, RopePairing};
use crate::weights::WeightFormat;

/// Copies and comparisons.
pub const EXACT: Tolerance = Tolerance {
    relative_rms: 0.0,
    relative_max: 0.0,
    reason: "the op moves or adds single values, nothing is reordered",
};

/// f32 arithmetic in another order.
pub const FLOAT: Tolerance = Tolerance {
    relative_rms: 2e-6,
    relative_max: 1e-5,
    reason: "f32 with another order of summation, fused multiply-adds and an exponential of a few units in the last place",
};

/// Products of quantised weights with f32 activations, or with such as lose nothing in 8 bits.
pub const CODES: Tolerance = Tolerance {
    relative_rms: 5e-6,
    relative_max: 3e-5,
    reason: "f32 in another order; codes and minima are summed apart, and part of their sums cancels",
};

/// Products with integer blocks.
const QUANTISED: Tolerance = Tolerance {
    relative_rms: 1e-2,
    relative_max: 5e-2,
    reason: "activations may be rounded to 8 bits per block: an error of at most 1/254 of the block's largest value, \
             about 0.5 % rms for uniform or normal values; single outputs are within five times that of their scale",
};

/// Two products with integer blocks, multiplied.
pub(super) const GATED: Tolerance = Tolerance {
    relative_rms: 2e-2,
    relative_max: 1e-1,
    reason: "two factors, each with the error of a product with integer blocks",
};

/// Attention over keys that were turned before they were rounded.
const TURNED: Tolerance = Tolerance {
    relative_rms: 5e-5,
    relative_max: 1e-3,
    reason: "an angle's last bit may send an element of a key to the other side of its rounding, which is 2^-11 of it in f16",
};

/// As `TURNED`, for types of so few bits that a flip is rarer and moves more: up to 2^-4 of an element in fp8, 1/127 of the
/// largest one in int8, whose scale an angle's last bit moves too.
const TURNED_COARSE: Tolerance = Tolerance {
    relative_rms: 5e-4,
    relative_max: 2e-2,
    reason: "an angle's last bit may send an element of a key to the other side of its rounding, which is 2^-8 of it in bf16 and \
             2^-4 of it in fp8",
};

/// Attention of heads so wide that a score's error counts.
const WIDE_HEADS: Tolerance = Tolerance {
    relative_rms: 4e-6,
    relative_max: 4e-5,
    reason: "as f32 elsewhere, but a score is the sum of 256 products, and its exponential has the score's absolute error as a \
             relative one",
};

/// Every case, in a fixed order.
pub fn all_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    row_wise_cases(&mut cases);
    rope_cases(&mut cases);
    linear_cases(&mut cases);
    fused_cases(&mut cases);
    attention_cases(&mut cases);
    sample_cases(&mut cases);
    // Last, so that the seeds of the others stay as they are.
    later_format_cases(&mut cases);
    family_cases(&mut cases);
    for (width, tokens) in [(20, 5), (40, 3), (1536, 33), (32, 1), (576, 9)] {
        push(&mut cases, EXACT, CaseOp::GatherColumns { width, tokens });
    }
    for dtype in [KvDtype::Bf16, KvDtype::Fp8E4m3, KvDtype::Int8PerTokenHead] {
        let rows = vec![(563, 37), (3, 1)];
        let case = AttentionCase { rows, ..AttentionCase::causal(3, 1, 64, dtype) };
        push(&mut cases, FLOAT, CaseOp::Attention(case));
    }
    cases
}

/// Formats in the order in which their cases came to the table: those with every case, and those with the cases that tell
/// formats apart.
fn formats() -> (Vec<WeightFormat>, Vec<WeightFormat>) {
    WeightFormat::all().partition(|&format| (format as usize) < WeightFormat::Q2K as usize)
}

pub(super) fn push(cases: &mut Vec<Case>, tolerance: Tolerance, op: CaseOp) {
    let seed = cases.len() as u64 + 1;
    cases.push(Case { op, tolerance, seed });
}

fn row_wise_cases(cases: &mut Vec<Case>) {
    for format in formats().0 {
        embed_cases(cases, format, widths(format));
    }
    // 20 and 40 end within a vector.
    for (width, tokens) in [(20, 5), (32, 1), (40, 3), (64, 3), (96, 2), (576, 5), (1536, 33), (8192, 2)] {
        push(cases, FLOAT, CaseOp::RmsNorm { width, tokens });
        push(cases, EXACT, CaseOp::Add { width, tokens });
        push(cases, FLOAT, CaseOp::GatedActivation { width, tokens, activation: Activation::Silu });
        push(cases, EXACT, CaseOp::CheckFinite { width, tokens });
        push(cases, EXACT, CaseOp::SelectRows { width, tokens, logit_rows: tokens + 2 });
    }
    for (heads, head_dim, offset, tokens) in
        [(1, 64, 0, 1), (5, 20, 4, 3), (3, 80, 0, 4), (4, 128, 128, 9), (9, 64, 192, 17)]
    {
        push(cases, FLOAT, CaseOp::NormHeads { heads, head_dim, offset, tokens });
    }
}

fn embed_cases(cases: &mut Vec<Case>, format: WeightFormat, widths: &[u32]) {
    // A block format's minimum may be added by a fused multiply-add.
    let tolerance = if format.block_len() == 1 { EXACT } else { FLOAT };
    for &width in widths {
        push(cases, tolerance, CaseOp::Embed { format, width, tokens: 5, scale: 1.0 });
    }
    // Rows of several panels, as a backend may pack them.
    push(cases, tolerance, CaseOp::Embed { format, width: widths[0], tokens: 37, scale: 1.0 });
}

fn rope_cases(cases: &mut Vec<Case>) {
    for pairing in [RopePairing::Half, RopePairing::Interleaved] {
        for (heads, head_dim, offset, start, tokens) in
            [(1, 64, 0, 0, 1), (5, 20, 4, 3, 3), (3, 80, 0, 7, 4), (4, 128, 64, 2000, 9), (9, 64, 192, 8190, 17)]
        {
            let turn = TurnCase::whole(pairing, head_dim);
            push(cases, FLOAT, CaseOp::Rope { heads, head_dim, offset, turn, start, tokens });
        }
    }
}

/// Widths of a row that fit the format: multiples of its block, few of them of a tile.
fn widths(format: WeightFormat) -> &'static [u32] {
    match format {
        _ if format.block_len() == 256 => &[256, 512, 768, 1536],
        _ => &[32, 64, 96, 576, 1536],
    }
}

/// Whether weights are multiplied with f32 activations, whatever the backend.
fn is_float(format: WeightFormat) -> bool {
    format.block_len() == 1 || format == WeightFormat::Fp8E4m3
}

fn linear_tolerance(parts: &[PartCase]) -> Tolerance {
    if parts.iter().all(|part| is_float(part.format)) { FLOAT } else { QUANTISED }
}

fn linear(cases: &mut Vec<Case>, in_features: u32, tokens: u32, parts: &[(u32, WeightFormat, bool)]) {
    let part = |&(out_features, format, bias)| PartCase { out_features, format, bias };
    let parts: Vec<PartCase> = parts.iter().map(part).collect();
    push(cases, linear_tolerance(&parts), CaseOp::Linear { in_features, parts, tokens });
}

fn linear_cases(cases: &mut Vec<Case>) {
    for format in formats().0 {
        let rows_and_tokens = [(7, 1), (33, 2), (100, 5), (65, 33), (48, 9)];
        for (&in_features, (rows, tokens)) in widths(format).iter().zip(rows_and_tokens) {
            linear(cases, in_features, tokens, &[(rows, format, false)]);
        }
        for tokens in (1..=9).chain([16, 33, 64]) {
            linear(cases, widths(format)[1], tokens, &[(37, format, tokens % 2 == 0)]);
        }
        // q, k and v with biases on some; a part of a few rows; more rows than one thread's share.
        linear(cases, widths(format)[3], 3, &[(64, format, true), (16, format, false), (16, format, true)]);
        linear(cases, widths(format)[0], 1, &[(1, format, true), (2, format, false), (3, format, false)]);
        linear(cases, widths(format)[2], 6, &[(1030, format, false), (515, format, true)]);
        // Parts without biases that end with whole panels: a backend may compute them as one.
        linear(cases, widths(format)[1], 2, &[(64, format, false), (128, format, false), (20, format, false)]);
        // More tokens than pass over the weights together.
        linear(cases, widths(format)[0], 150, &[(19, format, true)]);
    }
    // Parts of mixed formats, as quantised files have them (v and down in more bits).
    for tokens in [1, 4, 17] {
        use WeightFormat::{Bf16, F16, F32, Q4_1, Q4K, Q5_0, Q6K, Q8_0};
        linear(cases, 576, tokens, &[(96, Q4_1, true), (40, Q4_1, false), (40, Q8_0, true)]);
        linear(cases, 512, tokens, &[(96, Q4K, false), (32, Q4K, false), (32, Q6K, false)]);
        linear(cases, 256, tokens, &[(33, F16, false), (17, Q5_0, false)]);
        linear(cases, 96, tokens, &[(33, F32, true), (17, Bf16, false), (9, F16, false)]);
    }
}

/// Every end with and without a norm before; few tokens and many; parts that a backend may compute as one, and such that end
/// within a panel or have biases.
fn fused_cases(cases: &mut Vec<Case>) {
    use FusedEnd::{Add, Store};
    const GATE: FusedEnd = FusedEnd::Gate(Activation::Silu);
    for (end, norm, in_features, out_features, bias, tokens) in [
        (GATE, false, 64, 12, false, 1),
        (GATE, true, 256, 64, false, 3),
        (GATE, true, 256, 192, false, 1),
        (GATE, false, 512, 128, true, 2),
        (GATE, true, 512, 200, false, 33),
        (Store, true, 512, 64, false, 2),
        (Store, true, 256, 37, true, 1),
        (Add, false, 512, 100, false, 1),
        (Add, true, 256, 64, true, 5),
    ] {
        for format in formats().0.into_iter().filter(|format| in_features % 256 == 0 || format.block_len() < 256) {
            let part = PartCase { out_features, format, bias };
            let parts = if end == Add { vec![part] } else { vec![part, part] };
            fused(cases, FusedCase { in_features, parts, norm, end, tokens });
        }
    }
}

fn fused(cases: &mut Vec<Case>, case: FusedCase) {
    let tolerance = match case.end {
        _ if is_float(case.parts[0].format) => FLOAT,
        FusedEnd::Gate(_) => GATED,
        FusedEnd::Store | FusedEnd::Add => QUANTISED,
    };
    push(cases, tolerance, CaseOp::FusedLinear(case));
}

/// Rows that end within a panel, within a super group of scales, and numbers of tokens for every register tile.
fn later_format_cases(cases: &mut Vec<Case>) {
    for format in formats().1 {
        let widths = widths(format);
        embed_cases(cases, format, &[widths[0], widths[2]]);
        for (&in_features, (rows, tokens)) in widths.iter().zip([(7, 1), (33, 2), (100, 5), (65, 33)]) {
            linear(cases, in_features, tokens, &[(rows, format, false)]);
        }
        for tokens in [1, 4, 16] {
            linear(cases, widths[1], tokens, &[(37, format, tokens == 4)]);
        }
        linear(cases, widths[3], 3, &[(64, format, true), (16, format, false), (16, format, true)]);
        let part = PartCase { out_features: 64, format, bias: false };
        let gate = FusedCase {
            in_features: 512,
            parts: vec![part; 2],
            norm: true,
            end: FusedEnd::Gate(Activation::Silu),
            tokens: 2,
        };
        fused(cases, FusedCase { parts: vec![part], norm: false, end: FusedEnd::Add, ..gate.clone() });
        fused(cases, gate);
    }
}

/// How far attention may be from the reference.
pub fn attention_tolerance(case: &AttentionCase) -> Tolerance {
    match case.head_dim {
        _ if case.rope.is_some() && case.dtype == KvDtype::F16 => TURNED,
        _ if case.rope.is_some() && case.dtype != KvDtype::F32 => TURNED_COARSE,
        256.. => WIDE_HEADS,
        _ => FLOAT,
    }
}

fn attention_cases(cases: &mut Vec<Case>) {
    let base = AttentionCase::causal(3, 1, 64, KvDtype::F16);
    let mut add = |case: AttentionCase| {
        push(cases, attention_tolerance(&case), CaseOp::Attention(case));
    };
    for dtype in [KvDtype::F32, KvDtype::F16] {
        // Query heads per KV head of 1, 3 and 4; head sizes that are no power of two.
        for (heads, kv_heads, head_dim) in [(2, 2, 64), (9, 3, 64), (8, 2, 128), (4, 1, 80), (2, 1, 32), (2, 2, 256)] {
            let rows = vec![(0, 5), (20, 3), (33, 1)];
            add(AttentionCase { heads, kv_heads, head_dim, dtype, rows, ..base.clone() });
        }
        // Heads that end within a vector, blocks too.
        for (heads, kv_heads, head_dim, block_size) in [(2, 1, 24, 16), (3, 3, 72, 24), (7, 1, 20, 20)] {
            let rows = vec![(0, 5), (270, 3), (33, 1)];
            add(AttentionCase { heads, kv_heads, head_dim, dtype, block_size, rows, ..base.clone() });
        }
        for block_size in [1, 3, 16] {
            let rows = vec![(0, 1), (5, 4), (40, 1), (0, 19)];
            add(AttentionCase { dtype, block_size, rows, ..base.clone() });
        }
        // Lengths around the borders of a KV split (a power of two), decoding, in chunks and whole.
        for length in [255, 256, 257, 600] {
            add(AttentionCase { dtype, rows: vec![(length - 1, 1)], ..base.clone() });
            add(AttentionCase { dtype, rows: vec![(length - 37, 37), (3, 1)], ..base.clone() });
        }
        add(AttentionCase { dtype, rows: vec![(0, 300)], ..base.clone() });
        // A walk of more turns than some drivers let a loop take (Mesa's lavapipe: 65535, inner loops counted).
        let (heads, kv_heads, head_dim) = (1, 1, 256);
        add(AttentionCase { heads, kv_heads, head_dim, dtype, rows: vec![(700, 20)], ..base.clone() });
        add(AttentionCase { dtype, rows: vec![(511, 2), (1023, 3), (0, 1), (64, 1)], ..base.clone() });
        // Query heads per KV head of 1, 2 and 3; heads that end within a vector.
        for (heads, kv_heads, head_dim) in [(9, 3, 64), (4, 2, 128), (2, 2, 24), (2, 1, 20)] {
            for pairing in [RopePairing::Half, RopePairing::Interleaved] {
                let rope = Some(TurnCase::whole(pairing, head_dim));
                let rows = vec![(0, 5), (300, 3), (33, 1)];
                add(AttentionCase { heads, kv_heads, head_dim, dtype, rows, rope, ..base.clone() });
            }
        }
        for moves in [BlockMoves::Copy, BlockMoves::ReadWrite] {
            add(AttentionCase { dtype, moves, rows: vec![(20, 1), (7, 5)], ..base.clone() });
        }
    }
    for dtype in [KvDtype::Bf16, KvDtype::Fp8E4m3, KvDtype::Int8PerTokenHead] {
        small_type_cases(&AttentionCase { dtype, ..base.clone() }, &mut add);
    }
    let base = AttentionCase { heads: 4, kv_heads: 2, head_dim: 32, ..base };
    window_cases(&base, &mut add);
    for cap in [0.5, 5.0, 50.0] {
        add(AttentionCase { soft_cap: Some(cap), rows: vec![(0, 5), (270, 3), (33, 1)], ..base.clone() });
    }
    for rows in [vec![(0, 5), (270, 3), (33, 1)], vec![(0, 19), (301, 1)]] {
        add(AttentionCase { sinks: true, rows, ..base.clone() });
    }
    tree_cases(&base, &mut add);
    // All of them at once, in every shape that a step gives a row.
    for dtype in [KvDtype::F16, KvDtype::F32] {
        let all = AttentionCase { window: Some(100), soft_cap: Some(5.0), sinks: true, dtype, ..base.clone() };
        add(AttentionCase { rows: vec![(599, 1), (130, 9), (0, 5)], ..all.clone() });
        add(AttentionCase { rows: vec![(0, 300)], ..all.clone() });
        let trees = vec![vec![], heap(2, 7), heap(3, 5)];
        add(AttentionCase { rows: vec![(599, 1), (250, 7), (0, 5)], trees, ..all.clone() });
        add(AttentionCase { heads: 6, head_dim: 20, block_size: 5, rows: vec![(163, 37), (3, 1)], ..all });
    }
}

/// The types that f32 and f16 do not stand for already: what their loads, stores and scales can get wrong.
fn small_type_cases(base: &AttentionCase, add: &mut impl FnMut(AttentionCase)) {
    // Heads and blocks that end within a vector, within a word of a workgroup's lanes, and one head of many lanes.
    for (heads, kv_heads, head_dim, block_size) in [(9, 3, 64, 16), (7, 1, 20, 20), (4, 1, 80, 3), (2, 2, 256, 16)] {
        let rows = vec![(0, 5), (270, 3), (33, 1)];
        add(AttentionCase { heads, kv_heads, head_dim, block_size, rows, ..base.clone() });
    }
    for rows in [vec![(599, 1)], vec![(250, 37), (3, 1)], vec![(0, 300)]] {
        add(AttentionCase { rows, ..base.clone() });
    }
    for (heads, kv_heads, head_dim) in [(9, 3, 64), (2, 2, 24), (2, 1, 20)] {
        for pairing in [RopePairing::Half, RopePairing::Interleaved] {
            let (rows, rope) = (vec![(0, 5), (300, 3), (33, 1)], Some(TurnCase::whole(pairing, head_dim)));
            add(AttentionCase { heads, kv_heads, head_dim, rows, rope, ..base.clone() });
        }
    }
    for moves in [BlockMoves::Copy, BlockMoves::ReadWrite] {
        add(AttentionCase { moves, rows: vec![(20, 1), (7, 5)], ..base.clone() });
    }
    let (rows, trees) = (vec![(599, 1), (250, 7), (0, 5)], vec![vec![], heap(2, 7), heap(3, 5)]);
    let all = AttentionCase { window: Some(100), soft_cap: Some(5.0), sinks: true, ..base.clone() };
    add(AttentionCase { heads: 4, kv_heads: 2, head_dim: 32, rows, trees, ..all });
}

/// Windows of one position, within a block, of a split, across splits, and longer than a row.
fn window_cases(base: &AttentionCase, add: &mut impl FnMut(AttentionCase)) {
    for window in [1, 7, 64, 100, 256, 300] {
        let base = AttentionCase { window: Some(window), ..base.clone() };
        for rows in [vec![(0, 5), (130, 9), (599, 1)], vec![(563, 37), (3, 1)], vec![(255, 2), (256, 1), (600, 60)]] {
            add(AttentionCase { rows, ..base.clone() });
        }
    }
}

/// Trees that branch at once, late, or not at all, as large as they may be, around the border of a split and among causal
/// rows with more tokens than a tree may have; with windows that end within a tree.
fn tree_cases(base: &AttentionCase, add: &mut impl FnMut(AttentionCase)) {
    let base = AttentionCase { block_size: 3, ..base.clone() };
    let mixed = vec![None, None, Some(0), Some(1), Some(2), Some(0), Some(5), None, Some(4)];
    for window in [None, Some(2), Some(60)] {
        let base = AttentionCase { window, ..base.clone() };
        add(AttentionCase { rows: vec![(61, 9)], trees: vec![mixed.clone()], ..base.clone() });
        add(AttentionCase { rows: vec![(253, 7), (40, 1)], trees: vec![heap(2, 7)], ..base.clone() });
        add(AttentionCase { rows: vec![(0, 64)], trees: vec![heap(2, 64)], ..base.clone() });
        let (rows, trees) = (vec![(40, 7), (10, 70), (250, 12)], vec![heap(2, 7), vec![], heap(1, 12)]);
        add(AttentionCase { rows, trees, ..base });
    }
}

/// The parents of `num_tokens` tokens, numbered level by level, each of `children` children.
fn heap(children: u32, num_tokens: u32) -> Vec<Option<u32>> {
    (0..num_tokens).map(|j| j.checked_sub(1).map(|before| before / children)).collect()
}

fn sample_cases(cases: &mut Vec<Case>) {
    // Rows that start within four words, fewer logits than alternatives, and more rows than kinds of rows.
    for (vocab, rows) in [(1, 3), (7, 9), (32, 2), (513, 12), (2050, 7), (5003, 9), (49_152, 4)] {
        for (temperature, logprobs) in [(0.0, None), (0.0, Some(20)), (0.8, None), (1.3, Some(5)), (0.01, Some(0))] {
            push(cases, FLOAT, CaseOp::Sample(SampleCase { vocab, rows, temperature, logprobs }));
        }
    }
}
