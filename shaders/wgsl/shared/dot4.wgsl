// sum + a . b, in the order of the elements.
fn dot4(a: vec4f, b: vec4f, sum: f32) -> f32 {
    return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum))));
}
