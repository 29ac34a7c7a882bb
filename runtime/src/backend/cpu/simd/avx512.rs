//! The vector operations in AVX-512 with VNNI: one register per vector, one instruction per operation.
//!
//! Invariant: an `Avx512` value exists only inside `run`, which is called only where the CPU has the features; that is
//! why each intrinsic below is sound. Same bits as `portable`.

use std::arch::x86_64::*;

use super::{Kernel, LANES, Simd};

/// Proof that the features of `run` are there.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx512(());

/// Runs a kernel compiled for AVX-512 with VNNI.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2,popcnt")]
pub(super) fn run<K: Kernel>(kernel: K) {
    kernel.run(Avx512(()));
}

/// Calls intrinsics whose features the token proves.
macro_rules! intrinsic {
    ($e:expr) => {
        // SAFETY: `self` exists, so the CPU has the instruction (see the module's head); memory operands are references.
        unsafe { $e }
    };
}

impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;
    type B = __m512i;
    const WIDE: bool = true;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        intrinsic!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> __m512 {
        intrinsic!(_mm512_loadu_ps(x.as_ptr()))
    }
    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> __m512 {
        intrinsic!(_mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())))
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u16; LANES]) -> __m512 {
        intrinsic!({
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        })
    }
    #[inline(always)]
    fn store(self, v: __m512, out: &mut [f32; LANES]) {
        intrinsic!(_mm512_storeu_ps(out.as_mut_ptr(), v))
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        intrinsic!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn zero_where_less(self, v: __m512, x: __m512, limit: __m512) -> __m512 {
        intrinsic!(_mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, limit), v))
    }
    #[inline(always)]
    fn pow2(self, t: __m512) -> __m512 {
        intrinsic!({
            let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(t));
            _mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(0x3f80_0000)))
        })
    }
    #[inline(always)]
    fn round_to_i8(self, v: __m512) -> [i8; LANES] {
        let mut out = [0; LANES];
        intrinsic!(_mm_storeu_si128(out.as_mut_ptr().cast(), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v))));
        out
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> __m512i {
        intrinsic!(_mm512_set1_epi32(x))
    }
    #[inline(always)]
    fn shift_left(self, v: __m512i, bits: u32) -> __m512i {
        intrinsic!(_mm512_sll_epi32(v, _mm_cvtsi32_si128(bits as i32)))
    }
    #[inline(always)]
    fn max_i(self, a: __m512i, b: __m512i) -> __m512i {
        intrinsic!(_mm512_max_epi32(a, b))
    }
    #[inline(always)]
    fn abs_bits(self, v: __m512) -> __m512i {
        intrinsic!(_mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fff_ffff)))
    }
    #[inline(always)]
    fn to_f(self, v: __m512i) -> __m512 {
        intrinsic!(_mm512_cvtepi32_ps(v))
    }
    #[inline(always)]
    fn array_i(self, v: __m512i) -> [i32; LANES] {
        let mut out = [0; LANES];
        intrinsic!(_mm512_storeu_si512(out.as_mut_ptr().cast(), v));
        out
    }
    #[inline(always)]
    fn max_lane_i(self, v: __m512i) -> i32 {
        intrinsic!(_mm512_reduce_max_epi32(v))
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
    fn load_i8(self, x: &[i8; LANES]) -> __m512 {
        intrinsic!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast()))))
    }
    #[inline(always)]
    fn load_e4m3(self, x: &[u8; LANES]) -> __m512 {
        intrinsic!({
            let wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(x.as_ptr().cast()));
            let magnitude = _mm256_slli_epi16::<7>(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)));
            let sign = _mm256_slli_epi16::<8>(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)));
            _mm512_cvtph_ps(_mm256_or_si256(magnitude, sign))
        })
    }

    #[inline(always)]
    fn load_bytes(self, x: &[u8; 64]) -> __m512i {
        intrinsic!(_mm512_loadu_si512(x.as_ptr().cast()))
    }
    #[inline(always)]
    fn look_up(self, table: &[u8; 16], v: __m512i) -> __m512i {
        intrinsic!(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), v))
    }
    #[inline(always)]
    fn nibbles(self, v: __m512i) -> (__m512i, __m512i) {
        intrinsic!({
            let low = _mm512_set1_epi8(15);
            (_mm512_and_si512(v, low), _mm512_and_si512(_mm512_srli_epi16::<4>(v), low))
        })
    }
    #[inline(always)]
    fn dot_small(self, acc: __m512i, w: __m512i, a: [i8; 4]) -> __m512i {
        self.dot(acc, w, a)
    }
    #[inline(always)]
    fn dot(self, acc: __m512i, w: __m512i, a: [i8; 4]) -> __m512i {
        intrinsic!(_mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(bytemuck::cast(a))))
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
