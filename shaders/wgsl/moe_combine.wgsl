// residual[t] += sum over j of weight(t, j) * x[t, j], in the order of j.
// x [tokens, top_k * n]; route [tokens, 2 top_k]: ids, then weights; residual [tokens, n]; n a multiple of 4. A lane owns four
// elements of a token. Tolerance 2e-6 rms (products may be added by fused multiply-adds).
//!targets spirv msl hlsl glsl
struct Params { width_quads: u32, top_k: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4f>;
@group(0) @binding(2) var<storage, read> route: array<f32>;
@group(0) @binding(3) var<storage, read_write> residual: array<vec4f>;

const LANES: u32 = 32u; //!set lanes per workgroup, along the width

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3u) {
    if id.x >= params.width_quads {
        return;
    }
    let at = id.y * params.width_quads + id.x;
    var sum = residual[at];
    for (var j = 0u; j < params.top_k; j++) {
        let weight = route[(2u * id.y + 1u) * params.top_k + j];
        sum += weight * x[(id.y * params.top_k + j) * params.width_quads + id.x];
    }
    residual[at] = sum;
}
