// out = x / sqrt(mean(x^2) + eps) * weight, per row.
// x, out [rows, width]; weight [width].
// A workgroup owns a row, a lane every LANES-th four elements. f32 sums; tolerance 2e-6 rms (order of the sum).
// width is a multiple of 4. Method: Zhang and Sennrich 2019, Root Mean Square Layer Normalization.
//!use reduce/workgroup.wgsl as REDUCE
//!use shared/rms.wgsl
//!targets spirv msl hlsl glsl
struct Params { width_quads: u32, eps: f32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4f>;
@group(0) @binding(2) var<storage, read> weight: array<vec4f>;
@group(0) @binding(3) var<storage, read_write> out: array<vec4f>;

const LANES: u32 = 8u; //!set lanes per row, a power of two
const REDUCE_LANES: u32 = LANES;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
    let first = workgroup.x * params.width_quads;
    var squares = 0.0;
    for (var i = lane; i < params.width_quads; i += LANES) {
        squares = add_squares(x[first + i], squares);
    }
    let factor = rms_factor(reduce_sum(squares, lane), 4u * params.width_quads, params.eps);
    for (var i = lane; i < params.width_quads; i += LANES) {
        out[first + i] = x[first + i] * factor * weight[i];
    }
}
