// out[t, h] = softmax over positions p <= positions[t] of (scale * q[t, h] . k[p, h']) times v[p, h'], h' the KV head of h.
// With WINDOW the last `window` of them; with SOFT_CAP a score x becomes soft_cap * tanh(x / soft_cap); with SINKS the softmax
// has one more score per head, sinks[h], without a value. A token of a tree sees the positions of its path (shared/path.wgsl).
// q [tokens, q_stride], heads at column q_offset; keys, values: planes [blocks, kv_heads, block_size, head_dim]; key_scales,
// value_scales: planes [blocks, kv_heads, block_size], touched where elements have scales; sinks [heads];
// step: the step's inputs, whole; out [tokens, heads, head_dim], or with PARTIAL [tokens, heads, splits, head_dim + 4].
// One description for prefill, chunk, decode and trees: a token attends to its row's blocks by position.
// Positions are cut into splits of SPLIT at absolute places. A lane owns HEADS query heads (that share a KV head) of one token:
// all its splits one after the other, or one split with PARTIAL (attention_combine merges). With CARRIED a lane goes on with what
// another dispatch has left in out [tokens, heads, 1, head_dim + 4]: some drivers end a long walk. PARTS lanes share an item's
// positions, every PARTS-th each, merged in order. f32 sums; tolerance 2e-6 rms (order of sums, the exponential).
// head_dim is HEAD_DIM, a multiple of 4. Method: Dao 2023, FlashAttention-2 and Flash-Decoding; Kwon et al. 2023 (paged).
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
    max_blocks: u32,
    positions: u32,
    token_rows: u32,
    block_tables: u32,
    tree_masks: u32,
    window: u32,
    window_splits: u32,
    soft_cap: f32,
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

const HEAD_DIM: u32 = 64u; //!set elements per head
const HEADS: u32 = 1u; //!set query heads per lane, all of one KV head
const SPLIT: u32 = 64u; //!set positions per split
const ITEMS: u32 = 8u; //!set (token, heads, split) items per workgroup
const PARTS: u32 = 1u; //!set lanes per item
const PARTIAL: bool = false; //!set one split per item, merged by attention_combine
const CARRIED: bool = false; //!set walk_splits splits from first_split on, merged with those before; attention_combine ends it
const WINDOW: bool = false; //!set only the last positions are seen
const SOFT_CAP: bool = false; //!set scores are capped
const SINKS: bool = false; //!set a sink joins each softmax

const QUADS: u32 = HEAD_DIM / 4u;
const NONE: f32 = -3.0e38;
var<workgroup> part_values: array<vec4f, select(1u, ITEMS * PARTS * HEADS * QUADS, PARTS > 1u)>;
var<workgroup> part_sums: array<vec2f, select(1u, ITEMS * PARTS * HEADS, PARTS > 1u)>;

// Softmax sums of HEADS heads: the largest score, the sum, the weighted values.
struct Sums {
    m: array<f32, HEADS>,
    l: array<f32, HEADS>,
    values: array<vec4f, HEADS * QUADS>,
}

fn clear(sums: ptr<function, Sums>) {
    for (var h = 0u; h < HEADS; h++) {
        (*sums).m[h] = NONE;
        (*sums).l[h] = 0.0;
        for (var d = 0u; d < QUADS; d++) {
            (*sums).values[h * QUADS + d] = vec4f();
        }
    }
}

fn merge_into(first: ptr<function, Sums>, second: ptr<function, Sums>) {
    for (var h = 0u; h < HEADS; h++) {
        let factors = merge_factors((*first).m[h], (*second).m[h]);
        (*first).m[h] = max((*first).m[h], (*second).m[h]);
        (*first).l[h] = merge_sums((*first).l[h], (*second).l[h], factors);
        for (var d = 0u; d < QUADS; d++) {
            let at = h * QUADS + d;
            (*first).values[at] = merge_values((*first).values[at], (*second).values[at], factors);
        }
    }
}

// Adds one position. The sums are scaled anew only where the score is a new maximum: rare after the first few positions.
fn add_position(sums: ptr<function, Sums>, query: ptr<function, array<vec4f, HEADS * QUADS>>, entry: u32) {
    var scores: array<f32, HEADS>;
    for (var d = 0u; d < QUADS; d++) {
        let key = load_key(entry * QUADS + d);
        for (var h = 0u; h < HEADS; h++) {
            scores[h] += dot((*query)[h * QUADS + d], key);
        }
    }
    let scale = params.scale * key_scale(entry);
    let weight_scale = value_scale(entry);
    for (var h = 0u; h < HEADS; h++) {
        var score = scores[h] * scale;
        if SOFT_CAP {
            score = params.soft_cap * tanh_f32(score / params.soft_cap);
        }
        if score > (*sums).m[h] {
            let factor = exp_f32((*sums).m[h] - score);
            (*sums).m[h] = score;
            (*sums).l[h] *= factor;
            for (var d = 0u; d < QUADS; d++) {
                (*sums).values[h * QUADS + d] *= factor;
            }
        }
        scores[h] = exp_f32(score - (*sums).m[h]);
        (*sums).l[h] += scores[h];
        scores[h] *= weight_scale;
    }
    for (var d = 0u; d < QUADS; d++) {
        let value = load_value(entry * QUADS + d);
        for (var h = 0u; h < HEADS; h++) {
            let at = h * QUADS + d;
            (*sums).values[at] = fma(value, vec4f(scores[h]), (*sums).values[at]);
        }
    }
}

