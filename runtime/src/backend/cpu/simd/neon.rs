//! The vector operations in NEON: four registers per vector. Three sets differ in how they multiply bytes (`Dots`).
//!
//! Invariant: a `Neon` value exists only inside the `run` functions, which are called only where the CPU has their
//! features; that is why each intrinsic below is sound. Same bits as `portable`. `fmax` and `fmin` are not used: they
//! prefer NaN, whichever side it is on. The instructions of dotprod and i8mm are assembly: their intrinsics are not stable.

use std::arch::aarch64::*;
use std::arch::asm;

use super::{Kernel, LANES, Simd};

/// Proof that the features of `run` are there, and those of `D`.
#[derive(Clone, Copy)]
struct Neon<D>(D);

/// Lanes 0..4, 4..8, 8..12 and 12..16.
#[derive(Clone, Copy)]
struct Quad<T>(T, T, T, T);

/// `Simd::dot_small` and `Simd::dot`, given the 4 activations in every lane, and the way to the functions of a set.
trait Dots: Copy {
    fn small(self, acc: Quad<int32x4_t>, w: Quad<uint8x16_t>, a: int8x16_t) -> Quad<int32x4_t>;
    fn any(self, acc: Quad<int32x4_t>, w: Quad<uint8x16_t>, a: int8x16_t) -> Quad<int32x4_t>;
    /// `Simd::call`.
    fn call<K: Kernel>(self, kernel: K);
}

/// What every CPU has: products of 16 bits.
#[derive(Clone, Copy)]
struct Baseline(());

/// Proof of dotprod: sums of four products of signed bytes.
#[derive(Clone, Copy)]
struct Dotprod(());

/// Proof of i8mm: unsigned times signed bytes.
#[derive(Clone, Copy)]
struct I8mm(());

/// Runs a kernel compiled for NEON.
#[inline(never)]
#[target_feature(enable = "neon")]
pub(super) fn run<K: Kernel>(kernel: K) {
    kernel.run(Neon(Baseline(())));
}

/// Runs a kernel compiled for NEON with dotprod.
#[inline(never)]
#[target_feature(enable = "neon,dotprod")]
pub(super) fn run_dotprod<K: Kernel>(kernel: K) {
    kernel.run(Neon(Dotprod(())));
}

/// Runs a kernel compiled for NEON with i8mm.
#[inline(never)]
#[target_feature(enable = "neon,i8mm")]
pub(super) fn run_i8mm<K: Kernel>(kernel: K) {
    kernel.run(Neon(I8mm(())));
}

/// Calls intrinsics whose features the token proves.
macro_rules! intrinsic {
    ($e:expr) => {
        // SAFETY: `self` exists, so the CPU has the instruction (see the module's head); memory operands are references
        // to arrays, of which the four quarters are used.
        unsafe { $e }
    };
}

/// The same intrinsic on each quarter of its operands.
macro_rules! each {
    ($f:ident $(::<$c:tt>)?, $a:expr) => {{
        let a = $a;
        intrinsic!(Quad($f$(::<$c>)?(a.0), $f$(::<$c>)?(a.1), $f$(::<$c>)?(a.2), $f$(::<$c>)?(a.3)))
    }};
    ($f:ident, $a:expr, $b:expr) => {{
        let (a, b) = ($a, $b);
        intrinsic!(Quad($f(a.0, b.0), $f(a.1, b.1), $f(a.2, b.2), $f(a.3, b.3)))
    }};
    ($f:ident, $a:expr, $b:expr, $c:expr) => {{
        let (a, b, c) = ($a, $b, $c);
        intrinsic!(Quad($f(a.0, b.0, c.0), $f(a.1, b.1, c.1), $f(a.2, b.2, c.2), $f(a.3, b.3, c.3)))
    }};
}

