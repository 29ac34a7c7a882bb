//! Sixteen lanes of f32 or i32 as one type, so that each kernel is written once and compiled per instruction set.
//!
//! Invariant: every method gives the same bits on every implementation (f32 steps are single IEEE operations, integer
//! steps are exact, reductions go through one fixed tree), so that a kernel's result does not depend on the machine.
//! A token of an implementation exists only where the CPU has its instructions: holding one is the proof.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

pub(super) use portable::Portable;

use super::isa::Isa;

/// Lanes of a vector.
pub(super) const LANES: usize = 16;

/// The operations that kernels are written in. `F`: 16 x f32, `I`: 16 x i32, `B`: 16 lanes of 4 unsigned bytes.
pub(super) trait Simd: Copy {
    type F: Copy;
    type I: Copy;
    type B: Copy;
    /// Whether there are 32 registers that hold a whole vector: the register tiles are chosen by it.
    const WIDE: bool;

    fn splat(self, x: f32) -> Self::F;
    fn load(self, x: &[f32; LANES]) -> Self::F;
    fn load_f16(self, x: &[u16; LANES]) -> Self::F;
    fn load_bf16(self, x: &[u16; LANES]) -> Self::F;
    fn store(self, v: Self::F, out: &mut [f32; LANES]);
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a > b ? a : b`: a NaN in `b` passes, one in `a` does not.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a < b ? a : b`: a NaN in `b` passes, one in `a` does not.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// `v`, but 0 where `x < limit`.
    fn zero_where_less(self, v: Self::F, x: Self::F, limit: Self::F) -> Self::F;
    /// `2^n` where `t = ROUND + n`: the low bits of `t` moved to the exponent.
    fn pow2(self, t: Self::F) -> Self::F;
    /// Nearest integer, ties to even, of values within ±127.
    fn round_to_i8(self, v: Self::F) -> [i8; LANES];

    fn splat_i(self, x: i32) -> Self::I;
    fn shift_left(self, v: Self::I, bits: u32) -> Self::I;
    fn max_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// The bits of `|v|`: as integers they order like the values, a NaN above all.
    fn abs_bits(self, v: Self::F) -> Self::I;
    fn to_f(self, v: Self::I) -> Self::F;
    #[cfg_attr(target_arch = "aarch64", allow(dead_code, reason = "its kernels need no lanes one by one; tests do"))]
    fn array_i(self, v: Self::I) -> [i32; LANES];
    /// Greatest lane.
    fn max_lane_i(self, v: Self::I) -> i32;
    /// Sum of the lanes of bytes.
    fn sum_i8(self, v: [i8; LANES]) -> i32;

    /// Small integers as floats.
    fn load_i8(self, x: &[i8; LANES]) -> Self::F;
    /// Values of E4M3 bytes (see `weights::format`) divided by 256; no byte is a NaN.
    fn load_e4m3(self, x: &[u8; LANES]) -> Self::F;

    fn load_bytes(self, x: &[u8; 64]) -> Self::B;
    /// `table[v]` of each byte, all below 16.
    fn look_up(self, table: &[u8; 16], v: Self::B) -> Self::B;
    /// Low and high four bits of each byte.
    fn nibbles(self, v: Self::B) -> (Self::B, Self::B);
    /// Per lane: `acc + sum of w[i] * a[i]` over its 4 bytes, for `w` up to 31.
    fn dot_small(self, acc: Self::I, w: Self::B, a: [i8; 4]) -> Self::I;
    /// Per lane: `acc + sum of w[i] * a[i]` over its 4 bytes, for any `w`.
    fn dot(self, acc: Self::I, w: Self::B, a: [i8; 4]) -> Self::I;

    /// Runs a kernel as a function of its own: what is inlined into one function takes the compiler more than its share.
    fn call<K: Kernel>(self, kernel: K);

    /// Asks for the cache line at an address, which need not be valid.
    fn prefetch(self, at: *const u8);

    /// Asks for all cache lines of `x`.
    #[inline(always)]
    fn prefetch_all<T>(self, x: &[T]) {
        let start = x.as_ptr().cast::<u8>();
        for offset in (0..size_of_val(x)).step_by(64) {
            self.prefetch(start.wrapping_add(offset));
        }
    }

