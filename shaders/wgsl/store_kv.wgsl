// Rounds K and V of each token to the cache's type and stores them at slots[t] = block * block_size + place.
// k, v [tokens, stride], heads at a column offset; keys, values: planes [blocks, heads, block_size, head_dim]; key_scales,
// value_scales: planes [blocks, heads, block_size], touched by types with scales only.
// With SHARED the keys are the values: v is k, and no other plane is touched.
// A lane owns four elements of K and of V. Exact (one rounding, ties to even). Strides, offsets and head_dim: multiples of 4.
//!use kv_store/f16.wgsl as KV
//!use shared/largest.wgsl
//!targets spirv msl hlsl glsl
struct Params {
    k_stride_quads: u32,
    k_offset_quads: u32,
    v_stride_quads: u32,
    v_offset_quads: u32,
    heads: u32,
    head_quads: u32,
    block_size: u32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> k: array<vec4f>;
@group(0) @binding(2) var<storage, read> v: array<vec4f>;
@group(0) @binding(3) var<storage, read> slots: array<u32>;
@group(0) @binding(4) var<storage, read_write> keys: Elements;
@group(0) @binding(5) var<storage, read_write> values: Elements;
@group(0) @binding(6) var<storage, read_write> key_scales: array<f32>;
@group(0) @binding(7) var<storage, read_write> value_scales: array<f32>;

const LANES: u32 = 32u; //!set lanes per workgroup, along the width of K; where elements have scales, those of whole heads
const SHARED: bool = false; //!set whether the keys are the values

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3u, @builtin(local_invocation_id) local: vec3u) {
    // A lane past the end has a share of nobody's scale and writes nothing: every lane meets the barrier of the scales.
    let lane = min(id.x, params.heads * params.head_quads - 1u);
    let key = k[id.y * params.k_stride_quads + params.k_offset_quads + lane];
    let value = v[id.y * params.v_stride_quads + params.v_offset_quads + lane];
    let largest = share_largest(vec2u(largest_bits(key), largest_bits(value)), local.x, params.head_quads);
    if lane != id.x {
        return;
    }
    let head = lane / params.head_quads;
    let slot = slots[id.y];
    let block = slot / params.block_size;
    let entry = (block * params.heads + head) * params.block_size + slot % params.block_size;
    let quad = entry * params.head_quads + lane % params.head_quads;
    let key_scaling = scale_of(largest.x);
    let value_scaling = scale_of(largest.y);
    store_key(quad, key, key_scaling);
    if !SHARED {
        store_value(quad, value, value_scaling);
    }
    if lane % params.head_quads == 0u {
        store_key_scale(entry, key_scaling.x);
        if !SHARED {
            store_value_scale(entry, value_scaling.x);
        }
    }
}
