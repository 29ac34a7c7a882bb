// residual += x. Both [rows, width], width a multiple of 4. A lane owns four elements. Exact.
//!targets spirv msl hlsl glsl
struct Params { width_quads: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4f>;
@group(0) @binding(2) var<storage, read_write> residual: array<vec4f>;

const LANES: u32 = 32u; //!set lanes per workgroup, along the width

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3u) {
    if id.x < params.width_quads {
        residual[id.y * params.width_quads + id.x] += x[id.y * params.width_quads + id.x];
    }
}