/// The same intrinsic on the address of each quarter of an array `$x`, and on a quarter of `$v`.
macro_rules! each_at {
    ($f:ident, $x:ident.$address:ident() $(, $v:expr)?) => {{
        let quarter = $x.len() / 4;
        let at = $x.$address();
        intrinsic!(Quad(
            $f(at $(, $v.0)?),
            $f(at.add(quarter) $(, $v.1)?),
            $f(at.add(2 * quarter) $(, $v.2)?),
            $f(at.add(3 * quarter) $(, $v.3)?),
        ))
    }};
}

#[inline(always)]
fn all<T: Copy>(x: T) -> Quad<T> {
    Quad(x, x, x, x)
}

/// `acc + sum of w[i] * a[i]` over the four signed bytes of each lane.
#[inline]
#[target_feature(enable = "dotprod")]
fn sdot(mut acc: int32x4_t, w: int8x16_t, a: int8x16_t) -> int32x4_t {
    // SAFETY: one instruction of an enabled feature, on registers only.
    unsafe {
        asm!("sdot {acc:v}.4s, {w:v}.16b, {a:v}.16b", acc = inout(vreg) acc, w = in(vreg) w, a = in(vreg) a,
            options(pure, nomem, nostack, preserves_flags));
    }
    acc
}

/// `acc + sum of w[i] * a[i]` over the four bytes of each lane, those of `w` unsigned.
#[inline]
#[target_feature(enable = "i8mm")]
fn usdot(mut acc: int32x4_t, w: uint8x16_t, a: int8x16_t) -> int32x4_t {
    // SAFETY: as in `sdot`.
    unsafe {
        asm!("usdot {acc:v}.4s, {w:v}.16b, {a:v}.16b", acc = inout(vreg) acc, w = in(vreg) w, a = in(vreg) a,
            options(pure, nomem, nostack, preserves_flags));
    }
    acc
}

impl Baseline {
    /// Bytes 0 and 2, then 1 and 3, of each lane as 16-bit numbers.
    #[inline(always)]
    fn halves(self, w: Quad<uint8x16_t>, a: int8x16_t) -> [(Quad<int16x8_t>, Quad<int16x8_t>); 2] {
        let w = each!(vreinterpretq_u16_u8, w);
        let (even_w, odd_w) = (each!(vandq_u16, w, all(intrinsic!(vdupq_n_u16(255)))), each!(vshrq_n_u16::<8>, w));
        let a = intrinsic!(vreinterpretq_s16_s8(a));
        let even_a = all(intrinsic!(vshrq_n_s16::<8>(vshlq_n_s16::<8>(a))));
        let odd_a = all(intrinsic!(vshrq_n_s16::<8>(a)));
        [(each!(vreinterpretq_s16_u16, even_w), even_a), (each!(vreinterpretq_s16_u16, odd_w), odd_a)]
    }
}

impl Dots for Baseline {
    #[inline(always)]
    fn small(self, acc: Quad<int32x4_t>, w: Quad<uint8x16_t>, a: int8x16_t) -> Quad<int32x4_t> {
        // Two products of at most 31 * 128 fit into 16 bits.
        let [(even_w, even_a), (odd_w, odd_a)] = self.halves(w, a);
        let sums = each!(vmlaq_s16, each!(vmulq_s16, even_w, even_a), odd_w, odd_a);
        each!(vpadalq_s16, acc, sums)
    }
    #[inline(always)]
    fn any(self, acc: Quad<int32x4_t>, w: Quad<uint8x16_t>, a: int8x16_t) -> Quad<int32x4_t> {
        // One product fits, even 255 * -128.
        let [(even_w, even_a), (odd_w, odd_a)] = self.halves(w, a);
        let even = each!(vpadalq_s16, acc, each!(vmulq_s16, even_w, even_a));
        each!(vpadalq_s16, even, each!(vmulq_s16, odd_w, odd_a))
    }
    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) {
        intrinsic!(run(kernel));
    }
}

