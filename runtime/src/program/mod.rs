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
mod state;

pub use access::{Access, AccessKind};
pub use op::{Activation, FusedNorm, Launch, LinearEnd, LinearPart, Op, RopePairing, Rotary, Router, RouterScore};
pub use state::{KvDtype, Plane, StateSpec};

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
    /// Slots that keep their own memory to the end of a step, for the host to read: none but when activations are measured.
    pub kept: Vec<Slot>,
}
