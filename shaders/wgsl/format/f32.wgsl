// F32: value = the stored float.
//
// codes: 8 vec4u per group; vector i is elements 4i..4i+4.
// side:  not read.
// Limits: loads in group_values, so that a Group is only an address.

const HAS_SCALE: bool = false;
const HAS_MIN: bool = false;

struct Group {
    base: u32,
}

fn load_group(panel: u32, first: u32, group: u32, groups: u32) -> Group {
    return Group((panel * groups + group) * 512u + first);
}

fn group_values(g: ptr<function, Group>, i: u32) -> array<vec4f, ROWS> {
    let words = load_codes((*g).base + i * 64u);
    var values: array<vec4f, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        values[r] = bitcast<vec4f>(words[r]);
    }
    return values;
}

fn group_scale(g: ptr<function, Group>, r: u32) -> f32 {
    return 1.0;
}

fn group_min(g: ptr<function, Group>, r: u32) -> f32 {
    return 0.0;
}
