// INT8: value = (code - zero) * scale, codes and zero 0..=255.
//
// codes: 2 vec4u per group; element 4i + c is byte i % 4 of word c of vector i / 4.
// side:  5 words per 4 groups: their scales, f32; then their zeros, a byte each, that of the first group lowest.

const HAS_SCALE: bool = true;
const HAS_MIN: bool = false;

struct Group {
    words: array<vec4u, ROWS>,
    more_words: array<vec4u, ROWS>,
    scale: array<f32, ROWS>,
    zero: array<f32, ROWS>,
}

fn load_group(panel: u32, first: u32, group: u32, groups: u32) -> Group {
    let at = (panel * groups + group) * 128u + first;
    let base = (panel * ((groups + 3u) >> 2u) + (group >> 2u)) * 320u + first;
    let scales = load_side(base + (group & 3u) * 64u);
    let zeros = load_side(base + 256u);
    var g: Group;
    g.words = load_codes(at);
    g.more_words = load_codes(at + 64u);
    for (var r = 0u; r < ROWS; r++) {
        g.scale[r] = bitcast<f32>(scales[r]);
        g.zero[r] = f32((zeros[r] >> (8u * (group & 3u))) & 255u);
    }
    return g;
}

fn group_values(g: ptr<function, Group>, i: u32) -> array<vec4f, ROWS> {
    var values: array<vec4f, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        let words = select((*g).words[r], (*g).more_words[r], i >= 4u);
        values[r] = vec4f((words >> vec4u(8u * (i & 3u))) & vec4u(255u)) - vec4f((*g).zero[r]);
    }
    return values;
}

fn group_scale(g: ptr<function, Group>, r: u32) -> f32 {
    return (*g).scale[r];
}

fn group_min(g: ptr<function, Group>, r: u32) -> f32 {
    return 0.0;
}
