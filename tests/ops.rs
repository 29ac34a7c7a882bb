//! Every row of the op case table on every backend, against the reference; the reference against f64.
//!
//! Invariant: a backend is one line of `backends` here; nothing about a case is known outside `runtime::backend::cases`.

use runtime::backend::cases::{
    AttentionCase, CODES, Case, CaseOp, FLOAT, FusedCase, FusedEnd, HeadsCase, MoeCase, PartCase, Tolerance, all_cases,
    build_case, run_built, run_case,
};
use runtime::backend::cpu::{CpuBackend, CpuOptions};
use runtime::backend::reference::ReferenceBackend;
use runtime::backend::{Backend, StepInputs};
use runtime::ids::PlanId;
use runtime::program::KvDtype;
use runtime::weights::{HostTensor, WeightFormat};
use shaders::{GpuOptions, WgpuBackend, WgpuDevice};

#[path = "ops/cache.rs"]
mod cache;
#[path = "ops/classes.rs"]
mod classes;
#[path = "ops/expectation.rs"]
mod expectation;
#[path = "support/gpu.rs"]
mod gpu;
#[path = "ops/sample.rs"]
mod sample;

use expectation::expectation_f64;

type MakeBackend = Box<dyn Fn() -> Box<dyn Backend>>;

/// Backends under test by name; those of wgpu share a device.
fn backends() -> Vec<(&'static str, MakeBackend)> {
    let cpu = || CpuBackend::new(CpuOptions { threads: 2, isa: None }).expect("every machine has a CPU");
    let mut all: Vec<(&'static str, MakeBackend)> = vec![
        ("reference", Box::new(|| Box::new(ReferenceBackend::new(2)))),
        ("cpu", Box::new(move || Box::new(cpu()))),
    ];
    all.extend(gpu::device(GpuOptions::default()).map(|device| ("wgpu", on(device))));
    all
}

fn on(device: WgpuDevice) -> MakeBackend {
    Box::new(move || Box::new(WgpuBackend::new(&device)))
}

/// How far a backend may be from the reference: the table's, but what rounds no activations is held to f32's tolerance.
fn tolerance(name: &str, case: &Case) -> Tolerance {
    let is_linear = matches!(case.op, CaseOp::Linear { .. } | CaseOp::FusedLinear(_));
    if name == "wgpu" && is_linear { FLOAT } else { case.tolerance }
}

fn reference() -> ReferenceBackend {
    ReferenceBackend::new(1)
}

/// Every case, or on wgpu, where software Vulkan takes its time, every fourth: the table itself has been held to all of them.
fn share(name: &str, cases: &[Case]) -> Vec<Case> {
    cases.iter().step_by(if name == "wgpu" { 4 } else { 1 }).cloned().collect()
}

/// Runs `check` on every case and fails with all messages at once.
fn for_all(cases: &[Case], check: impl Fn(&Case) -> Result<(), String>) {
    assert!(!cases.is_empty());
    let failures: Vec<String> =
        cases.iter().filter_map(|case| check(case).err().map(|problem| format!("{case}: {problem}"))).collect();
    assert!(failures.is_empty(), "{} of {} cases failed:\n{}", failures.len(), cases.len(), failures.join("\n"));
}

fn run(make: &dyn Fn() -> Box<dyn Backend>, case: &Case) -> Result<Vec<f32>, String> {
    run_case(make().as_mut(), case).map_err(|e| e.to_string())
}

