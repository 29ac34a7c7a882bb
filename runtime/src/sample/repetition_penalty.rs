//! `repetition_penalty`: tokens of prompt and output lose by a factor (Keskar et al. 2019, CTRL, section 4.1, with the
//! sign rule that everyone has since: positive logits are divided, negative ones multiplied).

use super::Edit;

pub(super) const EDIT: Edit = Edit {
    is_on: |params| params.repetition_penalty != 1.0,
    apply: |logits, context, counts| {
        let penalty = context.params.repetition_penalty;
        counts.for_each(context.history, |token, _| {
            let logit = &mut logits[token.index()];
            let masked = *logit == f32::NEG_INFINITY;
            if !masked {
                // An extreme penalty must not make an infinity, which would be taken for a mask.
                let scaled = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
                *logit = scaled.clamp(f32::MIN, f32::MAX);
            }
        });
    },
};
