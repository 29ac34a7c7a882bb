//! `allowed_token_ids`: every other token is masked.

use super::Edit;
use crate::ids::TokenId;
use crate::request::SamplingParams;

pub(super) const EDIT: Edit = Edit {
    is_on: |params| params.allowed_token_ids.is_some(),
    apply: |logits, context, _| {
        let mut start = 0;
        // Ascending: what lies between two of them is masked.
        for token in context.params.allowed_token_ids.iter().flatten() {
            logits[start..token.index()].fill(f32::NEG_INFINITY);
            start = token.index() + 1;
        }
        logits[start..].fill(f32::NEG_INFINITY);
    },
};

impl SamplingParams {
    /// Allows these ids only, in whatever order and however often they are named.
    pub fn allow_only(&mut self, ids: impl IntoIterator<Item = TokenId>) {
        let mut ids: Vec<TokenId> = ids.into_iter().collect();
        ids.sort_unstable();
        ids.dedup();
        self.allowed_token_ids = Some(ids);
    }
}
