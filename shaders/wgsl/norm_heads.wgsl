// RMS norm of each head of x, in place: x[t, h] = x[t, h] / sqrt(mean(x[t, h]^2) + eps) * weight.
// x [tokens, stride], heads at column offset; weight [head_dim]. A lane owns a head of a token.
// f32 sums; tolerance 2e-6 rms. stride, offset and head_dim are multiples of 4.
//!use shared/rms.wgsl
//!targets spirv msl hlsl glsl
struct Params { stride_quads: u32, offset_quads: u32, heads: u32, head_quads: u32, eps: f32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> x: array<vec4f>;
@group(0) @binding(2) var<storage, read> weight: array<vec4f>;

const LANES: u32 = 8u; //!set lanes per workgroup, along the heads

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3u) {
    if id.x >= params.heads {
        return;
    }
    let first = id.y * params.stride_quads + params.offset_quads + id.x * params.head_quads;
    var squares = 0.0;
    for (var i = 0u; i < params.head_quads; i++) {
        squares = add_squares(x[first + i], squares);
    }
    let factor = rms_factor(squares, 4u * params.head_quads, params.eps);
    for (var i = 0u; i < params.head_quads; i++) {
        x[first + i] = x[first + i] * factor * weight[i];
    }
}
