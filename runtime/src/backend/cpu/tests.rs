//! Every case of the op table on every instruction set and several team sizes: near the reference, and the same bits.

use super::*;
use crate::backend::cases::{all_cases, run_case};
use crate::backend::reference::ReferenceBackend;

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
