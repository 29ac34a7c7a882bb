//! Every case of the op table on every instruction set and several team sizes: near the reference, and the same bits.

use std::ops::Range;
use std::sync::Arc;

use super::*;
use crate::backend::cases::{Case, CaseOp, FLOAT, MoeCase, PartCase, all_cases, build_case, run_built, run_case};
use crate::backend::reference::ReferenceBackend;
use crate::ids::Slot;
use crate::program::{Activation, Op, RowDim, SlotInfo, memory};
use crate::weights::{RowSource, WeightFormat};

fn backend(isa: Isa, threads: usize) -> CpuBackend {
    CpuBackend::new(CpuOptions { threads, isa: Some(isa) }).unwrap()
}

#[test]
fn every_instruction_set_agrees_with_the_reference_and_with_the_others() {
    let mut failures = Vec::new();
    for case in all_cases() {
        let expected = run_case(&mut ReferenceBackend::new(1), &case).unwrap();
        let portable: Vec<u32> = bits(&run_case(&mut backend(Isa::Portable, 1), &case).unwrap());
        for isa in Isa::available() {
            // The split of work is the same code for every instruction set: the fastest runs all team sizes.
            let teams = if Some(isa) == Isa::available().next() { 1..=3 } else { 2..=2 };
            for threads in teams {
                let got = run_case(&mut backend(isa, threads), &case).unwrap();
                if let Err(problem) = case.tolerance.check(&got, &expected) {
                    failures.push(format!("{case}, {isa:?}, {threads} threads: {problem}"));
                }
                if bits(&got) != portable {
                    failures.push(format!("{case}, {isa:?}, {threads} threads: other bits than portable"));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

/// Rows of a tensor in memory, four blocks of which have one scale.
#[derive(Debug)]
struct Shared(HostTensor);

impl RowSource for Shared {
    fn read(&self, rows: Range<usize>, out: &mut [u8]) {
        out.copy_from_slice(&self.0.rows(rows));
    }

    fn blocks_per_scale(&self) -> usize {
        4
    }
}

/// The tensor with the head of each fourth block before the three that follow; itself where it has no such blocks.
fn with_shared_heads(tensor: &HostTensor) -> HostTensor {
    let head = match tensor.format {
        WeightFormat::Q4_0 => 2,
        WeightFormat::Int4 => 3,
        _ => return tensor.clone(),
    };
    let mut bytes = tensor.rows(0..tensor.num_rows()).to_vec();
    for four in bytes.chunks_exact_mut(4 * tensor.format.block_bytes()) {
        let (first, others) = four.split_at_mut(tensor.format.block_bytes());
        others.chunks_exact_mut(first.len()).for_each(|block| block[..head].copy_from_slice(&first[..head]));
    }
    HostTensor::owned(tensor.name.clone(), tensor.format, tensor.shape.clone(), bytes)
}

/// Groups of 128 are multiplied as four of 32 are, bit by bit.
#[test]
fn scales_that_are_shared_give_the_same_bits() {
    for format in [WeightFormat::Q4_0, WeightFormat::Int4] {
        let part = |out_features, bias| PartCase { out_features, format, bias };
        let mut ops = vec![CaseOp::Embed { format, width: 384, tokens: 37, scale: 1.0 }];
        for (in_features, tokens) in (1..=9).map(|tokens| (128, tokens)).chain([(640, 1), (384, 33)]) {
            let parts = vec![part(37, false), part(16, true)];
            ops.push(CaseOp::Linear { in_features, parts, tokens });
        }
        for tokens in [1, 20] {
            let (experts, top_k, bias, activation) = (4, 2, false, Activation::Silu);
            let (hidden, intermediate) = (128, 256);
            ops.push(CaseOp::Moe(MoeCase { hidden, intermediate, experts, top_k, format, activation, bias, tokens }));
        }
        for (seed, op) in ops.into_iter().enumerate() {
            let case = Case { op, tolerance: FLOAT, seed: seed as u64 };
            let mut built = build_case(&case);
            built.tensors = built.tensors.iter().map(with_shared_heads).collect();
            let mut shared = build_case(&case);
            let mut num_shared = 0;
            shared.tensors = built
                .tensors
                .iter()
                .map(|tensor| match tensor.format {
                    WeightFormat::Q4_0 | WeightFormat::Int4 => {
                        num_shared += 1;
                        let source = Arc::new(Shared(tensor.clone()));
                        HostTensor::computed(tensor.name.clone(), format, tensor.shape.clone(), source)
                    }
                    _ => tensor.clone(),
                })
                .collect();
            assert!(num_shared > 0, "{case}");
            for isa in Isa::available() {
                let run = |built| run_built(&mut backend(isa, 2), built).unwrap();
                let (got, expected) = (run(&shared), run(&built));
                assert!(expected.iter().any(|x| *x != 0.0));
                assert_eq!(bits(&got), bits(&expected), "{case}, {isa:?}");
            }
        }
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    // Any NaN is as good as another.
    values.iter().map(|v| if v.is_nan() { u32::MAX } else { v.to_bits() }).collect()
}

#[test]
fn absent_instruction_sets_are_refused() {
    for isa in Isa::ALL {
        let made = CpuBackend::new(CpuOptions { threads: 1, isa: Some(isa) });
        assert_eq!(made.is_ok(), isa.is_available());
    }
}

/// `c` takes the place of `a` and has longer rows: with no barrier between, a thread that is ahead would write into rows of
/// `a` that another one still reads.
#[test]
fn a_chain_ends_before_an_op_that_reuses_its_memory() {
    let slot = |name: &str, width| SlotInfo { name: name.into(), rows: RowDim::Tokens, width };
    let [a, b, c, d] = [0, 1, 2, 3].map(Slot);
    let [narrow, norm, wide] = [0, 1, 2].map(WeightId);
    let program = Program {
        slots: vec![slot("a", 32), slot("b", 32), slot("c", 64), slot("d", 32)],
        ops: vec![
            Op::Embed { table: narrow, scale: 1.0, out: a },
            Op::RmsNorm { x: a, weight: norm, eps: 1e-5, out: b },
            Op::Embed { table: wide, scale: 1.0, out: c },
            Op::GatedActivation { x: c, groups: 1, activation: Activation::Silu, out: d },
        ],
        ..Program::default()
    };
    let mut backend = backend(Isa::Portable, 2);
    for (id, shape) in [(narrow, vec![4, 32]), (norm, vec![32]), (wide, vec![4, 64])] {
        let ones = vec![1.0; shape.iter().product()];
        backend.upload(id, &HostTensor::from_f32("ones", shape, &ones)).unwrap();
    }
    let bucket = Bucket { tokens: 8, rows: 1, logit_rows: 1 };
    let places = memory::plan(&program, bucket, 16).slots;
    assert_eq!((places[0].lane, places[0].offset), (places[2].lane, places[2].offset), "c takes the place of a");
    backend.compile(&program, bucket, &InputLayout::new(bucket, 1, 16, 1), &mut |_, _| ()).unwrap();
    let chains = backend.plans[0].phases.iter().map(|phase| match phase {
        Phase::Rows { ops, .. } => ops.len(),
        Phase::Experts(_) | Phase::Linear(_) | Phase::Attention(_) => unreachable!("the program has row-wise ops only"),
    });
    assert_eq!(chains.collect::<Vec<usize>>(), [2, 2]);
}
