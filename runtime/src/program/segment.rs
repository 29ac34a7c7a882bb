//! Cuts a program into runs that can be recorded once and runs that are launched anew in each step.
//!
//! Invariant: the cut follows from `Op::launch` and the backend's `fixed_grid` only, never from an op's name. Called by
//! backends that replay or capture.

use std::ops::Range;

use super::{Launch, Program};
use crate::program::Op;

/// A run of ops, as indices into `Program::ops`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Segment {
    /// Grids depend on the bucket only: recorded once per bucket.
    Recorded(Range<usize>),
    /// Grids depend on this step's lengths: launched anew.
    Live(Range<usize>),
}

/// Cuts `program` into maximal runs. `fixed_grid(op)` says that the backend's kernel for a `ByStep` op reads lengths from
/// device memory and can be recorded all the same.
pub fn segments(program: &Program, fixed_grid: impl Fn(&Op) -> bool) -> Vec<Segment> {
    let is_recorded = |op: &Op| op.launch() == Launch::ByBucket || fixed_grid(op);
    let mut next = 0;
    program
        .ops
        .chunk_by(|a, b| is_recorded(a) == is_recorded(b))
        .map(|run| {
            let range = next..next + run.len();
            next = range.end;
            if is_recorded(&run[0]) { Segment::Recorded(range) } else { Segment::Live(range) }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Layer, Slot};
    use crate::program::View;

    fn program() -> Program {
        let view = View { slot: Slot(0), offset: 0, width: 1 };
        let attention = Op::Attention {
            q: view,
            layer: Layer(0),
            heads: 1,
            head_dim: 1,
            scale: 1.0,
            window: None,
            soft_cap: None,
            sinks: None,
            out: Slot(1),
        };
        let check = Op::CheckFinite { x: Slot(0) };
        let ops = vec![check.clone(), check.clone(), attention.clone(), attention, check];
        Program { ops, ..Program::default() }
    }

    #[test]
    fn ops_that_depend_on_lengths_are_live() {
        let cut = segments(&program(), |_| false);
        assert_eq!(cut, [Segment::Recorded(0..2), Segment::Live(2..4), Segment::Recorded(4..5)]);
    }

    #[test]
    fn a_fixed_grid_melts_into_the_recorded_run() {
        assert_eq!(segments(&program(), |_| true), [Segment::Recorded(0..5)]);
        assert_eq!(segments(&Program::default(), |_| false), []);
    }
}
