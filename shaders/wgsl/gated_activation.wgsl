// out = act(x[:, :n]) * x[:, n:], for each group of 2 n columns of x.
// x [tokens, groups * 2 n]; out [tokens, groups * n]; n a multiple of 4. A lane owns four elements of out.
// Tolerance 2e-6 rms (the exponential is within 2 units in the last place).
//!use shared/activation.wgsl
//!targets spirv msl hlsl glsl
struct Params { out_quads: u32, group_quads: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4f>;
@group(0) @binding(2) var<storage, read_write> out: array<vec4f>;

const LANES: u32 = 32u; //!set lanes per workgroup, along the width

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3u) {
    if id.x >= params.out_quads {
        return;
    }
    let at = 2u * id.y * params.out_quads + id.x + (id.x / params.group_quads) * params.group_quads;
    let gate = x[at];
    let up = x[at + params.group_quads];
    out[id.y * params.out_quads + id.x] =
        vec4f(gated(gate.x, up.x), gated(gate.y, up.y), gated(gate.z, up.z), gated(gate.w, up.w));
}
