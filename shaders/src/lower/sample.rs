//! Sample: a row's logits become the few words that its token is drawn from.
//!
//! Invariant: a row is cut into shares by its width alone, so that sums run in one order for a device. Sampled rows follow
//! those that are read back; a step without any dispatches nothing. Called by `Lowering::op`.

use runtime::error::DeviceError;
use runtime::ids::Slot;
use runtime::sample::{Draw, MAX_CONTENDERS, MAX_TOP, Sample, WINDOW};

use super::Lowering;
use super::memory::whole;
use crate::compose::Settings;
use crate::replay::{Grid, When};
use crate::table;

// What the kernels have written into them.
const _: () = assert!(Draw::WORDS == 5 && MAX_CONTENDERS == 8 && MAX_TOP == 20 && size_of::<Sample>() == 4 * 69);

/// Lanes of `sample_pick`: so many that none takes many turns, whatever the vocabulary. It divides `MIN_SHARES`.
const PICK_LANES: u32 = 64;
/// Divides every number of shares.
const MIN_SHARES: u32 = 128;

/// Shares of a row of `vocab` logits: some 32 fours each, as many as keep a GPU busy and are quickly merged.
pub(super) fn num_shares(vocab: u32) -> u32 {
    (vocab / 128).next_power_of_two().clamp(MIN_SHARES, 1024)
}

impl Lowering<'_, '_> {
    pub(super) fn sample(&mut self, logits: Slot) -> Result<(), DeviceError> {
        let memory = self.target.memory;
        let (width, shares) = (self.width(logits), num_shares(self.width(logits)));
        let draws = memory.input(self.target.layout.draws());
        let (logits, bests, scores) = (memory.slot(logits), whole(&memory.sample_bests), whole(&memory.sample_scores));

        let (settings, grid) = self.flat("sample_scan", shares);
        let bindings = table::sample_scan::Bindings { logits, draws, bests };
        self.dispatch(bindings, table::sample_scan::Params { width, shares }, settings, When::Sampled, grid);

        let (settings, grid) = self.flat("sample_draw", shares);
        let bindings = table::sample_draw::Bindings { logits, draws, bests, scores };
        self.dispatch(bindings, table::sample_draw::Params { width, shares }, settings, When::Drawn, grid);

        let samples = whole(&memory.samples);
        let bindings = table::sample_pick::Bindings { logits, draws, bests, scores, samples };
        let params = table::sample_pick::Params { width, shares, window: WINDOW };
        self.dispatch(bindings, params, Settings::new().with("LANES", PICK_LANES), When::Sampled, Grid::Row);
        Ok(())
    }
}
