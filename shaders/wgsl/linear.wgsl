// out[t, n] = sum over k of x[t, k] * w[n, k] + bias[n], for one matrix, or one piece of its rows.
// x [tokens, in_features]; codes, side: panels of 64 rows in one of format/; bias [rows]; out [tokens, out_stride] at column
// out_column. One kernel for one token and for many: a lane owns ROWS rows x TOKENS tokens in registers; LANES * ROWS
// divides 64; a workgroup covers LANES * ROWS rows of TOKEN_LANES * TOKENS tokens.
// A group of 32 elements is summed as codes, then scaled: sum += scale * (codes . x) + min * sum(x), in f32.
// in_features is cut into SPLITS slices, each summed in order, the slices added in order: by SPLITS lanes and workgroup memory
// with SPLIT_LANES = SPLITS, by one lane with SPLIT_LANES = 1. The order depends on SPLITS only, so that variants with the
// same SPLITS give the same bits for any number of tokens. Tolerance 2e-6 rms (order of the sum).
// With GATED the matrix is two of `rows` rows, whole panels, one behind the other: out = silu(x . gate) * (x . up).
// x and out have room for whole tiles of tokens; in_features is a multiple of 32.
//!use format/q4_1.wgsl as FORMAT
//!use load/narrow.wgsl as LOAD
//!use input/own.wgsl as INPUT
//!use shared/silu.wgsl
//!targets spirv msl hlsl glsl
struct Params {
    groups: u32,
    rows: u32,
    out_stride: u32,
    out_column: u32,
    has_bias: u32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4f>;
@group(0) @binding(2) var<storage, read> codes: Codes;
@group(0) @binding(3) var<storage, read> side: Sides;
@group(0) @binding(4) var<storage, read> bias: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;

const ROWS: u32 = 8u; //!set rows of the matrix per lane
const TOKENS: u32 = 1u; //!set tokens per lane
const LANES: u32 = 8u; //!set lanes along the rows
const TOKEN_LANES: u32 = 1u; //!set lanes along the tokens
const SPLITS: u32 = 1u; //!set slices of in_features
const SPLIT_LANES: u32 = 1u; //!set lanes along the slices: SPLITS or 1
const GATED: bool = false; //!set whether the rows are gates and ups

const TILE: u32 = ROWS * TOKENS;
const HALVES: u32 = select(1u, 2u, GATED);
var<workgroup> partial: array<f32, select(1u, LANES * TOKEN_LANES * SPLITS * TILE, SPLIT_LANES > 1u)>;

fn dot4(a: vec4f, b: vec4f, sum: f32) -> f32 {
    return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum))));
}

// Sums of the lane's tile over all of in_features, those of the first lane along the slices.
fn row_sums(panel: u32, first: u32, first_token: u32, lane: Lane) -> array<f32, TILE> {
    let x_stride = params.groups * 8u;
    var total: array<f32, TILE>;
    if SPLIT_LANES > 1u && GATED {
        // The partial sums of the other half have been read.
        workgroupBarrier();
    }
    for (var slice = lane.local.z; slice < SPLITS; slice += SPLIT_LANES) {
        var sum: array<f32, TILE>;
        let end = (slice + 1u) * params.groups / SPLITS;
        for (var g = slice * params.groups / SPLITS; g < end; g++) {
            var group = load_group(panel, first + row_of(lane.local.x, 0u), g, params.groups);
            var inputs: array<Inputs, TOKENS>;
            for (var t = 0u; t < TOKENS; t++) {
                inputs[t] = load_inputs((first_token + t) * x_stride + g * 8u, lane);
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

@compute @workgroup_size(LANES, TOKEN_LANES, SPLIT_LANES)
fn main(lane: Lane) {
    const CHUNKS = 64u / (LANES * ROWS);
    let panel = lane.workgroup.x / CHUNKS;
    let first = (lane.workgroup.x % CHUNKS) * (LANES * ROWS);
    let first_token = (lane.workgroup.y * TOKEN_LANES + lane.local.y) * TOKENS;
    var gate: array<f32, TILE>;
    var total: array<f32, TILE>;
    for (var half = 0u; half < HALVES; half++) {
        gate = total;
        total = row_sums(panel + half * (params.rows / 64u), first, first_token, lane);
    }
    if lane.local.z > 0u {
        return;
    }
    for (var r = 0u; r < ROWS; r++) {
        let row = panel * 64u + first + row_of(lane.local.x, r);
        if row < params.rows {
            var add = 0.0;
            if params.has_bias != 0u {
                add = bias[row];
            }
            for (var t = 0u; t < TOKENS; t++) {
                var value = total[t * ROWS + r] + add;
                if GATED {
                    value *= silu(gate[t * ROWS + r]);
                }
                out[(first_token + t) * params.out_stride + params.out_column + row] = value;
            }
        }
    }
}
