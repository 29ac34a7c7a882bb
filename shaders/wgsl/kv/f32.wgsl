// Four consecutive elements of a plane of f32.
fn load_key(quad: u32) -> vec4f {
    return bitcast<vec4f>(vec4u(keys[2u * quad], keys[2u * quad + 1u]));
}

fn load_value(quad: u32) -> vec4f {
    return bitcast<vec4f>(vec4u(values[2u * quad], values[2u * quad + 1u]));
}
