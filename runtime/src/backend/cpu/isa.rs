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
    /// Plain Rust, compiled for the target's baseline (on aarch64: NEON with FMA).
    Portable,
}

impl Isa {
    const ALL: [Self; 3] = [Self::Avx512Vnni, Self::Avx2, Self::Portable];

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
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx512Vnni | Self::Avx2 => false,
            Self::Portable => true,
        }
    }

    /// For logs and `Caps::device`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Avx512Vnni => "avx512-vnni",
            Self::Avx2 => "avx2",
            Self::Portable => "portable",
        }
    }
}
