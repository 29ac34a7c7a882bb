// Rows of logits that are sampled: `draws` is the number of rows before them, which are read back, and then five words for
// each: 1 + the number of alternatives whose log-probabilities are wanted or 0, the inverse temperature or 0 for greedy, the
// seed (low word first), the position.
// A row [width] is read by fours that may reach into its neighbours': four `quad` holds ids 4 quad - shift + (0, 1, 2, 3).
// A share is every shares-th four. Logits are compared by keys: integers in the order of floats, so that no driver's treatment
// of zeros and of what is tiny or not finite changes an answer.
const LARGEST_MISSING: f32 = -3.4e38;
const NOTHING: vec2u = vec2u(0u, 0xffffffffu);

struct SampledRow { first_quad: u32, num_quads: u32, shift: u32, width: u32 }

// Row `index` of the logits.
fn sampled_row(index: u32, width: u32) -> SampledRow {
    let shift = (index * width) % 4u;
    return SampledRow((index * width) / 4u, (shift + width + 3u) / 4u, shift, width);
}

// Those before the first and after the last id of the row are not below its width.
fn ids_of(quad: u32, row: SampledRow) -> vec4u {
    return vec4u(4u * quad - row.shift) + vec4u(0u, 1u, 2u, 3u);
}

// 0 for what is not of the row, above 0 for every number.
fn keys_of(bits: vec4u, ids: vec4u, width: u32) -> vec4u {
    let plain = select(bits, vec4u(), bits == vec4u(0x80000000u));
    let keys = select(plain | vec4u(0x80000000u), ~plain, plain >= vec4u(0x80000000u));
    return select(vec4u(), keys, ids < vec4u(width));
}

fn key_of(value: f32) -> u32 {
    return keys_of(vec4u(bitcast<u32>(value)), vec4u(), 1u).x;
}

fn bits_of(key: u32) -> u32 {
    return select(~key, key ^ 0x80000000u, key >= 0x80000000u);
}

fn value_of(key: u32) -> f32 {
    return bitcast<f32>(bits_of(key));
}

// Whether (key, id) `a` comes before `b`: the larger, of equal ones the lower id.
fn is_before(a: vec2u, b: vec2u) -> bool {
    return a.x > b.x || (a.x == b.x && a.y < b.y);
}
