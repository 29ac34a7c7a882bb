//! Tensors of several matrices, one per expert, made of what files have: one tensor per expert, rows of two kinds that alternate or
//! follow each other, matrices that are stored the other way round.
//!
//! Invariant: places change, values do not; rows are computed when they are read, so that no model is in memory twice.
//! Called by the architectures and, for whole panels, by the backends.

use std::ops::Range;
use std::sync::Arc;

use super::{HostTensor, RowSource};

impl HostTensor {
    /// One tensor `[parts, rows, cols]` of matrices of one shape and format.
    ///
    /// # Panics
    /// When there are none, or they differ: the caller has checked.
    pub fn stacked(name: impl Into<String>, parts: Vec<HostTensor>) -> Self {
        let (shape, format) = (parts[0].shape.clone(), parts[0].format);
        assert!(parts.iter().all(|part| part.shape == shape && part.format == format), "matrices of one kind");
        let shape = [&[parts.len()], shape.as_slice()].concat();
        Self::computed(name, format, shape, Arc::new(Stacked(parts)))
    }

    /// Every second row from `first` of each matrix of `[matrices, 2 * rows, cols]`.
    ///
    /// # Panics
    /// When it is not of that shape.
    pub fn alternate_rows(&self, first: usize) -> Self {
        let &[matrices, rows, cols] = self.shape.as_slice() else { panic!("a tensor of matrices") };
        assert!(rows.is_multiple_of(2) && first < 2, "an even number of rows");
        let source = Arc::new(Alternate { tensor: self.clone(), first });
        Self::computed(self.name.clone(), self.format, vec![matrices, rows / 2, cols], source)
    }

    /// Some rows of a matrix.
    ///
    /// # Panics
    /// When it is no matrix of so many rows.
    pub fn row_range(&self, rows: Range<usize>) -> Self {
        let &[all, cols] = self.shape.as_slice() else { panic!("a matrix") };
        assert!(rows.end <= all, "rows of the matrix");
        let source = Arc::new(Rows { tensor: self.clone(), first: rows.start });
        Self::computed(self.name.clone(), self.format, vec![rows.len(), cols], source)
    }

    /// `[matrices, cols, rows]` of `[matrices, rows, cols]` of plain numbers.
    ///
    /// # Panics
    /// When it is not of that shape, or in a format of blocks.
    pub fn transposed_matrices(&self) -> Self {
        let &[matrices, rows, cols] = self.shape.as_slice() else { panic!("a tensor of matrices") };
        assert_eq!(self.format.block_len(), 1, "numbers of their own");
        Self::computed(self.name.clone(), self.format, vec![matrices, cols, rows], Arc::new(Transposed(self.clone())))
    }

    /// With rows of zero bytes behind each matrix of a tensor of several, so that each has a multiple of `multiple` rows; a
    /// tensor of one matrix is left as it is.
    pub fn with_padded_matrices(&self, multiple: usize) -> Self {
        match *self.shape.as_slice() {
            [matrices, rows, cols] if !rows.is_multiple_of(multiple) => {
                let padded = rows.next_multiple_of(multiple);
                let source = Arc::new(Padded { tensor: self.clone(), rows, padded });
                Self::computed(self.name.clone(), self.format, vec![matrices, padded, cols], source)
            }
            _ => self.clone(),
        }
    }

    fn row_bytes(&self) -> usize {
        self.num_bytes() / self.num_rows().max(1)
    }
}

#[derive(Debug)]
struct Stacked(Vec<HostTensor>);

impl RowSource for Stacked {
    fn read(&self, rows: Range<usize>, out: &mut [u8]) {
        let each = self.0[0].num_rows();
        for_runs(rows, each, out, self.0[0].row_bytes(), |matrix, rows, out| {
            out.copy_from_slice(&self.0[matrix].rows(rows));
        });
    }

    fn blocks_per_scale(&self) -> usize {
        let all = || self.0.iter().map(HostTensor::blocks_per_scale);
        // Of different groups none is taken.
        all().next().filter(|first| all().all(|blocks| blocks == *first)).unwrap_or(1)
    }
}

#[derive(Debug)]
struct Alternate {
    tensor: HostTensor,
    first: usize,
}

impl RowSource for Alternate {
    fn read(&self, rows: Range<usize>, out: &mut [u8]) {
        let both = self.tensor.rows(2 * rows.start..2 * rows.end);
        let row_bytes = self.tensor.row_bytes();
        let chosen = both.chunks_exact(row_bytes).skip(self.first).step_by(2);
        out.chunks_exact_mut(row_bytes).zip(chosen).for_each(|(out, row)| out.copy_from_slice(row));
    }

