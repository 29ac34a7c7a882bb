// MXFP4: value = VALUES[code] * 2^(e - 128), codes 0..=15, e 0..=255: E2M1 doubled, times half of the scale.
//
// codes: 1 vec4u per group; element 4i + c is bits 4i..4i+4 of word c.
// side:  1 word per 4 groups: e, a byte each, that of the first group lowest.
// Limits: a device may take the scales of e < 2, subnormal f32, for 0.
//!use shared/nibble_table.wgsl

const HAS_SCALE: bool = true;
const HAS_MIN: bool = false;
// 0 1 2 3 4 6 8 12, then the same below 0
const VALUES = vec4u(0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu);

struct Group {
    words: array<vec4u, ROWS>,
    scale: array<f32, ROWS>,
}

fn load_group(panel: u32, first: u32, group: u32, groups: u32) -> Group {
    let at = (panel * groups + group) * 64u + first;
    let exponents = load_side((panel * ((groups + 3u) >> 2u) + (group >> 2u)) * 64u + first);
    var g: Group;
    g.words = load_codes(at);
    for (var r = 0u; r < ROWS; r++) {
        let e = (exponents[r] >> (8u * (group & 3u))) & 255u;
        g.scale[r] = bitcast<f32>(select((e - 1u) << 23u, 0x00200000u << (e & 1u), e < 2u));
    }
    return g;
}

fn group_values(g: ptr<function, Group>, i: u32) -> array<vec4f, ROWS> {
    var values: array<vec4f, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        values[r] = look_up(VALUES, ((*g).words[r] >> vec4u(4u * i)) & vec4u(15u));
    }
    return values;
}

fn group_scale(g: ptr<function, Group>, r: u32) -> f32 {
    return (*g).scale[r];
}

fn group_min(g: ptr<function, Group>, r: u32) -> f32 {
    return 0.0;
}
