//! `min_tokens`: stop ids are masked until the output is that long.

use super::Edit;

pub(super) const EDIT: Edit = Edit {
    is_on: |context| context.output().len() < context.params.min_tokens as usize,
    apply: |logits, context, _| {
        let params = context.params;
        let eos = if params.ignore_eos { &[][..] } else { &params.eos_token_ids };
        for token in params.stop_token_ids.iter().chain(eos) {
            // Some models state an end-of-sequence id that their output layer does not have.
            if let Some(logit) = logits.get_mut(token.index()) {
                *logit = f32::NEG_INFINITY;
            }
        }
    },
};
