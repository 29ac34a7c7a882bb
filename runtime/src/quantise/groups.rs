//! Which inputs of linears may be scaled, read off the program: linears that read one slot, and what takes the inverse.
//!
//! Invariant: a group is here only where scaling is exact but for the rounding of weights: its slot is read by these linears
//! alone, each weight belongs to one op, and nothing but products and sums lies between the absorber and the slot. What is not
//! understood is left out.

use crate::ids::{Slot, WeightId};
use crate::program::{Activation, LinearEnd, LinearPart, Op, Program, View};

/// Linears that read one slot.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Group {
    pub(super) input: Slot,
    pub(super) matrices: Vec<WeightId>,
    /// Which scale each channel of the input has: query heads of one KV head share theirs.
    pub(super) scale_of: Vec<usize>,
    pub(super) absorber: Absorber,
}

/// What the inverse of the scales goes into.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Absorber {
    /// A norm's weight.
    Norm(WeightId),
    /// By scale, the output of a linear that makes the channel.
    Outputs(Vec<Output>),
}

/// A row of a matrix, and the bias that is added to its product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Output {
    pub(super) matrix: WeightId,
    pub(super) bias: Option<WeightId>,
    pub(super) row: usize,
}

/// The matrices of a linear.
pub(super) fn parts(op: &Op) -> &[LinearPart] {
    match op {
        Op::Linear { parts, .. } | Op::FusedLinear { parts, .. } | Op::MoeLinear { parts, .. } => parts,
        _ => &[],
    }
}

/// Every group of a program, in its order.
pub(super) fn groups(program: &Program) -> Vec<Group> {
    let find = |op| Finder { program }.group(op);
    program.ops.iter().filter_map(find).collect()
}

struct Finder<'a> {
    program: &'a Program,
}

impl Finder<'_> {
    fn group(&self, op: &Op) -> Option<Group> {
        let (input, norm) = match *op {
            Op::FusedLinear { norm: Some(norm), .. } => (norm.normed, Some(norm)),
            Op::FusedLinear { x, .. } | Op::Linear { x, .. } => (x, None),
            _ => return None,
        };
        let touches = |other: &&Op| other.accesses().iter().any(|access| access.slot == input);
        // The op that makes it, unless the linear does, and the linear.
        if self.program.ops.iter().filter(touches).count() != if norm.is_some() { 1 } else { 2 } {
            return None;
        }
        let width = self.program.slots[input.index()].width as usize;
        let (absorber, scale_of) = match norm {
            Some(norm) => (Absorber::Norm(norm.weight), (0..width).collect()),
            None => {
                let (outputs, scale_of) = self.outputs_behind(input)?;
                (Absorber::Outputs(outputs), scale_of)
            }
        };
        let matrices: Vec<WeightId> = parts(op).iter().map(|part| part.weight).collect();
        let absorbing = match &absorber {
            Absorber::Norm(norm) => vec![*norm],
            Absorber::Outputs(outputs) => {
                outputs.iter().flat_map(|out| [Some(out.matrix), out.bias]).flatten().collect()
            }
        };
        let is_alone = |weight: &WeightId| {
            let uses = self.program.ops.iter().flat_map(Op::weights).filter(|used| used == weight);
            uses.count() == 1
        };
        let all_alone = matrices.iter().chain(&absorbing).all(is_alone);
        (all_alone && scale_of.len() == width).then_some(Group { input, matrices, scale_of, absorber })
    }

    /// The outputs that a slot is linear in, and which of them each channel is.
    fn outputs_behind(&self, slot: Slot) -> Option<(Vec<Output>, Vec<usize>)> {
        let makes = |op: &&Op| op.accesses().iter().any(|access| access.slot == slot && access.kind.writes());
        match *self.program.ops.iter().find(makes)? {
            Op::FusedLinear {
                ref parts,
                end: LinearEnd::Gate { activation: Activation::Silu | Activation::GeluTanh, .. },
                ..
            } => {
                let outputs = self.outputs(parts);
                let ups = outputs[outputs.len() / 2..].to_vec();
                let scale_of = (0..ups.len()).collect();
                Some((ups, scale_of))
            }
            Op::Attention { layer, heads, head_dim, .. } => {
                let v = self.program.ops.iter().find_map(|op| match op {
                    Op::StoreKv { v, layer: stored, .. } | Op::RopeStoreKv { v, layer: stored, .. } => {
                        (*stored == layer).then_some(*v)
                    }
                    _ => None,
                })?;
                let outputs = self.untouched_outputs(v)?;
                let (dim, kv_heads) = (head_dim as usize, outputs.len() / head_dim as usize);
                let queries_per_head = heads as usize / kv_heads;
                let channels = 0..heads as usize * dim;
                Some((outputs, channels.map(|c| c / dim / queries_per_head * dim + c % dim).collect()))
            }
            _ => None,
        }
    }

    /// The outputs behind some columns of a slot that a linear makes, if nothing else changes those columns.
    fn untouched_outputs(&self, columns: View) -> Option<Vec<Output>> {
        let is_apart = |x: View| x.offset + x.width <= columns.offset || columns.offset + columns.width <= x.offset;
        let mut outputs = None;
        for op in &self.program.ops {
            if !op.accesses().iter().any(|access| access.slot == columns.slot) {
                continue;
            }
            match *op {
                Op::FusedLinear { ref parts, end: LinearEnd::Store, .. } | Op::Linear { ref parts, .. }
                    if outputs.is_none() =>
                {
                    outputs = Some(self.outputs(parts));
                }
                Op::NormHeads { x, .. } | Op::Rope { x, .. } | Op::ScaleByPosition { x, .. } if is_apart(x) => {}
                Op::Attention { q: x, .. } if is_apart(x) => {}
                Op::RopeStoreKv { x, v, .. } if is_apart(x) && v == columns => {}
                Op::StoreKv { k, v, .. } if is_apart(k) && v == columns => {}
                _ => return None,
            }
        }
        let range = columns.offset as usize..(columns.offset + columns.width) as usize;
        outputs.and_then(|outputs| outputs.get(range).map(<[Output]>::to_vec))
    }

    /// Every output of a linear.
    fn outputs(&self, parts: &[LinearPart]) -> Vec<Output> {
        let rows = |part: &LinearPart| {
            let LinearPart { weight, bias } = *part;
            let rows = self.program.weights[weight.index()].shape[0] as usize;
            (0..rows).map(move |row| Output { matrix: weight, bias, row })
        };
        parts.iter().flat_map(rows).collect()
    }
}
