//! Which rows of the op case table meet a kernel.

use runtime::backend::cases::{Case, CaseOp, all_cases};

/// Cases whose output a kernel of the table takes part in.
pub fn cases_of(kernel: &str) -> Vec<Case> {
    all_cases().into_iter().filter(|case| meets(kernel, &case.op)).collect()
}

/// A few small ones, for a look in passing.
pub fn quick_cases_of(kernel: &str) -> Vec<Case> {
    let cases = cases_of(kernel);
    let step = cases.len().div_ceil(12).max(1);
    cases.into_iter().step_by(step).collect()
}

fn meets(kernel: &str, op: &CaseOp) -> bool {
    match op {
        CaseOp::Embed { .. } => kernel == "embed",
        CaseOp::RmsNorm { .. } | CaseOp::AddRmsNorm { .. } => kernel == "rms_norm",
        CaseOp::NormHeads { .. } => kernel == "norm_heads",
        CaseOp::Add { .. } => kernel == "add",
        CaseOp::Linear { .. } => kernel == "linear",
        CaseOp::Rope { .. } => kernel == "rope",
        CaseOp::Attention(_) => ["store_kv", "attention", "attention_combine"].contains(&kernel),
        CaseOp::GatedActivation { .. } => kernel == "gated_activation",
        CaseOp::CheckFinite { .. } => kernel == "check_finite",
        CaseOp::SelectRows { .. } => kernel == "select_rows",
    }
}
