// Four consecutive elements of a plane of f32.
alias Elements = array<vec2u>;

fn load_key(quad: u32) -> vec4f {
    return bitcast<vec4f>(vec4u(keys[2u * quad], keys[2u * quad + 1u]));
}

fn load_value(quad: u32) -> vec4f {
    return bitcast<vec4f>(vec4u(values[2u * quad], values[2u * quad + 1u]));
}

// Elements that have no scale.
fn key_scale(entry: u32) -> f32 {
    return 1.0;
}

fn value_scale(entry: u32) -> f32 {
    return 1.0;
}
