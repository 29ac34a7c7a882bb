// The hyperbolic tangent within 4 units in the last place, the same on every device (built-in ones are loose, and some give
// no number for large x). A polynomial in x^2 near 0 (Cephes tanhf), beyond it 1 - 2 / (e^2|x| + 1).
//!use shared/exp.wgsl
fn tanh_f32(x: f32) -> f32 {
    let x2 = x * x;
    var p = -5.70498872745e-3;
    p = fma(p, x2, 2.06390887954e-2);
    p = fma(p, x2, -5.37397155531e-2);
    p = fma(p, x2, 1.33314422036e-1);
    p = fma(p, x2, -3.33332819422e-1);
    let near = fma(p * x2, x, x);
    let far = 1.0 - 2.0 / (exp_f32(2.0 * abs(x)) + 1.0);
    return select(select(far, -far, x < 0.0), near, abs(x) < 0.625);
}
