// Four consecutive elements of a plane of 8-bit floats (1 + 4 + 3 bits, bias 7, 0x7f is NaN), four to a word, low byte first.
// Exact. Subnormals are integers times 2^-9, not the subnormals of another type: drivers may flush those.
alias Elements = array<u32>;

fn wide(word: u32) -> vec4f {
    let codes = (vec4u(word) >> vec4u(0u, 8u, 16u, 24u)) & vec4u(0xffu);
    let magnitudes = codes & vec4u(0x7fu);
    // Rebias the exponent by 127 - 7.
    var bits = (magnitudes << vec4u(20u)) + vec4u(0x3c000000u);
    bits = select(bits, vec4u(0x7fc00000u), magnitudes == vec4u(0x7fu));
    let values = select(bitcast<vec4f>(bits), vec4f(magnitudes) * 0.001953125, magnitudes < vec4u(8u));
    return select(values, -values, codes > vec4u(0x7fu));
}

fn load_key(quad: u32) -> vec4f {
    return wide(keys[quad]);
}

fn load_value(quad: u32) -> vec4f {
    return wide(values[quad]);
}

// Elements that have no scale.
fn key_scale(entry: u32) -> f32 {
    return 1.0;
}

fn value_scale(entry: u32) -> f32 {
    return 1.0;
}
