//! Joins the splits of a unit and writes its output.
//!
//! Invariant: splits are joined one after the other in the order of positions, by the same operations whether one thread
//! computed them all (called by `work`) or several did (called by `Merge`).

use super::Attention;
use crate::backend::cpu::memory::Shared;
use crate::backend::cpu::rows::Columns;
use crate::backend::cpu::simd::{LANES, Simd};

/// `total` and `partial` are a unit's values, then maximum and sum: `total` becomes the softmax over both.
#[inline(always)]
pub(super) fn merge<S: Simd>(s: S, total: &mut [f32], partial: &[f32]) {
    let dim = total.len() - LANES;
    let (before, new) = (total[dim], partial[dim]);
    let max = if before > new { before } else { new };
    let (keep, add) = (s.exp(s.splat(before - max)), s.exp(s.splat(new - max)));
    let factors = (s.array(keep)[0], s.array(add)[0]);
    for (t, p) in total[..dim].as_chunks_mut::<LANES>().0.iter_mut().zip(partial.as_chunks::<LANES>().0) {
        let kept = s.mul(s.load(t), keep);
        s.store(s.fma(s.load(p), add, kept), t);
    }
    total[dim] = max;
    total[dim + 1] = total[dim + 1] * factors.0 + partial[dim + 1] * factors.1;
}

/// Divides by the sum and writes one head of one token.
#[inline(always)]
pub(super) fn write_out<S: Simd>(
    s: S,
    memory: Shared,
    op: &Attention,
    dim: usize,
    (token, head): (usize, usize),
    total: &[f32],
) {
    let columns = Columns { start: op.out.start + head * dim * size_of::<f32>(), width: dim, ..op.out };
    // SAFETY: one head of one token, which belongs to this thread's tile.
    let out = unsafe { columns.row_mut(memory, token) };
    let padded_dim = total.len() - LANES;
    let inverse = s.splat(1.0 / total[padded_dim + 1]);
    for (out, total) in out.chunks_mut(LANES).zip(total.as_chunks::<LANES>().0) {
        s.store_part(s.mul(s.load(total), inverse), out);
    }
}
