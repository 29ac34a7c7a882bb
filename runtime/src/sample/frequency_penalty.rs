//! `frequency_penalty`: output tokens lose by it once per occurrence.

use super::Edit;

pub(super) const EDIT: Edit = Edit {
    is_on: |params| params.frequency_penalty != 0.0,
    apply: |logits, context, counts| {
        let penalty = context.params.frequency_penalty;
        counts.for_each(context.output(), |token, count| logits[token.index()] -= penalty * count as f32);
    },
};
