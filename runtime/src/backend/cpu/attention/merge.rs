//! Joins the splits of a unit and writes its output.
//!
//! Invariant: splits are joined one after the other in the order of positions, by the same operations whether one thread
//! computed them all (called by `work`) or several did (called by `Merge`).

use super::Attention;
use crate::backend::cpu::rows::Columns;
use crate::backend::cpu::simd::{LANES, Simd};
use crate::backend::cpu::step::Step;

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

/// Divides by the sum, a sink's term included, and writes one head of one token.
#[inline(always)]
pub(super) fn write_out<S: Simd>(
    s: S,
    step: &Step<'_>,
    op: &Attention,
    dim: usize,
    (token, head): (usize, usize),
    total: &[f32],
) {
    let columns = Columns { start: op.out.start + head * dim * size_of::<f32>(), width: dim, ..op.out };
    // SAFETY: one head of one token, which belongs to this thread's tile.
    let out = unsafe { columns.row_mut(step.memory, token) };
    let padded_dim = total.len() - LANES;
    let (max, sum) = (total[padded_dim], total[padded_dim + 1]);
    let inverse = match op.sinks {
        None => 1.0 / sum,
        Some(sinks) => {
            let sink = step.weights.vector(sinks)[head];
            let top = if max > sink { max } else { sink };
            let (keep, add) = (s.exp(s.splat(max - top)), s.exp(s.splat(sink - top)));
            let (keep, add) = (s.array(keep)[0], s.array(add)[0]);
            keep / (sum * keep + add)
        }
    };
    let inverse = s.splat(inverse);
    for (out, total) in out.chunks_mut(LANES).zip(total.as_chunks::<LANES>().0) {
        s.store_part(s.mul(s.load(total), inverse), out);
    }
}
