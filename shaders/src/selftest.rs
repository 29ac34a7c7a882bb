//! The start-up self-test: every kernel that a program will use runs small cases of its ops, in the very variants that will
//! serve, against the reference.
//!
//! Invariant: a kernel that a driver compiles wrongly never serves. It is replaced by its plain variant, tested in the same way;
//! where that is wrong too, the device is refused. Drivers do this (faults of other engines are full of it), and a wrong
//! kernel gives text, not an error.

use std::collections::BTreeSet;

use runtime::backend::cases::{
    AttentionCase, CODES, Case, CaseOp, EXACT, FLOAT, FusedCase, FusedEnd, HeadsCase, MoeCase, PartCase, SampleCase,
    Tolerance, TurnCase, attention_tolerance, run_case,
};
use runtime::backend::reference::ReferenceBackend;
use runtime::error::DeviceError;
use runtime::program::{Activation, LinearEnd, Op, Program, Rotary};

use crate::backend::WgpuBackend;
use crate::lab::meets;
use crate::state::State;
use crate::table::KERNELS;
use crate::tuning::Tuning;
use crate::weights::Weights;

/// Small cases of everything that a program asks of the device, each once.
pub(crate) fn checks(
    program: &Program,
    weights: &Weights,
    state: &State,
    tuning: &Tuning,
    (split, is_software): (u32, bool),
) -> Result<Vec<Case>, DeviceError> {
    let mut checks: Vec<Case> = Vec::new();
    for op in &program.ops {
        let mut add = |tolerance: Tolerance, op: CaseOp| {
            if !checks.iter().any(|case| case.op == op) {
                let seed = checks.len() as u64;
                checks.push(Case { op, tolerance, seed });
            }
        };
        let width = |slot: &runtime::ids::Slot| program.slots[slot.index()].width;
        let tokens = 3;
        match op {
            Op::Embed { table, scale, .. } => {
                let format = weights.matrix_of(*table)?.format;
                add(FLOAT, CaseOp::Embed { format, width: 256, tokens, scale: *scale });
            }
            Op::RmsNorm { x, .. } => add(FLOAT, CaseOp::RmsNorm { width: width(x), tokens }),
            Op::NormHeads { x, weight, .. } => {
                let head_dim = program.weights[weight.index()].shape[0];
                let case = CaseOp::NormHeads { heads: x.width / head_dim, head_dim, offset: 4, tokens };
                add(FLOAT, case);
            }
            Op::Add { x, .. } => add(EXACT, CaseOp::Add { width: width(x), tokens }),
            Op::Linear { parts, .. } => {
                for part in parts {
                    let format = weights.matrix_of(part.weight)?.format;
                    let parts = vec![PartCase { out_features: 70, format, bias: part.bias.is_some() }];
                    for tile in tuning.linear.iter() {
                        let parts = parts.clone();
                        add(CODES, CaseOp::Linear { in_features: 512, parts, tokens: tile.from_tokens });
                    }
                }
            }
            Op::FusedLinear { x, norm, parts, end, .. } => {
                if norm.is_some() {
                    add(FLOAT, CaseOp::RmsNorm { width: width(x), tokens });
                }
                for part in parts {
                    let format = weights.matrix_of(part.weight)?.format;
                    let part = |out_features| PartCase { out_features, format, bias: part.bias.is_some() };
                    let (end, parts) = match end {
                        LinearEnd::Store => (FusedEnd::Store, vec![part(68)]),
                        LinearEnd::Gate { activation, .. } => (FusedEnd::Gate(*activation), vec![part(64), part(64)]),
                        LinearEnd::Add { .. } => (FusedEnd::Add, vec![part(68)]),
                    };
                    for tile in tuning.linear.iter() {
                        let (parts, norm, tokens) = (parts.clone(), norm.is_some(), tile.from_tokens);
                        let case = FusedCase { in_features: 512, parts, norm, end, tokens };
                        add(CODES, CaseOp::FusedLinear(case));
                    }
                }
            }
            Op::Rope { x, rotary, head_dim } => {
                let (heads, head_dim, turn) = (x.width / head_dim, *head_dim, turn_of(program, rotary));
                add(FLOAT, CaseOp::Rope { heads, head_dim, offset: 4, turn, start: 1000, tokens });
            }
            // Tested with attention, which reads what it wrote.
            Op::StoreKv { .. } => {}
            Op::RopeStoreKv { x, rotary, head_dim, layer, .. } => {
                let plane = state.layers[layer.index()][0].spec;
                let heads = x.width / head_dim - plane.heads;
                let case = AttentionCase {
                    block_size: state.block_size,
                    rows: vec![(100, 2)],
                    rope: Some(turn_of(program, rotary)),
                    ..AttentionCase::causal(heads, plane.heads, *head_dim, plane.dtype)
                };
                add(attention_tolerance(&case), CaseOp::Attention(case));
            }
            Op::Attention { layer, heads, head_dim, window, soft_cap, sinks, .. } => {
                let plane = state.layers[layer.index()][0].spec;
                let is_shared = program.states[layer.index()].is_shared();
                // Before, the positions are stored and attended to whole; then some tokens, those of a tree split by split.
                let tree = vec![None, Some(0), Some(0)];
                let mut rows_and_trees = vec![(vec![(split + 2, 3), (0, 1)], vec![tree]), (vec![(0, 19)], vec![])];
                if is_software {
                    // A walk of several dispatches.
                    rows_and_trees.push((vec![(700, 19)], vec![]));
                }
                for (rows, trees) in rows_and_trees {
                    let case = AttentionCase {
                        block_size: state.block_size,
                        rows,
                        // So small that it ends within the first split of these cases, and within the row.
                        window: window.map(|window| window.min(15)),
                        soft_cap: *soft_cap,
                        sinks: sinks.is_some(),
                        trees,
                        is_shared,
                        ..AttentionCase::causal(heads / plane.heads, 1, *head_dim, plane.dtype)
                    };
                    add(attention_tolerance(&case), CaseOp::Attention(case));
                }
            }
            Op::GatedActivation { out, activation, .. } => {
                add(FLOAT, CaseOp::GatedActivation { width: width(out), tokens, activation: *activation });
            }
            Op::MoeRoute { logits, bias, router, .. } => {
                let case = CaseOp::MoeRoute { experts: width(logits), router: *router, bias: bias.is_some(), tokens };
                add(FLOAT, case);
            }
            Op::MoeLinear { route: None, parts, .. } => {
                for part in parts {
                    let &[heads, out_features, in_features] = program.weights[part.weight.index()].shape.as_slice()
                    else {
                        unreachable!("check has passed the program");
                    };
                    let format = weights.matrix_of(part.weight)?.format;
                    let heads = heads.min(2);
                    let case = HeadsCase { heads, in_features, out_features, format, tokens };
                    add(CODES, CaseOp::Heads(case));
                }
            }
            Op::MoeLinear { parts, .. } => {
                for part in parts {
                    let case = MoeCase {
                        hidden: 256,
                        intermediate: 256,
                        experts: 4,
                        top_k: 2,
                        format: weights.matrix_of(part.weight)?.format,
                        activation: Activation::Silu,
                        bias: part.bias.is_some(),
                        tokens,
                    };
                    add(CODES, CaseOp::Moe(case));
                }
            }
            // Tested with the linears of experts.
            Op::MoeCombine { .. } => {}
            Op::ScaleByPosition { x, period, .. } => {
                let case = CaseOp::ScaleByPosition { width: x.width, offset: 4, period: *period, start: 5000, tokens };
                add(FLOAT, case);
            }
            Op::SoftCap { x, cap } => add(FLOAT, CaseOp::SoftCap { width: width(x), tokens, cap: *cap }),
            Op::CheckFinite { x } => add(EXACT, CaseOp::CheckFinite { width: width(x), tokens }),
            Op::SelectRows { x, .. } => {
                add(EXACT, CaseOp::SelectRows { width: width(x), tokens, logit_rows: 2 });
            }
            Op::GatherColumns { x, .. } => {
                add(EXACT, CaseOp::GatherColumns { width: width(x), tokens });
            }
            // Every kind of row, rows that start within four words, and more shares than lanes.
            Op::Sample { .. } => {
                let case = SampleCase { vocab: 20_003, rows: 6, temperature: 0.8, logprobs: Some(20) };
                add(FLOAT, CaseOp::Sample(case));
            }
        }
    }
    Ok(checks)
}