impl Dots for Dotprod {
    #[inline(always)]
    fn small(self, acc: Quad<int32x4_t>, w: Quad<uint8x16_t>, a: int8x16_t) -> Quad<int32x4_t> {
        each!(sdot, acc, each!(vreinterpretq_s8_u8, w), all(a))
    }
    #[inline(always)]
    fn any(self, acc: Quad<int32x4_t>, w: Quad<uint8x16_t>, a: int8x16_t) -> Quad<int32x4_t> {
        // Flipping the top bit makes a signed byte of w - 128; what that leaves out is 128 times the sum of `a`.
        let left_out = intrinsic!(vshlq_n_s32::<1>(sdot(vdupq_n_s32(0), vdupq_n_s8(64), a)));
        let moved = each!(veorq_u8, w, all(intrinsic!(vdupq_n_u8(128))));
        self.small(each!(vaddq_s32, acc, all(left_out)), moved, a)
    }
    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) {
        intrinsic!(run_dotprod(kernel));
    }
}

impl Dots for I8mm {
    #[inline(always)]
    fn small(self, acc: Quad<int32x4_t>, w: Quad<uint8x16_t>, a: int8x16_t) -> Quad<int32x4_t> {
        self.any(acc, w, a)
    }
    #[inline(always)]
    fn any(self, acc: Quad<int32x4_t>, w: Quad<uint8x16_t>, a: int8x16_t) -> Quad<int32x4_t> {
        each!(usdot, acc, w, all(a))
    }
    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) {
        intrinsic!(run_i8mm(kernel));
    }
}

