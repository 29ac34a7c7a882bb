// Four consecutive elements of a plane of bfloat16, the upper halves of f32, two to a word, low half first. Rounded to nearest,
// ties to even.
alias Elements = array<vec2u>;

fn half_words(x: vec4f) -> vec2u {
    let bits = bitcast<vec4u>(x);
    var halves = (bits + vec4u(0x7fffu) + ((bits >> vec4u(16u)) & vec4u(1u))) >> vec4u(16u);
    let is_nan = (bits & vec4u(0x7fffffffu)) > vec4u(0x7f800000u);
    halves = select(halves, (bits >> vec4u(16u)) | vec4u(0x40u), is_nan);
    return vec2u(halves.x | (halves.y << 16u), halves.z | (halves.w << 16u));
}

fn store_key(quad: u32, x: vec4f, scale: vec2f) {
    keys[quad] = half_words(x);
}

fn store_value(quad: u32, x: vec4f, scale: vec2f) {
    values[quad] = half_words(x);
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
