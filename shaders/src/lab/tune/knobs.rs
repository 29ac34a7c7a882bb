//! What may be chosen for a device: each choice with its neighbours, the cases that it is measured on, and those that it is
//! checked with.
//!
//! Invariant: a choice that changes the order of sums says so, and is left alone unless that was asked for.

use runtime::backend::cases::{CODES, Case, CaseOp, FusedCase, all_cases};

use super::super::cases::meets;
use super::workload::{Weighted, Workload};
use crate::layout::PANEL;
use crate::tuned::MAX_NORM_BLOCKS;
use crate::tuning::{LinearTile, Tuning};

/// Numbers of tokens that linears are measured with; a tile serves all numbers above the one before.
pub(super) const TOKENS: [u32; 6] = [1, 2, 4, 8, 16, 64];
/// Cases that a candidate is checked with.
const MAX_CHECKS: usize = 8;
/// Positions that a decode attends to.
const CONTEXT: u32 = 1024;

/// A choice.
pub(super) struct Knob {
    pub(super) name: String,
    /// Kernels that it changes.
    kernels: &'static [&'static str],
    pub(super) what: What,
    pub(super) measured: Vec<Weighted>,
    pub(super) checks: Vec<Case>,
}

/// Which field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    RowLanes,
    Subgroups,
    Splits,
    AttentionSplit,
    AttentionParts,
    DearLoads,
    /// By its place in the table.
    LinearTile(usize),
    AttentionItems,
    AttentionValues,
    FlatLanes,
}

/// In the order in which they are tuned: first what the others build on.
pub(super) fn knobs(workload: &Workload, order_is_free: bool) -> Vec<Knob> {
    let rows = workload.norms(1).into_iter().chain(workload.norms(64)).collect::<Vec<_>>();
    let decode = || workload.attention(&[(CONTEXT - 1, 1)]);
    let prefill = || workload.attention(&[(0, 128)]);
    let both = || decode().into_iter().chain(prefill()).collect::<Vec<_>>();
    let few = || workload.linears(1).into_iter().chain(workload.linears(4)).collect::<Vec<_>>();
    let mut all: Vec<(String, &'static [&'static str], What, Vec<Weighted>)> = Vec::new();
    if order_is_free {
        all.push(("row_lanes".into(), &["rms_norm", "check_finite"], What::RowLanes, rows.clone()));
        all.push(("subgroups".into(), &["rms_norm"], What::Subgroups, rows));
        all.push(("linear splits".into(), &["linear"], What::Splits, few()));
        all.push(("attention split".into(), ATTENTION, What::AttentionSplit, decode()));
        all.push(("attention parts".into(), ATTENTION, What::AttentionParts, both()));
    }
    all.push(("dear_loads".into(), &["linear"], What::DearLoads, few()));
    for (i, tokens) in TOKENS.into_iter().enumerate() {
        let name = format!("linear, {tokens} tokens");
        all.push((name, &["linear", "rms_norm"], What::LinearTile(i), workload.linears(tokens)));
    }
    all.push(("attention items".into(), ATTENTION, What::AttentionItems, both()));
    all.push(("attention max_values".into(), ATTENTION, What::AttentionValues, both()));
    all.push((
        "flat_lanes".into(),
        FLAT,
        What::FlatLanes,
        workload.gates(1).into_iter().chain(workload.gates(64)).collect(),
    ));
    let knob = |(name, kernels, what, measured)| {
        let mut knob = Knob { name, kernels, what, measured, checks: Vec::new() };
        knob.checks = knob.choose_checks(workload);
        knob
    };
    all.into_iter().filter(|(.., measured)| !measured.is_empty()).map(knob).collect()
}

const ATTENTION: &[&str] = &["attention"];
const FLAT: &[&str] = &[
    "embed",
    "norm_heads",
    "add",
    "gated_activation",
    "rope",
    "select_rows",
    "gather_columns",
    "store_kv",
    "rope_store_kv",
];

/// A class's row with a tile for each number of tokens that is measured.
pub(super) fn spread(tuning: &Tuning) -> Tuning {
    let mut from_tokens = 1;
    let tile = |tokens: u32| {
        let held =
            tuning.linear.iter().rev().find(|tile| tile.from_tokens <= tokens).expect("the first tile is from 1");
        let tile = LinearTile { from_tokens, ..*held };
        from_tokens = tokens + 1;
        tile
    };
    Tuning { linear: TOKENS.into_iter().map(tile).collect(), ..tuning.clone() }
}