    #[inline(always)]
    fn array(self, v: Self::F) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        self.store(v, &mut out);
        out
    }

    /// Loads up to 16 values; absent lanes are 0.
    #[inline(always)]
    fn load_part(self, x: &[f32]) -> Self::F {
        let mut padded = [0.0; LANES];
        padded[..x.len()].copy_from_slice(x);
        self.load(&padded)
    }

    /// Stores as many lanes as `out` holds, at most 16.
    #[inline(always)]
    fn store_part(self, v: Self::F, out: &mut [f32]) {
        out.copy_from_slice(&self.array(v)[..out.len()]);
    }

    /// Sum of the lanes, as a tree of halves.
    #[inline(always)]
    fn sum(self, v: Self::F) -> f32 {
        let mut a = self.array(v);
        for width in [8, 4, 2, 1] {
            for i in 0..width {
                a[i] += a[i + width];
            }
        }
        a[0]
    }

    /// Greatest lane; NaN lanes may or may not be seen, but the same way everywhere.
    #[inline(always)]
    fn max_lane(self, v: Self::F) -> f32 {
        let mut a = self.array(v);
        for width in [8, 4, 2, 1] {
            for i in 0..width {
                a[i] = if a[i] > a[i + width] { a[i] } else { a[i + width] };
            }
        }
        a[0]
    }

    /// `e^x`, relative error below 3e-7; 0 below -87, the value at 88 above it, NaN for NaN.
    #[inline(always)]
    fn exp(self, x: Self::F) -> Self::F {
        let clamped = self.min(self.splat(88.0), self.max(self.splat(EXP_LOWEST), x));
        let t = self.fma(clamped, self.splat(std::f32::consts::LOG2_E), self.splat(ROUND));
        let n = self.sub(t, self.splat(ROUND));
        let r = self.fma(n, self.splat(-LN2_HIGH), clamped);
        let r = self.fma(n, self.splat(-LN2_LOW), r);
        let mut p = self.splat(EXP_TAYLOR[0]);
        for &c in &EXP_TAYLOR[1..] {
            p = self.fma(p, r, self.splat(c));
        }
        self.zero_where_less(self.mul(p, self.pow2(t)), x, self.splat(EXP_LOWEST))
    }

    /// The hyperbolic tangent, relative error below 4e-7; NaN for NaN.
    #[inline(always)]
    fn tanh(self, x: Self::F) -> Self::F {
        // Near 0 a polynomial in x² (Cephes tanhf), beyond it 1 - 2 / (e^2|x| + 1) with the sign of x.
        let negative = self.sub(self.splat(0.0), x);
        let magnitude = self.max(negative, x);
        let square = self.mul(x, x);
        let mut p = self.splat(TANH_NEAR_0[0]);
        for &c in &TANH_NEAR_0[1..] {
            p = self.fma(p, square, self.splat(c));
        }
        let near = self.fma(self.mul(p, square), x, x);
        let one = self.splat(1.0);
        let power = self.exp(self.add(magnitude, magnitude));
        let far = self.sub(one, self.div(self.splat(2.0), self.add(power, one)));
        let zero = self.splat(0.0);
        let positive_far = self.zero_where_less(far, x, zero);
        let negative_far = self.zero_where_less(far, negative, zero);
        let far = self.sub(positive_far, negative_far);
        // Neighbouring limits: one of the two is zeroed, whatever x.
        let far = self.zero_where_less(far, magnitude, self.splat(TANH_NEAR));
        let limit = self.splat(-TANH_NEAR.next_down());
        let near = self.zero_where_less(near, self.sub(zero, magnitude), limit);
        self.add(near, far)
    }
}

/// Adding it rounds an f32 of modest size to an integer, which then stands in the low bits.
const ROUND: f32 = 12_582_912.0;
const EXP_LOWEST: f32 = -87.0;
/// ln 2 in two parts: products of the first with an exponent are exact.
const LN2_HIGH: f32 = 355.0 / 512.0;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Taylor's coefficients from degree 7 down: the remainder at |r| <= ln 2 / 2 is below 1e-8.
const EXP_TAYLOR: [f32; 8] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];

/// Where the polynomial for tanh ends.
const TANH_NEAR: f32 = 0.625;
/// From degree 4 down, in x², times x³.
const TANH_NEAR_0: [f32; 5] = [-5.704_988_7e-3, 2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1];

/// A computation written against `Simd`.
pub(super) trait Kernel {
    /// Must be `#[inline(always)]`, and all that it calls with `simd` too, and no closure may use `simd`: only then the code
    /// is compiled with the instructions of `S`. Anything else still gives the right bits, a hundred times slower.
    fn run<S: Simd>(self, simd: S);
}

/// An instruction set that this CPU has been found to have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Vectors(Isa);

impl Vectors {
    /// `None` where the CPU lacks it.
    pub(super) fn new(isa: Isa) -> Option<Self> {
        isa.is_available().then_some(Self(isa))
    }