fn turn_of(program: &Program, rotary: &Rotary) -> TurnCase {
    let pairs = program.weights[rotary.inv_freq.index()].shape[0];
    TurnCase { pairing: rotary.pairing, pairs, amplitude: rotary.amplitude }
}

/// Runs the checks; kernels that fail join `plain` and are tested again. Returns what was replaced and why. `tested` is told
/// how many are done.
///
/// # Errors
/// The plain variant is wrong too, or the device failed.
pub(crate) fn run(
    checks: &[Case],
    plain: &mut BTreeSet<&'static str>,
    backend: &dyn Fn(&BTreeSet<&'static str>) -> WgpuBackend,
    tested: &mut dyn FnMut(usize),
) -> Result<Vec<String>, DeviceError> {
    let mut replaced = Vec::new();
    for (done, case) in checks.iter().enumerate() {
        tested(done);
        let expected = run_case(&mut ReferenceBackend::new(1), case)?;
        let problem = |plain: &BTreeSet<&'static str>| match run_case(&mut backend(plain), case) {
            Ok(got) => case.tolerance.check(&got, &expected).err(),
            Err(error) => Some(error.to_string()),
        };
        let Some(first) = problem(plain) else { continue };
        let kernels = KERNELS.iter().map(|kernel| kernel.name).filter(|kernel| meets(kernel, &case.op));
        let names = kernels.clone().collect::<Vec<_>>().join(" + ");
        let before = plain.len();
        plain.extend(kernels);
        let second = if plain.len() == before { Some(first.clone()) } else { problem(plain) };
        if let Some(second) = second {
            return Err(DeviceError::Failed(format!(
                "kernel {names} is wrong on this device, its plain variant too: {case}: {second}"
            )));
        }
        let note =
            format!("kernel {names} runs its plain variant: another failed the self-test on this device ({first})");
        tracing::warn!("{note}");
        replaced.push(note);
    }
    tested(checks.len());
    Ok(replaced)
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use runtime::backend::Backend;
    use runtime::backend::cases::all_cases;

    use super::*;
    use crate::adapter::AdapterChoice;
    use crate::backend::WgpuDevice;
    use crate::compose::Settings;
    use crate::device::{Gpu, GpuOptions};
    use crate::lab::CustomKernel;
    use crate::pipelines::Pipelines;

    /// A kernel that is wrong on the device at hand, as a driver would have it: `add` subtracts.
    fn device_that_subtracts() -> Option<WgpuDevice> {
        let gpu = match Gpu::open(&AdapterChoice::Best, GpuOptions::default()) {
            Ok(gpu) => Rc::new(gpu),
            Err(DeviceError::Absent(_, why)) if std::env::var("KITTIWAKE_REQUIRE_WGPU").is_err() => {
                eprintln!("SKIPPED: {why}");
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let text = crate::table::source("add.wgsl").expect("it is there").replace("] += x[", "] -= x[");
        let file = std::env::temp_dir().join(format!("kittiwake-subtract-{}.wgsl", std::process::id()));
        std::fs::write(&file, text).expect("a temporary file");
        let kernel = CustomKernel::load("add", &file, &Settings::new()).expect("it keeps the contract");
        std::fs::remove_file(&file).expect("it was written");
        Some(WgpuDevice::with_pipelines(gpu, Pipelines::with_custom(vec![kernel], None)))
    }

    #[test]
    fn a_wrong_kernel_is_replaced_and_reported() {
        let Some(device) = device_that_subtracts() else { return };
        let is_sum = |case: &Case| matches!(case.op, CaseOp::Add { width: 64, .. });
        let case = all_cases().into_iter().find(is_sum).expect("the table has sums");
        let expected = run_case(&mut ReferenceBackend::new(1), &case).expect("the oracle runs");
        let mut untested = WgpuBackend::untested(&device);
        assert_ne!(run_case(&mut untested, &case).expect("it runs"), expected, "the kernel is wrong");
        assert!(untested.caps().replaced_kernels.is_empty());
        let mut backend = WgpuBackend::new(&device);
        assert_eq!(run_case(&mut backend, &case).expect("it runs"), expected, "the plain variant serves");
        let [note] = backend.caps().replaced_kernels.as_slice() else { panic!("one kernel was replaced") };
        assert!(note.starts_with("kernel add runs its plain variant"), "{note}");
    }
}
