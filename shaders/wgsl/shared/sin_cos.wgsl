// (sin x, cos x) for 0 <= x < 2^18 within about 3e-7, as RoPE needs it: built-in functions lose all precision there.
// The whole part of x becomes a fraction of a turn in 32-bit wrapping arithmetic (2^32 / 2 pi = 683565275.5764), so that the
// large multiple of 2 pi never meets a rounding; then one step to [-pi/4, pi/4] and the polynomials of Cephes' sinf and cosf.
fn sin_cos(x: f32) -> vec2f {
    let whole = floor(x);
    let w = u32(whole);
    let turns = w * 683565275u + ((w * 9444u) >> 14u);
    let angle = f32(bitcast<i32>(turns)) * 1.46291807926715968e-9 + (x - whole);
    let quarter = round(angle * 0.636619772367581343);
    let r = fma(quarter, -7.54978995489188216e-8, fma(quarter, -1.57079625129699707, angle));
    let r2 = r * r;
    var s = fma(fma(-1.9515295891e-4, r2, 8.3321608736e-3), r2, -1.6666654611e-1);
    s = fma(s * r2, r, r);
    var c = fma(fma(2.443315711809948e-5, r2, -1.388731625493765e-3), r2, 4.166664568298827e-2);
    c = fma(c * r2, r2, fma(-0.5, r2, 1.0));
    let q = u32(i32(quarter)) & 3u;
    let swapped = (q & 1u) == 1u;
    let sin_x = select(s, c, swapped);
    let cos_x = select(c, s, swapped);
    return vec2f(select(sin_x, -sin_x, q >= 2u), select(cos_x, -cos_x, q == 1u || q == 2u));
}
