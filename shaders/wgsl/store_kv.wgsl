// Rounds K and V of each token to the cache's type and stores them at slots[t] = block * block_size + place.
// k, v [tokens, stride], heads at a column offset; keys, values: planes [blocks, heads, block_size, head_dim].
// A lane owns four elements of K and of V. Exact (one rounding, ties to even). Strides, offsets and head_dim: multiples of 4.
//!use kv_store/f16.wgsl as KV
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
@group(0) @binding(4) var<storage, read_write> keys: array<vec2u>;
@group(0) @binding(5) var<storage, read_write> values: array<vec2u>;

const LANES: u32 = 32u; //!set lanes per workgroup, along the width of K

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3u) {
    if id.x >= params.heads * params.head_quads {
        return;
    }
    let head = id.x / params.head_quads;
    let slot = slots[id.y];
    let block = slot / params.block_size;
    let entry = (block * params.heads + head) * params.block_size + slot % params.block_size;
    let quad = entry * params.head_quads + id.x % params.head_quads;
    store_key(quad, k[id.y * params.k_stride_quads + params.k_offset_quads + id.x]);
    store_value(quad, v[id.y * params.v_stride_quads + params.v_offset_quads + id.x]);
}
