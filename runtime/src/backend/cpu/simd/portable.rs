//! The vector operations in plain Rust: the definition that the others must equal, and what runs where they cannot.
//!
//! Inlining is the compiler's choice here: there is no target feature to carry into a kernel.
//!
//! Invariant: lane by lane, no operation reads another lane. Compilers turn most of it into the target's baseline vectors
//! (on x86-64 without FMA, `mul_add` is a call and slow).

use super::{Kernel, LANES, Simd};

/// Needs no proof: every CPU has it.
#[derive(Clone, Copy)]
pub(in super::super) struct Portable;

#[inline]
fn each<T: Copy, U: Copy, R>(a: [T; LANES], b: [U; LANES], f: impl Fn(T, U) -> R) -> [R; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Simd for Portable {
    type F = [f32; LANES];
    type I = [i32; LANES];
    type B = [u8; 64];
    const WIDE: bool = false;

    #[inline]
    fn splat(self, x: f32) -> Self::F {
        [x; LANES]
    }
    #[inline]
    fn load(self, x: &[f32; LANES]) -> Self::F {
        *x
    }
    #[inline]
    fn load_f16(self, x: &[u16; LANES]) -> Self::F {
        x.map(|bits| half::f16::from_bits(bits).to_f32())
    }
    #[inline]
    fn load_bf16(self, x: &[u16; LANES]) -> Self::F {
        x.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }
    #[inline]
    fn store(self, v: Self::F, out: &mut [f32; LANES]) {
        *out = v;
    }
    #[inline]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        each(a, b, |x, y| x + y)
    }
    #[inline]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        each(a, b, |x, y| x - y)
    }
    #[inline]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        each(a, b, |x, y| x * y)
    }
    #[inline]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        each(a, b, |x, y| x / y)
    }
    #[inline]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        each(a, b, |x, y| if x > y { x } else { y })
    }
    #[inline]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        each(a, b, |x, y| if x < y { x } else { y })
    }
    #[inline]
    fn zero_where_less(self, v: Self::F, x: Self::F, limit: Self::F) -> Self::F {
        std::array::from_fn(|i| if x[i] < limit[i] { 0.0 } else { v[i] })
    }
    #[inline]
    fn pow2(self, t: Self::F) -> Self::F {
        t.map(|t| f32::from_bits((t.to_bits() << 23).wrapping_add(0x3f80_0000)))
    }
    #[inline]
    fn round_to_i8(self, v: Self::F) -> [i8; LANES] {
        v.map(|x| x.round_ties_even() as i8)
    }

    #[inline]
    fn splat_i(self, x: i32) -> Self::I {
        [x; LANES]
    }
    #[inline]
    fn shift_left(self, v: Self::I, bits: u32) -> Self::I {
        v.map(|x| x << bits)
    }
    #[inline]
    fn max_i(self, a: Self::I, b: Self::I) -> Self::I {
        each(a, b, |x, y| x.max(y))
    }
    #[inline]
    fn abs_bits(self, v: Self::F) -> Self::I {
        v.map(|x| (x.to_bits() & 0x7fff_ffff) as i32)
    }
    #[inline]
    fn to_f(self, v: Self::I) -> Self::F {
        v.map(|x| x as f32)
    }
    #[inline]
    fn array_i(self, v: Self::I) -> [i32; LANES] {
        v
    }
    #[inline]
    fn max_lane_i(self, v: Self::I) -> i32 {
        v.into_iter().fold(i32::MIN, i32::max)
    }
    #[inline]
    fn sum_i8(self, v: [i8; LANES]) -> i32 {
        v.into_iter().map(i32::from).sum()
    }

    #[inline]
    fn load_i8(self, x: &[i8; LANES]) -> Self::F {
        x.map(f32::from)
    }
    #[inline]
    fn load_e4m3(self, x: &[u8; LANES]) -> Self::F {
        self.load_f16(&x.map(|byte| u16::from(byte & 0x80) << 8 | u16::from(byte & 0x7f) << 7))
    }

    #[inline]
    fn load_bytes(self, x: &[u8; 64]) -> Self::B {
        *x
    }
    #[inline]
    fn look_up(self, table: &[u8; 16], v: Self::B) -> Self::B {
        v.map(|byte| table[usize::from(byte & 15)])
    }
    #[inline]
    fn nibbles(self, v: Self::B) -> (Self::B, Self::B) {
        (v.map(|b| b & 15), v.map(|b| b >> 4))
    }
    #[inline]
    fn dot_small(self, acc: Self::I, w: Self::B, a: [i8; 4]) -> Self::I {
        self.dot(acc, w, a)
    }
    #[inline]
    fn dot(self, acc: Self::I, w: Self::B, a: [i8; 4]) -> Self::I {
        let mut out = acc;
        for (lane, out) in out.iter_mut().enumerate() {
            for i in 0..4 {
                // Cannot overflow; wrapping spares the check in debug builds, where it fills whole kernels.
                *out = out.wrapping_add(i32::from(w[lane * 4 + i]).wrapping_mul(i32::from(a[i])));
            }
        }
        out
    }

    /// Compilers have no portable word for it.
    #[inline(never)]
    fn call<K: Kernel>(self, kernel: K) {
        kernel.run(self);
    }
    #[inline]
    fn prefetch(self, _at: *const u8) {}
}
