// Q5_0: value = (code - 16) * scale, codes 0..=31.
//
// codes: 1 vec4u per group; the low four bits of element 4i + c are bits 4i..4i+4 of word c.
// side:  3 words per 2 groups: scale f16 of the even group | of the odd group << 16; then a word per group,
//        whose bit 8c + i is the fifth bit of element 4i + c.
// Limits: a device may read f16 subnormals as 0.

const HAS_SCALE: bool = true;
const HAS_MIN: bool = false;

struct Group {
    words: vec4u,
    high: u32,
    scale: f32,
}

fn load_group(panel: u32, lane: u32, group: u32, groups: u32) -> Group {
    let at = (panel * groups + group) * 64u + lane;
    let base = (panel * ((groups + 1u) >> 1u) + (group >> 1u)) * 192u + lane;
    let odd = group & 1u;
    return Group(codes[at], side[base + (1u + odd) * 64u], unpack2x16float(side[base] >> (16u * odd)).x);
}

fn group_values(g: Group, i: u32) -> vec4f {
    let fifth = (vec4u(g.high) >> (vec4u(0u, 8u, 16u, 24u) + vec4u(i))) & vec4u(1u);
    let code = ((g.words >> vec4u(4u * i)) & vec4u(15u)) | (fifth << vec4u(4u));
    return vec4f(code) - vec4f(16.0);
}

fn group_scale(g: Group) -> f32 {
    return g.scale;
}

fn group_min(g: Group) -> f32 {
    return 0.0;
}
