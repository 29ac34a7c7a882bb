// e to the x within 2 units in the last place, the same on every device (built-in exponentials differ by driver).
// x = n ln 2 + r with |r| <= ln 2 / 2; a polynomial of degree 6 for e^r (Cephes expf); 2^n by its bits.
fn exp_f32(x: f32) -> f32 {
    let n = round(x * 1.44269504088896341);
    var r = fma(n, -0.693359375, x);
    r = fma(n, 2.12194440e-4, r);
    var p = 1.9875691500e-4;
    p = fma(p, r, 1.3981999507e-3);
    p = fma(p, r, 8.3334519073e-3);
    p = fma(p, r, 4.1665795894e-2);
    p = fma(p, r, 1.6666665459e-1);
    p = fma(p, r, 5.0000001201e-1);
    let value = fma(p * r, r, r) + 1.0;
    // Two factors, so that results below the smallest normal number go to 0 and large ones to infinity by themselves.
    let power = i32(clamp(n, -252.0, 252.0));
    let half = power / 2;
    let low = bitcast<f32>(u32(half + 127) << 23u);
    let high = bitcast<f32>(u32(power - half + 127) << 23u);
    return select(value * low * high, 0.0, x < -150.0);
}