impl<D: Dots> Simd for Neon<D> {
    type F = Quad<float32x4_t>;
    type I = Quad<int32x4_t>;
    type B = Quad<uint8x16_t>;
    // 32 registers, of a quarter vector each.
    const WIDE: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        all(intrinsic!(vdupq_n_f32(x)))
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::F {
        each_at!(vld1q_f32, x.as_ptr())
    }
    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> Self::F {
        let bits = each_at!(vld1_u16, x.as_ptr());
        each!(vcvt_f32_f16, each!(vreinterpret_f16_u16, bits))
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u16; LANES]) -> Self::F {
        let bits = each_at!(vld1_u16, x.as_ptr());
        each!(vreinterpretq_f32_u32, each!(vshll_n_u16::<16>, bits))
    }
    #[inline(always)]
    fn store(self, v: Self::F, out: &mut [f32; LANES]) {
        each_at!(vst1q_f32, out.as_mut_ptr(), v);
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        each!(vaddq_f32, a, b)
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        each!(vsubq_f32, a, b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        each!(vmulq_f32, a, b)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        each!(vdivq_f32, a, b)
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        each!(vfmaq_f32, c, a, b)
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        each!(vbslq_f32, each!(vcgtq_f32, a, b), a, b)
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        each!(vbslq_f32, each!(vcltq_f32, a, b), a, b)
    }
    #[inline(always)]
    fn zero_where_less(self, v: Self::F, x: Self::F, limit: Self::F) -> Self::F {
        let bits = each!(vreinterpretq_u32_f32, v);
        each!(vreinterpretq_f32_u32, each!(vbicq_u32, bits, each!(vcltq_f32, x, limit)))
    }
    #[inline(always)]
    fn pow2(self, t: Self::F) -> Self::F {
        let exponent = each!(vshlq_n_s32::<23>, each!(vreinterpretq_s32_f32, t));
        each!(vreinterpretq_f32_s32, each!(vaddq_s32, exponent, self.splat_i(0x3f80_0000)))
    }
    #[inline(always)]
    fn round_to_i8(self, v: Self::F) -> [i8; LANES] {
        let wide = each!(vcvtnq_s32_f32, v);
        let mut out = [0; LANES];
        intrinsic!({
            let low = vqmovn_high_s32(vqmovn_s32(wide.0), wide.1);
            let high = vqmovn_high_s32(vqmovn_s32(wide.2), wide.3);
            vst1q_s8(out.as_mut_ptr(), vqmovn_high_s16(vqmovn_s16(low), high));
        });
        out
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> Self::I {
        all(intrinsic!(vdupq_n_s32(x)))
    }
    #[inline(always)]
    fn shift_left(self, v: Self::I, bits: u32) -> Self::I {
        each!(vshlq_s32, v, self.splat_i(bits as i32))
    }
    #[inline(always)]
    fn max_i(self, a: Self::I, b: Self::I) -> Self::I {
        each!(vmaxq_s32, a, b)
    }
    #[inline(always)]
    fn abs_bits(self, v: Self::F) -> Self::I {
        each!(vandq_s32, each!(vreinterpretq_s32_f32, v), self.splat_i(0x7fff_ffff))
    }
    #[inline(always)]
    fn to_f(self, v: Self::I) -> Self::F {
        each!(vcvtq_f32_s32, v)
    }
    #[inline(always)]
    fn array_i(self, v: Self::I) -> [i32; LANES] {
        let mut out = [0; LANES];
        each_at!(vst1q_s32, out.as_mut_ptr(), v);
        out
    }
    #[inline(always)]
    fn max_lane_i(self, v: Self::I) -> i32 {
        intrinsic!(vmaxvq_s32(vmaxq_s32(vmaxq_s32(v.0, v.1), vmaxq_s32(v.2, v.3))))
    }
    #[inline(always)]
    fn sum_i8(self, v: [i8; LANES]) -> i32 {
        intrinsic!(vaddlvq_s8(vld1q_s8(v.as_ptr()))).into()
    }

    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> Self::F {
        let wide = intrinsic!({
            let bytes = vld1q_s8(x.as_ptr());
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes)));
            Quad(vget_low_s16(low), vget_high_s16(low), vget_low_s16(high), vget_high_s16(high))
        });
        each!(vcvtq_f32_s32, each!(vmovl_s16, wide))
    }
    #[inline(always)]
    fn load_e4m3(self, x: &[u8; LANES]) -> Self::F {
        let wide = intrinsic!({
            let bytes = vld1q_u8(x.as_ptr());
            let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_u8(vget_high_u8(bytes)));
            Quad(vget_low_u16(low), vget_high_u16(low), vget_low_u16(high), vget_high_u16(high))
        });
        let magnitude = each!(vshl_n_u16::<7>, each!(vand_u16, wide, all(intrinsic!(vdup_n_u16(0x7f)))));
        let sign = each!(vshl_n_u16::<8>, each!(vand_u16, wide, all(intrinsic!(vdup_n_u16(0x80)))));
        let bits = each!(vorr_u16, magnitude, sign);
        each!(vcvt_f32_f16, each!(vreinterpret_f16_u16, bits))
    }

    #[inline(always)]
    fn load_bytes(self, x: &[u8; 64]) -> Self::B {
        each_at!(vld1q_u8, x.as_ptr())
    }
    #[inline(always)]
    fn look_up(self, table: &[u8; 16], v: Self::B) -> Self::B {
        each!(vqtbl1q_u8, all(intrinsic!(vld1q_u8(table.as_ptr()))), v)
    }
    #[inline(always)]
    fn nibbles(self, v: Self::B) -> (Self::B, Self::B) {
        (each!(vandq_u8, v, all(intrinsic!(vdupq_n_u8(15)))), each!(vshrq_n_u8::<4>, v))
    }
    #[inline(always)]
    fn dot_small(self, acc: Self::I, w: Self::B, a: [i8; 4]) -> Self::I {
        self.0.small(acc, w, intrinsic!(vreinterpretq_s8_s32(vdupq_n_s32(bytemuck::cast(a)))))
    }
    #[inline(always)]
    fn dot(self, acc: Self::I, w: Self::B, a: [i8; 4]) -> Self::I {
        self.0.any(acc, w, intrinsic!(vreinterpretq_s8_s32(vdupq_n_s32(bytemuck::cast(a)))))
    }

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) {
        self.0.call(kernel);
    }
    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a hint, which no address makes fault.
        unsafe { asm!("prfm pldl1keep, [{at}]", at = in(reg) at, options(readonly, nostack, preserves_flags)) }
    }
}