    /// Runs a kernel compiled for the set.
    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `new` has found the instructions on this CPU.
            Isa::Avx512Vnni => unsafe { avx512::run(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `new` has found the instructions on this CPU.
            Isa::Avx2 => unsafe { avx2::run(kernel) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: `new` has found the instructions on this CPU.
            Isa::NeonI8mm => unsafe { neon::run_i8mm(kernel) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: `new` has found the instructions on this CPU.
            Isa::NeonDotprod => unsafe { neon::run_dotprod(kernel) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: `new` has found the instructions on this CPU.
            Isa::Neon => unsafe { neon::run(kernel) },
            _ => Portable.call(kernel),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tanh_is_within_its_error_and_the_same_everywhere() {
        let mut xs: Vec<f32> = (0..40_000).map(|i| -10.0 + i as f32 * 0.000_5).collect();
        xs.extend([0.0, -0.0, TANH_NEAR, TANH_NEAR.next_down(), -TANH_NEAR, 1e-30, 100.0, -1e9, f32::MAX, 3e-4]);
        xs.extend([f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::NAN, f32::NAN, f32::NAN]);
        let mut portable = Vec::new();
        Vectors::new(Isa::Portable).unwrap().run(Tanh(&xs, &mut portable));
        assert_eq!(portable.len(), xs.len());
        for (&x, &y) in xs.iter().zip(&portable) {
            let want = f64::from(x).tanh();
            assert!((f64::from(y) - want).abs() <= 4e-7 * want.abs() || x.is_nan() && y.is_nan(), "tanh({x}) = {y}");
        }
        for isa in Isa::available() {
            let mut got = Vec::new();
            Vectors::new(isa).unwrap().run(Tanh(&xs, &mut got));
            let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
            assert!(got.iter().zip(&portable).all(same), "{isa:?}");
        }
    }

    struct Tanh<'a>(&'a [f32], &'a mut Vec<f32>);

    impl Kernel for Tanh<'_> {
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for chunk in self.0.as_chunks::<LANES>().0 {
                self.1.extend(s.array(s.tanh(s.load(chunk))));
            }
        }
    }

    struct Exp<'a>(&'a [f32], &'a mut Vec<f32>);

    impl Kernel for Exp<'_> {
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for chunk in self.0.as_chunks::<LANES>().0 {
                self.1.extend(s.array(s.exp(s.load(chunk))));
            }
        }
    }

    #[test]
    fn exp_is_within_its_error_and_the_same_everywhere() {
        let xs: Vec<f32> = (0..200_000).map(|i| -90.0 + i as f32 * 0.000_9).collect();
        let mut portable = Vec::new();
        Vectors::new(Isa::Portable).unwrap().run(Exp(&xs, &mut portable));
        for (&x, &y) in xs.iter().zip(&portable) {
            let exact = f64::from(x).exp();
            let want = if x < EXP_LOWEST { 0.0 } else { exact.min(88f64.exp()) };
            assert!((f64::from(y) - want).abs() <= 3e-7 * want, "exp({x}) = {y}, not {want}");
        }
        for isa in Isa::available() {
            let mut got = Vec::new();
            Vectors::new(isa).unwrap().run(Exp(&xs, &mut got));
            assert!(got.iter().zip(&portable).all(|(a, b)| a.to_bits() == b.to_bits()), "{isa:?}");
        }
    }

    #[test]
    fn exp_of_odd_values() {
        let mut xs = [0.0; LANES];
        xs[..4].copy_from_slice(&[f32::NEG_INFINITY, f32::NAN, f32::INFINITY, 0.0]);
        for isa in Isa::available() {
            let mut got = Vec::new();
            Vectors::new(isa).unwrap().run(Exp(&xs, &mut got));
            assert_eq!(got[0], 0.0);
            assert!(got[1].is_nan());
            assert!(got[2] > 1e38);
            assert_eq!(got[3], 1.0);
        }
    }

    /// Every operation on three vectors of floats, as bits; any NaN is as good as another.
    struct Floats<'a>([&'a [f32; LANES]; 3], &'a mut Vec<u32>);

