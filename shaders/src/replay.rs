//! The replay list: every dispatch of a program with its pipeline, its bind group and the rule for its grid.
//!
//! Invariant: a step creates nothing. It picks, per op, the shape that fits its number of tokens and computes grids from its
//! counts; numbers of a dispatch lie in one uniform buffer, written once. WebGPU encodes anew for every submission anyway,
//! so that sizes are exact and nothing is padded. Made by `lower`, run by the backend.

use runtime::backend::{Compiled, StepInputs};
use runtime::error::DeviceError;
use runtime::program::RowDim;

use crate::device::{ALIGN_BYTES, Buffer, Gpu, Range};
use crate::pipelines::{PipelineId, Pipelines};

/// Workgroups along one dimension that every device takes.
pub(crate) const MAX_GRID: u32 = 65_535;

/// A step's counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) tokens: u32,
    pub(crate) logit_rows: u32,
    pub(crate) max_kv_len: u32,
    /// Logit rows that are read back.
    pub(crate) read_rows: u32,
    /// The others.
    pub(crate) sampled_rows: u32,
    /// Whether one of those is not greedy.
    pub(crate) draws: bool,
}

impl Counts {
    pub(crate) fn of(inputs: &StepInputs) -> Self {
        Self {
            tokens: inputs.num_tokens() as u32,
            logit_rows: inputs.num_logit_rows() as u32,
            max_kv_len: inputs.max_kv_len() as u32,
            read_rows: inputs.num_read_rows() as u32,
            sampled_rows: inputs.num_sampled_rows() as u32,
            draws: inputs.draws().any(|draw| !draw.is_greedy()),
        }
    }

    fn rows(&self, rows: RowDim) -> u32 {
        match rows {
            RowDim::Tokens => self.tokens,
            RowDim::LogitRows => self.logit_rows,
        }
    }
}

/// When a dispatch runs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum When {
    /// In every step that has rows of this kind.
    Rows(RowDim),
    /// Where the number of rows is in this range.
    RowsBetween(RowDim, u32, u32),
    /// Where each split of a token's positions has a lane of its own: few tokens, more than one split.
    Split { len: u32, max_tokens: u32 },
    /// Where it does not, and the longest context is at most `up_to`.
    Whole { len: u32, max_tokens: u32, up_to: u32 },
    /// Where it does not, and the longest context is above both: a part of a long walk.
    Walk { len: u32, max_tokens: u32, up_to: u32, from: u32 },
    /// In every step that has sampled rows.
    Sampled,
    /// Where one of them is not greedy.
    Drawn,
}

impl When {
    /// Rows of the grid.
    fn rows(self, counts: Counts) -> u32 {
        match self {
            Self::Rows(rows) | Self::RowsBetween(rows, ..) => counts.rows(rows),
            Self::Split { .. } | Self::Whole { .. } | Self::Walk { .. } => counts.tokens,
            Self::Sampled | Self::Drawn => counts.sampled_rows,
        }
    }
}

/// Workgroups of a dispatch.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Grid {
    /// `x` for each row.
    PerRow { x: u32 },
    /// `x` for each tile of `tokens` rows.
    PerTile { x: u32, tokens: u32 },
    /// One per row, along x.
    Row,
    /// `per_token` items of each token, `items` to a workgroup.
    Items { per_token: u32, items: u32 },
    /// The same for each split of `len` positions, `max_splits` at most.
    SplitItems { per_token: u32, items: u32, len: u32, max_splits: u32 },
}

/// One dispatch, its bind group not made yet.
pub(crate) struct Planned<'a> {
    pub(crate) pipeline: PipelineId,
    pub(crate) params: Vec<u8>,
    pub(crate) ranges: Vec<Range<'a>>,
    pub(crate) when: When,
    pub(crate) grid: Grid,
}

struct Dispatch {
    pipeline: PipelineId,
    bind_group: wgpu::BindGroup,
    when: When,
    grid: Grid,
}

/// A program, ready to be encoded.
pub(crate) struct Replay {
    dispatches: Vec<Dispatch>,
    /// Numbers of every dispatch, 256 bytes apart.
    _params: Buffer,
}

impl Replay {
    /// Compiles the pipelines and makes the bind groups.
    ///
    /// # Errors
    /// Out of memory, or a pipeline that the device refuses.
    pub(crate) fn new(
        gpu: &Gpu,
        pipelines: &mut Pipelines,
        planned: Vec<Planned<'_>>,
        progress: Compiled<'_>,
    ) -> Result<Self, DeviceError> {
        pipelines.compile(gpu, progress)?;
        let usage = wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST;
        let params = gpu.buffer("numbers of dispatches", planned.len() as u64 * ALIGN_BYTES, usage)?;
        let mut bytes = vec![0; planned.len() * ALIGN_BYTES as usize];
        for (slot, planned) in bytes.chunks_exact_mut(ALIGN_BYTES as usize).zip(&planned) {
            slot[..planned.params.len()].copy_from_slice(&planned.params);
        }
        gpu.queue.write_buffer(&params, 0, &bytes);
        let dispatches = planned
            .into_iter()
            .enumerate()
            .map(|(i, Planned { pipeline, ranges, when, grid, .. })| {
                let uniform = Range { buffer: &params, offset: i as u64 * ALIGN_BYTES, size: ALIGN_BYTES };
                let bind_group = gpu.bind_group(pipelines.layout(pipeline), uniform, &ranges);
                Dispatch { pipeline, bind_group, when, grid }
            })
            .collect();
        Ok(Self { dispatches, _params: params })
    }

