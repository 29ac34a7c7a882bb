//! Every case of the op table on every instruction set and several team sizes: near the reference, and the same bits.

use super::*;
use crate::backend::cases::{all_cases, run_case};
use crate::backend::reference::ReferenceBackend;
use crate::ids::Slot;
use crate::program::{Activation, Op, RowDim, SlotInfo, memory};

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
