// silu(x) = x / (1 + e^-x).
//!use shared/exp.wgsl
fn silu(x: f32) -> f32 {
    return x / (1.0 + exp_f32(-x));
}
