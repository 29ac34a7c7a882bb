// Q4_1: value = code * scale + minimum, codes 0..=15.
//
// codes: 1 vec4u per group; element 4i + c is bits 4i..4i+4 of word c.
// side:  1 word per group: scale f16 | minimum f16 << 16.
// Limits: a device may read f16 subnormals as 0.

const HAS_SCALE: bool = true;
const HAS_MIN: bool = true;

struct Group {
    words: vec4u,
    scale_and_min: vec2f,
}

fn load_group(panel: u32, lane: u32, group: u32, groups: u32) -> Group {
    let at = (panel * groups + group) * 64u + lane;
    return Group(codes[at], unpack2x16float(side[at]));
}

fn group_values(g: Group, i: u32) -> vec4f {
    return vec4f((g.words >> vec4u(4u * i)) & vec4u(15u));
}

fn group_scale(g: Group) -> f32 {
    return g.scale_and_min.x;
}

fn group_min(g: Group) -> f32 {
    return g.scale_and_min.y;
}
