// out[t] = ids of the top_k experts of the best scores, best first, then their weights, times scale; of equals the lower id first.
// A score is the softmax of the logits, or with SIGMOID 1 / (1 + e^-logit). bias, where there is one, is added for the choice only.
// Experts in groups: those of groups that are not among the best top_groups count as 0; a group is as good as its best
// expert, with SIGMOID as its best two together. With renormalise the weights are divided by their sum.
// logits [tokens, experts]; bias [experts]; out [tokens, 2 top_k]. A lane owns a token: the order of sums is its own.
// Tolerance 2e-6 rms (the exponential is within 2 units in the last place). At most 32 groups.
// Source: Shazeer et al. 2017; DeepSeek-AI 2024, DeepSeek-V2 and DeepSeek-V3.
//!use shared/exp.wgsl
//!targets spirv msl hlsl glsl
struct Params {
    experts: u32,
    top_k: u32,
    groups: u32,
    top_groups: u32,
    renormalise: u32,
    has_bias: u32,
    scale: f32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> logits: array<f32>;
@group(0) @binding(2) var<storage, read> bias: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;

const SIGMOID: bool = false; //!set whether scores are sigmoids

const LOWEST: f32 = -3.4028234e38;

// What the softmax of a token's logits is made of: their maximum, and the sum of exponentials.
var<private> maximum: f32;
var<private> total: f32;

fn score(logit: f32) -> f32 {
    if SIGMOID {
        return 1.0 / (1.0 + exp_f32(-logit));
    }
    return exp_f32(logit - maximum) / total;
}

// The score by which an expert is chosen; one that is not a number is the lowest.
fn biased(first: u32, expert: u32) -> f32 {
    var value = score(logits[first + expert]);
    if params.has_bias != 0u {
        value += bias[expert];
    }
    return select(LOWEST, value, value >= LOWEST);
}

fn group_score(first: u32, group: u32) -> f32 {
    let size = params.experts / params.groups;
    var best = LOWEST;
    var second = LOWEST;
    for (var i = 0u; i < size; i++) {
        let value = biased(first, group * size + i);
        if value > best {
            second = best;
            best = value;
        } else if value > second {
            second = value;
        }
    }
    if SIGMOID && size > 1u {
        return best + second;
    }
    return best;
}

// A bit for each of the best groups.
fn open_groups(first: u32) -> u32 {
    if params.groups == 1u {
        return 1u;
    }
    var scores: array<f32, 32>;
    for (var g = 0u; g < params.groups; g++) {
        scores[g] = group_score(first, g);
    }
    var open = 0u;
    for (var g = 0u; g < params.groups; g++) {
        var before = 0u;
        for (var other = 0u; other < params.groups; other++) {
            if scores[other] > scores[g] || (scores[other] == scores[g] && other < g) {
                before += 1u;
            }
        }
        if before < params.top_groups {
            open |= 1u << g;
        }
    }
    return open;
}

@compute @workgroup_size(1)
fn main(@builtin(workgroup_id) id: vec3u) {
    let first = id.x * params.experts;
    if !SIGMOID {
        maximum = LOWEST;
        total = 0.0;
        for (var e = 0u; e < params.experts; e++) {
            maximum = max(maximum, logits[first + e]);
        }
        for (var e = 0u; e < params.experts; e++) {
            total += exp_f32(logits[first + e] - maximum);
        }
    }
    let open = open_groups(first);
    let size = params.experts / params.groups;
    let row = id.x * 2u * params.top_k;
    var sum = 0.0;
    var last_score = 0.0;
    var last_expert = 0u;
    for (var j = 0u; j < params.top_k; j++) {
        var best_score = LOWEST;
        var best = params.experts;
        for (var e = 0u; e < params.experts; e++) {
            let value = select(0.0, biased(first, e), ((open >> (e / size)) & 1u) == 1u);
            let is_left = j == 0u || value < last_score || (value == last_score && e > last_expert);
            if is_left && (best == params.experts || value > best_score) {
                best_score = value;
                best = e;
            }
        }
        last_score = best_score;
        last_expert = best;
        let weight = score(logits[first + best]);
        out[row + j] = f32(best);
        out[row + params.top_k + j] = weight;
        sum += weight;
    }
    let factor = select(params.scale, params.scale / sum, params.renormalise != 0u);
    for (var j = 0u; j < params.top_k; j++) {
        out[row + params.top_k + j] *= factor;
    }
}
