// Q5_1: value = code * scale + minimum, codes 0..=31.
//
// codes: 1 vec4u per group; the low four bits of element 4i + c are bits 4i..4i+4 of word c.
// side:  2 words per group: scale f16 | minimum f16 << 16; bit 8c + i is the fifth bit of element 4i + c.
// Limits: a device may read f16 subnormals as 0.

const HAS_SCALE: bool = true;
const HAS_MIN: bool = true;

struct Group {
    words: vec4u,
    high: u32,
    scale_and_min: vec2f,
}

fn load_group(panel: u32, lane: u32, group: u32, groups: u32) -> Group {
    let panel_group = panel * groups + group;
    let base = panel_group * 128u + lane;
    return Group(codes[panel_group * 64u + lane], side[base + 64u], unpack2x16float(side[base]));
}

fn group_values(g: Group, i: u32) -> vec4f {
    let fifth = (vec4u(g.high) >> (vec4u(0u, 8u, 16u, 24u) + vec4u(i))) & vec4u(1u);
    let code = ((g.words >> vec4u(4u * i)) & vec4u(15u)) | (fifth << vec4u(4u));
    return vec4f(code);
}

fn group_scale(g: Group) -> f32 {
    return g.scale_and_min.x;
}

fn group_min(g: Group) -> f32 {
    return g.scale_and_min.y;
}
