// Four consecutive elements of a plane of 8-bit integers, four to a word, low byte first, and the scale of their entry.
alias Elements = array<u32>;

fn wide(word: u32) -> vec4f {
    return vec4f((vec4i(i32(word)) << vec4u(24u, 16u, 8u, 0u)) >> vec4u(24u));
}

fn load_key(quad: u32) -> vec4f {
    return wide(keys[quad]);
}

fn load_value(quad: u32) -> vec4f {
    return wide(values[quad]);
}

fn key_scale(entry: u32) -> f32 {
    return key_scales[entry];
}

fn value_scale(entry: u32) -> f32 {
    return value_scales[entry];
}
