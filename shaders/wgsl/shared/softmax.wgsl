// Merging softmax sums of two sets of positions (Milakov and Gimelshein 2018, Online normalizer calculation for softmax):
// each set has its largest score m, the sum l of e^(score - m), and the values weighted by the same.
// Everyone who merges does so by these functions, in order of positions, so that every way gives the same bits.
//!use shared/exp.wgsl

// Factors of the first and the second set for their common maximum.
fn merge_factors(first: f32, second: f32) -> vec2f {
    let m = max(first, second);
    return vec2f(exp_f32(first - m), exp_f32(second - m));
}

fn merge_sums(first: f32, second: f32, factors: vec2f) -> f32 {
    return fma(first, factors.x, second * factors.y);
}

fn merge_values(first: vec4f, second: vec4f, factors: vec2f) -> vec4f {
    return fma(first, vec4f(factors.x), second * factors.y);
}
