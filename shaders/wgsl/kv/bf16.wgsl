// Four consecutive elements of a plane of bfloat16, the upper halves of f32, two to a word, low half first.
alias Elements = array<vec2u>;

fn wide(words: vec2u) -> vec4f {
    return bitcast<vec4f>(vec4u(words.x << 16u, words.x & 0xffff0000u, words.y << 16u, words.y & 0xffff0000u));
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
