// The bits of the largest magnitude of four elements: as integers they order like the values, a NaN above all.
fn largest_bits(x: vec4f) -> u32 {
    let bits = bitcast<vec4u>(x) & vec4u(0x7fffffffu);
    return max(max(bits.x, bits.y), max(bits.z, bits.w));
}
