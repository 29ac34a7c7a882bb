// Natural logarithm of normal numbers above 0 within 2 units in the last place, the same on every device (Cephes logf):
// x = 2^n (1 + f), 1 + f near 1, taken from the bits; a polynomial of degree 9 in f.
fn log_f32(x: vec4f) -> vec4f {
    let bits = bitcast<vec4u>(x);
    // In [1/2, 1).
    let part = bitcast<vec4f>((bits & vec4u(0x007fffffu)) | vec4u(0x3f000000u));
    let is_low = part < vec4f(0.707106781186547524);
    let f = select(part, part + part, is_low) - 1.0;
    let n = vec4f(vec4i(bits >> vec4u(23u)) - 126) - select(vec4f(), vec4f(1.0), is_low);
    let f2 = f * f;
    var p = fma(vec4f(7.0376836292e-2), f, vec4f(-1.1514610310e-1));
    p = fma(p, f, vec4f(1.1676998740e-1));
    p = fma(p, f, vec4f(-1.2420140846e-1));
    p = fma(p, f, vec4f(1.4249322787e-1));
    p = fma(p, f, vec4f(-1.6668057665e-1));
    p = fma(p, f, vec4f(2.0000714765e-1));
    p = fma(p, f, vec4f(-2.4999993993e-1));
    p = fma(p, f, vec4f(3.3333331174e-1));
    var rest = p * f * f2;
    rest = fma(n, vec4f(-2.12194440e-4), rest);
    rest = fma(f2, vec4f(-0.5), rest);
    return fma(n, vec4f(0.693359375), f + rest);
}
