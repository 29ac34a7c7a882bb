// Four consecutive elements of a plane of f32.
alias Elements = array<vec2u>;

fn store_key(quad: u32, x: vec4f, scale: vec2f) {
    let words = bitcast<vec4u>(x);
    keys[2u * quad] = words.xy;
    keys[2u * quad + 1u] = words.zw;
}

fn store_value(quad: u32, x: vec4f, scale: vec2f) {
    let words = bitcast<vec4u>(x);
    values[2u * quad] = words.xy;
    values[2u * quad + 1u] = words.zw;
}

// Elements that have no scale.
fn share_largest(own: vec2u, lane: u32, head_lanes: u32) -> vec2u {
    return own;
}

fn scale_of(largest: u32) -> vec2f {
    return vec2f(1.0);
}

fn store_key_scale(entry: u32, scale: f32) {
}

fn store_value_scale(entry: u32, scale: f32) {
}
