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
    words: vec4u,
    high: u32,
    scale: f32,
    minimum: f32,
}

fn load_group(panel: u32, lane: u32, group: u32, groups: u32) -> Group {
    let at = (panel * groups + group) * 64u + lane;
    let base = (panel * ((groups + 7u) >> 3u) + (group >> 3u)) * 832u + lane;
    let d = unpack2x16float(side[base]);
    let pair = side[base + (1u + ((group & 7u) >> 1u)) * 64u] >> (16u * (group & 1u));
    let high = side[base + (5u + (group & 7u)) * 64u];
    return Group(codes[at], high, d.x * f32(pair & 255u), -d.y * f32((pair >> 8u) & 255u));
}

fn group_values(g: Group, i: u32) -> vec4f {
    let fifth = (vec4u(g.high) >> (vec4u(0u, 8u, 16u, 24u) + vec4u(i))) & vec4u(1u);
    let code = ((g.words >> vec4u(4u * i)) & vec4u(15u)) | (fifth << vec4u(4u));
    return vec4f(code);
}

fn group_scale(g: Group) -> f32 {
    return g.scale;
}

fn group_min(g: Group) -> f32 {
    return g.minimum;
}
