// INT4: value = (code - zero) * scale, codes 0..=15, zero 0..=16.
//
// codes: 1 vec4u per group; element 4i + c is bits 4i..4i+4 of word c.
// side:  1 word per group: scale f16 | zero f16 << 16.
// Limits: a device may read f16 subnormals as 0.

const HAS_SCALE: bool = true;
const HAS_MIN: bool = false;

struct Group {
    words: array<vec4u, ROWS>,
    scale_and_zero: array<vec2f, ROWS>,
}

fn load_group(panel: u32, first: u32, group: u32, groups: u32) -> Group {
    let at = (panel * groups + group) * 64u + first;
    let side_words = load_side(at);
    var g: Group;
    g.words = load_codes(at);
    for (var r = 0u; r < ROWS; r++) {
        g.scale_and_zero[r] = unpack2x16float(side_words[r]);
    }
    return g;
}

fn group_values(g: ptr<function, Group>, i: u32) -> array<vec4f, ROWS> {
    var values: array<vec4f, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        let code = ((*g).words[r] >> vec4u(4u * i)) & vec4u(15u);
        values[r] = vec4f(code) - vec4f((*g).scale_and_zero[r].y);
    }
    return values;
}

fn group_scale(g: ptr<function, Group>, r: u32) -> f32 {
    return (*g).scale_and_zero[r].x;
}

fn group_min(g: ptr<function, Group>, r: u32) -> f32 {
    return 0.0;
}
