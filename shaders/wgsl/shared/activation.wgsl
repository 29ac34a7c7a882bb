// The nonlinearity of a gate. 0, silu: x / (1 + e^-x). 1, gelu by tanh: x (1 + tanh(y)) / 2 = x / (1 + e^-2y) with
// y = sqrt(2 / pi) (x + 0.044715 x^3). The exponential is within 2 units in the last place.
//!use shared/exp.wgsl
const ACTIVATION: u32 = 0u; //!set the gate's nonlinearity: 0 silu, 1 gelu

fn activate(x: f32) -> f32 {
    if ACTIVATION == 1u {
        return x / (1.0 + exp_f32(-1.5957691 * fma(x * x * x, 0.044715, x)));
    }
    return x / (1.0 + exp_f32(-x));
}
