//! The vector operations in AVX2 with FMA and F16C: two registers per vector.
//!
//! Invariant: an `Avx2` value exists only inside `run`, which is called only where the CPU has the features; that is why
//! each intrinsic below is sound. Same bits as `portable`. Without VNNI, products of unsigned and signed bytes saturate in
//! pairs at 16 bits: `dot_small` stays below that (31 * 128 * 2), `dot` widens to 16 bits first.

use std::arch::x86_64::*;

use super::{Kernel, LANES, Simd};

/// Proof that the features of `run` are there.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx2(());

/// Lanes 0..8 and 8..16.
#[derive(Clone, Copy)]
pub(in super::super) struct Pair<T>(T, T);

/// Runs a kernel compiled for AVX2 with FMA.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c,bmi2,popcnt")]
pub(super) fn run<K: Kernel>(kernel: K) {
    kernel.run(Avx2(()));
}

/// Calls intrinsics whose features the token proves.
macro_rules! intrinsic {
    ($e:expr) => {
        // SAFETY: `self` exists, so the CPU has the instruction (see the module's head); memory operands are references
        // to 16 values, of which the two halves are used.
        unsafe { $e }
    };
}

/// The same intrinsic on both halves.
macro_rules! both {
    ($f:ident $(::<$c:tt>)?, $a:expr) => {
        intrinsic!(Pair($f$(::<$c>)?($a.0), $f$(::<$c>)?($a.1)))
    };
    ($f:ident, $a:expr, $b:expr) => {
        intrinsic!(Pair($f($a.0, $b.0), $f($a.1, $b.1)))
    };
    ($f:ident, $a:expr, $b:expr, $c:expr) => {
        intrinsic!(Pair($f($a.0, $b.0, $c.0), $f($a.1, $b.1, $c.1)))
    };
}

impl Avx2 {
    #[inline(always)]
    fn twice<T: Copy>(self, x: T) -> Pair<T> {
        Pair(x, x)
    }
}

