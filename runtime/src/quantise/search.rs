//! The search for a group's scales: of a grid of candidates that whose rounded weights change the group's outputs least.
//!
//! ```text
//! s = mean|x|^a / sqrt(max * min),  a = 0, 1/20 … 19/20;   least  sum over rows x, outputs n of (x · (Q(w_n s) / s - w_n))^2
//! ```
//! Q takes for each group of inputs the grid whose errors, times (mean|x| / s)^2, are least: this is where the paper clips.
//!
//! Source: Lin et al. 2023, "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration".
//!
//! Invariant: errors are added in one order, whatever the number of threads. Weights are seen as `pack` rounds them.

use std::ops::Range;

use super::calibrate::Activations;
use crate::weights::pack::num_threads;
use crate::weights::{HostTensor, Packing};

/// Candidates.
const STEPS: usize = 20;
/// Outputs of a matrix that errors are taken of, at even distances.
const MAX_OUTPUTS: usize = 512;
/// Means below this are taken for it: a channel that is never used has no say.
const SMALLEST_MEAN: f32 = 1e-4;

/// The candidates, by exponent; the first is 1 throughout.
pub(super) fn candidates(means: &[f32]) -> Vec<Vec<f32>> {
    let scales = |step: usize| {
        // In f64, whose last bits are the system library's and do not survive in f32.
        let exponent = step as f64 / STEPS as f64;
        let mut scales: Vec<f32> =
            means.iter().map(|mean| f64::from(mean.max(SMALLEST_MEAN)).powf(exponent) as f32).collect();
        let (low, high) = scales.iter().fold((f32::MAX, 0.0f32), |(low, high), &s| (low.min(s), high.max(s)));
        let middle = (low * high).sqrt();
        scales.iter_mut().for_each(|scale| *scale /= middle);
        scales
    };
    (0..STEPS).map(scales).collect()
}

/// The matrices of a group and what they read.
pub(super) struct Linears<'a> {
    pub(super) matrices: Vec<&'a HostTensor>,
    pub(super) packing: Packing,
    pub(super) activations: &'a Activations,
}

impl Linears<'_> {
    /// The error of each candidate, given by channel.
    pub(super) fn errors(&self, candidates: &[Vec<f32>]) -> Vec<f64> {
        let outputs: Vec<(usize, usize)> = self
            .matrices
            .iter()
            .enumerate()
            .flat_map(|(i, matrix)| {
                let rows = matrix.num_rows();
                (0..rows).step_by(rows.div_ceil(MAX_OUTPUTS)).map(move |row| (i, row))
            })
            .collect();
        let share = outputs.len().div_ceil(num_threads()).max(1);
        let of_outputs = |outputs: &[(usize, usize)]| {
            outputs.iter().map(|&(matrix, row)| self.errors_of(matrix, row, candidates)).collect::<Vec<_>>()
        };
        let of_each: Vec<Vec<f64>> = std::thread::scope(|scope| {
            let of_outputs = &of_outputs;
            let parts: Vec<_> = outputs.chunks(share).map(|outputs| scope.spawn(move || of_outputs(outputs))).collect();
            parts.into_iter().flat_map(|part| part.join().expect("the search does not panic")).collect()
        });
        let sum = |candidate: usize| of_each.iter().map(|errors| errors[candidate]).sum();
        (0..candidates.len()).map(sum).collect()
    }

    /// The errors of one output.
    fn errors_of(&self, matrix: usize, row: usize, candidates: &[Vec<f32>]) -> Vec<f64> {
        let matrix = self.matrices[matrix];
        let cols = matrix.row_len();
        let mut weights = vec![0.0; cols];
        matrix.dequantize_rows(row..row + 1, &mut weights);
        let changes: Vec<Vec<f32>> = candidates
            .iter()
            .map(|scales| {
                let scaled: Vec<f32> = weights.iter().zip(scales).map(|(w, s)| w * s).collect();
                let counts = counts(&self.activations.means, scales);
                let mut rounded = self.packing.rounded(&scaled, Some(&counts), matrix.format);
                rounded.iter_mut().zip(scales).zip(&weights).for_each(|((x, s), w)| *x = *x / s - w);
                rounded
            })
            .collect();
        let mut errors = vec![0.0; candidates.len()];
        for x in self.activations.rows.chunks_exact(cols) {
            for (error, change) in errors.iter_mut().zip(&changes) {
                *error += f64::from(dot(x, change)).powi(2);
            }
        }
        errors
    }
}

