//! Philox4x32-10, a counter-based random number generator: a keyed bijection of 128-bit counters whose outputs pass as
//! random (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"). It has no state, so that any
//! number can be asked for at any time, on any device.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: u32 = 10;

/// `LANES` counters at once, word by word: `counters[w][lane]` in, as many random words out.
#[inline(always)]
pub(super) fn philox4x32<const LANES: usize>(mut counters: [[u32; LANES]; 4], mut key: [u32; 2]) -> [[u32; LANES]; 4] {
    let wide = |a: u32, b: u32| u64::from(a) * u64::from(b);
    for _ in 0..ROUNDS {
        for lane in 0..LANES {
            let [c0, c1, c2, c3] = [counters[0][lane], counters[1][lane], counters[2][lane], counters[3][lane]];
            let (low, high) = (wide(c0, MULTIPLIERS[0]), wide(c2, MULTIPLIERS[1]));
            counters[0][lane] = (high >> 32) as u32 ^ c1 ^ key[0];
            counters[1][lane] = high as u32;
            counters[2][lane] = (low >> 32) as u32 ^ c3 ^ key[1];
            counters[3][lane] = low as u32;
        }
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    counters
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
