//! The forward pass as data: a straight-line `Program` of some twenty op kinds (`op`) over named slots.
//!
//! Invariant: no branch, no loop, no readback, and nothing that changes from step to step is a field of an op: such
//! values live in the step inputs. An architecture (`model/`) writes a program once; a backend lowers it; the reference
//! interpreter runs it. `check` refuses a bad one at load, `memory` places its slots, `segment` cuts it for replay.

mod access;
pub mod check;
mod dump;
pub mod memory;
mod op;
pub mod segment;

pub use access::{Access, AccessKind};
pub use op::{Activation, FusedNorm, Launch, LinearEnd, LinearPart, Op, RopePairing, Rotary, Router, RouterScore};

use serde::Serialize;

use crate::ids::Slot;

/// The leading dimension of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum RowDim {
    /// One row per token of the step.
    Tokens,
    /// One row per token whose logits are asked for.
    LogitRows,
}

/// A planned activation: `[rows, width]` of f32, row-major.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SlotInfo {
    /// For dumps and errors, e.g. `l3.qkv`.
    pub name: String,
    /// What a row is.
    pub rows: RowDim,
    /// Elements per row.
    pub width: u32,
}

/// A column range of a slot: `[rows, width]` at `offset` within each row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct View {
    /// The slot.
    pub slot: Slot,
    /// First column.
    pub offset: u32,
    /// Number of columns.
    pub width: u32,
}

/// An immutable tensor that the program reads.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WeightInfo {
    /// The house name, e.g. `layers.3.attn.q`; the architecture's name table maps it to the file's.
    pub name: String,
    /// `[out_features, in_features]`, `[vocab, hidden]`, or `[n]` for vectors.
    pub shape: Vec<u32>,
}

/// Numeric type of a KV plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum KvDtype {
    /// 32-bit float.
    F32,
    /// 16-bit float; K and V are rounded to it before attention reads them, the own chunk included.
    F16,
}

impl KvDtype {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
        }
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
    /// Paged planes, all named by the same `BlockId`: plane 0 is K, plane 1 is V.
    Paged {
        /// The buffers.
        planes: Vec<Plane>,
    },
}

impl StateSpec {
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

/// A forward pass: ops in order over slots, weights and per-layer state.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Program {
    /// The architecture's name.
    pub name: String,
    /// Indexed by `Slot`.
    pub slots: Vec<SlotInfo>,
    /// Indexed by `WeightId`.
    pub weights: Vec<WeightInfo>,
    /// Indexed by `Layer`.
    pub states: Vec<StateSpec>,
    /// In execution order.
    pub ops: Vec<Op>,
    /// `[logit_rows, vocab]`: of which the host may read rows after the last op.
    pub logits: Option<Slot>,
}
