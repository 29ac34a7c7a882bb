//! `top_k`: the most probable tokens; of equal ones at the edge the lowest ids (Fan et al. 2018, arXiv 1805.04833).

use super::Filter;

pub(super) const FILTER: Filter =
    Filter { is_on: |params| params.top_k > 0, apply: |kept, params| kept.keep_best(params.top_k as usize) };
