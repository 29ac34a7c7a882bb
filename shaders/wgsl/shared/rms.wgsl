// Root mean square: the same bits in every kernel that norms.
//!use shared/dot4.wgsl

fn add_squares(value: vec4f, sum: f32) -> f32 {
    return dot4(value, value, sum);
}

// What `elements` numbers with this sum of squares are multiplied by.
fn rms_factor(squares: f32, elements: u32, eps: f32) -> f32 {
    return 1.0 / sqrt(squares / f32(elements) + eps);
}
