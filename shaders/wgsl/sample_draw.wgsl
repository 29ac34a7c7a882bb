// scores[i, s] = the largest score of share s of sampled row i: scaled logit + noise (shared/noise.wgsl). Greedy rows are left out.
// logits [logit_rows, width]; draws: see shared/sample.wgsl; bests [sampled_rows, shares], of which the row's largest logit is
// taken; scores [sampled_rows, shares]. A lane owns a share of a row. f32; tolerance 1e-5 of a score, which changes no token drawn.
//!use shared/noise.wgsl
//!targets spirv msl hlsl glsl
struct Params { width: u32, shares: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> logits: array<vec4u>;
@group(0) @binding(2) var<storage, read> draws: array<u32>;
@group(0) @binding(3) var<storage, read> bests: array<vec4u>;
@group(0) @binding(4) var<storage, read_write> scores: array<f32>;

const LANES: u32 = 32u; //!set lanes per workgroup, along the shares

var<workgroup> largest: array<u32, LANES>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
    let first_share = workgroup.y * params.shares;
    let draw = 1u + 5u * workgroup.y;
    if draws[draw + 1u] == 0u {
        return;
    }
    var own = 0u;
    for (var share = lane; share < params.shares; share += LANES) {
        own = max(own, bests[first_share + share].x);
    }
    largest[lane] = own;
    workgroupBarrier();
    var top = 0u;
    for (var i = 0u; i < LANES; i++) {
        top = max(top, largest[i]);
    }
    let share = workgroup.x * LANES + lane;
    if share >= params.shares {
        return;
    }
    let row = sampled_row(draws[0] + workgroup.y, params.width);
    let key = vec2u(draws[draw + 2u], draws[draw + 3u]);
    let noise = Noise(key, draws[draw + 4u], bitcast<f32>(draws[draw + 1u]), value_of(top));
    var best = LARGEST_MISSING;
    for (var quad = share; quad < row.num_quads; quad += params.shares) {
        let four = scores_of(logits[row.first_quad + quad], quad, row, noise);
        best = max(best, max(max(four.x, four.y), max(four.z, four.w)));
    }
    scores[first_share + share] = best;
}
