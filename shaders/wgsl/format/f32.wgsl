// F32: value = the stored float.
//
// codes: 8 vec4u per group; vector i is elements 4i..4i+4.
// side:  not read.
// Limits: loads in group_values, so a Group is only an address.

const HAS_SCALE: bool = false;
const HAS_MIN: bool = false;

struct Group {
    base: u32,
}

fn load_group(panel: u32, lane: u32, group: u32, groups: u32) -> Group {
    return Group((panel * groups + group) * 512u + lane);
}

fn group_values(g: Group, i: u32) -> vec4f {
    return bitcast<vec4f>(codes[g.base + i * 64u]);
}

fn group_scale(g: Group) -> f32 {
    return 1.0;
}

fn group_min(g: Group) -> f32 {
    return 0.0;
}
