//! Elements of the paged cache: one trait, so that what stores and what widens them is written once for all types.
//!
//! Invariant: what a type rounds to is said once, in `backend::cached` and `half`; loads are exact. Codes that mean nothing without
//! a scale (`SCALED`) are multiplied with it by whoever loads them. Called by `rows` and `attention::widen`.

use bytemuck::Pod;

use super::repack::Float;
use super::simd::{LANES, Simd};
use crate::backend::cached::{E4M3_FROM_HALF, E4m3, Int8Scale};

/// A stored element of K or V.
pub(super) trait Cached: Pod {
    /// Whether it is a code that has a scale per entry.
    const SCALED: bool;
    /// Rounds one value; `scale` is that of the value's entry, for codes.
    fn round(x: f32, scale: Int8Scale) -> Self;
    /// 16 values, or codes.
    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::F;
}

impl<T: Float> Cached for T {
    const SCALED: bool = false;
    #[inline(always)]
    fn round(x: f32, _scale: Int8Scale) -> Self {
        Self::from_f32(x)
    }
    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::F {
        <T as Float>::load(s, x)
    }
}

impl Cached for i8 {
    const SCALED: bool = true;
    #[inline(always)]
    fn round(x: f32, scale: Int8Scale) -> Self {
        scale.code(x)
    }
    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::F {
        let mut codes = [0.0; LANES];
        codes.iter_mut().zip(x).for_each(|(code, &x)| *code = f32::from(x));
        s.load(&codes)
    }
}

impl Cached for E4m3 {
    const SCALED: bool = false;
    #[inline(always)]
    fn round(x: f32, _scale: Int8Scale) -> Self {
        Self::from_f32(x)
    }
    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::F {
        let mut bits = [0; LANES];
        bits.iter_mut().zip(x).for_each(|(bits, x)| *bits = x.half_bits());
        s.mul(s.load_f16(&bits), s.splat(E4M3_FROM_HALF))
    }
}
