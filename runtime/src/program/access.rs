//! Which slots, weights and state an op touches, and how: the one place that knows the operands of every op.
//!
//! Invariant: the matches are exhaustive, so that a new op must answer. Read by `check` (order of writes), `memory`
//! (live ranges, lanes) and by backends that bind buffers.

use super::{LinearEnd, LinearPart, Op, Slot};
use crate::ids::{Layer, WeightId};

/// One slot that an op touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The slot, in whole or in part.
    pub slot: Slot,
    /// How.
    pub kind: AccessKind,
}

/// How an op touches a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessKind {
    /// Only read.
    Read,
    /// Written in full without being read.
    Write,
    /// Changed in place: one read-write binding.
    ReadWrite,
}

impl AccessKind {
    /// Whether the slot changes.
    pub fn writes(self) -> bool {
        self != Self::Read
    }
}

impl Op {
    /// The op's name in dumps and errors.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Embed { .. } => "Embed",
            Self::RmsNorm { .. } => "RmsNorm",
            Self::NormHeads { .. } => "NormHeads",
            Self::Add { .. } => "Add",
            Self::Linear { .. } => "Linear",
            Self::Rope { .. } => "Rope",
            Self::StoreKv { .. } => "StoreKv",
            Self::RopeStoreKv { .. } => "RopeStoreKv",
            Self::Attention { .. } => "Attention",
            Self::GatedActivation { .. } => "GatedActivation",
            Self::FusedLinear { .. } => "FusedLinear",
            Self::MoeRoute { .. } => "MoeRoute",
            Self::MoeLinear { .. } => "MoeLinear",
            Self::MoeCombine { .. } => "MoeCombine",
            Self::ScaleByPosition { .. } => "ScaleByPosition",
            Self::SoftCap { .. } => "SoftCap",
            Self::CheckFinite { .. } => "CheckFinite",
            Self::SelectRows { .. } => "SelectRows",
            Self::GatherColumns { .. } => "GatherColumns",
            Self::Sample { .. } => "Sample",
        }
    }

    /// The slots it touches: what is read, then what is changed, then what is written.
    pub fn accesses(&self) -> Vec<Access> {
        let read = |slot: Slot| Access { slot, kind: AccessKind::Read };
        let write = |slot: Slot| Access { slot, kind: AccessKind::Write };
        let change = |slot: Slot| Access { slot, kind: AccessKind::ReadWrite };
        match *self {
            Self::Embed { out, .. } => vec![write(out)],
            Self::RmsNorm { x, out, .. }
            | Self::Linear { x, out, .. }
            | Self::GatedActivation { x, out, .. }
            | Self::MoeRoute { logits: x, out, .. }
            | Self::SelectRows { x, out }
            | Self::GatherColumns { x, out, .. } => vec![read(x), write(out)],
            Self::MoeLinear { x, route, out, .. } => {
                [Some(read(x)), route.map(read), Some(write(out))].into_iter().flatten().collect()
            }
            Self::MoeCombine { x, route, residual } => vec![read(x), read(route), change(residual)],
            Self::Attention { q, out, .. } => vec![read(q.slot), write(out)],
            Self::NormHeads { x, .. } | Self::Rope { x, .. } | Self::ScaleByPosition { x, .. } => vec![change(x.slot)],
            Self::SoftCap { x, .. } => vec![change(x)],
            Self::Add { residual, x } => vec![read(x), change(residual)],
            Self::StoreKv { k, v, .. } => {
                let other = v.map(|v| v.slot).filter(|&slot| slot != k.slot);
                [k.slot].into_iter().chain(other).map(read).collect()
            }
            Self::RopeStoreKv { x, v, .. } if x.slot == v.slot => vec![change(x.slot)],
            Self::RopeStoreKv { x, v, .. } => vec![read(v.slot), change(x.slot)],
            Self::FusedLinear { x, norm, ref end, out, .. } => {
                let out = if matches!(end, LinearEnd::Add { .. }) { change(out) } else { write(out) };
                let room = norm.map(|norm| norm.normed).into_iter().chain(end.product());
                [read(x), out].into_iter().chain(room.map(write)).collect()
            }
            Self::CheckFinite { x } | Self::Sample { logits: x } => vec![read(x)],
        }
    }

    /// The weights it reads.
    pub fn weights(&self) -> Vec<WeightId> {
        match self {
            Self::Embed { table: weight, .. }
            | Self::RmsNorm { weight, .. }
            | Self::NormHeads { weight, .. }
            | Self::GatherColumns { order: weight, .. } => vec![*weight],
            Self::Rope { rotary, .. } | Self::RopeStoreKv { rotary, .. } => vec![rotary.inv_freq],
            Self::Linear { parts, .. } | Self::MoeLinear { parts, .. } => of_parts(parts),
            Self::MoeRoute { bias, .. } => bias.iter().copied().collect(),
            Self::FusedLinear { norm, parts, .. } => {
                norm.iter().map(|norm| norm.weight).chain(of_parts(parts)).collect()
            }
            Self::Attention { sinks, .. } => sinks.iter().copied().collect(),
            Self::Add { .. }
            | Self::StoreKv { .. }
            | Self::GatedActivation { .. }
            | Self::MoeCombine { .. }
            | Self::ScaleByPosition { .. }
            | Self::SoftCap { .. }
            | Self::CheckFinite { .. }
            | Self::SelectRows { .. }
            | Self::Sample { .. } => Vec::new(),
        }
    }

    /// The layer whose state it touches.
    pub fn layer(&self) -> Option<Layer> {
        match self {
            Self::StoreKv { layer, .. } | Self::RopeStoreKv { layer, .. } | Self::Attention { layer, .. } => {
                Some(*layer)
            }
            Self::Embed { .. }
            | Self::RmsNorm { .. }
            | Self::NormHeads { .. }
            | Self::Add { .. }
            | Self::Linear { .. }
            | Self::Rope { .. }
            | Self::GatedActivation { .. }
            | Self::FusedLinear { .. }
            | Self::MoeRoute { .. }
            | Self::MoeLinear { .. }
            | Self::MoeCombine { .. }
            | Self::ScaleByPosition { .. }
            | Self::SoftCap { .. }
            | Self::CheckFinite { .. }
            | Self::SelectRows { .. }
            | Self::GatherColumns { .. }
            | Self::Sample { .. } => None,
        }
    }

    /// Whether it reads or writes ranges of the step inputs (`CheckFinite` and `Sample` write beside them).
    pub fn uses_inputs(&self) -> bool {
        match self {
            Self::Embed { .. }
            | Self::Rope { .. }
            | Self::StoreKv { .. }
            | Self::RopeStoreKv { .. }
            | Self::Attention { .. }
            | Self::ScaleByPosition { .. }
            | Self::CheckFinite { .. }
            | Self::SelectRows { .. }
            | Self::Sample { .. } => true,
            Self::RmsNorm { .. }
            | Self::NormHeads { .. }
            | Self::Add { .. }
            | Self::Linear { .. }
            | Self::GatedActivation { .. }
            | Self::GatherColumns { .. }
            | Self::FusedLinear { .. }
            | Self::MoeRoute { .. }
            | Self::MoeLinear { .. }
            | Self::MoeCombine { .. }
            | Self::SoftCap { .. } => false,
        }
    }
}

fn of_parts(parts: &[LinearPart]) -> Vec<WeightId> {
    parts.iter().flat_map(|&LinearPart { weight, bias }| [Some(weight), bias]).flatten().collect()
}
