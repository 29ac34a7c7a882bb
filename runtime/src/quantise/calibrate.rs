//! What the linears of a model read: the model is run over a text on the CPU backend, and slots are looked at after each step.
//!
//! Invariant: what is kept of a slot is bounded, however long the text is. The backend's bits depend neither on the instruction
//! set nor on the number of threads, so that a text gives the same numbers on every machine.

use crate::backend::cpu::{CpuBackend, CpuOptions};
use crate::backend::{Backend, Bucket, InputLayout, StepInputs};
use crate::error::{DeviceError, LoadError};
use crate::ids::{Slot, TokenId, WeightId};
use crate::model::Model;

/// Tokens of a step: the slots that are looked at keep their memory, so that a step's size is that of the activations.
const STEP_TOKENS: usize = 128;
const BLOCK_SIZE: usize = 16;
/// Rows of a slot that are kept.
const MAX_ROWS: usize = 256;

/// What was seen of a slot.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Activations {
    /// The mean magnitude of each channel.
    pub(super) means: Vec<f32>,
    /// Rows at even distances, one after the other.
    pub(super) rows: Vec<f32>,
}

/// Runs the model over windows of tokens. `progress` hears how many tokens are done.
///
/// # Errors
/// Out of memory, or the activations are not finite.
pub(super) fn activations(
    model: &Model,
    slots: &[Slot],
    windows: &[Vec<TokenId>],
    threads: usize,
    progress: &mut dyn FnMut(u64),
) -> Result<Vec<Activations>, LoadError> {
    let mut backend = CpuBackend::new(CpuOptions { threads, isa: None })?;
    for (i, tensor) in model.weights.iter().enumerate() {
        backend.upload(WeightId(i as u32), tensor)?;
    }
    let blocks = windows.iter().map(Vec::len).max().unwrap_or(0).div_ceil(BLOCK_SIZE) as u32;
    backend.alloc_state(&model.program.states, blocks + 1, BLOCK_SIZE as u32)?;
    let mut program = model.program.clone();
    program.kept = slots.to_vec();
    let bucket = Bucket { tokens: STEP_TOKENS as u32, rows: 1, logit_rows: 1 };
    let layout = InputLayout::new(bucket, blocks, BLOCK_SIZE as u32, 1);
    let plan = backend.compile(&program, bucket, &layout, &mut |_, _| ())?;

    let block_table: Vec<u32> = (1..=blocks).collect();
    let total: usize = windows.iter().map(Vec::len).sum();
    let mut seen = vec![Seen::default(); slots.len()];
    let (mut inputs, mut done) = (StepInputs::new(layout), 0);
    for window in windows {
        for (i, tokens) in window.chunks(STEP_TOKENS).enumerate() {
            inputs.clear();
            inputs.push_row(tokens.iter().map(|token| token.0), (i * STEP_TOKENS) as u32, &block_table);
            let ticket = backend.submit(plan, &inputs)?;
            let is_finite = backend.wait(ticket)?.non_finite.iter().all(|&flag| flag == 0);
            if !is_finite {
                return Err(DeviceError::Failed("the model's activations are not finite".into()).into());
            }
            for (index, seen) in seen.iter_mut().enumerate() {
                seen.add(backend.kept(index), tokens.len(), (done, total));
            }
            done += tokens.len();
            progress(done as u64);
        }
    }
    Ok(seen.into_iter().map(|seen| seen.finish(done)).collect())
}

/// Sums of a slot.
#[derive(Clone, Default)]
struct Seen {
    /// Of magnitudes, by channel.
    sums: Vec<f64>,
    rows: Vec<f32>,
}

impl Seen {
    /// Adds the rows of a step, which has `before` of `total` tokens before it.
    fn add(&mut self, values: &[f32], num_tokens: usize, (before, total): (usize, usize)) {
        let width = values.len() / num_tokens;
        self.sums.resize(width, 0.0);
        for (i, row) in values.chunks_exact(width).enumerate() {
            self.sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(x.abs()));
            let kept = |tokens: usize| tokens * MAX_ROWS.min(total) / total;
            if kept(before + i + 1) > kept(before + i) {
                self.rows.extend_from_slice(row);
            }
        }
    }

    fn finish(self, num_tokens: usize) -> Activations {
        let means = self.sums.iter().map(|sum| (sum / num_tokens as f64) as f32).collect();
        Activations { means, rows: self.rows }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_kept_at_even_distances() {
        let mut seen = Seen::default();
        for step in 0..10 {
            let values: Vec<f32> = (0..100).flat_map(|i| [(step * 100 + i) as f32, -2.0]).collect();
            seen.add(&values, 100, (step * 100, 1000));
        }
        let Activations { means, rows } = seen.finish(1000);
        assert_eq!(means, [499.5, 2.0]);
        assert_eq!(rows.len(), MAX_ROWS * 2);
        let numbers: Vec<f32> = rows.chunks(2).map(|row| row[0]).collect();
        let steps: Vec<f32> = numbers.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(steps.iter().all(|step| (3.0..=4.0).contains(step)), "{steps:?}");
    }
}
