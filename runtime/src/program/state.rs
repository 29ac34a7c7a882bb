//! What a layer keeps between steps: planes of paged K and V, and the types that they are stored in.
//!
//! Invariant: a plane is `[blocks, heads, block_size, dim]`, and all planes of a layer are named by the same `BlockId`; a type
//! whose codes mean nothing without a scale brings planes of scales with it (`StateSpec::kv`, `StateSpec::shared`), so that whoever
//! copies, reads, sizes or checks blocks walks the planes and need not know the types. How values are rounded: `backend::cached`.

use std::fmt;

use serde::Serialize;

/// Numeric type of a KV plane. K and V are rounded to it before attention reads them, the own chunk included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum KvDtype {
    /// 32-bit float.
    F32,
    /// 16-bit float.
    F16,
    /// bfloat16: the upper half of a 32-bit float.
    Bf16,
    /// 8-bit float with 4 bits of exponent and 3 of fraction, as it is, without a scale (Micikevicius et al. 2022, E4M3; what
    /// vLLM stores without calibrated scales). Values beyond ±448 become ±448.
    Fp8E4m3,
    /// 8-bit integers from -127 to 127 with one f32 scale per token and head (vLLM's name).
    Int8PerTokenHead,
}

impl KvDtype {
    /// All types that K and V may have, by descending size.
    pub const ALL: [Self; 5] = [Self::F32, Self::F16, Self::Bf16, Self::Fp8E4m3, Self::Int8PerTokenHead];

    /// The name on the command line, in metrics, and of the type's kernels.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Fp8E4m3 => "fp8_e4m3",
            Self::Int8PerTokenHead => "int8_per_token_head",
        }
    }

    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Fp8E4m3 | Self::Int8PerTokenHead => 1,
        }
    }

    /// Whether each token and head has a scale, in a plane of its own.
    pub fn is_scaled(self) -> bool {
        self == Self::Int8PerTokenHead
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One buffer of a layer's paged state: `[blocks, heads, block_size, dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Plane {
    /// KV heads.
    pub heads: u32,
    /// Elements per head.
    pub dim: u32,
    /// Element type.
    pub dtype: KvDtype,
}

/// What a layer keeps between steps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum StateSpec {
    /// Paged planes, all named by the same `BlockId`: K, V unless it is K, then their scales if the type has them.
    Paged {
        /// The buffers.
        planes: Vec<Plane>,
    },
}

impl StateSpec {
    /// K and V of one shape and type, with the planes of scales that the type asks for: `[K, V]` or `[K, V, scales of K, scales
    /// of V]`.
    pub fn kv(plane: Plane) -> Self {
        let mut planes = vec![plane; 2];
        if plane.dtype.is_scaled() {
            planes.extend([Plane { dim: 1, dtype: KvDtype::F32, ..plane }; 2]);
        }
        Self::Paged { planes }
    }

    /// One plane that is K and V (DeepSeek-AI 2024, "DeepSeek-V2": what heads share is cached, not what they make of it), with
    /// the plane of scales that its type asks for.
    pub fn shared(plane: Plane) -> Self {
        let mut planes = vec![plane];
        if plane.dtype.is_scaled() {
            planes.push(Plane { dim: 1, dtype: KvDtype::F32, ..plane });
        }
        Self::Paged { planes }
    }

    /// The plane of K, if these are the planes of `kv` or `shared`.
    pub fn kv_plane(&self) -> Option<Plane> {
        let Self::Paged { planes } = self;
        planes.first().copied().filter(|&plane| *self == Self::kv(plane) || *self == Self::shared(plane))
    }

    /// Whether K is V too.
    pub fn is_shared(&self) -> bool {
        let Self::Paged { planes } = self;
        planes.first().is_some_and(|&plane| *self == Self::shared(plane))
    }

    /// Which plane holds V.
    pub fn value_plane(&self) -> usize {
        usize::from(!self.is_shared())
    }

    /// Which planes hold the scales of K and of V, where the type has them.
    pub fn scale_planes(&self) -> [usize; 2] {
        if self.is_shared() { [1; 2] } else { [2, 3] }
    }

    /// Bytes of one block of `block_size` tokens over all planes.
    pub fn block_bytes(&self, block_size: u32) -> u64 {
        match self {
            Self::Paged { planes } => planes
                .iter()
                .map(|p| u64::from(p.heads) * u64::from(p.dim) * u64::from(block_size) * p.dtype.bytes() as u64)
                .sum(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_count_every_plane() {
        let bytes = |dtype| StateSpec::kv(Plane { heads: 3, dim: 64, dtype }).block_bytes(16);
        let [f32, f16, bf16, fp8, int8] = KvDtype::ALL.map(bytes);
        assert_eq!((f32, f16, bf16, fp8), (2 * 3 * 64 * 16 * 4, f32 / 2, f32 / 2, f32 / 4));
        assert_eq!(int8, fp8 + 2 * 3 * 16 * 4, "a scale per token and head of K and of V");
    }

    #[test]
    fn a_shared_plane_is_half_of_k_and_v() {
        for dtype in KvDtype::ALL {
            let plane = Plane { heads: 1, dim: 576, dtype };
            let (shared, kv) = (StateSpec::shared(plane), StateSpec::kv(plane));
            assert_eq!(2 * shared.block_bytes(16), kv.block_bytes(16));
            assert_eq!((shared.kv_plane(), shared.is_shared(), kv.is_shared()), (Some(plane), true, false));
            let StateSpec::Paged { planes } = shared;
            assert_eq!(planes.len(), if dtype.is_scaled() { 2 } else { 1 });
        }
    }

    #[test]
    fn planes_of_another_shape_are_not_k_and_v() {
        let plane = Plane { heads: 3, dim: 64, dtype: KvDtype::Int8PerTokenHead };
        let StateSpec::Paged { planes } = StateSpec::kv(plane);
        assert_eq!(StateSpec::Paged { planes: planes.clone() }.kv_plane(), Some(plane));
        assert_eq!(StateSpec::Paged { planes: planes[..2].to_vec() }.kv_plane(), None);
        assert_eq!(StateSpec::Paged { planes: planes[..1].to_vec() }.kv_plane(), None, "no scales");
        assert_eq!(StateSpec::Paged { planes: Vec::new() }.kv_plane(), None);
        let other = Plane { dim: 32, ..planes[1] };
        assert_eq!(StateSpec::Paged { planes: vec![planes[0], other, planes[2], planes[3]] }.kv_plane(), None);
    }
}
