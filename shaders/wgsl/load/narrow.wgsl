// A lane's ROWS rows lie LANES apart, so that neighbouring lanes read neighbouring words: what GPUs want.
//
// A kernel that binds `codes: Codes` and `side: Sides` says at which word the lane's first row lies; see format/.
alias Codes = array<vec4u>;
alias Sides = array<u32>;

fn row_of(lane: u32, r: u32) -> u32 {
    return lane + r * LANES;
}

fn load_codes(at: u32) -> array<vec4u, ROWS> {
    var words: array<vec4u, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        words[r] = codes[at + r * LANES];
    }
    return words;
}

fn load_side(at: u32) -> array<u32, ROWS> {
    var words: array<u32, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        words[r] = side[at + r * LANES];
    }
    return words;
}
