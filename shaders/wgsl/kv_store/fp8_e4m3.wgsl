// Four consecutive elements of a plane of 8-bit floats (1 + 4 + 3 bits, bias 7), four to a word, low byte first, so that a lane
// writes whole words. Rounded to nearest, ties to even; beyond 448 they become 448, what is not finite becomes NaN (0x7f).
alias Elements = array<u32>;

fn eight_bits(x: vec4f) -> u32 {
    let bits = bitcast<vec4u>(x);
    let magnitudes = bits & vec4u(0x7fffffffu);
    // Rebias the exponent by 127 - 7 and round away 20 bits; a carry moves into the exponent.
    let rebiased = magnitudes - vec4u(0x3c000000u);
    var codes = min((rebiased + vec4u(0x7ffffu) + ((rebiased >> vec4u(20u)) & vec4u(1u))) >> vec4u(20u), vec4u(0x7eu));
    // Below 2^-6: the sum's unit in the last place is 2^-9, the smallest subnormal.
    let subnormal = bitcast<vec4u>(bitcast<vec4f>(magnitudes) + vec4f(16384.0)) - vec4u(0x46800000u);
    codes = select(codes, subnormal, magnitudes < vec4u(0x3c800000u));
    codes = select(codes, vec4u(0x7fu), magnitudes >= vec4u(0x7f800000u));
    codes |= (bits >> vec4u(24u)) & vec4u(0x80u);
    return codes.x | (codes.y << 8u) | (codes.z << 16u) | (codes.w << 24u);
}

fn store_key(quad: u32, x: vec4f, scale: vec2f) {
    keys[quad] = eight_bits(x);
}

fn store_value(quad: u32, x: vec4f, scale: vec2f) {
    values[quad] = eight_bits(x);
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
