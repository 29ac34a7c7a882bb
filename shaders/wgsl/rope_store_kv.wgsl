// q and k turn by positions[t] * inv_freq[i], times amplitude, as in rope.wgsl; k so turned and v go to slots[t] as in store_kv.wgsl.
// x [tokens, stride]: heads of q, then of k, from column offset on; v's kv_heads from v_offset on; inv_freq [pairs];
// positions, slots [tokens]; keys, values, key_scales, value_scales: planes as in store_kv.wgsl. q is turned in place.
// A lane owns two quads of a head: four pairs, with INTERLEAVED neighbours, else across the quads; or what lies past the pairs.
// Tolerance 2e-6 rms (sine and cosine within 3e-7). head_dim and twice the pairs are multiples of 8, strides and offsets of 4; positions < 2^18.
// Method: Su et al. 2021, RoFormer.
//!use shared/sin_cos.wgsl
//!use kv_store/f16.wgsl as KV
//!use shared/largest.wgsl
//!targets spirv msl hlsl glsl
struct Params {
    stride_quads: u32,
    offset_quads: u32,
    v_offset_quads: u32,
    q_heads: u32,
    kv_heads: u32,
    half_quads: u32,
    // Quads of pairs.
    pair_quads: u32,
    amplitude: f32,
    block_size: u32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> x: array<vec4f>;
@group(0) @binding(2) var<storage, read> inv_freq: array<f32>;
@group(0) @binding(3) var<storage, read> positions: array<u32>;
@group(0) @binding(4) var<storage, read> slots: array<u32>;
@group(0) @binding(5) var<storage, read_write> keys: Elements;
@group(0) @binding(6) var<storage, read_write> values: Elements;
@group(0) @binding(7) var<storage, read_write> key_scales: array<f32>;
@group(0) @binding(8) var<storage, read_write> value_scales: array<f32>;

const INTERLEAVED: bool = false; //!set whether neighbours form a pair
const LANES: u32 = 32u; //!set lanes per workgroup, along the heads; where elements have scales, those of whole heads

// Pairs of neighbours: first at `pair`, then the one after it.
fn turn_neighbours(quad: vec4f, position: f32, pair: u32) -> vec4f {
    let a = sin_cos(position * inv_freq[pair]) * params.amplitude;
    let b = sin_cos(position * inv_freq[pair + 1u]) * params.amplitude;
    return quad * vec4f(a.y, a.y, b.y, b.y) + quad.yxwz * vec4f(-a.x, a.x, -b.x, b.x);
}

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3u, @builtin(local_invocation_id) local: vec3u) {
    // A lane past the end turns the last quads again and writes nothing: every lane meets the barrier of the scales.
    let lane = min(id.x, (params.q_heads + 2u * params.kv_heads) * params.half_quads - 1u);
    let head = lane / params.half_quads;
    let j = lane % params.half_quads;
    let kv_first = select(params.q_heads, params.q_heads + params.kv_heads, head >= params.q_heads + params.kv_heads);
    let is_value = kv_first > params.q_heads;
    let column = select(params.offset_quads + head * 2u * params.half_quads,
        params.v_offset_quads + (head - kv_first) * 2u * params.half_quads, is_value);
    // The quads of its pairs, else two neighbours behind all pairs.
    let is_turned = j < params.pair_quads;
    let first = select(2u * j, j, is_turned);
    let second = select(2u * j + 1u, j + params.pair_quads, is_turned);
    let at = id.y * params.stride_quads + column;
    var low = x[at + first];
    var high = x[at + second];
    if !is_value && is_turned {
        let position = f32(positions[id.y]);
        if INTERLEAVED {
            low = turn_neighbours(low, position, 2u * first);
            high = turn_neighbours(high, position, 2u * second);
        } else {
            var sin: vec4f;
            var cos: vec4f;
            for (var i = 0u; i < 4u; i++) {
                let turn = sin_cos(position * inv_freq[4u * j + i]) * params.amplitude;
                sin[i] = turn.x;
                cos[i] = turn.y;
            }
            let unturned = low;
            low = unturned * cos - high * sin;
            high = high * cos + unturned * sin;
        }
    }
    let largest = share_largest(vec2u(max(largest_bits(low), largest_bits(high))), local.x, params.half_quads);
    if lane != id.x {
        return;
    }
    if head < params.q_heads {
        x[at + first] = low;
        x[at + second] = high;
        return;
    }
    let slot = slots[id.y];
    let block = slot / params.block_size;
    let entry = (block * params.kv_heads + head - kv_first) * params.block_size + slot % params.block_size;
    let quad = entry * 2u * params.half_quads;
    let scaling = scale_of(largest.x);
    if is_value {
        store_value(quad + first, low, scaling);
        store_value(quad + second, high, scaling);
    } else {
        store_key(quad + first, low, scaling);
        store_key(quad + second, high, scaling);
    }
    if j > 0u {
        return;
    }
    if is_value {
        store_value_scale(entry, scaling.x);
    } else {
        store_key_scale(entry, scaling.x);
    }
}
