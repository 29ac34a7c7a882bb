// flags[t] |= 1 where row t of x holds a NaN or an infinity.
// x [tokens, width], width a multiple of 4; flags [tokens]. A workgroup owns a row, a lane every LANES-th four elements.
// By the bits: a compiler may assume that floats are finite, and then a comparison says nothing. Exact.
//!targets spirv msl hlsl glsl
struct Params { width_quads: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4u>;
@group(0) @binding(2) var<storage, read_write> flags: array<atomic<u32>>;

const LANES: u32 = 8u; //!set lanes per row

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
    let exponent = vec4u(0x7f800000u);
    var bad = false;
    for (var i = lane; i < params.width_quads; i += LANES) {
        bad = bad || any((x[workgroup.x * params.width_quads + i] & exponent) == exponent);
    }
    if bad {
        atomicOr(&flags[workgroup.x], 1u);
    }
}
