// out = act(x[:, :n]) * x[:, n:].
// x [tokens, 2 n]; out [tokens, n]; n a multiple of 4. A lane owns four elements of out.
// Tolerance 2e-6 rms (the exponential is within 2 units in the last place).
//!use shared/activation.wgsl
//!targets spirv msl hlsl glsl
struct Params { out_quads: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4f>;
@group(0) @binding(2) var<storage, read_write> out: array<vec4f>;

const LANES: u32 = 32u; //!set lanes per workgroup, along the width

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3u) {
    if id.x >= params.out_quads {
        return;
    }
    let gate = x[2u * id.y * params.out_quads + id.x];
    let up = x[(2u * id.y + 1u) * params.out_quads + id.x];
    out[id.y * params.out_quads + id.x] = vec4f(activate(gate.x), activate(gate.y), activate(gate.z), activate(gate.w)) * up;
}
