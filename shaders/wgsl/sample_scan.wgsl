// bests[i, s] = (key and id of the largest logit, sum of e^(logit - largest), whether one is not finite) of share s of sampled row i.
// logits [logit_rows, width]; draws: see shared/sample.wgsl; bests [sampled_rows, shares]. The sum is there where
// log-probabilities are wanted. A lane owns a share of a row: neighbours read neighbouring fours, and no lane waits for another.
// Exact but for the sum: f32, in the order of ids; tolerance 2e-6 rms. Method: Milakov and Gimelshein 2018, Online normalizer
// calculation for softmax.
//!use shared/exp.wgsl
//!use shared/sample.wgsl
//!targets spirv msl hlsl glsl
struct Params { width: u32, shares: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> logits: array<vec4u>;
@group(0) @binding(2) var<storage, read> draws: array<u32>;
@group(0) @binding(3) var<storage, read_write> bests: array<vec4u>;

const LANES: u32 = 32u; //!set lanes per workgroup, along the shares

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3u) {
    if id.x >= params.shares {
        return;
    }
    let row = sampled_row(draws[0] + id.y, params.width);
    let wants_sum = draws[1u + 5u * id.y] > 0u;
    let exponent = vec4u(0x7f800000u);
    var best = NOTHING;
    var sum = 0.0;
    var bad = false;
    for (var quad = id.x; quad < row.num_quads; quad += params.shares) {
        let bits = logits[row.first_quad + quad];
        let ids = ids_of(quad, row);
        let keys = keys_of(bits, ids, row.width);
        bad = bad || any(((bits & exponent) == exponent) & (keys > vec4u()));
        let top = max(max(keys.x, keys.y), max(keys.z, keys.w));
        if top > best.x {
            if wants_sum && best.x > 0u {
                sum *= exp_f32(value_of(best.x) - value_of(top));
            }
            let at = select(select(select(ids.w, ids.z, keys.z == top), ids.y, keys.y == top), ids.x, keys.x == top);
            best = vec2u(top, at);
        }
        if wants_sum {
            let above = bitcast<vec4f>(bits) - value_of(best.x);
            sum += select(0.0, exp_f32(above.x), keys.x > 0u);
            sum += select(0.0, exp_f32(above.y), keys.y > 0u);
            sum += select(0.0, exp_f32(above.z), keys.z > 0u);
            sum += select(0.0, exp_f32(above.w), keys.w > 0u);
        }
    }
    bests[id.y * params.shares + id.x] = vec4u(best, bitcast<u32>(sum), u32(bad));
}
