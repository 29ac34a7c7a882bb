//! Which rows of the op case table meet a kernel, and which of them a user's kernel takes.
//!
//! Invariant: a case is left out only where what the kernel fixes rules it out; whether it ran is for `check` to count.
//! Pure; called by `check`, `reload`, the start-up self-test and the command line.

use runtime::backend::cases::{AttentionCase, Case, CaseOp, FusedCase, FusedEnd, all_cases};
use runtime::program::{RopePairing, RouterScore};

use super::CustomKernel;
use crate::layout::fragment_of;
use crate::lower::activation_setting;

/// Cases of a quick look.
const QUICK: usize = 12;

/// Cases whose output a kernel of the table takes part in.
pub fn cases_of(kernel: &str) -> Vec<Case> {
    all_cases().into_iter().filter(|case| meets(kernel, &case.op)).collect()
}

/// Some of the cases that a user's kernel takes, from the first to the last, for a look in passing.
pub fn quick_cases_of(kernel: &CustomKernel) -> Vec<Case> {
    let mut cases = cases_of(kernel.kernel().name);
    cases.retain(|case| may_take(kernel, &case.op));
    let step = cases.len().div_ceil(QUICK).max(1);
    cases.into_iter().step_by(step).collect()
}

/// Whether a kernel of the table takes part in a case.
pub(crate) fn meets(kernel: &str, op: &CaseOp) -> bool {
    match op {
        CaseOp::Embed { .. } => kernel == "embed",
        CaseOp::RmsNorm { .. } => kernel == "rms_norm",
        CaseOp::NormHeads { .. } => kernel == "norm_heads",
        CaseOp::Add { .. } => kernel == "add",
        CaseOp::Linear { .. } => kernel == "linear",
        CaseOp::Rope { .. } => kernel == "rope",
        CaseOp::FusedLinear(case) => kernel == "linear" || (kernel == "rms_norm" && case.norm),
        CaseOp::Attention(case) => {
            let store = if case.rope.is_some() { "rope_store_kv" } else { "store_kv" };
            [store, "attention", "attention_combine"].contains(&kernel)
        }
        CaseOp::GatedActivation { .. } => kernel == "gated_activation",
        CaseOp::SoftCap { .. } => kernel == "soft_cap",
        CaseOp::ScaleByPosition { .. } => kernel == "scale_by_position",
        CaseOp::MoeRoute { .. } => kernel == "moe_route",
        CaseOp::Heads(_) => kernel == "moe_linear",
        CaseOp::Moe(_) => ["moe_route", "moe_linear", "moe_combine", "gated_activation"].contains(&kernel),
        CaseOp::CheckFinite { .. } => kernel == "check_finite",
        CaseOp::SelectRows { .. } => kernel == "select_rows",
        CaseOp::GatherColumns { .. } => kernel == "gather_columns",
        CaseOp::Sample(case) => match kernel {
            "sample_draw" => case.temperature > 0.0,
            _ => ["sample_scan", "sample_pick"].contains(&kernel),
        },
    }
}

/// Whether what a kernel fixes can be what a case asks for; only running the case says for sure.
pub(crate) fn may_take(kernel: &CustomKernel, op: &CaseOp) -> bool {
    kernel.fixed().iter().all(|&(name, value)| match (name, op) {
        ("FORMAT", CaseOp::Embed { format, .. }) => fragment_of(*format) == value,
        ("FORMAT", CaseOp::Linear { parts, .. } | CaseOp::FusedLinear(FusedCase { parts, .. })) => {
            parts.iter().any(|part| fragment_of(part.format) == value)
        }
        ("NORM" | "GATED" | "ADD", CaseOp::Linear { .. }) => value == "false",
        ("NORM", CaseOp::FusedLinear(case)) => (value == "true") == case.norm,
        ("GATED", CaseOp::FusedLinear(case)) => (value == "true") == matches!(case.end, FusedEnd::Gate(_)),
        ("ADD", CaseOp::FusedLinear(case)) => (value == "true") == (case.end == FusedEnd::Add),
        ("HEAD_DIM", CaseOp::Attention(case)) => case.head_dim.to_string() == value,
        ("KV", CaseOp::Attention(case)) => case.dtype.name() == value,
        ("WINDOW", CaseOp::Attention(case)) => (value == "true") == case.window.is_some(),
        ("SOFT_CAP", CaseOp::Attention(case)) => (value == "true") == case.soft_cap.is_some(),
        ("SINKS", CaseOp::Attention(case)) => (value == "true") == case.sinks,
        ("INTERLEAVED", CaseOp::Rope { turn, .. } | CaseOp::Attention(AttentionCase { rope: Some(turn), .. })) => {
            (value == "true") == (turn.pairing == RopePairing::Interleaved)
        }
        ("SHARED", CaseOp::Attention(case)) => (value == "true") == case.is_shared,
        ("EACH", CaseOp::Moe(_)) => value == "false",
        ("EACH", CaseOp::Heads(_)) => value == "true",
        ("FORMAT", CaseOp::Heads(case)) => fragment_of(case.format) == value,
        ("FORMAT", CaseOp::Moe(case)) => fragment_of(case.format) == value,
        ("SIGMOID", CaseOp::MoeRoute { router, .. }) => (value == "true") == (router.score == RouterScore::Sigmoid),
        (
            "ACTIVATION",
            CaseOp::GatedActivation { activation, .. }
            | CaseOp::FusedLinear(FusedCase { end: FusedEnd::Gate(activation), .. }),
        ) => activation_setting(*activation).to_string() == value.trim_end_matches('u'),
        _ => true,
    })
}
