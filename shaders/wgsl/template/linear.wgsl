// out[t, n] = sum over k of x[t, k] * w[n, k] + bias[n], for one matrix, or one piece of its rows.
// x [tokens, in_features]; codes, side: panels of 64 rows in one of format/; bias [rows]; out [tokens, out_stride] at column
// out_column. A lane owns one row of the matrix and one token.
// A group of 32 elements is summed as codes, then scaled: sum += scale * (codes . x) + min * sum(x), in f32, in order.
// With NORM a row of x is multiplied as rms_norm.wgsl would leave it. With ADD the sums are added to out.
// With GATED the matrix is two of `rows` rows, whole panels, one behind the other: out = act(x . gate) * (x . up).
// Tolerance 2e-6 rms (order of the sum). in_features is a multiple of 32.
//
// Where to go from here: several rows (ROWS) and tokens (TOKENS) per lane, so that a loaded value serves several sums;
// lanes that share a row's groups, merged through workgroup memory. LANES * ROWS divides 64, TOKEN_LANES * TOKENS too.
//!use format/q4_1.wgsl as FORMAT
//!use load/narrow.wgsl
//!use shared/rms.wgsl
//!use shared/activation.wgsl
//!targets spirv msl hlsl glsl
struct Params {
    // Groups of 32 in a row.
    groups: u32,
    rows: u32,
    out_stride: u32,
    out_column: u32,
    has_bias: u32,
    // Blocks of LANES rows that a workgroup takes one after the other: of a norm, for which it finds the factor first.
    blocks: u32,
    eps: f32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4f>;
@group(0) @binding(2) var<storage, read> codes: Codes;
@group(0) @binding(3) var<storage, read> side: Sides;
@group(0) @binding(4) var<storage, read> bias: array<f32>;
@group(0) @binding(5) var<storage, read> norm: array<vec4f>;
@group(0) @binding(6) var<storage, read_write> out: array<f32>;

// The grid follows these: fixed here, the tuning table's with `//!set`.
const ROWS: u32 = 1u;
const TOKENS: u32 = 1u;
const TOKEN_LANES: u32 = 1u;
const LANES: u32 = 64u;
// Given by the model.
const NORM: bool = false; //!set whether x is normed first
const GATED: bool = false; //!set whether the rows are gates and ups
const ADD: bool = false; //!set whether the sums are added to out

// What the token's row is multiplied by, with the weights of the norm.
fn norm_factor(token: u32) -> f32 {
    var squares = 0.0;
    for (var i = 0u; i < params.groups * 8u; i++) {
        squares = add_squares(x[token * params.groups * 8u + i], squares);
    }
    return rms_factor(squares, 32u * params.groups, params.eps);
}

// One row of the matrix times one token.
fn row_sum(row: u32, token: u32, factor: f32) -> f32 {
    var sum = 0.0;
    for (var g = 0u; g < params.groups; g++) {
        var group = load_group(row / 64u, row % 64u, g, params.groups);
        var products = 0.0;
        var x_sum = 0.0;
        for (var i = 0u; i < 8u; i++) {
            var value = x[(token * params.groups + g) * 8u + i];
            if NORM {
                value *= factor * norm[g * 8u + i];
            }
            products += dot(group_values(&group, i)[0], value);
            if HAS_MIN {
                x_sum += (value.x + value.y) + (value.z + value.w);
            }
        }
        if HAS_SCALE {
            sum = fma(group_scale(&group, 0u), products, sum);
        } else {
            sum += products;
        }
        if HAS_MIN {
            sum = fma(group_min(&group, 0u), x_sum, sum);
        }
    }
    return sum;
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
    let token = workgroup.y;
    var factor = 1.0;
    if NORM {
        factor = norm_factor(token);
    }
    for (var block = workgroup.x * params.blocks; block < (workgroup.x + 1u) * params.blocks; block++) {
        let row = block * LANES + lane;
        // The last panel is padded with rows of zeros, which are nobody's.
        if row >= params.rows {
            return;
        }
        var sum = row_sum(row, token, factor);
        if params.has_bias != 0u {
            sum += bias[row];
        }
        if GATED {
            // The ups lie behind the gates; neither has a bias.
            sum = gated(sum, row_sum(row + params.rows, token, factor));
        }
        let at = token * params.out_stride + params.out_column + row;
        if ADD {
            sum += out[at];
        }
        out[at] = sum;
    }
}
