// Q6_K: value = ((code - 32) * s) * d, codes 0..=63, s -128..=127 of each half group. The inner product is exact.
//
// codes: 1 vec4u per group; the low four bits of element 4i + c are bits 4i..4i+4 of word c.
// side:  21 words per 8 groups: d f16; then per 2 groups four signed bytes, the scales s of their halves; then 2 words
//        per group: bits 8c + 2(i % 4) and up of word i / 4 are the upper two bits of element 4i + c.
// Limits: a device may read f16 subnormals as 0.

const HAS_SCALE: bool = true;
const HAS_MIN: bool = false;

struct Group {
    words: vec4u,
    high: vec2u,
    half_scales: vec2f,
    scale: f32,
}

fn load_group(panel: u32, lane: u32, group: u32, groups: u32) -> Group {
    let at = (panel * groups + group) * 64u + lane;
    let base = (panel * ((groups + 7u) >> 3u) + (group >> 3u)) * 1344u + lane;
    let d = unpack2x16float(side[base]);
    let pair = side[base + (1u + ((group & 7u) >> 1u)) * 64u] >> (16u * (group & 1u));
    let half_scales = vec2f(bitcast<vec2i>(vec2u(pair << 24u, (pair >> 8u) << 24u)) >> vec2u(24u));
    let high = base + (5u + 2u * (group & 7u)) * 64u;
    return Group(codes[at], vec2u(side[high], side[high + 64u]), half_scales, d.x);
}

fn group_values(g: Group, i: u32) -> vec4f {
    let word = select(g.high.x, g.high.y, i >= 4u);
    let upper = (vec4u(word) >> (vec4u(0u, 8u, 16u, 24u) + vec4u(2u * (i & 3u)))) & vec4u(3u);
    let code = ((g.words >> vec4u(4u * i)) & vec4u(15u)) | (upper << vec4u(4u));
    return (vec4f(code) - vec4f(32.0)) * select(g.half_scales.x, g.half_scales.y, i >= 4u);
}

fn group_scale(g: Group) -> f32 {
    return g.scale;
}

fn group_min(g: Group) -> f32 {
    return 0.0;
}
