// Q4_0: value = (code - 8) * scale, codes 0..=15.
//
// codes: 1 vec4u per group; element 4i + c is bits 4i..4i+4 of word c.
// side:  1 word per 2 groups: scale f16 of the even group | of the odd group << 16.
// Limits: a device may read f16 subnormals as 0.

const HAS_SCALE: bool = true;
const HAS_MIN: bool = false;

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
        values[r] = vec4f(((*g).words[r] >> vec4u(4u * i)) & vec4u(15u)) - vec4f(8.0);
    }
    return values;
}

fn group_scale(g: ptr<function, Group>, r: u32) -> f32 {
    return (*g).scale[r];
}

fn group_min(g: ptr<function, Group>, r: u32) -> f32 {
    return 0.0;
}
