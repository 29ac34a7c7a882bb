//! The draw: the token with the largest `scaled logit + Gumbel noise`, which is a draw from their softmax (Gumbel-max;
//! Maddison, Tarlow, Minka 2014, "A* sampling"). Of equal sums the lowest id.
//!
//! Invariant: a token's noise is a function of (seed, position, id) alone. It is word `id % 4` of Philox4x32-10 with the
//! seed as key (low word first) and the counter `(id / 4, position, 0, 0)`. A 32-bit word w means the uniform
//! u = (w + 1/2) / 2^32 and the noise -ln(-ln(1 - u)); small words are the large noise, where f64 resolves it well.

use super::kept::Candidate;
use super::philox::philox4x32;
use super::temperature::ScaledRow;
use crate::ids::TokenId;

/// The noise of one draw.
#[derive(Clone, Copy, Debug)]
pub(super) struct Noise {
    key: [u32; 2],
    position: u32,
}

/// Blocks of four tokens whose words are made at once: enough for compilers to keep the rounds in SIMD loops.
const LANES: usize = 16;
/// Tokens that are looked at together.
const TOKENS: usize = 64;

impl Noise {
    /// For the token at absolute `position` of a sequence with this seed.
    pub(super) fn new(seed: u64, position: usize) -> Self {
        let position = u32::try_from(position).expect("contexts are shorter than 2^32 tokens");
        Self { key: [seed as u32, (seed >> 32) as u32], position }
    }

    fn word(self, id: u32) -> u32 {
        let words = philox4x32([[id / 4], [self.position], [0], [0]], self.key);
        words[id as usize % 4][0]
    }

    /// The words of the `TOKENS` tokens from `first` on, a multiple of 4.
    #[inline(always)]
    fn words(self, first: u32) -> [u32; TOKENS] {
        let mut in_order = [0; TOKENS];
        for (index, group) in in_order.as_chunks_mut::<{ 4 * LANES }>().0.iter_mut().enumerate() {
            let block = first / 4 + (index * LANES) as u32;
            let blocks = std::array::from_fn(|lane| block + lane as u32);
            let words = philox4x32([blocks, [self.position; LANES], [0; LANES], [0; LANES]], self.key);
            for (i, word) in group.iter_mut().enumerate() {
                *word = words[i % 4][i / 4];
            }
        }
        in_order
    }
}

fn gumbel(word: u32) -> f64 {
    let u = (f64::from(word) + 0.5) / 4_294_967_296.0;
    -(-(-u).ln_1p()).ln()
}

/// At least `gumbel(word)`, without logarithms: -ln(1 - u) >= u, and the bits of a float, read as an integer, are its
/// exponent and below it a fraction f <= log2(1 + f), hence a lower bound of its logarithm. At most 0.07 too much where
/// noise is large.
#[inline(always)]
fn gumbel_bound(word: u32) -> f32 {
    const LN_2: f32 = std::f32::consts::LN_2;
    const STEP: f32 = LN_2 / 8_388_608.0;
    // 31 and the float's bias, and more than all roundings here.
    const OFFSET: f32 = (31.0 + 127.0) * LN_2 + 1e-3;
    // One bit less makes it a signed integer, which every instruction set converts.
    let bits = ((word >> 1) as i32 as f32).to_bits() as i32;
    OFFSET - bits as f32 * STEP
}

/// The best token so far.
struct Best {
    id: u32,
    score: f64,
    /// Not above `score`: what cannot reach it cannot win.
    floor: f32,
}

impl Best {
    fn new(id: u32, score: f64) -> Self {
        Self { id, score, floor: (score as f32).next_down() }
    }

    fn offer(&mut self, id: u32, scaled: f32, word: u32) {
        let score = f64::from(scaled) + gumbel(word);
        if score > self.score || (score == self.score && id < self.id) {
            *self = Self::new(id, score);
        }
    }
}

/// Draws from all of `row`, whose largest logit is at `best`. Logarithms are taken only of noise that could win: the
/// result is that of taking them all.
pub(super) fn from_row(row: &ScaledRow<'_>, best: TokenId, noise: Noise) -> TokenId {
    let mut winner = Best::new(best.0, gumbel(noise.word(best.0)));
    let (chunks, tail) = row.logits.as_chunks::<TOKENS>();
    for (index, logits) in chunks.iter().enumerate() {
        let first = (index * TOKENS) as u32;
        offer_chunk(&mut winner, row, logits, first, &noise.words(first));
    }
    let first = (chunks.len() * TOKENS) as u32;
    for (id, &logit) in (first..).zip(tail) {
        offer_if_possible(&mut winner, id, row.scaled(logit), noise.word(id));
    }
    TokenId(winner.id)
}

