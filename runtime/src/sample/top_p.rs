//! `top_p`: the smallest set of most probable tokens whose probabilities, among what earlier filters left, sum to it
//! (nucleus sampling, Holtzman et al. 2019, arXiv 1904.09751).

use super::Filter;
use super::exp::exp;
use super::kept::{Candidate, Kept};

pub(super) const FILTER: Filter =
    Filter { is_on: |params| params.top_p < 1.0, apply: |kept, params| keep_nucleus(kept, f64::from(params.top_p)) };

fn keep_nucleus(kept: &mut Kept<'_>, top_p: f64) {
    let total = kept.total_weight();
    // Tokens lighter than this weigh less than (1 - p) of the total all together, so that none of them is needed. The
    // hundredth is far more than the rounding of either side.
    let floor = ((1.0 - top_p) * total / kept.len() as f64).ln() - 0.01;
    kept.retain_at_least(floor as f32);

    let row = kept.row();
    let weight = |candidates: &[Candidate]| -> f64 {
        candidates.iter().map(|candidate| f64::from(exp(row.scaled(candidate.logit)))).sum()
    };
    // Quickselect by weight: the best `enough` tokens weigh the target, the best `too_few` do not and weigh `above`.
    let list = kept.candidates();
    let target = top_p * total;
    let (mut too_few, mut enough) = (0, list.len());
    let mut above = 0.0;
    while enough - too_few > 1 {
        let middle = too_few.midpoint(enough);
        list[too_few..enough].select_nth_unstable_by(middle - too_few, Candidate::order);
        let upper = weight(&list[too_few..middle]);
        if above + upper >= target {
            enough = middle;
        } else {
            (too_few, above) = (middle, above + upper);
        }
    }
    list.truncate(enough);
}