/// The same table without tiles that go on as the one before.
pub(super) fn gathered(tuning: &Tuning) -> Tuning {
    let mut linear = tuning.linear.to_vec();
    linear.dedup_by(|next, held| LinearTile { from_tokens: held.from_tokens, ..*next } == *held);
    Tuning { linear: linear.into(), ..tuning.clone() }
}

impl Knob {
    /// The kernels that a measurement times.
    pub(super) fn times(&self, kernel: &str) -> bool {
        self.kernels.contains(&kernel) || self.kernels == ATTENTION && kernel == "attention_combine"
    }

    /// Some rows of the op table that meet what this changes.
    fn choose_checks(&self, workload: &Workload) -> Vec<Case> {
        let mut cases = all_cases();
        cases.retain(|case| self.kernels.iter().any(|kernel| meets(kernel, &case.op)) && self.is_near(case, workload));
        let step = cases.len().div_ceil(MAX_CHECKS).max(1);
        let mut chosen: Vec<Case> = cases.into_iter().step_by(step).collect();
        if self.kernels == ATTENTION {
            // The table may have no heads of this size.
            let own = workload.attention(&[(0, 5), (270, 3), (33, 1)]);
            chosen.extend(own.into_iter().map(|(case, _)| case));
        }
        for case in &mut chosen {
            if matches!(case.op, CaseOp::Linear { .. } | CaseOp::FusedLinear(_)) {
                // Nothing here rounds activations.
                case.tolerance = CODES;
            }
        }
        chosen
    }

    /// Whether a case runs the variant in question in a format or size of the workload.
    fn is_near(&self, case: &Case, workload: &Workload) -> bool {
        match &case.op {
            CaseOp::Linear { tokens, parts, .. } | CaseOp::FusedLinear(FusedCase { tokens, parts, .. }) => {
                let is_its = match self.what {
                    // The last serves all numbers above.
                    What::LinearTile(i) if i + 1 == TOKENS.len() => *tokens > TOKENS[i - 1],
                    What::LinearTile(i) => (lower_bound(i)..=TOKENS[i]).contains(tokens),
                    _ => true,
                };
                is_its && workload.has_formats(parts)
            }
            CaseOp::Attention(case) => workload.has_heads(case) || self.kernels != ATTENTION,
            _ => true,
        }
    }

    /// What is tried next to a table.
    pub(super) fn neighbours(&self, tuning: &Tuning, workload: &Workload) -> Vec<Tuning> {
        let with = |change: &dyn Fn(&mut Tuning)| {
            let mut new = tuning.clone();
            change(&mut new);
            new
        };
        let halved_and_doubled =
            |field: fn(&mut Tuning) -> &mut u32| vec![with(&|new| *field(new) /= 2), with(&|new| *field(new) *= 2)];
        match self.what {
            What::RowLanes => halved_and_doubled(|new| &mut new.row_lanes),
            What::Subgroups => vec![with(&|new| new.subgroups = !new.subgroups)],
            What::DearLoads => vec![with(&|new| new.dear_loads = !new.dear_loads)],
            What::Splits => halved_and_doubled(|new| &mut new.splits),
            What::AttentionSplit => halved_and_doubled(|new| &mut new.attention.split),
            What::AttentionParts => halved_and_doubled(|new| &mut new.attention.parts),
            What::AttentionItems => halved_and_doubled(|new| &mut new.attention.items),
            What::FlatLanes => halved_and_doubled(|new| &mut new.flat_lanes),
            What::AttentionValues => {
                let heads =
                    (1..=workload.largest_group()).filter(|heads| workload.largest_group().is_multiple_of(*heads));
                heads.map(|heads| with(&|new| new.attention.max_values = heads * workload.largest_head())).collect()
            }
            What::LinearTile(i) => {
                let tiles = tiles_near(&tuning.linear[i], TOKENS[i]);
                tiles.into_iter().map(|tile| with(&|new| new.linear.to_mut()[i] = tile)).collect()
            }
        }
    }
}

