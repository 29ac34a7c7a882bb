// out[t, n] = sum over k of x[t, k] * w[n, k] + bias[n], for one matrix, or one piece of its rows.
// x [tokens, in_features]; codes, side: panels of 64 rows in one of format/; bias [rows]; out [tokens, out_stride] at column
// out_column. One kernel for one token and for many: a lane owns ROWS rows x TOKENS tokens in registers; LANES * ROWS
// divides 64; a workgroup covers blocks of LANES * ROWS rows of TOKEN_LANES * TOKENS tokens.
// A group of 32 elements is summed as codes, then scaled: sum += scale * (codes . x) + min * sum(x), in f32.
// in_features is cut into SPLITS slices, each summed in order, the slices added in order: by SPLITS lanes and workgroup memory
// with SPLIT_LANES = SPLITS, by one lane with SPLIT_LANES = 1. The order depends on SPLITS only, so that variants with the
// same SPLITS give the same bits for any number of tokens. Tolerance 2e-6 rms (order of the sum).
// With NORM a row of x is multiplied as rms_norm.wgsl would leave it, with the same bits where that has as many lanes as sum the
// squares here (see input/): each workgroup finds its tokens' factors first, then takes several blocks of rows.
// With GATED the matrix is two of `rows` rows, whole panels, one behind the other: out = act(x . gate) * (x . up).
// With ADD the sums are added to out.
// x and out have room for whole tiles of tokens; in_features is a multiple of 32.
//!use format/q4_1.wgsl as FORMAT
//!use load/narrow.wgsl as LOAD
//!use input/own.wgsl as INPUT
//!use shared/dot4.wgsl
//!use shared/rms.wgsl
//!use shared/activation.wgsl
//!targets spirv msl hlsl glsl
struct Params {
    groups: u32,
    rows: u32,
    out_stride: u32,
    out_column: u32,
    has_bias: u32,
    // Blocks of LANES * ROWS rows that a workgroup takes one after the other.
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

const ROWS: u32 = 8u; //!set rows of the matrix per lane
const TOKENS: u32 = 1u; //!set tokens per lane
const LANES: u32 = 8u; //!set lanes along the rows
const TOKEN_LANES: u32 = 1u; //!set lanes along the tokens
const SPLITS: u32 = 1u; //!set slices of in_features
const SPLIT_LANES: u32 = 1u; //!set lanes along the slices: SPLITS or 1
const NORM: bool = false; //!set whether x is normed first
const GATED: bool = false; //!set whether the rows are gates and ups
const ADD: bool = false; //!set whether the sums are added to out

const TILE: u32 = ROWS * TOKENS;
const_assert !NORM || TOKEN_LANES == 1u;
const HALVES: u32 = select(1u, 2u, GATED);
var<workgroup> partial: array<f32, select(1u, LANES * TOKEN_LANES * SPLITS * TILE, SPLIT_LANES > 1u)>;

// A vector of a token's row that starts at `row`, normed by the token's factor.
fn x_at(row: u32, column: u32, factor: f32) -> vec4f {
    if NORM {
        return x[row + column] * factor * norm[column];
    }
    return x[row + column];
}

// Sum of the squares of every `lanes`-th vector of a row from the `index`-th on.
fn squares_of(row: u32, index: u32, lanes: u32) -> f32 {
    var sum = 0.0;
    for (var i = index; i < params.groups * 8u; i += lanes) {
        sum = add_squares(x[row + i], sum);
    }
    return sum;
}

// What the rows of the workgroup's tokens are multiplied by.
fn norm_factors(first_token: u32, lane: Lane) -> array<f32, TOKENS> {
    var factors: array<f32, TOKENS>;
    for (var t = 0u; t < TOKENS; t++) {
        let squares = row_squares((first_token + t) * params.groups * 8u, lane);
        factors[t] = rms_factor(squares, 32u * params.groups, params.eps);
    }
    return factors;
}

// Sums of the lane's tile over all of in_features, those of the first lane along the slices.
fn row_sums(panel: u32, first: u32, first_token: u32, factors: array<f32, TOKENS>, lane: Lane) -> array<f32, TILE> {
    let x_stride = params.groups * 8u;
    var total: array<f32, TILE>;
    if SPLIT_LANES > 1u && (GATED || NORM) {
        // The partial sums of the other half, or of the block before, have been read.
        workgroupBarrier();
    }
    for (var slice = lane.local.z; slice < SPLITS; slice += SPLIT_LANES) {
        var sum: array<f32, TILE>;
        let end = (slice + 1u) * params.groups / SPLITS;
        for (var g = slice * params.groups / SPLITS; g < end; g++) {
            var group = load_group(panel, first + row_of(lane.local.x, 0u), g, params.groups);
            var inputs: array<Inputs, TOKENS>;
            for (var t = 0u; t < TOKENS; t++) {
                inputs[t] = load_inputs((first_token + t) * x_stride, g * 8u, factors[t], lane);
            }
            var products: array<f32, TILE>;
            var x_sum: array<f32, TOKENS>;
            for (var i = 0u; i < 8u; i++) {
                let w = group_values(&group, i);
                for (var t = 0u; t < TOKENS; t++) {
                    let value = input_at(inputs[t], i, lane);
                    if HAS_MIN {
                        x_sum[t] += (value.x + value.y) + (value.z + value.w);
                    }
                    for (var r = 0u; r < ROWS; r++) {
                        products[t * ROWS + r] = dot4(w[r], value, products[t * ROWS + r]);
                    }
                }
            }
            for (var t = 0u; t < TOKENS; t++) {
                for (var r = 0u; r < ROWS; r++) {
                    var s = sum[t * ROWS + r];
                    if HAS_SCALE {
                        s = fma(group_scale(&group, r), products[t * ROWS + r], s);
                    } else {
                        s += products[t * ROWS + r];
                    }
                    if HAS_MIN {
                        s = fma(group_min(&group, r), x_sum[t], s);
                    }
                    sum[t * ROWS + r] = s;
                }
            }
        }
        if SPLIT_LANES > 1u {
            for (var i = 0u; i < TILE; i++) {
                partial[((slice * TOKEN_LANES + lane.local.y) * TILE + i) * LANES + lane.local.x] = sum[i];
            }
        } else {
            for (var i = 0u; i < TILE; i++) {
                total[i] += sum[i];
            }
        }
    }
    if SPLIT_LANES > 1u {
        workgroupBarrier();
        for (var slice = 0u; slice < SPLITS && lane.local.z == 0u; slice++) {
            for (var i = 0u; i < TILE; i++) {
                total[i] += partial[((slice * TOKEN_LANES + lane.local.y) * TILE + i) * LANES + lane.local.x];
            }
        }
    }
    return total;
}

// Sums of one block of rows, stored.
fn block(index: u32, first_token: u32, factors: array<f32, TOKENS>, lane: Lane) {
    const BLOCKS = 64u / (LANES * ROWS);
    let panel = index / BLOCKS;
    let first = (index % BLOCKS) * (LANES * ROWS);
    var gate: array<f32, TILE>;
    var total: array<f32, TILE>;
    for (var half = 0u; half < HALVES; half++) {
        gate = total;
        total = row_sums(panel + half * (params.rows / 64u), first, first_token, factors, lane);
    }
    for (var r = 0u; r < ROWS; r++) {
        let row = panel * 64u + first + row_of(lane.local.x, r);
        if row < params.rows && lane.local.z == 0u {
            var add = 0.0;
            if params.has_bias != 0u {
                add = bias[row];
            }
            for (var t = 0u; t < TOKENS; t++) {
                var value = total[t * ROWS + r] + add;
                if GATED {
                    value = gated(gate[t * ROWS + r], value);
                }
                let at = (first_token + t) * params.out_stride + params.out_column + row;
                if ADD {
                    value += out[at];
                }
                out[at] = value;
            }
        }
    }
}

@compute @workgroup_size(LANES, TOKEN_LANES, SPLIT_LANES)
fn main(@builtin(workgroup_id) workgroup: vec3u, lane: Lane) {
    let first_token = (workgroup.y * TOKEN_LANES + lane.local.y) * TOKENS;
    if !NORM {
        block(workgroup.x, first_token, array<f32, TOKENS>(), lane);
        return;
    }
    let factors = norm_factors(first_token, lane);
    let first = workgroup.x * params.blocks;
    let end = min(first + params.blocks, (params.rows + LANES * ROWS - 1u) / (LANES * ROWS));
    for (var index = first; index < end; index++) {
        block(index, first_token, factors, lane);
    }
}
