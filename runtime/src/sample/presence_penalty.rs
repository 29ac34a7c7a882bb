//! `presence_penalty`: output tokens lose by it once, however often they occur.

use super::Edit;

pub(super) const EDIT: Edit = Edit {
    is_on: |params| params.presence_penalty != 0.0,
    apply: |logits, context, counts| {
        let penalty = context.params.presence_penalty;
        counts.for_each(context.output(), |token, _| logits[token.index()] -= penalty);
    },
};
