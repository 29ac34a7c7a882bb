// Scores of tokens, the largest of which is drawn: scaled logit + Gumbel noise (Maddison, Tarlow, Minka 2014, A* sampling).
// A token's noise is word id % 4 of Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, Parallel random numbers) with the seed as
// key and the counter (id / 4, position, 0, 0): a word w is u = (w + 1/2) / 2^32 and the noise -ln(-ln(1 - u)).
// f32: noise within 5e-6, which the host knows (`sample::WINDOW`); it decides in f64 among those that are near the best.
//!use shared/log.wgsl
//!use shared/sample.wgsl

// What a row's tokens are scored with.
struct Noise { key: vec2u, position: u32, inverse_temperature: f32, max: f32 }

// Low and high word of a product.
fn multiply_wide(a: u32, b: u32) -> vec2u {
    let low = (a & 0xffffu) * (b & 0xffffu);
    let left = (a >> 16u) * (b & 0xffffu) + (low >> 16u);
    let right = (a & 0xffffu) * (b >> 16u) + (left & 0xffffu);
    return vec2u(a * b, (a >> 16u) * (b >> 16u) + (left >> 16u) + (right >> 16u));
}

fn philox(block: u32, noise: Noise) -> vec4u {
    var words = vec4u(block, noise.position, 0u, 0u);
    var key = noise.key;
    for (var round = 0u; round < 10u; round++) {
        let first = multiply_wide(words.x, 0xd2511f53u);
        let second = multiply_wide(words.z, 0xcd9e8d57u);
        words = vec4u(second.y ^ words.y ^ key.x, second.x, first.y ^ words.w ^ key.y, first.x);
        key += vec2u(0x9e3779b9u, 0xbb67ae85u);
    }
    return words;
}

// The words of the four ids of `quad`, which lie in two blocks where the row starts within a four.
fn words_of(quad: u32, shift: u32, noise: Noise) -> vec4u {
    let own = philox(quad, noise);
    if shift == 0u {
        return own;
    }
    let before = philox(quad - 1u, noise);
    if shift == 1u {
        return vec4u(before.w, own.xyz);
    }
    if shift == 2u {
        return vec4u(before.zw, own.xy);
    }
    return vec4u(before.yzw, own.x);
}

fn gumbel(words: vec4u) -> vec4f {
    let u = (vec4f(words) + 0.5) * 2.3283064365386963e-10;
    // 1 - u, which is exact where u is near 1; where u is small, the series of -ln(1 - u).
    let rest = (vec4f(~words) + 0.5) * 2.3283064365386963e-10;
    let small = u * fma(u, fma(u, fma(u, fma(u, vec4f(0.2), vec4f(0.25)), vec4f(0.333333333)), vec4f(0.5)), vec4f(1.0));
    return -log_f32(select(-log_f32(rest), small, u < vec4f(0.015625)));
}

// Scores of a four; LARGEST_MISSING for what is not of the row.
fn scores_of(bits: vec4u, quad: u32, row: SampledRow, noise: Noise) -> vec4f {
    let scaled = (bitcast<vec4f>(bits) - noise.max) * noise.inverse_temperature;
    let scores = scaled + gumbel(words_of(quad, row.shift, noise));
    return select(vec4f(LARGEST_MISSING), scores, ids_of(quad, row) < vec4u(row.width));
}