fn is_attention(op: &CaseOp) -> bool {
    matches!(op, CaseOp::Attention(_))
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn same_bits(got: &[f32], expected: &[f32]) -> Result<(), String> {
    if bits(got) == bits(expected) { Ok(()) } else { Err("not bitwise equal".into()) }
}

/// Three tests, which run side by side: software Vulkan takes seconds to compile a shape of attention that it has not seen.
fn every_backend_agrees(is_chosen: impl Fn(&CaseOp) -> bool) {
    let cases: Vec<Case> = all_cases().into_iter().filter(|case| is_chosen(&case.op)).collect();
    for (name, make) in backends() {
        for_all(&cases, |case| {
            let expected = run_case(&mut reference(), case).map_err(|e| e.to_string())?;
            let got = run(&make, case).map_err(|e| format!("{name}: {e}"))?;
            tolerance(name, case).check(&got, &expected).map_err(|e| format!("{name}: {e}"))
        });
    }
}

#[test]
fn every_backend_agrees_on_all_but_attention() {
    every_backend_agrees(|op| !is_attention(op));
}

#[test]
fn every_backend_agrees_on_attention_over_f16() {
    every_backend_agrees(|op| matches!(op, CaseOp::Attention(a) if a.dtype == KvDtype::F16));
}

#[test]
fn every_backend_agrees_on_attention_over_f32() {
    every_backend_agrees(|op| matches!(op, CaseOp::Attention(a) if a.dtype == KvDtype::F32));
}

#[test]
fn every_backend_agrees_on_attention_over_smaller_types() {
    let is_small = |dtype| !matches!(dtype, KvDtype::F32 | KvDtype::F16);
    every_backend_agrees(|op| matches!(op, CaseOp::Attention(a) if is_small(a.dtype)));
}

/// Formulas again, in f64 and without the reference's code.
#[test]
fn the_reference_agrees_with_f64() {
    let cases: Vec<Case> = all_cases().into_iter().filter(|case| expectation_f64(case).is_some()).collect();
    // All of linear, attention, norm and gate; what the cache rounds is rounded anew.
    assert!(cases.len() > 150, "{}", cases.len());
    let tolerance = Tolerance {
        relative_rms: 1e-6,
        relative_max: 1e-5,
        reason: "f32 against f64: a few units in the last place per sum",
    };
    for_all(&cases, |case| {
        let got = run_case(&mut reference(), case).map_err(|e| e.to_string())?;
        let expected: Vec<f32> = expectation_f64(case).unwrap_or_default().iter().map(|&v| v as f32).collect();
        tolerance.check(&got, &expected)
    });
}

/// Whole numbers with 127 in every group lose nothing in 8 bits: what is left is the order of sums, in every format.
#[test]
fn a_linear_is_exact_where_eight_bits_hold_the_activations() {
    let cases: Vec<Case> = all_cases().into_iter().filter(|c| matches!(c.op, CaseOp::Linear { .. })).collect();
    for (name, make) in backends() {
        for_all(&share(name, &cases), |case| {
            let mut built = build_case(case);
            let mut x: Vec<f32> = built.tensors[0].to_f32().iter().map(|x| (x * 127.0).round()).collect();
            x.iter_mut().step_by(32).for_each(|x| *x = 127.0);
            built.tensors[0] = HostTensor::from_f32("x", built.tensors[0].shape.clone(), &x);
            let run = |backend: &mut dyn Backend| run_built(backend, &built).map_err(|e| format!("{name}: {e}"));
            let (got, expected) = (run(make().as_mut())?, run(&mut reference())?);
            CODES.check(&got, &expected).map_err(|e| format!("{name}: {e}"))
        });
    }
}

/// What is not finite stays so through every kind of product, in its own row only: `CheckFinite` must see it at the end.
#[test]
fn a_linear_passes_on_what_is_not_finite() {
    let is_linear = |case: &Case| matches!(case.op, CaseOp::Linear { tokens: 5, .. });
    let cases: Vec<Case> = all_cases().into_iter().filter(is_linear).collect();
    for (name, make) in backends() {
        for_all(&cases, |case| {
            let CaseOp::Linear { in_features, .. } = case.op else { unreachable!("filtered above") };
            let finite = run(&make, case)?;
            let width = finite.len() / 5;
            for (i, bad) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().enumerate() {
                let mut built = build_case(case);
                let mut x = built.tensors[0].to_f32();
                let row = i + 1;
                x[row * in_features as usize + 17 * i] = bad;
                built.tensors[0] = HostTensor::from_f32("x", vec![5, in_features as usize], &x);
                let got = run_built(make().as_mut(), &built).map_err(|e| e.to_string())?;
                for (token, (got, finite)) in got.chunks(width).zip(finite.chunks(width)).enumerate() {
                    if token != row {
                        same_bits(got, finite).map_err(|e| format!("{name}, {bad} in another row: {e}"))?;
                    } else if got.iter().any(|value| value.is_finite()) {
                        return Err(format!("{name}: {bad} was lost"));
                    }
                }
            }
            Ok(())
        });
    }
}

/// The first token's result is the same bits whatever the number of tokens in the step.
#[test]
fn linear_does_not_depend_on_the_number_of_tokens() {
    let mut cases = all_cases();
    cases.retain(|case| {
        matches!(case.op, CaseOp::Linear { .. } | CaseOp::FusedLinear(_) | CaseOp::Moe(_) | CaseOp::Heads(_))
    });
    for (name, make) in invariant_backends() {
        for_all(&share(name, &cases), |case| {
            let whole = run(&make, case)?;
            for fewer in [1, 2, 3, 4, 7, 8, 15, 16] {
                let mut few = case.clone();
                let (CaseOp::Linear { tokens, .. }
                | CaseOp::FusedLinear(FusedCase { tokens, .. })
                | CaseOp::Moe(MoeCase { tokens, .. })
                | CaseOp::Heads(HeadsCase { tokens, .. })) = &mut few.op
                else {
                    unreachable!("retained above");
                };
                if fewer >= std::mem::replace(tokens, fewer) {
                    break;
                }
                let got = run(&make, &few)?;
                same_bits(&got, &whole[..got.len()]).map_err(|e| format!("{name}, {fewer} tokens: {e}"))?;
            }
            Ok(())
        });
    }
}

/// Whether a workgroup of the linear sums a norm's squares (one token, two) or a kernel before it (many): rounding shows another
/// order in some rows only, so that many are asked for.
#[test]
fn a_fused_norm_has_the_bits_of_one_that_is_not() {
    let parts = vec![PartCase { out_features: 64, format: WeightFormat::Q8_0, bias: false }];
    let fused = |tokens| {
        CaseOp::FusedLinear(FusedCase {
            in_features: 512,
            parts: parts.clone(),
            norm: true,
            end: FusedEnd::Store,
            tokens,
        })
    };
    let cases: Vec<Case> = (1..=40).map(|seed| Case { op: fused(33), tolerance: FLOAT, seed }).collect();
    for (_, make) in invariant_backends() {
        for_all(&cases, |case| {
            let whole = run(&make, case)?;
            [1, 2].into_iter().try_for_each(|tokens| {
                let got = run(&make, &Case { op: fused(tokens), ..case.clone() })?;
                same_bits(&got, &whole[..got.len()])
            })
        });
    }
}

/// A position's result is the same bits whole, in chunks of any size, alone or beside others, in blocks of any size.
#[test]
fn attention_does_not_depend_on_chunks_mates_or_blocks() {
    let attention = |case: &Case| if let CaseOp::Attention(a) = &case.op { Some(a.clone()) } else { None };
    let is_causal = |case: &Case| attention(case).is_some_and(|attention| attention.trees.is_empty());
    let cases: Vec<Case> = all_cases().into_iter().filter(is_causal).collect();
    for (name, make) in invariant_backends() {
        for_all(&share(name, &cases), |case| {
            let whole = attention(case).ok_or("not attention")?;
            let (start, length) = whole.rows[0];
            let expected = run(&make, case)?;
            let row_values = |tokens: u32| (tokens * whole.heads * whole.head_dim) as usize;
            let same = |what: &str, changed: AttentionCase, expected: &[f32]| {
                let got = run(&make, &Case { op: CaseOp::Attention(changed), ..case.clone() })?;
                let got = &got[got.len() - expected.len()..];
                same_bits(got, expected).map_err(|e| format!("{name}, {what}: {e}"))
            };
            let first_row = &expected[..row_values(length)];
            let alone = AttentionCase { rows: vec![whole.rows[0]], ..whole.clone() };
            same("alone", alone.clone(), first_row)?;
            same("whole", AttentionCase { rows: vec![(0, start + length)], ..alone.clone() }, first_row)?;
            for block_size in [3, 32] {
                same("other blocks", AttentionCase { block_size, ..whole.clone() }, &expected)?;
            }
            let last = vec![(start + length - 1, 1)];
            same("last token", AttentionCase { rows: last, ..alone }, &first_row[row_values(length - 1)..])
        });
    }
}

/// Speculation changes no bit: each token of a tree gets those that it has as the last token of its path, in a causal row.
#[test]
fn tokens_of_a_tree_have_the_bits_of_their_paths() {
    let has_tree = |case: &Case| matches!(&case.op, CaseOp::Attention(a) if !a.trees.is_empty());
    let cases: Vec<Case> = all_cases().into_iter().filter(has_tree).collect();
    for (name, make) in invariant_backends() {
        for_all(&cases, |case| {
            let CaseOp::Attention(attention) = &case.op else { unreachable!("filtered above") };
            let built = build_case(case);
            let expected = run(&make, case)?;
            let width = (attention.heads * attention.head_dim) as usize;
            let starts = built.step.row_starts();
            for (row, parents) in attention.trees.iter().enumerate() {
                // A token in the middle of a tree and the last one, at the end of its longest path.
                for j in [parents.len() / 2, parents.len().saturating_sub(1)].into_iter().filter(|j| *j < parents.len())
                {
                    let (first, start) = (starts[row] as usize, attention.rows[row].0);
                    let path = &cache::path(start as usize, Some(parents), start as usize + j)[start as usize..];
                    let ids = path.iter().map(|index| built.step.token_ids()[first + index - start as usize]);
                    let mut causal = built.clone();
                    causal.step.clear();
                    causal.step.push_row(ids, start, built.step.block_table(row));
                    causal.step.push_logit_row(path.len() as u32 - 1);
                    let got = run_built(make().as_mut(), &causal).map_err(|e| e.to_string())?;
                    let token = (first + j) * width;
                    same_bits(&got, &expected[token..][..width])
                        .map_err(|e| format!("{name}, token {j} of row {row}: {e}"))?;
                }
            }
            Ok(())
        });
    }
}

/// What a step leaves in a backend's memory does not reach the next one: the same rows in another order, the same bits.
#[test]
fn a_step_sees_nothing_of_the_one_before() {
    // Far on, and at the last position of a KV split.
    let rows = vec![(600, 1), (255, 1)];
    let Some(CaseOp::Attention(base)) = all_cases().into_iter().map(|case| case.op).find(is_attention) else {
        panic!("the table has attention");
    };
    let (heads, head_dim) = (base.heads, base.head_dim);
    let op = CaseOp::Attention(AttentionCase { rows, ..base });
    let built = build_case(&Case { op, ..all_cases()[0].clone() });
    for (name, make) in invariant_backends() {
        let mut backend = make();
        let expected = run_built(backend.as_mut(), &built).expect(name);
        let step = &built.step;
        let mut swapped = StepInputs::new(*step.layout());
        swapped.clear();
        for row in [1, 0] {
            swapped.push_row([step.token_ids()[row]].into_iter(), step.positions()[row], step.block_table(row));
        }
        (0..2).for_each(|token| swapped.push_logit_row(token));
        let ticket = backend.submit(PlanId(0), &swapped).expect(name);
        let got = backend.wait(ticket).expect(name).logits;
        let (second, first) = got.split_at((heads * head_dim) as usize);
        same_bits(&[first, second].concat(), &expected).expect(name);
    }
}

/// Backends that promise it.
fn invariant_backends() -> Vec<(&'static str, MakeBackend)> {
    backends().into_iter().filter(|(_, make)| make().caps().batch_invariant).collect()
}

/// The same built case twice is the same bits. Every fifth case: each kind of op among them.
#[test]
fn a_backend_is_deterministic() {
    let cases: Vec<Case> = all_cases().into_iter().step_by(5).collect();
    for (name, make) in backends() {
        for_all(&share(name, &cases), |case| {
            let built = build_case(case);
            let run = || run_built(make().as_mut(), &built).map_err(|e| e.to_string());
            same_bits(&run()?, &run()?).map_err(|e| format!("{name}: {e}"))
        });
    }
}
