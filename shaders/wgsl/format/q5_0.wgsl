// Q5_0: value = (code - 16) * scale, codes 0..=31.
//
// codes: 1 vec4u per group; the low four bits of element 4i + c are bits 4i..4i+4 of word c.
// side:  3 words per 2 groups: scale f16 of the even group | of the odd group << 16; then a word per group,
//        whose bit 8c + i is the fifth bit of element 4i + c.
// Limits: a device may read f16 subnormals as 0.

const HAS_SCALE: bool = true;
const HAS_MIN: bool = false;

struct Group {
    words: array<vec4u, ROWS>,
    high: array<u32, ROWS>,
    scale: array<f32, ROWS>,
}

fn load_group(panel: u32, first: u32, group: u32, groups: u32) -> Group {
    let at = (panel * groups + group) * 64u + first;
    let base = (panel * ((groups + 1u) >> 1u) + (group >> 1u)) * 192u + first;
    let odd = group & 1u;
    let scales = load_side(base);
    var g: Group;
    g.words = load_codes(at);
    g.high = load_side(base + (1u + odd) * 64u);
    for (var r = 0u; r < ROWS; r++) {
        g.scale[r] = unpack2x16float(scales[r] >> (16u * odd)).x;
    }
    return g;
}

fn group_values(g: ptr<function, Group>, i: u32) -> array<vec4f, ROWS> {
    var values: array<vec4f, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        let fifth = (vec4u((*g).high[r]) >> (vec4u(0u, 8u, 16u, 24u) + vec4u(i))) & vec4u(1u);
        let code = (((*g).words[r] >> vec4u(4u * i)) & vec4u(15u)) | (fifth << vec4u(4u));
        values[r] = vec4f(code) - vec4f(16.0);
    }
    return values;
}

fn group_scale(g: ptr<function, Group>, r: u32) -> f32 {
    return (*g).scale[r];
}

fn group_min(g: ptr<function, Group>, r: u32) -> f32 {
    return 0.0;
}
