// x = cap * tanh(x / cap), in place.
// x [rows, width]; width a multiple of 4. A lane owns four elements.
// Tolerance 2e-6 rms (the hyperbolic tangent is within 4 units in the last place). Source: Gemma Team 2024, Gemma 2.
//!use shared/tanh.wgsl
//!targets spirv msl hlsl glsl
struct Params { width_quads: u32, cap: f32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> x: array<vec4f>;

const LANES: u32 = 32u; //!set lanes per workgroup, along the width

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3u) {
    if id.x >= params.width_quads {
        return;
    }
    let at = id.y * params.width_quads + id.x;
    let y = x[at] / params.cap;
    x[at] = params.cap * vec4f(tanh_f32(y.x), tanh_f32(y.y), tanh_f32(y.z), tanh_f32(y.w));
}
