//! Places a program's slots in lanes (buffers): liveness first, then one greedy pass.
//!
//! Invariant: two slots that are alive at the same op never share bytes, and a slot that an op writes lies in another lane
//! than every other slot of that op (WebGPU forbids a buffer to be bound for reading and writing in one dispatch).
//! Pure; called by backends when they compile a bucket.

use std::ops::Range;

use super::{Program, RowDim};
use crate::backend::Bucket;
use crate::ids::Slot;

/// Where one slot lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Which buffer.
    pub lane: usize,
    /// First element (f32) within the lane.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
}

impl Placement {
    fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len
    }
}

/// Every slot's place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Elements (f32) per lane.
    pub lanes: Vec<usize>,
    /// Indexed by `Slot`; slots that no op touches have `len` 0.
    pub slots: Vec<Placement>,
}

/// Plans `program` for steps of up to `bucket`; offsets are multiples of `align` elements.
pub fn plan(program: &Program, bucket: Bucket, align: usize) -> MemoryPlan {
    let live = live_ranges(program);
    let apart = must_be_apart(program);
    let mut plan =
        MemoryPlan { lanes: Vec::new(), slots: vec![Placement { lane: 0, offset: 0, len: 0 }; program.slots.len()] };
    let mut order: Vec<usize> = (0..program.slots.len()).filter(|&slot| !live[slot].is_empty()).collect();
    order.sort_by_key(|&slot| live[slot].start);
    let mut placed: Vec<usize> = Vec::new();
    for slot in order {
        let len = num_elements(program, slot, bucket);
        let forbidden = |lane: usize| {
            placed.iter().any(|&other| {
                plan.slots[other].lane == lane && (apart[slot].contains(&other) || apart[other].contains(&slot))
            })
        };
        let in_lane = |lane: usize| {
            let busy =
                placed.iter().filter(|&&other| plan.slots[other].lane == lane && overlap(&live[other], &live[slot]));
            first_fit(busy.map(|&other| plan.slots[other].range()).collect(), len, align)
        };
        // The lane that grows least; a new one only where none is allowed.
        let best = (0..plan.lanes.len())
            .filter(|&lane| !forbidden(lane))
            .map(|lane| (lane, in_lane(lane)))
            .min_by_key(|&(lane, offset)| ((offset + len).saturating_sub(plan.lanes[lane]), lane));
        let (lane, offset) = best.unwrap_or((plan.lanes.len(), 0));
        if lane == plan.lanes.len() {
            plan.lanes.push(0);
        }
        plan.lanes[lane] = plan.lanes[lane].max(offset + len);
        plan.slots[slot] = Placement { lane, offset, len };
        placed.push(slot);
    }
    plan
}

fn num_elements(program: &Program, slot: usize, bucket: Bucket) -> usize {
    let info = &program.slots[slot];
    let rows = match info.rows {
        RowDim::Tokens => bucket.tokens,
        RowDim::LogitRows => bucket.logit_rows,
    };
    rows as usize * info.width as usize
}

/// Per slot, the ops from its first to its last access; the logits and what is kept live to the end.
fn live_ranges(program: &Program) -> Vec<Range<usize>> {
    let mut live = vec![0..0; program.slots.len()];
    let mut touch = |slot: Slot, op: usize| {
        let range: &mut Range<usize> = &mut live[slot.index()];
        let start = if range.start == range.end { op } else { range.start };
        *range = start..op + 1;
    };
    for (i, op) in program.ops.iter().enumerate() {
        for access in op.accesses() {
            touch(access.slot, i);
        }
    }
    for &slot in program.logits.iter().chain(&program.kept) {
        touch(slot, program.ops.len());
    }
    live
}

