//! A program as text, one line per op: for snapshot tests, `examples/program_dump.rs` and bug reports.
//!
//! Invariant: everything that changes the meaning of a program changes its dump.

use std::fmt::{Display, Formatter, Result};

use super::{LinearPart, Op, Program, RowDim, StateSpec, View};
use crate::ids::{Slot, WeightId};

impl Display for Program {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        writeln!(f, "program {}", self.name)?;
        for (i, StateSpec::Paged { planes }) in self.states.iter().enumerate() {
            let planes: Vec<String> =
                planes.iter().map(|p| format!("[blocks, {}, block_size, {}] {:?}", p.heads, p.dim, p.dtype)).collect();
            writeln!(f, "state {i}: {}", planes.join(", "))?;
        }
        for (i, op) in self.ops.iter().enumerate() {
            writeln!(f, "{i:4}  {}", Line { program: self, op })?;
        }
        match self.logits {
            Some(slot) => writeln!(f, "logits: {}", self.slot(slot)),
            None => writeln!(f, "logits: none"),
        }
    }
}

struct Line<'a> {
    program: &'a Program,
    op: &'a Op,
}

impl Program {
    fn slot(&self, slot: Slot) -> String {
        self.slots.get(slot.index()).map_or_else(|| format!("slot {slot}?"), |info| info.name.clone())
    }

    fn slot_shape(&self, slot: Slot) -> String {
        match self.slots.get(slot.index()) {
            Some(info) if info.rows == RowDim::Tokens => format!("{}[tokens, {}]", info.name, info.width),
            Some(info) => format!("{}[logit_rows, {}]", info.name, info.width),
            None => format!("slot {slot}?"),
        }
    }

    fn view(&self, view: View) -> String {
        format!("{}[{}..{}]", self.slot(view.slot), view.offset, u64::from(view.offset) + u64::from(view.width))
    }

    fn weight(&self, id: WeightId) -> String {
        self.weights.get(id.index()).map_or_else(|| format!("weight {id}?"), |w| format!("{}{:?}", w.name, w.shape))
    }

    fn part(&self, part: &LinearPart) -> String {
        let bias = part.bias.map(|bias| format!(" + {}", self.weight(bias))).unwrap_or_default();
        format!("{}{bias}", self.weight(part.weight))
    }
}

impl Display for Line<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let (p, kind) = (self.program, self.op.kind());
        match self.op {
            Op::Embed { table, out } => write!(f, "{} = {kind} {}", p.slot_shape(*out), p.weight(*table)),
            Op::RmsNorm { x, weight, eps, out } => {
                write!(f, "{} = {kind} {}, {}, eps {eps:e}", p.slot_shape(*out), p.slot(*x), p.weight(*weight))
            }
            Op::NormHeads { x, weight, eps } => write!(f, "{kind} {}, {}, eps {eps:e}", p.view(*x), p.weight(*weight)),
            Op::Add { residual, x } => write!(f, "{kind} {} += {}", p.slot(*residual), p.slot(*x)),
            Op::AddRmsNorm { residual, x, weight, eps, out } => {
                let (out, residual, x) = (p.slot_shape(*out), p.slot(*residual), p.slot(*x));
                write!(f, "{out} = {kind} {residual} += {x}, {}, eps {eps:e}", p.weight(*weight))
            }
            Op::Linear { x, parts, out } => {
                let parts: Vec<String> = parts.iter().map(|part| p.part(part)).collect();
                write!(f, "{} = {kind} {}, {}", p.slot_shape(*out), p.slot(*x), parts.join(", "))
            }
            Op::Rope { x, inv_freq, pairing, head_dim } => {
                write!(f, "{kind} {}, {}, {pairing:?}, head_dim {head_dim}", p.view(*x), p.weight(*inv_freq))
            }
            Op::StoreKv { k, v, layer } => write!(f, "{kind} {}, {}, state {layer}", p.view(*k), p.view(*v)),
            Op::Attention { q, layer, heads, head_dim, scale, out } => {
                let (out, q) = (p.slot_shape(*out), p.view(*q));
                write!(f, "{out} = {kind} {q}, state {layer}, heads {heads}, head_dim {head_dim}, scale {scale}")
            }
            Op::GatedActivation { x, activation, out } => {
                write!(f, "{} = {kind} {}, {activation:?}", p.slot_shape(*out), p.slot(*x))
            }
            Op::CheckFinite { x } => write!(f, "{kind} {}", p.slot(*x)),
            Op::SelectRows { x, out } => write!(f, "{} = {kind} {}", p.slot_shape(*out), p.slot(*x)),
            Op::Sample { logits } => write!(f, "{kind} {}", p.slot(*logits)),
        }
    }
}
