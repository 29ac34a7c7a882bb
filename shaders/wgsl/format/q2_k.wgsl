// Q2_K: value = code * (d * s) - dmin * m, codes 0..=3, s and m 0..=15 of each half group. Both products are exact, so that one
// fused multiply-add gives the value; a group has no scale of its own.
//
// codes: 1 vec4u per group; element 4i + c is bits 4i..4i+4 of word c.
// side:  5 words per 8 groups: d f16 | dmin f16 << 16; then per 2 groups a byte for each of their halves, s | m << 4.
// Limits: a device may read f16 subnormals as 0.

const HAS_SCALE: bool = false;
const HAS_MIN: bool = false;

struct Group {
    words: array<vec4u, ROWS>,
    scale: array<vec2f, ROWS>,
    minimum: array<vec2f, ROWS>,
}

fn load_group(panel: u32, first: u32, group: u32, groups: u32) -> Group {
    let at = (panel * groups + group) * 64u + first;
    let base = (panel * ((groups + 7u) >> 3u) + (group >> 3u)) * 320u + first;
    let d_words = load_side(base);
    let pairs = load_side(base + (1u + ((group & 7u) >> 1u)) * 64u);
    var g: Group;
    g.words = load_codes(at);
    for (var r = 0u; r < ROWS; r++) {
        let d = unpack2x16float(d_words[r]);
        let pair = pairs[r] >> (16u * (group & 1u));
        g.scale[r] = d.x * vec2f(vec2u(pair, pair >> 8u) & vec2u(15u));
        g.minimum[r] = -d.y * vec2f(vec2u(pair >> 4u, pair >> 12u) & vec2u(15u));
    }
    return g;
}

fn group_values(g: ptr<function, Group>, i: u32) -> array<vec4f, ROWS> {
    var values: array<vec4f, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        let code = ((*g).words[r] >> vec4u(4u * i)) & vec4u(15u);
        let scale = select((*g).scale[r].x, (*g).scale[r].y, i >= 4u);
        let minimum = select((*g).minimum[r].x, (*g).minimum[r].y, i >= 4u);
        values[r] = fma(vec4f(code), vec4f(scale), vec4f(minimum));
    }
    return values;
}

fn group_scale(g: ptr<function, Group>, r: u32) -> f32 {
    return 1.0;
}

fn group_min(g: ptr<function, Group>, r: u32) -> f32 {
    return 0.0;
}
