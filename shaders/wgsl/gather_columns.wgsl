// out[t, k] = x[t, order[k]]. x [rows, width]; order [width], whole numbers below width in f32; out [rows, width].
// A lane owns one element. Exact (bits are copied).
//!targets spirv msl hlsl glsl
struct Params { width: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<u32>;
@group(0) @binding(2) var<storage, read> order: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<u32>;

const LANES: u32 = 32u; //!set lanes per workgroup, along the width

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3u) {
    if id.x < params.width {
        out[id.y * params.width + id.x] = x[id.y * params.width + u32(order[id.x])];
    }
}
