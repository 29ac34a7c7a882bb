// FP8_E4M3: value = E4M3 of the code * scale; no code is a NaN.
//
// codes: 2 vec4u per group; element 4i + c is byte i % 4 of word c of vector i / 4.
// side:  1 word per group: scale f32.
// Normal values move their seven bits to the top of an f32's mantissa and exponent and add 120 to the exponent; a subnormal is its
// mantissa times 2^-9, because a device may take subnormal f32 for 0.

const HAS_SCALE: bool = true;
const HAS_MIN: bool = false;

struct Group {
    words: array<vec4u, ROWS>,
    more_words: array<vec4u, ROWS>,
    scale: array<f32, ROWS>,
}

fn load_group(panel: u32, first: u32, group: u32, groups: u32) -> Group {
    let at = (panel * groups + group) * 128u + first;
    let scales = load_side((panel * groups + group) * 64u + first);
    var g: Group;
    g.words = load_codes(at);
    g.more_words = load_codes(at + 64u);
    for (var r = 0u; r < ROWS; r++) {
        g.scale[r] = bitcast<f32>(scales[r]);
    }
    return g;
}

fn group_values(g: ptr<function, Group>, i: u32) -> array<vec4f, ROWS> {
    var values: array<vec4f, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        let words = select((*g).words[r], (*g).more_words[r], i >= 4u);
        let code = words >> vec4u(8u * (i & 3u));
        let magnitude = code & vec4u(127u);
        let normal = bitcast<vec4f>((magnitude << vec4u(20u)) + vec4u(120u << 23u));
        let value = select(vec4f(magnitude) * 0.001953125, normal, magnitude >= vec4u(8u));
        values[r] = select(value, -value, (code & vec4u(128u)) != vec4u());
    }
    return values;
}

fn group_scale(g: ptr<function, Group>, r: u32) -> f32 {
    return (*g).scale[r];
}

fn group_min(g: ptr<function, Group>, r: u32) -> f32 {
    return 0.0;
}
