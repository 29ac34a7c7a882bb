// Four consecutive elements of a plane of f32.
fn store_key(quad: u32, x: vec4f) {
    let words = bitcast<vec4u>(x);
    keys[2u * quad] = words.xy;
    keys[2u * quad + 1u] = words.zw;
}

fn store_value(quad: u32, x: vec4f) {
    let words = bitcast<vec4u>(x);
    values[2u * quad] = words.xy;
    values[2u * quad + 1u] = words.zw;
}