@compute @workgroup_size(ITEMS, PARTS)
fn main(
    @builtin(workgroup_id) workgroup: vec3u,
    @builtin(num_workgroups) grid: vec3u,
    @builtin(local_invocation_id) lane: vec3u,
) {
    let num_tokens = step[0];
    let num_splits = splits_per_token();
    let sets = params.heads / HEADS;
    let item = (workgroup.y * grid.x + workgroup.x) * ITEMS + lane.x;
    // A lane past the end computes the last token again and writes nothing: every lane meets every barrier.
    let is_item = item < num_tokens * sets * select(1u, num_splits, PARTIAL);
    let token = item % num_tokens;
    let heads = item / num_tokens % sets;
    let kv_head = heads * HEADS / (params.heads / params.kv_heads);
    let position_end = select(0u, step[params.positions + token] + 1u, is_item);
    let position_first = first_seen(position_end);
    let path = path_of(token, position_end);
    let table = params.block_tables + step[params.token_rows + token] * params.max_blocks;
    var query: array<vec4f, HEADS * QUADS>;
    let q_first = token * params.q_stride_quads + params.q_offset_quads + heads * HEADS * QUADS;
    for (var i = 0u; i < HEADS * QUADS; i++) {
        query[i] = q[q_first + i];
    }

    var total: Sums;
    clear(&total);
    // Splits are numbered from that of the first position that the token sees.
    var own_split = 0u;
    var own_splits = num_splits;
    if PARTIAL {
        own_split = item / (num_tokens * sets);
        own_splits = 1u;
    }
    if CARRIED {
        own_split = params.first_split;
        own_splits = min(num_splits - min(num_splits, own_split), params.walk_splits);
        for (var h = 0u; h < HEADS && own_split > 0u; h++) {
            let at = (token * params.heads + heads * HEADS + h) * (QUADS + 1u);
            for (var d = 0u; d < QUADS; d++) {
                total.values[h * QUADS + d] = out[at + d];
            }
            let carried = out[at + QUADS];
            total.m[h] = carried.x;
            total.l[h] = carried.y;
        }
    }
    // Counted from 0, not from the lane's own split: a compiler must see that all lanes meet the barriers in `share`.
    for (var i = 0u; i < own_splits; i++) {
        let split_first = (position_first / SPLIT + own_split + i) * SPLIT;
        let first = max(split_first, position_first);
        let end = min(split_first + SPLIT, position_end);
        var sums: Sums;
        clear(&sums);
        for (var position = first + lane.y; position < end; position += PARTS) {
            let index = cache_index(path, position);
            let block = step[table + index / params.block_size];
            let entry = (block * params.kv_heads + kv_head) * params.block_size + index % params.block_size;
            add_position(&sums, &query, entry);
        }
        if PARTS > 1u {
            share(&sums, lane);
        }
        if first < end {
            merge_into(&total, &sums);
        }
    }
    if !is_item || lane.y > 0u {
        return;
    }
    for (var h = 0u; h < HEADS; h++) {
        let head = heads * HEADS + h;
        let row = token * params.heads + head;
        if PARTIAL || CARRIED {
            let at = select(row * num_splits + own_split, row, CARRIED) * (QUADS + 1u);
            for (var d = 0u; d < QUADS; d++) {
                out[at + d] = total.values[h * QUADS + d];
            }
            out[at + QUADS] = vec4f(total.m[h], total.l[h], 0.0, 0.0);
        } else {
            var l = total.l[h];
            if SINKS {
                let factors = merge_factors(total.m[h], sinks[head]);
                l = merge_sums(l, 1.0, factors);
                for (var d = 0u; d < QUADS; d++) {
                    let at = h * QUADS + d;
                    total.values[at] = merge_values(total.values[at], vec4f(), factors);
                }
            }
            for (var d = 0u; d < QUADS; d++) {
                out[row * QUADS + d] = total.values[h * QUADS + d] / l;
            }
        }
    }
}

// Merges the sums of the lanes of an item, in order, into those of its first lane.
fn share(sums: ptr<function, Sums>, lane: vec3u) {
    let mine = (lane.x * PARTS + lane.y) * HEADS;
    for (var h = 0u; h < HEADS; h++) {
        part_sums[mine + h] = vec2f((*sums).m[h], (*sums).l[h]);
        for (var d = 0u; d < QUADS; d++) {
            part_values[(mine + h) * QUADS + d] = (*sums).values[h * QUADS + d];
        }
    }
    workgroupBarrier();
    if lane.y == 0u {
        for (var part = 1u; part < PARTS; part++) {
            for (var h = 0u; h < HEADS; h++) {
                let other = (lane.x * PARTS + part) * HEADS + h;
                let factors = merge_factors((*sums).m[h], part_sums[other].x);
                (*sums).m[h] = max((*sums).m[h], part_sums[other].x);
                (*sums).l[h] = merge_sums((*sums).l[h], part_sums[other].y, factors);
                for (var d = 0u; d < QUADS; d++) {
                    let at = h * QUADS + d;
                    (*sums).values[at] = merge_values((*sums).values[at], part_values[other * QUADS + d], factors);
                }
            }
        }
    }
    workgroupBarrier();
}
