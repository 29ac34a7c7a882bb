// samples[i] = what sampled row i is drawn from and what its log-probabilities need, from its shares' bests and scores.
// logits [logit_rows, width]; draws: see shared/sample.wgsl; bests, scores [sampled_rows, shares]; samples [sampled_rows, 69]:
// the number of contenders (0: a logit is not finite), the number of best tokens, the largest logit, the sum of e^(logit - largest)
// as an f64, 8 contenders (id, logit, rank), 20 best tokens (id, logit).
// Greedy: one contender. Else every token whose score is within `window` of the best; the host decides. A workgroup owns a row, lane
// l of it all fours l, l + LANES, ...: the next best is looked for where the last one was. LANES divides the number of shares.
// Exact but for the sum: f32, lanes in a tree; tolerance 2e-6 rms.
//!use reduce/workgroup.wgsl
//!use shared/exp.wgsl
//!use shared/noise.wgsl
//!targets spirv msl hlsl glsl
struct Params { width: u32, shares: u32, window: f32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> logits: array<vec4u>;
@group(0) @binding(2) var<storage, read> draws: array<u32>;
@group(0) @binding(3) var<storage, read> bests: array<vec4u>;
@group(0) @binding(4) var<storage, read> scores: array<f32>;
@group(0) @binding(5) var<storage, read_write> samples: array<u32>;

const LANES: u32 = 64u; //!set lanes per row, a power of two of at most 128
const REDUCE_LANES: u32 = LANES;

const WORDS: u32 = 69u;
const MAX_CONTENDERS: u32 = 8u;
const FIRST_CONTENDER: u32 = 5u;
const FIRST_TOP: u32 = 29u;
const MAX_TOP: u32 = 20u;

var<workgroup> tree: array<vec2u, LANES>;
var<workgroup> num_bad: atomic<u32>;
var<workgroup> num_contenders: atomic<u32>;
// Key and id.
var<workgroup> contenders: array<vec2u, MAX_CONTENDERS>;
var<workgroup> num_before: array<atomic<u32>, MAX_CONTENDERS>;

// The first of the lanes' (key, id).
fn first_of_lanes(own: vec2u, lane: u32) -> vec2u {
    workgroupBarrier();
    tree[lane] = own;
    for (var half = LANES / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if lane < half && is_before(tree[lane + half], tree[lane]) {
            tree[lane] = tree[lane + half];
        }
    }
    workgroupBarrier();
    return tree[0];
}

// The first (key, id) after `last` among the fours of `owner`; all lanes look.
fn next_of_lane(owner: u32, last: vec2u, row: SampledRow, lane: u32) -> vec2u {
    var found = NOTHING;
    for (var quad = owner + LANES * lane; quad < row.num_quads; quad += LANES * LANES) {
        let ids = ids_of(quad, row);
        let keys = keys_of(logits[row.first_quad + quad], ids, row.width);
        for (var i = 0u; i < 4u; i++) {
            let candidate = vec2u(keys[i], ids[i]);
            if candidate.x > 0u && is_before(last, candidate) && is_before(candidate, found) {
                found = candidate;
            }
        }
    }
    return first_of_lanes(found, lane);
}

// Adds the tokens of a share that may win.
fn add_contenders(share: u32, least: f32, row: SampledRow, noise: Noise) {
    for (var quad = share; quad < row.num_quads; quad += params.shares) {
        let bits = logits[row.first_quad + quad];
        let four = scores_of(bits, quad, row, noise);
        let ids = ids_of(quad, row);
        let keys = keys_of(bits, ids, row.width);
        for (var i = 0u; i < 4u; i++) {
            if keys[i] > 0u && four[i] >= least {
                let place = atomicAdd(&num_contenders, 1u);
                if place < MAX_CONTENDERS {
                    contenders[place] = vec2u(keys[i], ids[i]);
                }
            }
        }
    }
}

// Counts the tokens before each contender among this lane's.
fn count_before(count: u32, row: SampledRow, lane: u32) {
    for (var quad = lane; quad < row.num_quads; quad += LANES) {
        let ids = ids_of(quad, row);
        let keys = keys_of(logits[row.first_quad + quad], ids, row.width);
        for (var i = 0u; i < count; i++) {
            let own = contenders[i];
            let is_larger = keys > vec4u(own.x);
            let is_equal_before = (keys == vec4u(own.x)) & (ids < vec4u(own.y));
            let n = dot(select(vec4u(), vec4u(1u), is_larger | is_equal_before), vec4u(1u));
            if n > 0u {
                atomicAdd(&num_before[i], n);
            }
        }
    }
}

// The row's largest share sums, scaled to the row's largest logit.
fn sum_of_shares(first_share: u32, largest: f32, lane: u32) -> f32 {
    var sum = 0.0;
    for (var share = lane; share < params.shares; share += LANES) {
        let best = bests[first_share + share];
        if best.x > 0u {
            sum += bitcast<f32>(best.z) * exp_f32(value_of(best.x) - largest);
        }
    }
    return reduce_sum(sum, lane);
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
    let first_share = workgroup.x * params.shares;
    let draw = 1u + 5u * workgroup.x;
    let wanted = draws[draw];
    let is_greedy = draws[draw + 1u] == 0u;
    let row = sampled_row(draws[0] + workgroup.x, params.width);
    let out = workgroup.x * WORDS;
    if lane == 0u {
        atomicStore(&num_bad, 0u);
        atomicStore(&num_contenders, 0u);
        for (var i = 0u; i < MAX_CONTENDERS; i++) {
            atomicStore(&num_before[i], 0u);
        }
    }
    workgroupBarrier();

    var own = NOTHING;
    var own_score = LARGEST_MISSING;
    for (var share = lane; share < params.shares; share += LANES) {
        let best = bests[first_share + share];
        if is_before(best.xy, own) {
            own = best.xy;
        }
        if best.w > 0u {
            atomicAdd(&num_bad, 1u);
        }
        if !is_greedy {
            own_score = max(own_score, scores[first_share + share]);
        }
    }
    let first = first_of_lanes(own, lane);
    let largest = value_of(first.x);

    if is_greedy {
        if lane == 0u {
            atomicStore(&num_contenders, 1u);
            contenders[0] = first;
        }
    } else {
        let key = vec2u(draws[draw + 2u], draws[draw + 3u]);
        let noise = Noise(key, draws[draw + 4u], bitcast<f32>(draws[draw + 1u]), largest);
        let least = value_of(first_of_lanes(vec2u(key_of(own_score), lane), lane).x) - params.window;
        for (var share = lane; share < params.shares; share += LANES) {
            if scores[first_share + share] >= least {
                add_contenders(share, least, row, noise);
            }
        }
    }
    workgroupBarrier();
    let count = min(atomicLoad(&num_contenders), MAX_CONTENDERS);

    var num_top = 0u;
    if wanted > 0u {
        let sum = bitcast<u32>(sum_of_shares(first_share, largest, lane));
        if !is_greedy {
            count_before(count, row, lane);
        }
        num_top = min(min(wanted - 1u, MAX_TOP), params.width);
        var best = first;
        for (var i = 0u; i < num_top; i++) {
            if lane == 0u {
                samples[out + FIRST_TOP + 2u * i] = best.y;
                samples[out + FIRST_TOP + 2u * i + 1u] = bits_of(best.x);
            }
            if i + 1u < num_top {
                let owner = ((best.y + row.shift) / 4u) % LANES;
                let next = next_of_lane(owner, best, row, lane);
                if lane == owner {
                    own = next;
                }
                best = first_of_lanes(own, lane);
            }
        }
        if lane == 0u {
            samples[out + 3u] = sum << 29u;
            samples[out + 4u] = (sum >> 3u) + (896u << 20u);
        }
    }
    workgroupBarrier();
    if lane == 0u {
        samples[out] = select(count, 0u, atomicLoad(&num_bad) > 0u);
        samples[out + 1u] = num_top;
        samples[out + 2u] = bits_of(first.x);
        for (var i = 0u; i < count; i++) {
            let at = out + FIRST_CONTENDER + 3u * i;
            samples[at] = contenders[i].y;
            samples[at + 1u] = bits_of(contenders[i].x);
            samples[at + 2u] = 1u + atomicLoad(&num_before[i]);
        }
    }
}
