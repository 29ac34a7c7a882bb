//! The largest logit; of equal ones the lowest id. One pass that compilers turn into SIMD.

use crate::ids::TokenId;

const CHUNK: usize = 256;
const LANES: usize = 16;

/// The id of the largest of `logits`, `[vocab]`.
///
/// # Panics
/// When no logit is a number above -inf.
pub(super) fn argmax(logits: &[f32]) -> TokenId {
    let mut best = f32::NEG_INFINITY;
    let mut best_chunk = 0;
    for (index, chunk) in logits.chunks(CHUNK).enumerate() {
        let max = max_of(chunk);
        if max > best {
            (best, best_chunk) = (max, index);
        }
    }
    assert!(best > f32::NEG_INFINITY, "rows that are masked or not finite are not drawn from");
    let start = best_chunk * CHUNK;
    let within = logits[start..].iter().position(|&logit| logit == best).expect("the chunk holds its maximum");
    TokenId((start + within) as u32)
}

fn max_of(values: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (vectors, tail) = values.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for vector in vectors {
        for (lane, &value) in lanes.iter_mut().zip(vector) {
            *lane = larger(*lane, value);
        }
    }
    lanes.iter().chain(tail).fold(f32::NEG_INFINITY, |a, &b| larger(a, b))
}
