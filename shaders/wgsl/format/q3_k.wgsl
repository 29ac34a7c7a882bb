// Q3_K: value = ((code - 4) * s) * d, codes 0..=7, s -32..=31 of each half group. The inner product is exact.
//
// codes: 1 vec4u per group; element 4i + c is bits 4i..4i+4 of word c.
// side:  5 words per 8 groups: d f16; then per 2 groups four signed bytes, the scales s of their halves.
// Limits: a device may read f16 subnormals as 0.

const HAS_SCALE: bool = true;
const HAS_MIN: bool = false;

struct Group {
    words: array<vec4u, ROWS>,
    half_scales: array<vec2f, ROWS>,
    scale: array<f32, ROWS>,
}

fn load_group(panel: u32, first: u32, group: u32, groups: u32) -> Group {
    let at = (panel * groups + group) * 64u + first;
    let base = (panel * ((groups + 7u) >> 3u) + (group >> 3u)) * 320u + first;
    let d_words = load_side(base);
    let pairs = load_side(base + (1u + ((group & 7u) >> 1u)) * 64u);
    var g: Group;
    g.words = load_codes(at);
    for (var r = 0u; r < ROWS; r++) {
        g.scale[r] = unpack2x16float(d_words[r]).x;
        let pair = pairs[r] >> (16u * (group & 1u));
        g.half_scales[r] = vec2f(bitcast<vec2i>(vec2u(pair << 24u, (pair >> 8u) << 24u)) >> vec2u(24u));
    }
    return g;
}

fn group_values(g: ptr<function, Group>, i: u32) -> array<vec4f, ROWS> {
    var values: array<vec4f, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        let code = ((*g).words[r] >> vec4u(4u * i)) & vec4u(15u);
        let half_scale = select((*g).half_scales[r].x, (*g).half_scales[r].y, i >= 4u);
        values[r] = (vec4f(code) - vec4f(4.0)) * half_scale;
    }
    return values;
}

fn group_scale(g: ptr<function, Group>, r: u32) -> f32 {
    return (*g).scale[r];
}

fn group_min(g: ptr<function, Group>, r: u32) -> f32 {
    return 0.0;
}
