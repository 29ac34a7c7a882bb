//! Philox4x32-10, a counter-based random number generator: a keyed bijection of 128-bit counters whose outputs pass as
//! random (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"). It has no state, so that any
//! number can be asked for at any time, on any device.

const MULTIPLIERS: [u64; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: u32 = 10;

/// `LANES` counters at once, word by word: `counters[w][lane]` in, as many random words out.
///
/// Words live in the low halves of 64-bit lanes, whatever the high halves hold: that is the operand that SIMD multiplies
/// of 32 by 32 bits take, so that no round shuffles.
#[inline(always)]
pub(super) fn philox4x32<const LANES: usize>(counters: [[u32; LANES]; 4], mut key: [u32; 2]) -> [[u32; LANES]; 4] {
    let product = |word: u64, multiplier: u64| (word & 0xffff_ffff).wrapping_mul(multiplier);
    let mut words = counters.map(|lanes| lanes.map(u64::from));
    for _ in 0..ROUNDS {
        let [k0, k1] = key.map(u64::from);
        let [w0, w1, w2, w3] = &mut words;
        for (((w0, w1), w2), w3) in w0.iter_mut().zip(w1).zip(w2).zip(w3) {
            let (p0, p1) = (product(*w0, MULTIPLIERS[0]), product(*w2, MULTIPLIERS[1]));
            (*w0, *w1) = ((p1 >> 32) ^ *w1 ^ k0, p1);
            (*w2, *w3) = ((p0 >> 32) ^ *w3 ^ k1, p0);
        }
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    words.map(|lanes| lanes.map(|word| word as u32))
}

#[cfg(test)]
mod tests {
    use super::philox4x32;

    /// The known answers that Random123 ships for philox4x32 with 10 rounds.
    #[test]
    fn known_answers() {
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox4x32(counter.map(|word: u32| [word]), key).map(|[word]| word), expected);
        }
    }

    #[test]
    fn lanes_are_independent() {
        let counters = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]];
        let together = philox4x32(counters, [13, 14]);
        for lane in 0..3 {
            let alone = philox4x32(counters.map(|word| [word[lane]]), [13, 14]);
            assert_eq!(alone.map(|[word]| word), together.map(|word| word[lane]));
        }
    }
}
