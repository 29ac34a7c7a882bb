// out[i] = x[rows[i]]. x [tokens, width]; rows [logit_rows]; out [logit_rows, width].
// A lane owns one element. Exact (bits are copied).
//!targets spirv msl hlsl glsl
struct Params { width: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<u32>;
@group(0) @binding(2) var<storage, read> rows: array<u32>;
@group(0) @binding(3) var<storage, read_write> out: array<u32>;

const LANES: u32 = 32u; //!set lanes per workgroup, along the width

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3u) {
    if id.x < params.width {
        out[id.y * params.width + id.x] = x[rows[id.y] * params.width + id.x];
    }
}
