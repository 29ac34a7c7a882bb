//! Matrices whose columns are in another order than their inputs (GPTQ in the order of activations): the program gathers the inputs
//! before it multiplies.
//!
//! Invariant: parts of one linear read one gathered input, so that their orders must be equal, as they are in every checkpoint
//! whose parts were quantised on the same inputs. Called by `layers` when a program is finished.

use std::collections::HashMap;

use crate::ids::{Slot, WeightId};
use crate::program::{FusedNorm, LinearEnd, LinearPart, Op, Program, SlotInfo};

/// Orders of inputs, each once, and whose they are.
#[derive(Default)]
pub(super) struct Orders {
    of_matrix: HashMap<WeightId, WeightId>,
    known: Vec<(Vec<u32>, WeightId)>,
}

impl Orders {
    /// Gives a matrix its order; `add` makes it a weight of the program where it is new.
    pub(super) fn insert(&mut self, matrix: WeightId, order: Vec<u32>, add: impl FnOnce(&[u32]) -> WeightId) {
        let known = self.known.iter().find(|(other, _)| *other == order).map(|(_, id)| *id);
        let id = known.unwrap_or_else(|| {
            let id = add(&order);
            self.known.push((order, id));
            id
        });
        self.of_matrix.insert(matrix, id);
    }

    /// Puts a `GatherColumns` before every linear whose matrices have an order.
    ///
    /// # Errors
    /// A matrix whose order is not that of the other parts, or that another op reads.
    pub(super) fn gather_inputs(&self, program: &mut Program) -> Result<(), WeightId> {
        for op in std::mem::take(&mut program.ops) {
            match op.weights().into_iter().find(|weight| self.of_matrix.contains_key(weight)) {
                None => program.ops.push(op),
                Some(first) => match op {
                    Op::Linear { x, parts, out } => self.gather(program, (x, None), (parts, LinearEnd::Store), out)?,
                    Op::FusedLinear { x, norm, parts, end, out } => {
                        self.gather(program, (x, norm), (parts, end), out)?;
                    }
                    _ => return Err(first),
                },
            }
        }
        Ok(())
    }

    fn gather(
        &self,
        program: &mut Program,
        (x, norm): (Slot, Option<FusedNorm>),
        (parts, end): (Vec<LinearPart>, LinearEnd),
        out: Slot,
    ) -> Result<(), WeightId> {
        let order_of = |part: &LinearPart| self.of_matrix.get(&part.weight).copied();
        let first = parts.first().and_then(order_of);
        let Some(order) = first.filter(|_| parts.iter().all(|part| order_of(part) == first)) else {
            let other = parts.iter().find(|part| order_of(part) != first).unwrap_or(&parts[0]);
            return Err(other.weight);
        };
        let mut input = x;
        if let Some(FusedNorm { weight, eps, normed }) = norm {
            program.ops.push(Op::RmsNorm { x, weight, eps, out: normed });
            input = normed;
        }
        let SlotInfo { name, rows, width } = program.slots[input.index()].clone();
        let gathered = Slot(program.slots.len() as u32);
        program.slots.push(SlotInfo { name: format!("{name}.gathered"), rows, width });
        program.ops.push(Op::GatherColumns { x: input, order, out: gathered });
        program.ops.push(match end {
            LinearEnd::Store => Op::Linear { x: gathered, parts, out },
            end => Op::FusedLinear { x: gathered, norm: None, parts, end, out },
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::RowDim;

    /// A linear of two matrices, 0 and 1, whose orders are these.
    fn gathered(orders: [Option<&[u32]>; 2], op: impl Fn(Vec<LinearPart>) -> Op) -> Result<Vec<String>, WeightId> {
        let slot = |name: &str| SlotInfo { name: name.into(), rows: RowDim::Tokens, width: 2 };
        let parts = [0, 1].map(|weight| LinearPart { weight: WeightId(weight), bias: None }).to_vec();
        let mut program = Program { slots: vec![slot("x"), slot("normed"), slot("out")], ..Program::default() };
        program.ops = vec![op(parts)];
        let (mut known, mut next) = (Orders::default(), 10);
        for (matrix, order) in orders.into_iter().enumerate() {
            let Some(order) = order else { continue };
            known.insert(WeightId(matrix as u32), order.to_vec(), |_| {
                next += 1;
                WeightId(next)
            });
        }
        known.gather_inputs(&mut program)?;
        Ok(program.to_string().lines().filter(|line| line.starts_with(' ')).map(|line| line.trim().into()).collect())
    }

    #[test]
    fn parts_of_one_order_read_one_gathered_input() {
        let norm = FusedNorm { weight: WeightId(5), eps: 1.0, normed: Slot(1) };
        let fused =
            |parts| Op::FusedLinear { x: Slot(0), norm: Some(norm), parts, end: LinearEnd::Store, out: Slot(2) };
        let lines = gathered([Some(&[1, 0]), Some(&[1, 0])], fused).unwrap();
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(lines[0].contains("normed[tokens, 2] = RmsNorm x"), "{lines:?}");
        assert!(lines[1].contains("normed.gathered[tokens, 2] = GatherColumns normed, weight 11?"), "{lines:?}");
        assert!(lines[2].contains("out[tokens, 2] = Linear normed.gathered"), "{lines:?}");
        assert_eq!(gathered([None, None], fused).unwrap().len(), 1);
        assert_eq!(gathered([Some(&[1, 0]), Some(&[0, 1])], fused), Err(WeightId(1)));
        assert_eq!(gathered([None, Some(&[1, 0])], fused), Err(WeightId(1)));
        let embed = |_| Op::Embed { table: WeightId(1), scale: 1.0, out: Slot(0) };
        assert_eq!(gathered([None, Some(&[1, 0])], embed), Err(WeightId(1)), "only a linear has inputs");
    }
}
