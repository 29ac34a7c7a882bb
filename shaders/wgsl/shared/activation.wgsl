// What becomes of a gate and an up. 0, silu: gate / (1 + e^-gate) * up. 1, gelu by tanh: the same with the sigmoid of 2 y,
// y = sqrt(2 / pi) (gate + 0.044715 gate^3). 2, gpt-oss: gates up to 7, ups within 7 of 0; gate / (1 + e^(-1.702 gate)) * (up + 1).
// The exponential is within 2 units in the last place.
//!use shared/exp.wgsl
const ACTIVATION: u32 = 0u; //!set the gate's nonlinearity: 0 silu, 1 gelu, 2 clamped swiglu

fn gated(gate: f32, up: f32) -> f32 {
    if ACTIVATION == 2u {
        let low = min(gate, 7.0);
        return low / (1.0 + exp_f32(-1.702 * low)) * (clamp(up, -7.0, 7.0) + 1.0);
    }
    if ACTIVATION == 1u {
        return gate / (1.0 + exp_f32(-1.5957691 * fma(gate * gate * gate, 0.044715, gate))) * up;
    }
    return gate / (1.0 + exp_f32(-gate)) * up;
}
