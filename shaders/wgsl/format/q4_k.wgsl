// Q4_K: value = code * (d * s) - dmin * m, codes 0..=15, s and m 0..=63.
//
// codes: 1 vec4u per group; element 4i + c is bits 4i..4i+4 of word c.
// side:  5 words per 8 groups: d f16 | dmin f16 << 16; then per 2 groups their scale s and minimum m,
//        a byte each: s | m << 8 | s of the odd group << 16 | m << 24.
// Limits: a device may read f16 subnormals as 0.

const HAS_SCALE: bool = true;
const HAS_MIN: bool = true;

struct Group {
    words: vec4u,
    scale: f32,
    minimum: f32,
}

fn load_group(panel: u32, lane: u32, group: u32, groups: u32) -> Group {
    let at = (panel * groups + group) * 64u + lane;
    let base = (panel * ((groups + 7u) >> 3u) + (group >> 3u)) * 320u + lane;
    let d = unpack2x16float(side[base]);
    let pair = side[base + (1u + ((group & 7u) >> 1u)) * 64u] >> (16u * (group & 1u));
    return Group(codes[at], d.x * f32(pair & 255u), -d.y * f32((pair >> 8u) & 255u));
}

fn group_values(g: Group, i: u32) -> vec4f {
    return vec4f((g.words >> vec4u(4u * i)) & vec4u(15u));
}

fn group_scale(g: Group) -> f32 {
    return g.scale;
}

fn group_min(g: Group) -> f32 {
    return g.minimum;
}