fn lower_bound(place: usize) -> u32 {
    place.checked_sub(1).map_or(1, |before| TOKENS[before] + 1)
}

/// Tiles that differ by a factor of two in one size, or in two that make up for each other.
fn tiles_near(tile: &LinearTile, tokens: u32) -> Vec<LinearTile> {
    let LinearTile { rows, lanes, tokens: own, token_lanes, .. } = *tile;
    let moves = [
        (rows * 2, lanes, own, token_lanes),
        (rows / 2, lanes, own, token_lanes),
        (rows, lanes * 2, own, token_lanes),
        (rows, lanes / 2, own, token_lanes),
        (rows * 2, lanes / 2, own, token_lanes),
        (rows / 2, lanes * 2, own, token_lanes),
        (rows, lanes, own * 2, token_lanes),
        (rows, lanes, own / 2, token_lanes),
        (rows, lanes, own, token_lanes * 2),
        (rows, lanes, own, token_lanes / 2),
        (rows, lanes, own * 2, token_lanes / 2),
        (rows, lanes, own / 2, token_lanes * 2),
    ];
    let is_whole = |(rows, lanes, own, token_lanes): &(u32, u32, u32, u32)| {
        rows * lanes > 0 && rows * lanes <= PANEL as u32 && (1..=tokens).contains(&(own * token_lanes))
    };
    let near = |(rows, lanes, own, token_lanes)| LinearTile { rows, lanes, tokens: own, token_lanes, ..*tile };
    let mut all: Vec<LinearTile> = moves.into_iter().filter(is_whole).map(near).collect();
    all.push(LinearTile { split_lanes: !tile.split_lanes, ..*tile });
    let norm_blocks = [tile.norm_blocks / 2, (2 * tile.norm_blocks).clamp(1, MAX_NORM_BLOCKS)];
    all.extend(norm_blocks.map(|norm_blocks| LinearTile { norm_blocks, ..*tile }));
    all.retain(|near| near != tile);
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tuning::DeviceClass;

    #[test]
    fn the_order_of_sums_stays_unless_it_is_free() {
        let workload = Workload::default_shapes();
        for class in DeviceClass::ALL {
            let tuning = spread(class.tuning());
            let near = |order_is_free| {
                let knobs = knobs(&workload, order_is_free);
                knobs.iter().flat_map(|knob| knob.neighbours(&tuning, &workload)).collect::<Vec<_>>()
            };
            let order = |tuning: &Tuning| {
                let Tuning { row_lanes, subgroups, splits, attention, .. } = tuning;
                (*row_lanes, *subgroups, *splits, attention.split, attention.parts)
            };
            assert!(near(false).len() > 20);
            assert!(near(false).iter().all(|near| order(near) == order(&tuning)), "{}", class.name());
            let others = near(true).iter().filter(|near| order(near) != order(&tuning)).count();
            assert_eq!(others, near(true).len() - near(false).len(), "{}", class.name());
        }
    }

    #[test]
    fn spreading_and_gathering_change_no_tile() {
        let held = |tuning: &Tuning, tokens: u32| {
            let tile = tuning.linear.iter().rev().find(|tile| tile.from_tokens <= tokens).expect("from 1 on");
            LinearTile { from_tokens: 1, ..*tile }
        };
        for class in DeviceClass::ALL {
            let (own, all) = (class.tuning(), spread(class.tuning()));
            assert_eq!(all.linear.len(), TOKENS.len());
            let few = gathered(&all);
            assert!(few.linear.len() <= own.linear.len(), "{}", class.name());
            few.check_shapes().expect("it may stand in a file");
            for tokens in TOKENS {
                assert_eq!(held(&all, tokens), held(own, tokens), "{}, {tokens} tokens", class.name());
                assert_eq!(held(&few, tokens), held(own, tokens), "{}, {tokens} tokens", class.name());
            }
        }
    }

    /// A kernel that is not in the checks would be measured unchecked.
    #[test]
    fn every_choice_is_measured_and_checked() {
        for knob in knobs(&Workload::default_shapes(), true) {
            assert!(!knob.measured.is_empty() && knob.checks.len() > 1, "{}", knob.name);
            assert!(knob.kernels.iter().any(|kernel| knob.times(kernel)), "{}", knob.name);
        }
    }
}
