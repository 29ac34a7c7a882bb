// Four consecutive elements of a plane of f16, two to a word, low half first.
alias Elements = array<vec2u>;

fn load_key(quad: u32) -> vec4f {
    let words = keys[quad];
    return vec4f(unpack2x16float(words.x), unpack2x16float(words.y));
}

fn load_value(quad: u32) -> vec4f {
    let words = values[quad];
    return vec4f(unpack2x16float(words.x), unpack2x16float(words.y));
}

// Elements that have no scale.
fn key_scale(entry: u32) -> f32 {
    return 1.0;
}

fn value_scale(entry: u32) -> f32 {
    return 1.0;
}
