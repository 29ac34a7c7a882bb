// out[t, j, n] = sum over k of x[t (, j), k] * w[e(t, j), n, k] + bias[e(t, j), n], e(t, j) being route[t, j], or with EACH j.
// x [tokens, in_features], or with per_choice [tokens * top_k, in_features]; route [tokens, 2 top_k]; codes, side: one matrix of
// whole panels of 64 rows per expert from first_expert on, in one of format/; bias [experts, rows]; out [tokens * top_k, out_stride]
// at column out_column. A workgroup owns LANES * ROWS rows of one choice, a lane ROWS of them; a choice whose expert lies in
// another piece of the weights is left alone.
// A group of 32 elements is summed as codes, then scaled, in f32, the groups in order: the same bits whatever is in the batch.
// Tolerance 2e-6 rms (order of the sum). in_features is a multiple of 32. Source: Shazeer et al. 2017.
//!use format/q4_1.wgsl as FORMAT
//!use load/narrow.wgsl
//!use shared/dot4.wgsl
//!targets spirv msl hlsl glsl
struct Params {
    groups: u32,
    rows: u32,
    top_k: u32,
    // 1 where each choice has an input of its own.
    per_choice: u32,
    first_expert: u32,
    num_experts: u32,
    out_stride: u32,
    out_column: u32,
    has_bias: u32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4f>;
@group(0) @binding(2) var<storage, read> route: array<f32>;
@group(0) @binding(3) var<storage, read> codes: Codes;
@group(0) @binding(4) var<storage, read> side: Sides;
@group(0) @binding(5) var<storage, read> bias: array<f32>;
@group(0) @binding(6) var<storage, read_write> out: array<f32>;

const ROWS: u32 = 4u; //!set rows of the matrix per lane
const LANES: u32 = 16u; //!set lanes along the rows
const EACH: bool = false; //!set whether choice j is matrix j; route is not touched

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
    const BLOCKS = 64u / (LANES * ROWS);
    let blocks = ((params.rows + 63u) / 64u) * BLOCKS;
    let token = workgroup.y;
    let choice = workgroup.x / blocks;
    let block = workgroup.x % blocks;
    var chosen = choice;
    if !EACH {
        chosen = u32(route[token * 2u * params.top_k + choice]);
    }
    let expert = chosen - params.first_expert;
    // An expert before the piece wraps around to a large number.
    if expert >= params.num_experts {
        return;
    }
    let at = token * params.top_k + choice;
    let input = select(token, at, params.per_choice != 0u) * params.groups * 8u;
    let panel = expert * ((params.rows + 63u) / 64u) + block / BLOCKS;
    let first = (block % BLOCKS) * (LANES * ROWS);
    var sum: array<f32, ROWS>;
    for (var g = 0u; g < params.groups; g++) {
        var group = load_group(panel, first + row_of(lane, 0u), g, params.groups);
        var products: array<f32, ROWS>;
        var x_sum = 0.0;
        for (var i = 0u; i < 8u; i++) {
            let w = group_values(&group, i);
            let value = x[input + g * 8u + i];
            if HAS_MIN {
                x_sum += (value.x + value.y) + (value.z + value.w);
            }
            for (var r = 0u; r < ROWS; r++) {
                products[r] = dot4(w[r], value, products[r]);
            }
        }
        for (var r = 0u; r < ROWS; r++) {
            if HAS_SCALE {
                sum[r] = fma(group_scale(&group, r), products[r], sum[r]);
            } else {
                sum[r] += products[r];
            }
            if HAS_MIN {
                sum[r] = fma(group_min(&group, r), x_sum, sum[r]);
            }
        }
    }
    for (var r = 0u; r < ROWS; r++) {
        let row = (block / BLOCKS) * 64u + first + row_of(lane, r);
        if row < params.rows {
            var value = sum[r];
            if params.has_bias != 0u {
                value += bias[(params.first_expert + expert) * params.rows + row];
            }
            out[at * params.out_stride + params.out_column + row] = value;
        }
    }
}
