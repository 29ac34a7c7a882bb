//! `logit_bias`: the client's own additions, each clamped to ±100.

use super::Edit;

const LIMIT: f32 = 100.0;

pub(super) const EDIT: Edit = Edit {
    is_on: |params| !params.logit_bias.is_empty(),
    apply: |logits, context, _| {
        for &(token, bias) in &context.params.logit_bias {
            logits[token.index()] += bias.clamp(-LIMIT, LIMIT);
        }
    },
};