/// What the error of a scaled weight counts for, by input: the square of what the input, divided by its scale, is in the mean.
pub(super) fn counts(means: &[f32], scales: &[f32]) -> Vec<f32> {
    means.iter().zip(scales).map(|(mean, scale)| (mean.max(SMALLEST_MEAN) / scale).powi(2)).collect()
}

/// The candidate of the least error, the first of equals.
pub(super) fn best(errors: &[f64]) -> usize {
    let indices: Range<usize> = 0..errors.len();
    indices.min_by(|&a, &b| errors[a].total_cmp(&errors[b])).unwrap_or(0)
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0.0f32; LANES];
    for (a, b) in a.as_chunks::<LANES>().0.iter().zip(b.as_chunks::<LANES>().0) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 128 inputs, of which the fifth is fifty times the others, in 64 outputs.
    fn outlier() -> (HostTensor, Activations) {
        let noise = |i: usize| {
            let mixed = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            ((mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as f32 / (1u32 << 23) as f32 - 1.0
        };
        // Few weights of a matrix are large.
        let bell = |i: usize| (0..4).map(|k| noise(4 * i + k)).sum::<f32>();
        let weights: Vec<f32> = (0..64 * 128).map(|i| 0.05 * bell(i)).collect();
        let loud = |i: usize| if i % 128 == 5 { 50.0 } else { 1.0 };
        let rows: Vec<f32> = (0..32 * 128).map(|i| noise(i + 99_999) * loud(i)).collect();
        let means = (0..128).map(|c| rows.iter().skip(c).step_by(128).map(|x| x.abs()).sum::<f32>() / 32.0).collect();
        (HostTensor::from_f32("w", vec![64, 128], &weights), Activations { means, rows })
    }

    #[test]
    fn an_outlier_is_scaled_and_the_error_is_clearly_smaller() {
        let (matrix, activations) = outlier();
        for packing in [Packing::Int4 { group: 128, symmetric: true }, Packing::Int4 { group: 64, symmetric: false }] {
            let linears = Linears { matrices: vec![&matrix], packing, activations: &activations };
            let candidates = candidates(&activations.means);
            assert!(candidates[0].iter().all(|&scale| scale == 1.0));
            let errors = linears.errors(&candidates);
            let best = best(&errors);
            assert!(candidates[best][5] > 1.5 * candidates[best][6], "{:?}", candidates[best]);
            assert!(errors[best] < 0.8 * errors[0], "{packing:?}: {} of {}", errors[best], errors[0]);
            // Where every input counts the same, nothing is known of the outlier.
            let blind = Activations { means: vec![1.0; 128], rows: activations.rows.clone() };
            let unscaled = Linears { matrices: vec![&matrix], packing, activations: &blind }.errors(&candidates[..1]);
            assert!(errors[best] < 0.35 * unscaled[0], "{packing:?}: {} of {}", errors[best], unscaled[0]);
        }
    }

    #[test]
    fn without_activations_nothing_is_scaled() {
        let (matrix, _) = outlier();
        let activations = Activations { means: vec![0.0; 128], rows: Vec::new() };
        let packing = Packing::Int4 { group: 32, symmetric: true };
        let linears = Linears { matrices: vec![&matrix], packing, activations: &activations };
        let candidates = candidates(&activations.means);
        assert_eq!(best(&linears.errors(&candidates)), 0);
        assert!(candidates.iter().flatten().all(|scale| (scale - 1.0).abs() < 1e-6));
    }
}
