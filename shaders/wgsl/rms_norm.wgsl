// out = x / sqrt(mean(x^2) + eps) * weight, per row; with ADD first residual += x, and the norm is of the residual.
// x, residual, out [rows, width]; weight [width]. residual is touched with ADD only.
// A workgroup owns a row, a lane every LANES-th four elements. f32 sums; tolerance 2e-6 rms (order of the sum).
// width is a multiple of 4. Method: Zhang and Sennrich 2019, Root Mean Square Layer Normalization.
//!use reduce/workgroup.wgsl as REDUCE
//!targets spirv msl hlsl glsl
struct Params { width_quads: u32, eps: f32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4f>;
@group(0) @binding(2) var<storage, read_write> residual: array<vec4f>;
@group(0) @binding(3) var<storage, read> weight: array<vec4f>;
@group(0) @binding(4) var<storage, read_write> out: array<vec4f>;

const ADD: bool = false; //!set whether x is added to the residual first
const LANES: u32 = 8u; //!set lanes per row, a power of two

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
    let first = workgroup.x * params.width_quads;
    var squares = 0.0;
    for (var i = lane; i < params.width_quads; i += LANES) {
        var value = x[first + i];
        if ADD {
            value += residual[first + i];
            residual[first + i] = value;
        }
        squares += dot(value, value);
    }
    let mean = reduce_sum(squares, lane) / f32(4u * params.width_quads);
    let factor = 1.0 / sqrt(mean + params.eps);
    for (var i = lane; i < params.width_quads; i += LANES) {
        var value = vec4f();
        if ADD {
            value = residual[first + i];
        } else {
            value = x[first + i];
        }
        out[first + i] = value * factor * weight[i];
    }
}
