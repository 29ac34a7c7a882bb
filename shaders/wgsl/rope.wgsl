// Rotary embedding in place: pair i of every head of token t turns by positions[t] * inv_freq[i] and grows by amplitude.
// x [tokens, stride], heads of head_dim at column offset; inv_freq [pairs]; positions [tokens]. Pairs are (i, i + pairs),
// or (2 i, 2 i + 1) with INTERLEAVED; what lies past them stays. A lane owns one pair of all heads of a token, so that the angle is computed once.
// The angle is the f32 product, as the reference has it; sine and cosine within 3e-7. Tolerance 2e-6 rms. Positions < 2^18.
// Method: Su et al. 2021, RoFormer.
//!use shared/sin_cos.wgsl
//!targets spirv msl hlsl glsl
struct Params { stride: u32, offset: u32, heads: u32, head_dim: u32, pairs: u32, amplitude: f32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> x: array<f32>;
@group(0) @binding(2) var<storage, read> inv_freq: array<f32>;
@group(0) @binding(3) var<storage, read> positions: array<u32>;

const INTERLEAVED: bool = false; //!set whether neighbours form a pair
const LANES: u32 = 8u; //!set lanes per workgroup, along the pairs

@compute @workgroup_size(LANES)
fn main(@builtin(global_invocation_id) id: vec3u) {
    if id.x >= params.pairs {
        return;
    }
    let turn = sin_cos(f32(positions[id.y]) * inv_freq[id.x]) * params.amplitude;
    let distance = select(params.pairs, 1u, INTERLEAVED);
    var at = id.y * params.stride + params.offset + select(id.x, 2u * id.x, INTERLEAVED);
    for (var head = 0u; head < params.heads; head++) {
        let a = x[at];
        let b = x[at + distance];
        x[at] = a * turn.y - b * turn.x;
        x[at + distance] = b * turn.y + a * turn.x;
        at += params.head_dim;
    }
}
