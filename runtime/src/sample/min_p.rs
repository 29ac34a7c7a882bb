//! `min_p`: tokens with at least this fraction of the best token's probability (Nguyen et al. 2024, arXiv 2407.01082).

use super::Filter;

pub(super) const FILTER: Filter = Filter {
    is_on: |params| params.min_p > 0.0,
    // p / p_max = e^scaled, so that no sum is needed.
    apply: |kept, params| kept.retain_at_least(params.min_p.ln()),
};
