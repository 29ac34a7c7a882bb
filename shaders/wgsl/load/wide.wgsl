// A lane's ROWS rows are neighbours, read 32 bytes at a time: where a load costs the same whatever its width (software
// Vulkan). ROWS is a multiple of 8. The device must have 64-bit integers.
//
// A kernel that binds `codes: Codes` and `side: Sides` says at which word the lane's first row lies; see format/.
//!targets spirv msl hlsl
//!naga-only u64
alias Codes = array<vec4<u64>>;
alias Sides = array<vec4<u64>>;
const_assert ROWS % 8u == 0u;

fn row_of(lane: u32, r: u32) -> u32 {
    return lane * ROWS + r;
}

fn halves(low: u64, high: u64) -> vec4u {
    return vec4u(u32(low), u32(low >> 32u), u32(high), u32(high >> 32u));
}

fn load_codes(at: u32) -> array<vec4u, ROWS> {
    var words: array<vec4u, ROWS>;
    for (var r = 0u; r < ROWS; r += 2u) {
        let two = codes[at / 2u + r / 2u];
        words[r] = halves(two.x, two.y);
        words[r + 1u] = halves(two.z, two.w);
    }
    return words;
}

fn load_side(at: u32) -> array<u32, ROWS> {
    var words: array<u32, ROWS>;
    for (var r = 0u; r < ROWS; r += 8u) {
        let eight = side[at / 8u + r / 8u];
        let first = halves(eight.x, eight.y);
        let last = halves(eight.z, eight.w);
        for (var i = 0u; i < 4u; i++) {
            words[r + i] = first[i];
            words[r + 4u + i] = last[i];
        }
    }
    return words;
}
