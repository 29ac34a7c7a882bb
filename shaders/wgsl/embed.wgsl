// out[t] = table[token_ids[t]] * scale
// token_ids [tokens]; codes, side: rows first_row .. first_row + num_rows of a table in one of format/; out [tokens, width].
// A lane owns four elements of a token; a token whose row lies in another piece of the table is left alone.
// Exact for float formats; code * scale + min may be fused otherwise: tolerance 2e-6 rms. width is a multiple of 4.
//!use format/q4_1.wgsl as FORMAT
//!use load/narrow.wgsl
//!targets spirv msl hlsl glsl
struct Params { width_quads: u32, groups: u32, first_row: u32, num_rows: u32, scale: f32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> token_ids: array<u32>;
@group(0) @binding(2) var<storage, read> codes: Codes;
@group(0) @binding(3) var<storage, read> side: Sides;
@group(0) @binding(4) var<storage, read_write> out: array<vec4f>;

const LANES: u32 = 32u; //!set lanes per workgroup, along the width
const ROWS: u32 = 1u; // rows per lane, for load/

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3u) {
    let quad = id.x;
    let row = token_ids[id.y] - params.first_row;
    // An id before the piece wraps around to a large number.
    if quad >= params.width_quads || row >= params.num_rows {
        return;
    }
    var group = load_group(row / 64u, row % 64u, quad / 8u, params.groups);
    var value = group_values(&group, quad % 8u)[0];
    if HAS_SCALE {
        value = fma(value, vec4f(group_scale(&group, 0u)), vec4f(group_min(&group, 0u)));
    }
    out[id.y * params.width_quads + quad] = value * params.scale;
}
