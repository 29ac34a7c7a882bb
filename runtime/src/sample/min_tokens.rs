//! `min_tokens`: stop ids are masked until the output is that long.

use super::Edit;

pub(super) const EDIT: Edit = Edit {
    is_on: |params| params.min_tokens > 0,
    apply: |logits, context, _| {
        let params = context.params;
        if context.output().len() >= params.min_tokens as usize {
            return;
        }
        let eos = if params.ignore_eos { &[][..] } else { &params.eos_token_ids };
        for token in params.stop_token_ids.iter().chain(eos) {
            // Some models state an end-of-sequence id that their output layer does not have.
            if let Some(logit) = logits.get_mut(token.index()) {
                *logit = f32::NEG_INFINITY;
            }
        }
    },
};
