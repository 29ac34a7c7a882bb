// out[t, h] = softmax over positions p <= positions[t] of (scale * q[t, h] . k[p, h']) times v[p, h'], h' the KV head of h.
// With WINDOW the last `window` of them; with SOFT_CAP a score x becomes soft_cap * tanh(x / soft_cap); with SINKS the softmax
// has one more score per head, sinks[h], without a value. A token of a tree sees the positions of its path (shared/path.wgsl).
// q [tokens, q_stride], heads at column q_offset; keys, values: planes [blocks, kv_heads, block_size, head_dim]; key_scales,
// value_scales: planes [blocks, kv_heads, block_size], touched where elements have scales; sinks [heads];
// step: the step's inputs, whole; out [tokens, heads, head_dim], or with PARTIAL [tokens, heads, splits, head_dim + 4].
// A lane owns one query head of one token: all its splits one after the other, or one split with PARTIAL (the kernel
// attention_combine merges those). One position at a time, the softmax kept up as it goes. f32 sums; tolerance 2e-6 rms.
// head_dim is a multiple of 4. Method: Milakov and Gimelshein 2018, Online normalizer calculation for softmax.
//
// Where to go from here: several query heads of a KV head per lane (HEADS), so that a key is loaded once for all of them;
// several positions at a time; several lanes per item, merged through workgroup memory.
//!use kv/f16.wgsl as KV
//!use shared/path.wgsl
//!use shared/softmax.wgsl
//!use shared/splits.wgsl
//!use shared/tanh.wgsl
//!targets spirv msl hlsl glsl
struct Params {
    q_stride_quads: u32,
    q_offset_quads: u32,
    heads: u32,
    kv_heads: u32,
    scale: f32,
    block_size: u32,
    // Blocks of a row in the block tables.
    max_blocks: u32,
    // Where in `step` the tokens' positions, the tokens' rows and the rows' block tables begin.
    positions: u32,
    token_rows: u32,
    block_tables: u32,
    // Where the tokens' tree masks begin, two words each.
    tree_masks: u32,
    // With WINDOW: positions that a token sees, and splits that they lie in at most. With SOFT_CAP: the cap.
    window: u32,
    window_splits: u32,
    soft_cap: f32,
    // With CARRIED, which this kernel leaves to the built-in one: see there.
    first_split: u32,
    walk_splits: u32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> q: array<vec4f>;
@group(0) @binding(2) var<storage, read> keys: Elements;
@group(0) @binding(3) var<storage, read> values: Elements;
@group(0) @binding(4) var<storage, read> key_scales: array<f32>;
@group(0) @binding(5) var<storage, read> value_scales: array<f32>;
@group(0) @binding(6) var<storage, read> step: array<u32>;
@group(0) @binding(7) var<storage, read> sinks: array<f32>;
@group(0) @binding(8) var<storage, read_write> out: array<vec4f>;

// The model decides these. Fix the last three (without `//!set`) and leave out what they stand for, and models that ask for it
// run the built-in kernel.
const HEAD_DIM: u32 = 64u; //!set elements per head
const SPLIT: u32 = 64u; //!set positions per split
const PARTIAL: bool = false; //!set one split per item, merged by attention_combine
const CARRIED: bool = false; // very long walks, on software only, stay with the built-in kernel
const WINDOW: bool = false; //!set only the last positions are seen
const SOFT_CAP: bool = false; //!set scores are capped
const SINKS: bool = false; //!set a sink joins each softmax
// The grid follows these: fixed here, the tuning table's with `//!set`.
const HEADS: u32 = 1u;
const ITEMS: u32 = 8u; //!set (token, head, split) items per workgroup

const QUADS: u32 = HEAD_DIM / 4u;

@compute @workgroup_size(ITEMS)
fn main(
    @builtin(workgroup_id) workgroup: vec3u,
    @builtin(num_workgroups) grid: vec3u,
    @builtin(local_invocation_index) lane: u32,
) {
    let num_tokens = step[0];
    let num_splits = splits_per_token();
    let item = (workgroup.y * grid.x + workgroup.x) * ITEMS + lane;
    if item >= num_tokens * params.heads * select(1u, num_splits, PARTIAL) {
        return;
    }
    let token = item % num_tokens;
    let head = item / num_tokens % params.heads;
    let kv_head = head / (params.heads / params.kv_heads);
    let position_end = step[params.positions + token] + 1u;
    let position_first = first_seen(position_end);
    let path = path_of(token, position_end);
    let table = params.block_tables + step[params.token_rows + token] * params.max_blocks;
    var query: array<vec4f, QUADS>;
    for (var d = 0u; d < QUADS; d++) {
        query[d] = q[token * params.q_stride_quads + params.q_offset_quads + head * QUADS + d];
    }
    // Splits are counted from that of the first position that the token sees.
    var own_split = 0u;
    var first_split = position_first / SPLIT;
    var split_end = (position_end + SPLIT - 1u) / SPLIT;
    if PARTIAL {
        own_split = item / (num_tokens * params.heads);
        first_split += own_split;
        split_end = first_split + 1u;
    }
    // The largest score, the sum of e^(score - largest), the values weighted by the same: of all splits, and of one. Splits
    // are merged the same way here and in attention_combine, so that a token gets the same bits whole and in parts.
    var total_m = -3.0e38;
    var total_l = 0.0;
    var total: array<vec4f, QUADS>;
    for (var split = first_split; split < split_end; split++) {
        var m = -3.0e38;
        var l = 0.0;
        var sums: array<vec4f, QUADS>;
        let end = min((split + 1u) * SPLIT, position_end);
        for (var position = max(split * SPLIT, position_first); position < end; position++) {
            let index = cache_index(path, position);
            let block = step[table + index / params.block_size];
            let entry = (block * params.kv_heads + kv_head) * params.block_size + index % params.block_size;
            var score = 0.0;
            for (var d = 0u; d < QUADS; d++) {
                score += dot(query[d], load_key(entry * QUADS + d));
            }
            score *= params.scale * key_scale(entry);
            if SOFT_CAP {
                score = params.soft_cap * tanh_f32(score / params.soft_cap);
            }
            let largest = max(m, score);
            let factor = exp_f32(m - largest);
            let weight = exp_f32(score - largest);
            m = largest;
            l = fma(l, factor, weight);
            let value_weight = weight * value_scale(entry);
            for (var d = 0u; d < QUADS; d++) {
                sums[d] = fma(load_value(entry * QUADS + d), vec4f(value_weight), sums[d] * factor);
            }
        }
        let factors = merge_factors(total_m, m);
        total_m = max(total_m, m);
        total_l = merge_sums(total_l, l, factors);
        for (var d = 0u; d < QUADS; d++) {
            total[d] = merge_values(total[d], sums[d], factors);
        }
    }
    if SINKS && !PARTIAL {
        let factors = merge_factors(total_m, sinks[head]);
        total_l = merge_sums(total_l, 1.0, factors);
        for (var d = 0u; d < QUADS; d++) {
            total[d] = merge_values(total[d], vec4f(), factors);
        }
    }
    let row = token * params.heads + head;
    for (var d = 0u; d < QUADS; d++) {
        if PARTIAL {
            out[(row * num_splits + own_split) * (QUADS + 1u) + d] = total[d];
        } else {
            out[row * QUADS + d] = total[d] / total_l;
        }
    }
    if PARTIAL {
        out[(row * num_splits + own_split) * (QUADS + 1u) + QUADS] = vec4f(total_m, total_l, 0.0, 0.0);
    }
}
