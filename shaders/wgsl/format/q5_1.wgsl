// Q5_1: value = code * scale + minimum, codes 0..=31.
//
// codes: 1 vec4u per group; the low four bits of element 4i + c are bits 4i..4i+4 of word c.
// side:  2 words per group: scale f16 | minimum f16 << 16; bit 8c + i is the fifth bit of element 4i + c.
// Limits: a device may read f16 subnormals as 0.

const HAS_SCALE: bool = true;
const HAS_MIN: bool = true;

struct Group {
    words: array<vec4u, ROWS>,
    high: array<u32, ROWS>,
    scale_and_min: array<vec2f, ROWS>,
}

fn load_group(panel: u32, first: u32, group: u32, groups: u32) -> Group {
    let panel_group = panel * groups + group;
    let base = panel_group * 128u + first;
    let side_words = load_side(base);
    var g: Group;
    g.words = load_codes(panel_group * 64u + first);
    g.high = load_side(base + 64u);
    for (var r = 0u; r < ROWS; r++) {
        g.scale_and_min[r] = unpack2x16float(side_words[r]);
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
    return (*g).scale_and_min[r].x;
}

fn group_min(g: ptr<function, Group>, r: u32) -> f32 {
    return (*g).scale_and_min[r].y;
}
