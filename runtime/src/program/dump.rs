//! A program as text, one line per op: for snapshot tests, `examples/program_dump.rs` and bug reports.
//!
//! Invariant: everything that changes the meaning of a program changes its dump.

use std::fmt::{Display, Formatter, Result};

use super::{FusedNorm, LinearEnd, LinearPart, Op, Program, Rotary, Router, RowDim, StateSpec, View};
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

    fn rotary(&self, rotary: &Rotary) -> String {
        let Rotary { inv_freq, amplitude, pairing } = *rotary;
        let times = if amplitude == 1.0 { String::new() } else { format!(" * {amplitude}") };
        format!("{}{times}, {pairing:?}", self.weight(inv_freq))
    }

    fn parts(&self, parts: &[LinearPart]) -> String {
        let part = |part: &LinearPart| {
            let bias = part.bias.map(|bias| format!(" + {}", self.weight(bias))).unwrap_or_default();
            format!("{}{bias}", self.weight(part.weight))
        };
        parts.iter().map(part).collect::<Vec<_>>().join(", ")
    }
}

impl Display for Line<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let (p, kind) = (self.program, self.op.kind());
        match self.op {
            Op::Embed { table, scale, out } => {
                write!(f, "{} = {kind} {}", p.slot_shape(*out), p.weight(*table))?;
                if *scale == 1.0 { Ok(()) } else { write!(f, " * {scale}") }
            }
            Op::RmsNorm { x, weight, eps, out } => {
                write!(f, "{} = {kind} {}, {}, eps {eps:e}", p.slot_shape(*out), p.slot(*x), p.weight(*weight))
            }
            Op::NormHeads { x, weight, eps } => write!(f, "{kind} {}, {}, eps {eps:e}", p.view(*x), p.weight(*weight)),
            Op::Add { residual, x } => write!(f, "{kind} {} += {}", p.slot(*residual), p.slot(*x)),
            Op::Linear { x, parts, out } => {
                write!(f, "{} = {kind} {}, {}", p.slot_shape(*out), p.slot(*x), p.parts(parts))
            }
            Op::Rope { x, rotary, head_dim } => {
                write!(f, "{kind} {}, {}, head_dim {head_dim}", p.view(*x), p.rotary(rotary))
            }
            Op::StoreKv { k, v, layer } => {
                write!(f, "{kind} {}", p.view(*k))?;
                v.map_or(Ok(()), |v| write!(f, ", {}", p.view(v)))?;
                write!(f, ", state {layer}")
            }
            Op::Attention { q, layer, heads, head_dim, scale, window, soft_cap, sinks, out } => {
                let (out, q) = (p.slot_shape(*out), p.view(*q));
                write!(f, "{out} = {kind} {q}, state {layer}, heads {heads}, head_dim {head_dim}, scale {scale}")?;
                window.map_or(Ok(()), |window| write!(f, ", window {window}"))?;
                soft_cap.map_or(Ok(()), |cap| write!(f, ", soft cap {cap}"))?;
                sinks.map_or(Ok(()), |sinks| write!(f, ", sinks {}", p.weight(sinks)))
            }
            Op::GatedActivation { x, groups, activation, out } => {
                write!(f, "{} = {kind} {}, {activation:?}", p.slot_shape(*out), p.slot(*x))?;
                if *groups == 1 { Ok(()) } else { write!(f, ", groups {groups}") }
            }
            Op::MoeRoute { logits, bias, router, out } => {
                write!(f, "{} = {kind} {}", p.slot_shape(*out), p.slot(*logits))?;
                bias.map_or(Ok(()), |bias| write!(f, " + {}", p.weight(bias)))?;
                let Router { top_k, score, groups, top_groups, renormalise, scale } = router;
                write!(f, ", top {top_k}, {score:?}, groups {top_groups} of {groups}, scale {scale}")?;
                if *renormalise { write!(f, ", renormalised") } else { Ok(()) }
            }
            Op::MoeLinear { x, route, parts, out } => {
                write!(f, "{} = {kind} {}", p.slot_shape(*out), p.slot(*x))?;
                route.map_or(Ok(()), |route| write!(f, ", {}", p.slot(route)))?;
                write!(f, ", {}", p.parts(parts))
            }
            Op::MoeCombine { x, route, residual } => {
                write!(f, "{kind} {} += {}, {}", p.slot(*residual), p.slot(*x), p.slot(*route))
            }
            Op::RopeStoreKv { x, v, rotary, head_dim, layer } => {
                let (x, v, rotary) = (p.view(*x), p.view(*v), p.rotary(rotary));
                write!(f, "{kind} {x}, {v}, {rotary}, head_dim {head_dim}, state {layer}")
            }
            Op::FusedLinear { x, norm, parts, end, out } => {
                match end {
                    LinearEnd::Add { .. } => write!(f, "{} += {kind} ", p.slot(*out))?,
                    LinearEnd::Store | LinearEnd::Gate { .. } => write!(f, "{} = {kind} ", p.slot_shape(*out))?,
                }
                match norm {
                    Some(FusedNorm { weight, eps, normed: _ }) => {
                        write!(f, "RmsNorm({}, {}, eps {eps:e}), ", p.slot(*x), p.weight(*weight))?;
                    }
                    None => write!(f, "{}, ", p.slot(*x))?,
                }
                if let LinearEnd::Gate { activation, product: _ } = end {
                    write!(f, "{activation:?} ")?;
                }
                write!(f, "{}", p.parts(parts))
            }
            Op::ScaleByPosition { x, beta, period } => write!(f, "{kind} {}, beta {beta}, period {period}", p.view(*x)),
            Op::SoftCap { x, cap } => write!(f, "{kind} {}, {cap}", p.slot(*x)),
            Op::CheckFinite { x } => write!(f, "{kind} {}", p.slot(*x)),
            Op::SelectRows { x, out } => write!(f, "{} = {kind} {}", p.slot_shape(*out), p.slot(*x)),
            Op::GatherColumns { x, order, out } => {
                write!(f, "{} = {kind} {}, {}", p.slot_shape(*out), p.slot(*x), p.weight(*order))
            }
            Op::Sample { logits } => write!(f, "{kind} {}", p.slot(*logits)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Layer;
    use crate::program::{SlotInfo, WeightInfo};

    #[test]
    fn attention_says_what_it_sees() {
        let slot = |name: &str| SlotInfo { name: name.into(), rows: RowDim::Tokens, width: 8 };
        let q = View { slot: Slot(0), offset: 0, width: 8 };
        let line = |window, soft_cap, sinks| {
            let op = Op::Attention {
                q,
                layer: Layer(0),
                heads: 2,
                head_dim: 4,
                scale: 0.5,
                window,
                soft_cap,
                sinks,
                out: Slot(1),
            };
            let weights = vec![WeightInfo { name: "sinks".into(), shape: vec![2] }];
            let program = Program { slots: vec![slot("q"), slot("out")], weights, ops: vec![op], ..Program::default() };
            program.to_string().lines().nth(1).expect("the op's line").trim_start_matches([' ', '0']).to_owned()
        };
        let plain = "out[tokens, 8] = Attention q[0..8], state 0, heads 2, head_dim 4, scale 0.5";
        assert_eq!(line(None, None, None), plain);
        let all = format!("{plain}, window 7, soft cap 50, sinks sinks[2]");
        assert_eq!(line(Some(7), Some(50.0), Some(WeightId(0))), all);
    }
}
