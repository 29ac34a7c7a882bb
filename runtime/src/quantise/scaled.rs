//! Scales that were found, and the tensors that they change.
//!
//! Invariant: a matrix is `w[n, k] * columns[k] / rows[n]`; whoever sets a column's factor sets its inverse where the column's
//! input is made.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Mutex;

use half::{bf16, f16};

use crate::weights::{HostTensor, WeightFormat, pack};

/// By the name in the file.
#[derive(Debug, Default)]
pub(super) struct Scaling {
    /// What the inputs' columns are multiplied with.
    pub(super) columns: HashMap<String, Vec<f32>>,
    /// What errors count for, by column: the square of what the scaled input is in the mean.
    pub(super) counts: HashMap<String, Vec<f32>>,
    /// What the outputs' rows are divided by.
    rows: HashMap<String, Vec<f32>>,
    /// Norms and biases as they are to be stored.
    pub(super) vectors: HashMap<String, Vec<f32>>,
}

impl Scaling {
    /// Divides one output of a linear, and its bias.
    ///
    /// # Panics
    /// When the matrix is not in the file.
    pub(super) fn divide_output(
        &mut self,
        matrix: Option<&HostTensor>,
        bias: Option<&HostTensor>,
        (row, scale): (usize, f32),
    ) {
        let matrix = matrix.expect("matrices that are scaled are in the file");
        let ones = || vec![1.0; matrix.num_rows()];
        self.rows.entry(matrix.name.clone()).or_insert_with(ones)[row] *= scale;
        if let Some(bias) = bias {
            self.vectors.entry(bias.name.clone()).or_insert_with(|| bias.to_f32())[row] /= scale;
        }
    }
}

/// A matrix with its scales.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scaled<'a> {
    tensor: &'a HostTensor,
    columns: Option<&'a [f32]>,
    rows: Option<&'a [f32]>,
    counts: Option<&'a [f32]>,
    /// Is told of a matrix that cannot be rounded: rows have no error to give.
    not_finite: &'a Mutex<Option<String>>,
}

impl<'a> Scaled<'a> {
    pub(super) fn new(tensor: &'a HostTensor, scaling: &'a Scaling, not_finite: &'a Mutex<Option<String>>) -> Self {
        let of = |scales: &'a HashMap<String, Vec<f32>>| scales.get(&tensor.name).map(Vec::as_slice);
        Self { tensor, columns: of(&scaling.columns), rows: of(&scaling.rows), counts: of(&scaling.counts), not_finite }
    }
}

impl pack::Rows for Scaled<'_> {
    fn shape(&self) -> [usize; 2] {
        [self.tensor.num_rows(), self.tensor.row_len()]
    }

    fn stored(&self) -> WeightFormat {
        self.tensor.format
    }

    fn counts(&self) -> Option<&[f32]> {
        self.counts
    }

    fn read(&self, rows: Range<usize>, out: &mut [f32]) {
        self.tensor.dequantize_rows(rows.clone(), out);
        for (n, row) in rows.zip(out.chunks_exact_mut(self.tensor.row_len())) {
            if let Some(columns) = self.columns {
                row.iter_mut().zip(columns).for_each(|(w, scale)| *w *= scale);
            }
            if let Some(rows) = self.rows {
                row.iter_mut().for_each(|w| *w /= rows[n]);
            }
            if !row.iter().all(|w| w.is_finite()) {
                let mut not_finite = self.not_finite.lock().expect("nobody panicked with it");
                not_finite.get_or_insert_with(|| self.tensor.name.clone());
            }
        }
    }
}

/// A norm's weight divided by scales, as its file rounds it; the scales become those that this has divided by, so that the
/// matrices undo it exactly. `used` is what is stored and an offset.
pub(super) fn round_norm(used: &[f32], (format, offset): (WeightFormat, f32), scales: &mut [f32]) -> Vec<f32> {
    let round = |x: f32| match format {
        WeightFormat::F16 => f16::from_f32(x).to_f32(),
        WeightFormat::Bf16 => bf16::from_f32(x).to_f32(),
        _ => x,
    };
    let one = |(&used, scale): (&f32, &mut f32)| {
        let stored = round(used / *scale - offset);
        let exact = used / (stored + offset);
        if exact.is_finite() && exact > 0.0 {
            *scale = exact;
            return stored;
        }
        // Nothing comes through a norm of 0, and nothing is divided by one that became it.
        *scale = 1.0;
        used - offset
    };
    used.iter().zip(scales).map(one).collect()
}
