// Q4_0: value = (code - 8) * scale, codes 0..=15.
//
// codes: 1 vec4u per group; element 4i + c is bits 4i..4i+4 of word c.
// side:  1 word per 2 groups: scale f16 of the even group | of the odd group << 16.
// Limits: a device may read f16 subnormals as 0.

const HAS_SCALE: bool = true;
const HAS_MIN: bool = false;

struct Group {
    words: vec4u,
    scale: f32,
}

fn load_group(panel: u32, lane: u32, group: u32, groups: u32) -> Group {
    let at = (panel * groups + group) * 64u + lane;
    let scales = side[(panel * ((groups + 1u) >> 1u) + (group >> 1u)) * 64u + lane];
    return Group(codes[at], unpack2x16float(scales >> (16u * (group & 1u))).x);
}

fn group_values(g: Group, i: u32) -> vec4f {
    return vec4f((g.words >> vec4u(4u * i)) & vec4u(15u)) - vec4f(8.0);
}

fn group_scale(g: Group) -> f32 {
    return g.scale;
}

fn group_min(g: Group) -> f32 {
    return 0.0;
}