#[inline(always)]
fn offer_chunk(winner: &mut Best, row: &ScaledRow<'_>, logits: &[f32; TOKENS], first: u32, words: &[u32; TOKENS]) {
    let mut bounds = [0.0; TOKENS];
    for ((bound, &logit), &word) in bounds.iter_mut().zip(logits).zip(words) {
        *bound = row.scaled(logit) + gumbel_bound(word);
    }
    let floor = winner.floor;
    if bounds.iter().fold(false, |any, &bound| any | (bound >= floor)) {
        for ((id, &logit), &word) in (first..).zip(logits).zip(words) {
            offer_if_possible(winner, id, row.scaled(logit), word);
        }
    }
}

fn offer_if_possible(winner: &mut Best, id: u32, scaled: f32, word: u32) {
    if scaled + gumbel_bound(word) >= winner.floor {
        winner.offer(id, scaled, word);
    }
}

/// Draws from some tokens of `row`.
///
/// # Panics
/// When there are none.
pub(super) fn from_candidates(row: &ScaledRow<'_>, candidates: &[Candidate], noise: Noise) -> TokenId {
    let (first, rest) = candidates.split_first().expect("every filter keeps the best token");
    let score = f64::from(row.scaled(first.logit)) + gumbel(noise.word(first.id));
    let mut winner = Best::new(first.id, score);
    for candidate in rest {
        offer_if_possible(&mut winner, candidate.id, row.scaled(candidate.logit), noise.word(candidate.id));
    }
    TokenId(winner.id)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::sample::argmax::argmax;
    use crate::sample::temperature::scale;

    fn plain(row: &ScaledRow<'_>, noise: Noise) -> TokenId {
        let mut best = (f64::NEG_INFINITY, 0);
        for (id, &logit) in (0..).zip(row.logits) {
            let score = f64::from(row.scaled(logit)) + gumbel(noise.word(id));
            if score > best.0 {
                best = (score, id);
            }
        }
        TokenId(best.1)
    }

    #[test]
    fn the_bound_is_above_and_near() {
        let near_powers = (0..32).flat_map(|bit| [-2i64, -1, 0, 1, 2].map(|off| ((1i64 << bit) + off) as u32));
        for word in near_powers.chain((0..1_000_000).map(|i: u32| i.wrapping_mul(2_654_435_761))) {
            let (exact, bound) = (gumbel(word), f64::from(gumbel_bound(word)));
            assert!(bound > exact, "{word}: {bound} <= {exact}");
            assert!(!(2..1 << 24).contains(&word) || bound < exact + 0.63, "{word}: {bound} is far above {exact}");
            assert!(
                !(1 << 10..1 << 24).contains(&word) || bound < exact + 0.07,
                "{word}: {bound} is far above {exact}"
            );
        }
    }

    #[test]
    fn words_of_a_chunk_are_those_of_its_tokens() {
        let noise = Noise::new(0x1234_5678_9abc_def0, 77);
        let words = noise.words(128);
        for id in 128..128 + TOKENS as u32 {
            assert_eq!(words[id as usize - 128], noise.word(id));
        }
    }

    proptest! {
        #[test]
        fn skipping_changes_nothing(
            logits in prop::collection::vec(prop_oneof![-30.0f32..30.0, Just(3.0), Just(f32::NEG_INFINITY)], 1..400),
            temperature in 0.005f32..2.0,
            seed: u64,
            position in 0usize..5000,
        ) {
            prop_assume!(logits.iter().any(|logit| logit.is_finite()));
            let best = argmax(&logits);
            let row = scale(&logits, best, temperature);
            let noise = Noise::new(seed, position);
            let expected = plain(&row, noise);
            prop_assert_eq!(from_row(&row, best, noise), expected);
            let all: Vec<_> = logits.iter().zip(0..).map(|(&logit, id)| Candidate { logit, id }).collect();
            prop_assert_eq!(from_candidates(&row, &all, noise), expected);
        }
    }
}
