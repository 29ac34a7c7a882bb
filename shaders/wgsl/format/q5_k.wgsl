// Q5_K: value = code * (d * s) - dmin * m, codes 0..=31, s and m 0..=63.
//
// codes: 1 vec4u per group; the low four bits of element 4i + c are bits 4i..4i+4 of word c.
// side:  13 words per 8 groups: d f16 | dmin f16 << 16; then per 2 groups their scale s and minimum m,
//        a byte each: s | m << 8 | s of the odd group << 16 | m << 24; then a word per group,
//        whose bit 8c + i is the fifth bit of element 4i + c.
// Limits: a device may read f16 subnormals as 0.

const HAS_SCALE: bool = true;
const HAS_MIN: bool = true;

struct Group {
    words: array<vec4u, ROWS>,
    high: array<u32, ROWS>,
    scale: array<f32, ROWS>,
    minimum: array<f32, ROWS>,
}

fn load_group(panel: u32, first: u32, group: u32, groups: u32) -> Group {
    let at = (panel * groups + group) * 64u + first;
    let base = (panel * ((groups + 7u) >> 3u) + (group >> 3u)) * 832u + first;
    let d_words = load_side(base);
    let pairs = load_side(base + (1u + ((group & 7u) >> 1u)) * 64u);
    var g: Group;
    g.words = load_codes(at);
    g.high = load_side(base + (5u + (group & 7u)) * 64u);
    for (var r = 0u; r < ROWS; r++) {
        let d = unpack2x16float(d_words[r]);
        let pair = pairs[r] >> (16u * (group & 1u));
        g.scale[r] = d.x * f32(pair & 255u);
        g.minimum[r] = -d.y * f32((pair >> 8u) & 255u);
    }
    return g;
}

fn group_values(g: ptr<function, Group>, i: u32) -> array<vec4f, ROWS> {
    var values: array<vec4f, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        let fifth = (vec4u((*g).high[r]) >> (vec4u(0u, 8u, 16u, 24u) + vec4u(i))) & vec4u(1u);
        let code = (((*g).words[r] >> vec4u(4u * i)) & vec4u(15u)) | (fifth << vec4u(4u));
        values[r] = vec4f(code);
    }
    return values;
}

fn group_scale(g: ptr<function, Group>, r: u32) -> f32 {
    return (*g).scale[r];
}

fn group_min(g: ptr<function, Group>, r: u32) -> f32 {
    return (*g).minimum[r];
}
