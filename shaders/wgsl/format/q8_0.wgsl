// Q8_0: value = code * scale, codes -128..=127.
//
// codes: 2 vec4u per group; element 4i + c is byte i % 4 of word c of vector i / 4, signed.
// side:  1 word per 2 groups: scale f16 of the even group | of the odd group << 16.
// Limits: a device may read f16 subnormals as 0.

const HAS_SCALE: bool = true;
const HAS_MIN: bool = false;

struct Group {
    first: vec4u,
    second: vec4u,
    scale: f32,
}

fn load_group(panel: u32, lane: u32, group: u32, groups: u32) -> Group {
    let at = (panel * groups + group) * 128u + lane;
    let scales = side[(panel * ((groups + 1u) >> 1u) + (group >> 1u)) * 64u + lane];
    return Group(codes[at], codes[at + 64u], unpack2x16float(scales >> (16u * (group & 1u))).x);
}

fn group_values(g: Group, i: u32) -> vec4f {
    let words = select(g.first, g.second, i >= 4u);
    return vec4f(bitcast<vec4i>(words << vec4u(24u - 8u * (i & 3u))) >> vec4u(24u));
}

fn group_scale(g: Group) -> f32 {
    return g.scale;
}

fn group_min(g: Group) -> f32 {
    return 0.0;
}
