// Q8_0: value = code * scale, codes -128..=127.
//
// codes: 2 vec4u per group; element 4i + c is byte i % 4 of word c of vector i / 4, signed.
// side:  1 word per 2 groups: scale f16 of the even group | of the odd group << 16.
// Limits: a device may read f16 subnormals as 0.

const HAS_SCALE: bool = true;
const HAS_MIN: bool = false;

struct Group {
    words: array<vec4u, ROWS>,
    more_words: array<vec4u, ROWS>,
    scale: array<f32, ROWS>,
}

fn load_group(panel: u32, first: u32, group: u32, groups: u32) -> Group {
    let at = (panel * groups + group) * 128u + first;
    let scales = load_side((panel * ((groups + 1u) >> 1u) + (group >> 1u)) * 64u + first);
    var g: Group;
    g.words = load_codes(at);
    g.more_words = load_codes(at + 64u);
    for (var r = 0u; r < ROWS; r++) {
        g.scale[r] = unpack2x16float(scales[r] >> (16u * (group & 1u))).x;
    }
    return g;
}

fn group_values(g: ptr<function, Group>, i: u32) -> array<vec4f, ROWS> {
    var values: array<vec4f, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        let words = select((*g).words[r], (*g).more_words[r], i >= 4u);
        values[r] = vec4f(bitcast<vec4i>(words << vec4u(24u - 8u * (i & 3u))) >> vec4u(24u));
    }
    return values;
}

fn group_scale(g: ptr<function, Group>, r: u32) -> f32 {
    return (*g).scale[r];
}

fn group_min(g: ptr<function, Group>, r: u32) -> f32 {
    return 0.0;
}
