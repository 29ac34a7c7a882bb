// Four consecutive elements of a plane of f16, two to a word, low half first. Rounded to nearest, ties to even, by hand:
// what pack2x16float does with a tie or a subnormal is the driver's choice, and cached bytes must be the same everywhere.
alias Elements = array<vec2u>;

fn half_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let magnitude = bits & 0x7fffffffu;
    // Rebias the exponent by 127 - 15 and round away 13 bits.
    var half = (magnitude + 0xc8000fffu + ((magnitude >> 13u) & 1u)) >> 13u;
    // Below 2^-14: the sum's unit in the last place is the smallest subnormal.
    let subnormal = bitcast<u32>(bitcast<f32>(magnitude) + 0.5) - 0x3f000000u;
    half = select(half, subnormal, magnitude < 0x38800000u);
    half = select(half, 0x7c00u, magnitude >= 0x477ff000u);
    half = select(half, 0x7e00u, magnitude > 0x7f800000u);
    return half | ((bits >> 16u) & 0x8000u);
}

fn half_words(x: vec4f) -> vec2u {
    return vec2u(half_bits(x.x) | (half_bits(x.y) << 16u), half_bits(x.z) | (half_bits(x.w) << 16u));
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