    impl Kernel for Floats<'_> {
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            let Self([a, b, c], out) = self;
            let (a, b, c) = (s.load(a), s.load(b), s.load(c));
            let (magnitude, doubled) = (s.abs_bits(a), s.shift_left(s.abs_bits(b), 1));
            let floats = [
                [s.add(a, b), s.sub(a, b), s.mul(a, b), s.div(a, b)],
                [s.fma(a, b, c), s.max(a, b), s.min(a, b), s.zero_where_less(a, b, c)],
                [s.pow2(a), s.exp(a), s.to_f(magnitude), s.to_f(doubled)],
            ];
            for v in floats.as_flattened() {
                out.extend(s.array(*v).map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }));
            }
            for v in [magnitude, doubled, s.max_i(magnitude, doubled)] {
                out.extend(s.array_i(v).map(|x| x as u32));
                out.push(s.max_lane_i(v) as u32);
            }
        }
    }

    #[test]
    fn float_operations_give_the_bits_of_portable() {
        let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, f32::MAX, -f32::MIN_POSITIVE, 1e-40];
        let plain = [1.0, -1.5, 0.1, 126.5, -87.3, 3e38, 1.000_000_1, -7e-8];
        let values: [f32; LANES] = std::array::from_fn(|i| [odd, plain][i % 2][i / 2]);
        for shifts in 0..LANES * LANES {
            let [b, c] = [shifts % LANES, shifts / LANES].map(|by| std::array::from_fn(|i| values[(i + by) % LANES]));
            assert_bits_of_portable(|vectors, out| vectors.run(Floats([&values, &b, &c], out)));
        }
    }

    /// Loads of 16-bit floats, and bytes of the same bits divided by 256.
    struct Narrow<'a>(&'a [u16; LANES], &'a mut Vec<u32>);

    impl Kernel for Narrow<'_> {
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            let Self(bits, out) = self;
            for v in [s.load_f16(bits), s.load_bf16(bits)] {
                out.extend(s.array(v).map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }));
            }
            let codes = s.round_to_i8(s.load(&bits.map(|x| (f32::from(x) / 256.0 - 127.0).min(127.0))));
            out.extend(codes.map(|x| x as u32));
            out.push(s.sum_i8(codes) as u32);
        }
    }

    #[test]
    fn narrow_operations_give_the_bits_of_portable() {
        for start in (0..=u16::MAX).step_by(LANES) {
            // Ties of rounding, every 128, are among lanes in ascending order; sums reach both ends.
            let near = std::array::from_fn(|i| start + i as u16);
            assert_bits_of_portable(|vectors, out| vectors.run(Narrow(&near, out)));
        }
    }

    fn assert_bits_of_portable(run: impl Fn(Vectors, &mut Vec<u32>)) {
        let mut portable = Vec::new();
        run(Vectors(Isa::Portable), &mut portable);
        for isa in Isa::available() {
            let mut got = Vec::new();
            run(Vectors(isa), &mut got);
            assert_eq!(got, portable, "{isa:?}");
        }
    }

    /// Loads of E4M3, and bytes that are looked up.
    struct Bytes<'a>(&'a [u8; 64], &'a [u8; 16], &'a mut Vec<u32>);

    impl Kernel for Bytes<'_> {
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            let Self(bytes, table, out) = self;
            for lanes in bytes.as_chunks::<LANES>().0 {
                out.extend(s.array(s.load_e4m3(lanes)).map(f32::to_bits));
                out.extend(s.array(s.load_i8(bytemuck::cast_ref(lanes))).map(f32::to_bits));
            }
            let (low, high) = s.nibbles(s.load_bytes(bytes));
            for v in [s.look_up(table, low), s.look_up(table, high)] {
                for a in [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]] {
                    out.extend(s.array_i(s.dot(s.splat_i(0), v, a)).map(|x| x as u32));
                }
            }
        }
    }

    #[test]
    fn byte_operations_give_the_bits_of_portable() {
        let table = std::array::from_fn(|i| (i * 53 + 7) as u8);
        for start in (0..=255u8).step_by(64) {
            let bytes = std::array::from_fn(|i| start + i as u8);
            assert_bits_of_portable(|vectors, out| vectors.run(Bytes(&bytes, &table, out)));
        }
    }

    struct Dots<'a>(&'a [u8; 64], [i8; 4], &'a mut Vec<[i32; LANES]>);

    impl Kernel for Dots<'_> {
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            let w = s.load_bytes(self.0);
            let (low, high) = s.nibbles(w);
            self.2.push(s.array_i(s.dot(s.splat_i(-7), w, self.1)));
            self.2.push(s.array_i(s.dot_small(s.splat_i(5), low, self.1)));
            self.2.push(s.array_i(s.dot_small(s.shift_left(s.splat_i(-3), 7), high, self.1)));
        }
    }

    #[test]
    fn integer_dots_are_exact_at_the_extremes() {
        let sum = |w: [i32; 4], a: [i8; 4]| (0..4).map(|i| w[i] * i32::from(a[i])).sum::<i32>();
        for a in [[127; 4], [-128; 4], [-127, 127, -1, 1]] {
            let bytes: [u8; 64] = std::array::from_fn(|i| if i < 16 { 255 } else { (i * 37 % 256) as u8 });
            for isa in Isa::available() {
                let mut got = Vec::new();
                Vectors::new(isa).unwrap().run(Dots(&bytes, a, &mut got));
                for lane in 0..LANES {
                    let w: [i32; 4] = std::array::from_fn(|i| i32::from(bytes[lane * 4 + i]));
                    assert_eq!(got[0][lane], -7 + sum(w, a), "{isa:?}");
                    assert_eq!(got[1][lane], 5 + sum(w.map(|x| x & 15), a), "{isa:?}");
                    assert_eq!(got[2][lane], -384 + sum(w.map(|x| x >> 4), a), "{isa:?}");
                }
            }
        }
    }
}
