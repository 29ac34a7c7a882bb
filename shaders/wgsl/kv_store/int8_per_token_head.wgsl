// Four consecutive elements of a plane of 8-bit integers, four to a word, low byte first, so that a lane writes whole words, and
// one scale per entry: the largest magnitude of the token's head divided by 127. Codes are x * (127 / largest), rounded to
// nearest, ties to even. The divisions are written out: those of drivers differ, and cached bytes must be the same everywhere.
// All lanes of a head are neighbours in one workgroup: LANES is a multiple of `head_lanes`.
alias Elements = array<u32>;

var<workgroup> largest_of_lanes: array<vec2u, LANES>;

// The largest magnitudes (of K and of V, as bits) of the lane's head.
fn share_largest(own: vec2u, lane: u32, head_lanes: u32) -> vec2u {
    largest_of_lanes[lane] = own;
    workgroupBarrier();
    let first = lane - lane % head_lanes;
    var largest = own;
    for (var i = 0u; i < head_lanes; i++) {
        largest = max(largest, largest_of_lanes[first + i]);
    }
    return largest;
}

// a / b, of bits of normal positive floats with a normal quotient, rounded to nearest: long division of the fractions.
fn quotient(a: u32, b: u32) -> f32 {
    let divisor = (b & 0x7fffffu) | 0x800000u;
    var rest = (a & 0x7fffffu) | 0x800000u;
    var exponent = 127u + (a >> 23u) - (b >> 23u);
    if rest < divisor {
        rest <<= 1u;
        exponent -= 1u;
    }
    var fraction = 0u;
    for (var i = 0u; i < 24u; i++) {
        let digit = select(0u, 1u, rest >= divisor);
        rest = (rest - digit * divisor) << 1u;
        fraction = (fraction << 1u) | digit;
    }
    if rest > divisor || (rest == divisor && (fraction & 1u) == 1u) {
        fraction += 1u;
    }
    // The sum carries into the exponent where rounding gives the next power of two.
    return bitcast<f32>((exponent << 23u) + (fraction - 0x800000u));
}

// The scale and its inverse; 0 and 0 below 2^-100, NaN and 0 where a value is not finite.
fn scale_of(largest: u32) -> vec2f {
    if largest >= 0x7f800000u {
        return vec2f(bitcast<f32>(largest | 0x7fc00000u), 0.0);
    }
    if largest < 0x0d800000u {
        return vec2f();
    }
    return vec2f(quotient(largest, 0x42fe0000u), quotient(0x42fe0000u, largest));
}

fn eight_bits(x: vec4f, inverse: f32) -> u32 {
    // Not by the product with 0, which a NaN or an infinity survives.
    let codes = select(vec4u(), bitcast<vec4u>(vec4i(round(x * inverse))) & vec4u(0xffu), vec4<bool>(inverse > 0.0));
    return codes.x | (codes.y << 8u) | (codes.z << 16u) | (codes.w << 24u);
}

fn store_key(quad: u32, x: vec4f, scale: vec2f) {
    keys[quad] = eight_bits(x, scale.y);
}

fn store_value(quad: u32, x: vec4f, scale: vec2f) {
    values[quad] = eight_bits(x, scale.y);
}

fn store_key_scale(entry: u32, scale: f32) {
    key_scales[entry] = scale;
}

fn store_value_scale(entry: u32, scale: f32) {
    value_scales[entry] = scale;
}
