// BF16: value = the stored float.
//
// codes: 4 vec4u per group; elements 4i..4i+4 are words 2(i % 2) and 2(i % 2) + 1 of vector i / 2, low half first.
// side:  not read.
// Limits: loads in group_values, so a Group is only an address.

const HAS_SCALE: bool = false;
const HAS_MIN: bool = false;

struct Group {
    base: u32,
}

fn load_group(panel: u32, lane: u32, group: u32, groups: u32) -> Group {
    return Group((panel * groups + group) * 256u + lane);
}

fn group_values(g: Group, i: u32) -> vec4f {
    let words = codes[g.base + (i >> 1u) * 64u];
    let pair = select(words.xy, words.zw, (i & 1u) == 1u);
    return bitcast<vec4f>(vec4u(pair.x << 16u, pair.x & 0xffff0000u, pair.y << 16u, pair.y & 0xffff0000u));
}

fn group_scale(g: Group) -> f32 {
    return 1.0;
}

fn group_min(g: Group) -> f32 {
    return 0.0;
}
