// IQ4_NL: value = VALUES[code] * scale, codes 0..=15.
//
// codes: 1 vec4u per group; element 4i + c is bits 4i..4i+4 of word c.
// side:  1 word per 2 groups: scale f16 of the even group | of the odd group << 16.
// Limits: a device may read f16 subnormals as 0.
//!use shared/nibble_table.wgsl

const HAS_SCALE: bool = true;
const HAS_MIN: bool = false;
// -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113
const VALUES = vec4u(0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u);

struct Group {
    words: array<vec4u, ROWS>,
    scale: array<f32, ROWS>,
}

fn load_group(panel: u32, first: u32, group: u32, groups: u32) -> Group {
    let at = (panel * groups + group) * 64u + first;
    let scales = load_side((panel * ((groups + 1u) >> 1u) + (group >> 1u)) * 64u + first);
    var g: Group;
    g.words = load_codes(at);
    for (var r = 0u; r < ROWS; r++) {
        g.scale[r] = unpack2x16float(scales[r] >> (16u * (group & 1u))).x;
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