impl Simd for Avx2 {
    type F = Pair<__m256>;
    type I = Pair<__m256i>;
    type B = Pair<__m256i>;
    const WIDE: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        self.twice(intrinsic!(_mm256_set1_ps(x)))
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::F {
        intrinsic!(Pair(_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))))
    }
    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> Self::F {
        intrinsic!(Pair(
            _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().add(8).cast()))
        ))
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u16; LANES]) -> Self::F {
        let wide = intrinsic!(Pair(
            _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().cast())),
            _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().add(8).cast()))
        ));
        let shifted = both!(_mm256_slli_epi32::<16>, wide);
        both!(_mm256_castsi256_ps, shifted)
    }
    #[inline(always)]
    fn store(self, v: Self::F, out: &mut [f32; LANES]) {
        intrinsic!({
            _mm256_storeu_ps(out.as_mut_ptr(), v.0);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), v.1);
        })
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_add_ps, a, b)
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_sub_ps, a, b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_mul_ps, a, b)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_div_ps, a, b)
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        both!(_mm256_fmadd_ps, a, b, c)
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_max_ps, a, b)
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_min_ps, a, b)
    }
    #[inline(always)]
    fn zero_where_less(self, v: Self::F, x: Self::F, limit: Self::F) -> Self::F {
        let keep =
            intrinsic!(Pair(_mm256_cmp_ps::<_CMP_NLT_UQ>(x.0, limit.0), _mm256_cmp_ps::<_CMP_NLT_UQ>(x.1, limit.1)));
        both!(_mm256_and_ps, v, keep)
    }
    #[inline(always)]
    fn pow2(self, t: Self::F) -> Self::F {
        let bits = both!(_mm256_castps_si256, t);
        let exponent = both!(_mm256_slli_epi32::<23>, bits);
        let biased = both!(_mm256_add_epi32, exponent, self.splat_i(0x3f80_0000));
        both!(_mm256_castsi256_ps, biased)
    }
    #[inline(always)]
    fn round_to_i8(self, v: Self::F) -> [i8; LANES] {
        let wide = both!(_mm256_cvtps_epi32, v);
        self.array_i(wide).map(|x| x.clamp(-128, 127) as i8)
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> Self::I {
        self.twice(intrinsic!(_mm256_set1_epi32(x)))
    }
    #[inline(always)]
    fn shift_left(self, v: Self::I, bits: u32) -> Self::I {
        let count = self.twice(intrinsic!(_mm_cvtsi32_si128(bits as i32)));
        both!(_mm256_sll_epi32, v, count)
    }
    #[inline(always)]
    fn max_i(self, a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_max_epi32, a, b)
    }
    #[inline(always)]
    fn abs_bits(self, v: Self::F) -> Self::I {
        let bits = both!(_mm256_castps_si256, v);
        both!(_mm256_and_si256, bits, self.splat_i(0x7fff_ffff))
    }
    #[inline(always)]
    fn to_f(self, v: Self::I) -> Self::F {
        both!(_mm256_cvtepi32_ps, v)
    }
    #[inline(always)]
    fn array_i(self, v: Self::I) -> [i32; LANES] {
        let mut out = [0; LANES];
        intrinsic!({
            _mm256_storeu_si256(out.as_mut_ptr().cast(), v.0);
            _mm256_storeu_si256(out.as_mut_ptr().add(8).cast(), v.1);
        });
        out
    }
    #[inline(always)]
    fn max_lane_i(self, v: Self::I) -> i32 {
        intrinsic!({
            let eight = _mm256_max_epi32(v.0, v.1);
            let four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
            let two = _mm_max_epi32(four, _mm_shuffle_epi32::<0b00_00_11_10>(four));
            _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32::<1>(two)))
        })
    }
    #[inline(always)]
    fn sum_i8(self, v: [i8; LANES]) -> i32 {
        // Sums of differences from 0 of the bytes moved up by 128, in two halves.
        intrinsic!({
            let moved = _mm_xor_si128(_mm_loadu_si128(v.as_ptr().cast()), _mm_set1_epi8(-128));
            let sums = _mm_sad_epu8(moved, _mm_setzero_si128());
            _mm_cvtsi128_si32(sums) + _mm_extract_epi16::<4>(sums) - 128 * LANES as i32
        })
    }

    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> Self::F {
        intrinsic!(Pair(
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(x.as_ptr().cast()))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(x.as_ptr().add(8).cast())))
        ))
    }
    #[inline(always)]
    fn load_e4m3(self, x: &[u8; LANES]) -> Self::F {
        intrinsic!({
            let wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(x.as_ptr().cast()));
            let magnitude = _mm256_slli_epi16::<7>(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)));
            let sign = _mm256_slli_epi16::<8>(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)));
            let halves = _mm256_or_si256(magnitude, sign);
            Pair(
                _mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)),
            )
        })
    }

    #[inline(always)]
    fn load_bytes(self, x: &[u8; 64]) -> Self::B {
        intrinsic!(Pair(_mm256_loadu_si256(x.as_ptr().cast()), _mm256_loadu_si256(x.as_ptr().add(32).cast())))
    }
    #[inline(always)]
    fn look_up(self, table: &[u8; 16], v: Self::B) -> Self::B {
        let table = self.twice(intrinsic!(_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()))));
        both!(_mm256_shuffle_epi8, table, v)
    }
    #[inline(always)]
    fn nibbles(self, v: Self::B) -> (Self::B, Self::B) {
        let mask = self.twice(intrinsic!(_mm256_set1_epi8(15)));
        let shifted = both!(_mm256_srli_epi16::<4>, v);
        (both!(_mm256_and_si256, v, mask), both!(_mm256_and_si256, shifted, mask))
    }
    #[inline(always)]
    fn dot_small(self, acc: Self::I, w: Self::B, a: [i8; 4]) -> Self::I {
        let pairs = both!(_mm256_maddubs_epi16, w, self.splat_i(bytemuck::cast(a)));
        let ones = self.twice(intrinsic!(_mm256_set1_epi16(1)));
        let quads = both!(_mm256_madd_epi16, pairs, ones);
        both!(_mm256_add_epi32, acc, quads)
    }
    #[inline(always)]
    fn dot(self, acc: Self::I, w: Self::B, a: [i8; 4]) -> Self::I {
        // Bytes 0 and 2, then 1 and 3, of each lane as 16-bit numbers.
        let a = intrinsic!(_mm256_set1_epi32(bytemuck::cast(a)));
        let even_a = self.twice(intrinsic!(_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(a))));
        let odd_a = self.twice(intrinsic!(_mm256_srai_epi16::<8>(a)));
        let even_w = both!(_mm256_and_si256, w, self.splat_i(0x00ff_00ff));
        let odd_w = both!(_mm256_srli_epi16::<8>, w);
        let even = both!(_mm256_madd_epi16, even_w, even_a);
        let odd = both!(_mm256_madd_epi16, odd_w, odd_a);
        let sum = both!(_mm256_add_epi32, even, odd);
        both!(_mm256_add_epi32, acc, sum)
    }

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) {
        intrinsic!(run(kernel));
    }
    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        intrinsic!(_mm_prefetch::<_MM_HINT_T0>(at.cast()))
    }
}
