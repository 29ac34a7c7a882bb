// F16: value = the stored float.
//
// codes: 4 vec4u per group; elements 4i..4i+4 are words 2(i % 2) and 2(i % 2) + 1 of vector i / 2, low half first.
// side:  not read.
// Limits: loads in group_values, so that a Group is an address and what was loaded last. A device may read f16 subnormals as 0.

const HAS_SCALE: bool = false;
const HAS_MIN: bool = false;

struct Group {
    base: u32,
    // Where the words were loaded from; at first from nowhere.
    loaded: u32,
    words: array<vec4u, ROWS>,
}

fn load_group(panel: u32, first: u32, group: u32, groups: u32) -> Group {
    var g: Group;
    g.base = (panel * groups + group) * 256u + first;
    g.loaded = 0xffffffffu;
    return g;
}

fn group_values(g: ptr<function, Group>, i: u32) -> array<vec4f, ROWS> {
    let at = (*g).base + (i >> 1u) * 64u;
    if (*g).loaded != at {
        (*g).words = load_codes(at);
        (*g).loaded = at;
    }
    var values: array<vec4f, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        let words = (*g).words[r];
        let pair = select(words.xy, words.zw, (i & 1u) == 1u);
        values[r] = vec4f(unpack2x16float(pair.x), unpack2x16float(pair.y));
    }
    return values;
}

fn group_scale(g: ptr<function, Group>, r: u32) -> f32 {
    return 1.0;
}

fn group_min(g: ptr<function, Group>, r: u32) -> f32 {
    return 0.0;
}