    fn blocks_per_scale(&self) -> usize {
        self.tensor.blocks_per_scale()
    }
}

#[derive(Debug)]
struct Rows {
    tensor: HostTensor,
    first: usize,
}

impl RowSource for Rows {
    fn read(&self, rows: Range<usize>, out: &mut [u8]) {
        out.copy_from_slice(&self.tensor.rows(self.first + rows.start..self.first + rows.end));
    }

    fn blocks_per_scale(&self) -> usize {
        self.tensor.blocks_per_scale()
    }
}

#[derive(Debug)]
struct Transposed(HostTensor);

impl RowSource for Transposed {
    fn read(&self, rows: Range<usize>, out: &mut [u8]) {
        let (stored_rows, each) = (self.0.shape[1], self.0.shape[2]);
        let element = self.0.format.block_bytes();
        for_runs(rows, each, out, stored_rows * element, |matrix, columns, out| {
            let stored = self.0.rows(matrix * stored_rows..(matrix + 1) * stored_rows);
            for (k, row) in stored.chunks_exact(each * element).enumerate() {
                let wanted = row[columns.start * element..columns.end * element].chunks_exact(element);
                for (r, value) in wanted.enumerate() {
                    out[(r * stored_rows + k) * element..][..element].copy_from_slice(value);
                }
            }
        });
    }
}

#[derive(Debug)]
struct Padded {
    tensor: HostTensor,
    rows: usize,
    padded: usize,
}

impl RowSource for Padded {
    fn read(&self, rows: Range<usize>, out: &mut [u8]) {
        let row_bytes = self.tensor.row_bytes();
        for_runs(rows, self.padded, out, row_bytes, |matrix, rows, out| {
            let stored = rows.start.min(self.rows)..rows.end.min(self.rows);
            let (there, padding) = out.split_at_mut(stored.len() * row_bytes);
            there
                .copy_from_slice(&self.tensor.rows(matrix * self.rows + stored.start..matrix * self.rows + stored.end));
            padding.fill(0);
        });
    }

    fn blocks_per_scale(&self) -> usize {
        self.tensor.blocks_per_scale()
    }
}

/// Calls `one(matrix, rows of it, their bytes)` for each run of rows that lies in one matrix of `each` rows.
fn for_runs(
    rows: Range<usize>,
    each: usize,
    mut out: &mut [u8],
    row_bytes: usize,
    mut one: impl FnMut(usize, Range<usize>, &mut [u8]),
) {
    let mut row = rows.start;
    while row < rows.end {
        let (matrix, first) = (row / each, row % each);
        let last = each.min(first + rows.end - row);
        let (own, rest) = std::mem::take(&mut out).split_at_mut((last - first) * row_bytes);
        one(matrix, first..last, own);
        out = rest;
        row += last - first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(shape: &[usize], first: f32) -> HostTensor {
        let len = shape.iter().product::<usize>();
        HostTensor::from_f32("t", shape.to_vec(), &(0..len).map(|i| first + i as f32).collect::<Vec<_>>())
    }

    /// Whole and in runs that begin and end within matrices.
    fn check(tensor: &HostTensor, expected: &[f32]) {
        assert_eq!(tensor.to_f32(), expected);
        let cols = tensor.row_len();
        for first in 0..tensor.num_rows() {
            for last in first..tensor.num_rows() {
                let mut out = vec![0.0; (last - first) * cols];
                tensor.dequantize_rows(first..last, &mut out);
                assert_eq!(out, expected[first * cols..last * cols]);
            }
        }
    }

    #[test]
    fn experts_are_stacked_parted_turned_and_padded() {
        let stacked = HostTensor::stacked("s", vec![tensor(&[2, 2], 0.0), tensor(&[2, 2], 4.0)]);
        assert_eq!(stacked.shape, [2, 2, 2]);
        check(&stacked, &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        check(&stacked.alternate_rows(1), &[2.0, 3.0, 6.0, 7.0]);
        check(&stacked.transposed_matrices(), &[0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
        let padded = stacked.with_padded_matrices(3);
        assert_eq!(padded.shape, [2, 3, 2]);
        check(&padded, &[0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 4.0, 5.0, 6.0, 7.0, 0.0, 0.0]);
        check(&tensor(&[4, 2], 0.0).row_range(1..3), &[2.0, 3.0, 4.0, 5.0]);
        check(&tensor(&[1, 2, 3], 0.0).transposed_matrices(), &[0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    }
}
