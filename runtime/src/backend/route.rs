//! How a token's experts are chosen from the logits of its router (`Router`): one function, whoever runs it in host memory.
//!
//! Invariant: of equal scores the expert with the lower number comes first, and whatever the logits are, not a number
//! included, the chosen ids are different ones of the table. Called by the reference and by the CPU backend.

use std::cmp::Ordering;

use crate::program::check::MAX_GROUPS;
use crate::program::{Router, RouterScore};

/// Writes the ids of the chosen experts (as floats), best first, then their weights, to `out`, `[2 * top_k]`; `logits` and `bias`
/// are `[experts]`.
pub(super) fn route(router: &Router, logits: &[f32], bias: Option<&[f32]>, out: &mut [f32]) {
    let (ids, weights) = out.split_at_mut(router.top_k as usize);
    let softmax = Softmax::of(logits);
    let score = |expert: usize| match router.score {
        RouterScore::Softmax => softmax.probability(logits[expert]),
        RouterScore::Sigmoid => 1.0 / (1.0 + (-logits[expert]).exp()),
    };
    let biased = |expert: usize| score(expert) + bias.map_or(0.0, |bias| bias[expert]);
    let group_len = logits.len() / router.groups as usize;
    let group_score = |group: usize| {
        let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for value in (group * group_len..(group + 1) * group_len).map(biased) {
            if value > best {
                (best, second) = (value, best);
            } else if value > second {
                second = value;
            }
        }
        match router.score {
            RouterScore::Softmax => best,
            RouterScore::Sigmoid => best + if group_len > 1 { second } else { 0.0 },
        }
    };
    let open = match router.groups {
        1 => 1,
        groups => open_groups(groups as usize, router.top_groups as usize, group_score),
    };
    // Experts of other groups count as 0, as in the official implementation.
    let choice = |expert: usize| if open >> (expert / group_len) & 1 == 1 { biased(expert) } else { 0.0 };
    let mut last = None;
    for (id, weight) in ids.iter_mut().zip(weights.iter_mut()) {
        let left = (0..logits.len()).map(|expert| (expert, choice(expert)));
        let left = left.filter(|&candidate| last.is_none_or(|last| comes_before(last, candidate)));
        let best = left.reduce(|best, other| if comes_before(other, best) { other } else { best });
        let best = best.expect("a router chooses at most as many experts as there are");
        last = Some(best);
        *id = best.0 as f32;
        *weight = score(best.0);
    }
    let sum: f32 = weights.iter().sum();
    let factor = if router.renormalise { router.scale / sum } else { router.scale };
    weights.iter_mut().for_each(|weight| *weight *= factor);
}

/// A bit for each of the best groups: those before which fewer than `top_groups` come.
fn open_groups(groups: usize, top_groups: usize, score: impl Fn(usize) -> f32) -> u32 {
    let scores: [f32; MAX_GROUPS as usize] =
        std::array::from_fn(|group| if group < groups { score(group) } else { 0.0 });
    let rank = |group: usize| {
        let before = |&other: &usize| comes_before((other, scores[other]), (group, scores[group]));
        (0..groups).filter(before).count()
    };
    (0..groups).filter(|&group| rank(group) < top_groups).map(|group| 1 << group).sum()
}

/// A total order of `(number, score)`: higher scores first, then lower numbers; what is not a number last.
fn comes_before(a: (usize, f32), b: (usize, f32)) -> bool {
    let key = |score: f32| if score.is_nan() { f32::NEG_INFINITY } else { score };
    match key(a.1).partial_cmp(&key(b.1)) {
        Some(Ordering::Greater) => true,
        Some(Ordering::Less) => false,
        Some(Ordering::Equal) | None => a.0 < b.0,
    }
}

struct Softmax {
    max: f32,
    sum: f32,
}

impl Softmax {
    fn of(logits: &[f32]) -> Self {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        Self { max, sum: logits.iter().map(|logit| (logit - max).exp()).sum() }
    }

    fn probability(&self, logit: f32) -> f32 {
        (logit - self.max).exp() / self.sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(router: &Router, logits: &[f32], bias: Option<&[f32]>) -> (Vec<f32>, Vec<f32>) {
        let mut out = vec![0.0; 2 * router.top_k as usize];
        route(router, logits, bias, &mut out);
        let weights = out.split_off(router.top_k as usize);
        (out, weights)
    }

    fn router(top_k: u32, score: RouterScore) -> Router {
        Router { top_k, score, groups: 1, top_groups: 1, renormalise: true, scale: 1.0 }
    }

    #[test]
    fn equals_come_in_order_and_weights_sum_to_the_scale() {
        let (ids, weights) =
            chosen(&Router { scale: 2.5, ..router(3, RouterScore::Softmax) }, &[1.0, 2.0, 2.0, 0.0], None);
        assert_eq!(ids, [1.0, 2.0, 0.0]);
        assert!((weights.iter().sum::<f32>() - 2.5).abs() < 1e-6 && weights[0] == weights[1]);
    }

    #[test]
    fn a_bias_chooses_and_does_not_weigh() {
        let (ids, weights) = chosen(&router(1, RouterScore::Sigmoid), &[3.0, -3.0], Some(&[0.0, 9.0]));
        assert_eq!((ids[0], weights[0]), (1.0, 1.0));
    }

    #[test]
    fn closed_groups_are_left_out() {
        // The best expert is alone in its group; the other group's two are better together.
        let logits = [4.0, -9.0, 2.0, 1.9];
        let grouped = Router { groups: 2, ..router(2, RouterScore::Sigmoid) };
        assert_eq!(chosen(&grouped, &logits, None).0, [2.0, 3.0]);
        let by_best = Router { groups: 2, ..router(2, RouterScore::Softmax) };
        assert_eq!(chosen(&by_best, &logits, None).0[0], 0.0);
    }

    #[test]
    fn whatever_the_logits_the_ids_are_different_ones() {
        for logits in [[f32::NAN; 4], [f32::INFINITY; 4], [f32::NEG_INFINITY, f32::NAN, 1.0, f32::INFINITY]] {
            for score in [RouterScore::Softmax, RouterScore::Sigmoid] {
                let mut ids = chosen(&router(4, score), &logits, None).0;
                ids.sort_unstable_by(f32::total_cmp);
                assert_eq!(ids, [0.0, 1.0, 2.0, 3.0]);
            }
        }
    }
}
