// Merges the splits that attention has left with PARTIAL, in order of positions, then a sink, as a lane that walks them would.
// partials [tokens, heads, splits, head_dim + 4] (values, then the largest score and the sum), a token's splits from that of the
// first position that it sees, or with CARRIED one that holds them all; sinks [heads], touched with SINKS only; step: the step's inputs, whole;
// out [tokens, heads, head_dim]. A lane owns four elements of one head of a token. f32; adds nothing to attention's tolerance.
//!use shared/softmax.wgsl
//!use shared/splits.wgsl
//!targets spirv msl hlsl glsl
struct Params {
    heads: u32,
    head_quads: u32,
    positions: u32,
    window: u32,
    window_splits: u32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> partials: array<vec4f>;
@group(0) @binding(2) var<storage, read> step: array<u32>;
@group(0) @binding(3) var<storage, read> sinks: array<f32>;
@group(0) @binding(4) var<storage, read_write> out: array<vec4f>;

const SPLIT: u32 = 64u; //!set positions per split, as attention has it
const CARRIED: bool = false; //!set whether the splits have been merged, as attention has it
const WINDOW: bool = false; //!set only the last positions are seen
const SINKS: bool = false; //!set a sink joins each softmax
const LANES: u32 = 8u; //!set lanes per workgroup, along heads * head_dim

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3u) {
    if id.x >= params.heads * params.head_quads {
        return;
    }
    let head = id.x / params.head_quads;
    let quad = id.x % params.head_quads;
    let position = step[params.positions + id.y];
    let num_splits = select(splits_per_token(), 1u, CARRIED);
    let own_splits = select(position / SPLIT + 1u - first_seen(position + 1u) / SPLIT, 1u, CARRIED);
    let stride = params.head_quads + 1u;
    var at = (id.y * params.heads + head) * num_splits * stride;
    var m = -3.0e38;
    var l = 0.0;
    var values = vec4f();
    for (var split = 0u; split < own_splits; split++) {
        let sums = partials[at + params.head_quads];
        let factors = merge_factors(m, sums.x);
        m = max(m, sums.x);
        l = merge_sums(l, sums.y, factors);
        values = merge_values(values, partials[at + quad], factors);
        at += stride;
    }
    if SINKS {
        let factors = merge_factors(m, sinks[head]);
        l = merge_sums(l, 1.0, factors);
        values = merge_values(values, vec4f(), factors);
    }
    out[(id.y * params.heads + head) * params.head_quads + quad] = values / l;
}