/// Per slot, those that an op touches while it writes this one.
fn must_be_apart(program: &Program) -> Vec<Vec<usize>> {
    let mut apart = vec![Vec::new(); program.slots.len()];
    for op in &program.ops {
        let accesses = op.accesses();
        for written in accesses.iter().filter(|access| access.kind.writes()) {
            let others = accesses.iter().filter(|other| other.slot != written.slot);
            apart[written.slot.index()].extend(others.map(|other| other.slot.index()));
        }
    }
    apart
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

/// The lowest aligned offset where `len` elements touch no busy range.
fn first_fit(mut busy: Vec<Range<usize>>, len: usize, align: usize) -> usize {
    busy.sort_by_key(|range| range.start);
    let mut offset = 0;
    for range in busy {
        if offset + len <= range.start {
            break;
        }
        offset = offset.max(range.end.next_multiple_of(align.max(1)));
    }
    offset
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ids::WeightId;
    use crate::program::{Activation, FusedNorm, LinearEnd, Op, SlotInfo};

    /// Straight-line programs: each op reads slots that exist and writes a new one, or changes one in place.
    fn programs() -> impl Strategy<Value = Program> {
        let op = (0u8..5, any::<u16>(), any::<u16>(), 1u32..40);
        prop::collection::vec(op, 1..40).prop_map(|ops| {
            let mut program = Program::default();
            let new_slot = |program: &mut Program, width: u32| {
                let rows = if width.is_multiple_of(7) { RowDim::LogitRows } else { RowDim::Tokens };
                program.slots.push(SlotInfo { name: String::new(), rows, width });
                Slot(program.slots.len() as u32 - 1)
            };
            let (weight, eps) = (WeightId(0), 0.0);
            let out = new_slot(&mut program, 8);
            program.ops.push(Op::Embed { table: weight, scale: 1.0, out });
            for (kind, a, b, width) in ops {
                let old = |pick: u16| Slot(u32::from(pick) % program.slots.len() as u32);
                let (x, residual) = (old(a), old(b));
                let op = match kind {
                    0 => Op::Embed { table: weight, scale: 1.0, out: new_slot(&mut program, width) },
                    1 => Op::RmsNorm { x, weight, eps, out: new_slot(&mut program, width) },
                    2 if x != residual => Op::Add { residual, x },
                    3 if x != residual => {
                        let norm = Some(FusedNorm { weight, eps, normed: new_slot(&mut program, width) });
                        let end = LinearEnd::Add { product: new_slot(&mut program, width) };
                        Op::FusedLinear { x, norm, parts: Vec::new(), end, out: residual }
                    }
                    _ => {
                        let out = new_slot(&mut program, width);
                        Op::GatedActivation { x, groups: 1, activation: Activation::Silu, out }
                    }
                };
                program.ops.push(op);
            }
            program.logits = Some(Slot(0));
            program
        })
    }

    proptest! {
        /// Runs the plan on buffers whose cells hold the name of the slot written last: every read must find its own.
        #[test]
        fn what_is_read_is_what_was_written(program in programs(), align in 1usize..9) {
            let bucket = Bucket { tokens: 5, rows: 2, logit_rows: 3 };
            let plan = plan(&program, bucket, align);
            let mut lanes: Vec<Vec<Option<Slot>>> = plan.lanes.iter().map(|&len| vec![None; len]).collect();
            let mut check = |slot: Slot, written: bool| {
                let place = plan.slots[slot.index()];
                assert_eq!(place.len, num_elements(&program, slot.index(), bucket));
                assert!(place.offset.is_multiple_of(align));
                let cells = &mut lanes[place.lane][place.range()];
                if written {
                    cells.fill(Some(slot));
                } else {
                    assert!(cells.iter().all(|cell| *cell == Some(slot)), "{slot:?} was overwritten");
                }
            };
            for op in &program.ops {
                for access in op.accesses() {
                    check(access.slot, access.kind == crate::program::AccessKind::Write);
                }
            }
            check(Slot(0), false);
            for op in &program.ops {
                let accesses = op.accesses();
                for (i, a) in accesses.iter().enumerate() {
                    for b in &accesses[i + 1..] {
                        let same_lane = plan.slots[a.slot.index()].lane == plan.slots[b.slot.index()].lane;
                        prop_assert!(!same_lane || !(a.kind.writes() || b.kind.writes()), "{op:?} aliases a lane");
                    }
                }
            }
        }
    }

    #[test]
    fn dead_slots_are_reused() {
        let mut program = Program::default();
        for i in 0..9 {
            program.slots.push(SlotInfo { name: i.to_string(), rows: RowDim::Tokens, width: 16 });
        }
        program.ops.push(Op::Embed { table: WeightId(0), scale: 1.0, out: Slot(0) });
        program.ops.extend((0..8).map(|i| Op::RmsNorm { x: Slot(i), weight: WeightId(0), eps: 0.0, out: Slot(i + 1) }));
        program.logits = Some(Slot(8));
        let plan = plan(&program, Bucket { tokens: 4, rows: 1, logit_rows: 1 }, 1);
        assert_eq!(plan.lanes, [64, 64], "a chain needs two buffers, used in turn");
        program.kept = vec![Slot(3), Slot(4)];
        let plan = super::plan(&program, Bucket { tokens: 4, rows: 1, logit_rows: 1 }, 1);
        let [kept, others] = [&plan.slots[3..5], &plan.slots[5..]];
        let clash = |a: &Placement, b: &Placement| a.lane == b.lane && overlap(&a.range(), &b.range());
        assert!(!clash(&kept[0], &kept[1]) && !others.iter().any(|other| kept.iter().any(|slot| clash(slot, other))));
    }
}