    /// Encodes one step into a pass.
    pub(crate) fn encode(&self, pipelines: &Pipelines, counts: Counts, pass: &mut wgpu::ComputePass<'_>) {
        self.encode_only(pipelines, counts, pass, &|_| true);
    }

    /// Encodes the dispatches of some kernels of a step.
    pub(crate) fn encode_only(
        &self,
        pipelines: &Pipelines,
        counts: Counts,
        pass: &mut wgpu::ComputePass<'_>,
        is_wanted: &dyn Fn(&str) -> bool,
    ) {
        let mut last = None;
        if let Some(probe) = pipelines.probe() {
            pass.set_bind_group(1, probe.bind_group(), &[]);
        }
        for dispatch in self.dispatches.iter().filter(|dispatch| is_wanted(pipelines.kernel(dispatch.pipeline))) {
            let [x, y] = match runs(dispatch.when, counts) {
                true => grid(dispatch.grid, dispatch.when.rows(counts), counts.max_kv_len),
                false => continue,
            };
            if x == 0 || y == 0 {
                continue;
            }
            if last != Some(dispatch.pipeline) {
                pass.set_pipeline(pipelines.pipeline(dispatch.pipeline));
                last = Some(dispatch.pipeline);
            }
            pass.set_bind_group(0, &dispatch.bind_group, &[]);
            pass.dispatch_workgroups(x, y, 1);
        }
    }
}

fn runs(when: When, counts: Counts) -> bool {
    match when {
        When::Rows(rows) => counts.rows(rows) > 0,
        When::RowsBetween(rows, from, to) => (from..=to).contains(&counts.rows(rows)),
        When::Split { len, max_tokens } => counts.tokens <= max_tokens && counts.max_kv_len > len,
        When::Whole { len, max_tokens, up_to } => {
            !runs(When::Split { len, max_tokens }, counts) && counts.max_kv_len <= up_to
        }
        When::Walk { len, max_tokens, up_to, from } => {
            !runs(When::Split { len, max_tokens }, counts) && counts.max_kv_len > up_to.max(from)
        }
        When::Sampled => counts.sampled_rows > 0,
        When::Drawn => counts.draws,
    }
}

fn grid(grid: Grid, rows: u32, max_kv_len: u32) -> [u32; 2] {
    match grid {
        Grid::PerRow { x } => [x, rows],
        Grid::PerTile { x, tokens } => [x, rows.div_ceil(tokens)],
        Grid::Row => [rows, 1],
        Grid::Items { per_token, items } => flat(u64::from(rows) * u64::from(per_token), items),
        Grid::SplitItems { per_token, items, len, max_splits } => {
            let splits = max_kv_len.div_ceil(len).min(max_splits);
            flat(u64::from(rows) * u64::from(per_token) * u64::from(splits), items)
        }
    }
}

/// A flat number of items as two dimensions, neither above the limit.
fn flat(items: u64, per_workgroup: u32) -> [u32; 2] {
    let workgroups = items.div_ceil(u64::from(per_workgroup));
    let y = workgroups.div_ceil(u64::from(MAX_GRID)).max(1);
    [workgroups.div_ceil(y) as u32, y as u32]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_cover_their_items() {
        for items in [0u64, 1, 7, 8, 9, 65_535 * 8, 65_535 * 8 + 1, 3_000_000] {
            let [x, y] = flat(items, 8);
            assert!(u64::from(x) * u64::from(y) * 8 >= items, "{items}");
            assert!(u64::from(x) * u64::from(y) * 8 < items + 8 * u64::from(y) + 8, "{items}: too many");
            assert!(x <= MAX_GRID && y <= MAX_GRID);
        }
        assert_eq!(grid(Grid::PerTile { x: 3, tokens: 8 }, 17, 0), [3, 3]);
        let by_split = |max_splits| Grid::SplitItems { per_token: 3, items: 8, len: 64, max_splits };
        assert_eq!(grid(by_split(u32::MAX), 2, 65), [2, 1], "2 * 3 * 2 items");
        assert_eq!(grid(by_split(3), 2, 1000), [3, 1], "2 * 3 * 3 items");
    }

    #[test]
    fn exactly_one_way_of_attention_runs() {
        let is_split = [(1, 64, false), (1, 65, true), (16, 65, true), (17, 65, false), (17, 320, false)];
        let too_long = [(17, 321, false), (17, 641, false), (16, 641, true)];
        for (tokens, max_kv_len, split) in is_split.into_iter().chain(too_long) {
            let counts = Counts { tokens, logit_rows: 1, max_kv_len, read_rows: 1, sampled_rows: 0, draws: false };
            assert_eq!(runs(When::Split { len: 64, max_tokens: 16 }, counts), split);
            let (len, max_tokens, up_to) = (64, 16, 320);
            let is_walk = !split && max_kv_len > 320;
            assert_eq!(runs(When::Whole { len, max_tokens, up_to }, counts), !split && !is_walk);
            let parts = [0, 320, 640].map(|from| runs(When::Walk { len, max_tokens, up_to, from }, counts));
            assert_eq!(parts, [is_walk, is_walk, is_walk && max_kv_len > 640]);
        }
    }
}
