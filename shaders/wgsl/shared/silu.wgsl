// silu(x) = x / (1 + e^-x), the gate of most models. The exponential is within 2 units in the last place.
//!use shared/exp.wgsl
fn silu(x: f32) -> f32 {
    return x / (1.0 + exp_f32(-x));
}
