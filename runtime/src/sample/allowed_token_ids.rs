//! `allowed_token_ids`: every other token is masked.

use super::Edit;

pub(super) const EDIT: Edit = Edit {
    is_on: |context| context.params.allowed_token_ids.is_some(),
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
