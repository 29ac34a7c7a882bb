//! Which instruction set the kernels are compiled for: a value, found once, held by the backend.
//!
//! Invariant: all give the same bits (`simd`), so that the choice is about speed only; tests run every one that the
//! machine has.

/// An instruction set that kernels exist for, fastest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 with VNNI: 16 lanes, 8-bit dot products.
    Avx512Vnni,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// NEON with 8-bit dot products of unsigned and signed bytes.
    NeonI8mm,
    /// NEON with 8-bit dot products of signed bytes.
    NeonDotprod,
    /// NEON.
    Neon,
    /// Plain Rust, compiled for the target's baseline.
    Portable,
}

impl Isa {
    pub(super) const ALL: [Self; 6] =
        [Self::Avx512Vnni, Self::Avx2, Self::NeonI8mm, Self::NeonDotprod, Self::Neon, Self::Portable];

    /// Those that this CPU has, fastest first; never empty.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// Whether this CPU has it.
    pub fn is_available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
                    && Self::Avx2.is_available()
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("bmi2")
                    && is_x86_feature_detected!("popcnt")
            }
            #[cfg(target_arch = "aarch64")]
            Self::NeonI8mm => {
                std::arch::is_aarch64_feature_detected!("neon") && std::arch::is_aarch64_feature_detected!("i8mm")
            }
            #[cfg(target_arch = "aarch64")]
            Self::NeonDotprod => {
                std::arch::is_aarch64_feature_detected!("neon") && std::arch::is_aarch64_feature_detected!("dotprod")
            }
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            Self::Portable => true,
            _ => false,
        }
    }

    /// For logs and `Caps::device`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Avx512Vnni => "avx512-vnni",
            Self::Avx2 => "avx2",
            Self::NeonI8mm => "neon-i8mm",
            Self::NeonDotprod => "neon-dotprod",
            Self::Neon => "neon",
            Self::Portable => "portable",
        }
    }
}
