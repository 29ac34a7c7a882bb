// x[t] *= 1 + beta * ln(1 + floor(positions[t] / period)), in place.
// x [tokens, stride], columns from offset on; positions [tokens]; all multiples of 4. A lane owns four elements of a token.
// Tolerance 2e-6 rms (the logarithm is within 2e-7 of itself). Source: Llama 4's and Ministral 3's configurations.
//!use shared/log.wgsl
//!targets spirv msl hlsl glsl
struct Params { stride_quads: u32, offset_quads: u32, width_quads: u32, period: u32, beta: f32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> x: array<vec4f>;
@group(0) @binding(2) var<storage, read> positions: array<u32>;

const LANES: u32 = 32u; //!set lanes per workgroup, along the columns

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3u) {
    if id.x >= params.width_quads {
        return;
    }
    let periods = f32(positions[id.y] / params.period);
    x[id.y * params.stride_quads + params.offset_quads + id.x] *= 1.0 + params.beta * log_f32(vec4f(1.0 + periods)).x;
}
