//! Linear: one dispatch per matrix and shape; a step runs the shape that fits its number of tokens.
//!
//! Invariant: what decides the order of sums (`SPLITS`) does not depend on the number of tokens where the device is batch
//! invariant. Called by `Lowering::op`.

use runtime::error::DeviceError;
use runtime::ids::Slot;
use runtime::program::{FusedNorm, LinearEnd, LinearPart};

use super::Lowering;
use super::memory::PAD_ROWS;
use super::rows::activation_setting;
use crate::compose::Settings;
use crate::device::Range;
use crate::layout::{GROUP, PANEL, fragment_of};
use crate::replay::{Grid, When};
use crate::table;
use crate::tuning::LinearTile;
use crate::weights::{Matrix, Piece};

/// Lanes that hand their inputs round, and sum a row's squares, in `input/shared.wgsl`.
const SHARING_LANES: u32 = 8;

/// A linear, fused or not, as `Op::FusedLinear` has it.
pub(super) struct Linear<'p> {
    pub(super) x: Slot,
    pub(super) norm: Option<FusedNorm>,
    pub(super) parts: &'p [LinearPart],
    pub(super) end: LinearEnd,
    pub(super) out: Slot,
}

impl Linear<'_> {
    fn is_gated(&self) -> bool {
        matches!(self.end, LinearEnd::Gate { .. })
    }

    fn activation_setting(&self) -> u32 {
        match self.end {
            LinearEnd::Gate { activation, .. } => activation_setting(activation),
            LinearEnd::Store | LinearEnd::Add { .. } => 0,
        }
    }
}

/// Rows of one matrix, or of one piece of it.
struct Rows<'m, 'a> {
    matrix: &'m Matrix,
    piece: &'m Piece,
    bias: Option<Range<'a>>,
    /// Rows of the output, and the column of the first.
    num_rows: u32,
    column: u32,
}

impl<'a> Lowering<'a, '_> {
    /// Plans a linear with its norm and end, and says whether the kernel takes them: gates and ups must lie behind each other in
    /// whole panels.
    pub(super) fn linear(&mut self, linear: &Linear<'_>) -> Result<bool, DeviceError> {
        let matrices = self.matrices(linear.x, linear.parts)?;
        let is_one = matches!(matrices.as_slice(), [(matrix, None)] if matrix.pieces.len() == 1);
        // One matrix may hold both from the start, and its gates may end within a panel.
        let is_panels = self.width(linear.out).is_multiple_of(PANEL as u32);
        if linear.is_gated() && !(is_one && is_panels) {
            return Ok(false);
        }
        let tiles = self.tiles()?;
        if let Some(FusedNorm { weight, eps, normed }) = linear.norm
            && let Some(tile) = tiles.iter().find(|tile| !self.norms_itself(tile))
        {
            let when = When::RowsBetween(self.rows(linear.x), tile.from_tokens, u32::MAX);
            self.rms_norm(linear.x, (weight, eps), normed, when)?;
        }
        let mut column = 0;
        for (matrix, bias) in matrices {
            for piece in &matrix.pieces {
                let num_rows = if linear.is_gated() { self.width(linear.out) } else { piece.num_rows };
                let rows = Rows { matrix: &matrix, piece, bias, num_rows, column: column + piece.first_row };
                self.linear_tiles(linear, &rows, &tiles)?;
            }
            column += matrix.rows;
        }
        Ok(true)
    }

    /// Whether a tile of a linear norms its tokens' rows itself, with the bits that `rms_norm` has.
    fn norms_itself(&self, tile: &LinearTile) -> bool {
        let slices = if tile.split_lanes { self.tuning("linear").splits } else { 1 };
        let lanes = if self.input_fragment(tile) == "shared" { SHARING_LANES } else { tile.lanes * slices };
        let same_order = lanes == self.tuning("rms_norm").row_lanes && !self.norms_by_subgroups();
        let can = lanes.is_power_of_two() && tile.token_lanes == 1;
        tile.norm_blocks > 0 && can && (same_order || !self.target.gpu.batch_invariant())
    }

    /// The matrices of a linear of `x` with their biases; such as lie behind each other (q, k and v, gate and up) become one.
    ///
    /// # Errors
    /// Rows that end within a group: those of `x` have no room for its rest.
    fn matrices(&self, x: Slot, parts: &[LinearPart]) -> Result<Vec<(Matrix, Option<Range<'a>>)>, DeviceError> {
        let (weights, in_features) = (self.target.weights, self.width(x));
        if !in_features.is_multiple_of(GROUP as u32) {
            return Err(DeviceError::Failed(format!(
                "{}: in_features {in_features} is not a multiple of {GROUP}, as the wgpu backend needs",
                self.what
            )));
        }
        let mut all: Vec<(Matrix, Option<Range<'a>>)> = Vec::new();
        for part in parts {
            let matrix = weights.matrix_of(part.weight)?;
            let bias = part.bias.map(|bias| weights.vector_of(bias)).transpose()?;
            let joined = match all.last() {
                Some((last, None)) if bias.is_none() => last.join(matrix, self.target.gpu.max_binding_bytes()),
                _ => None,
            };
            match joined {
                Some(joined) => *all.last_mut().expect("it was joined to the last") = (joined, None),
                None => all.push((matrix.clone(), bias)),
            }
        }
        Ok(all)
    }

    /// One dispatch for each shape of the table; a step runs the one that fits its number of tokens.
    fn linear_tiles(
        &mut self,
        linear: &Linear<'_>,
        rows: &Rows<'_, 'a>,
        tiles: &[LinearTile],
    ) -> Result<(), DeviceError> {
        let (memory, weights) = (self.target.memory, self.target.weights);
        let params = table::linear::Params {
            groups: rows.matrix.groups,
            rows: rows.num_rows,
            out_stride: self.width(linear.out),
            out_column: rows.column,
            has_bias: u32::from(rows.bias.is_some()),
            blocks: 1,
            eps: linear.norm.map_or(0.0, |norm| norm.eps),
        };
        for (i, tile) in tiles.iter().enumerate() {
            let norm = linear.norm.filter(|_| self.norms_itself(tile));
            let x = match linear.norm {
                Some(before) if norm.is_none() => before.normed,
                _ => linear.x,
            };
            let bindings = table::linear::Bindings {
                x: memory.slot(x),
                codes: weights.range(rows.piece.codes),
                side: weights.range(rows.piece.side),
                bias: rows.bias.map_or(memory.unused(0), |bias| bias.after(4 * u64::from(rows.piece.first_row))),
                norm: norm.map_or(Ok(memory.unused(0)), |norm| weights.vector_of(norm.weight))?,
                out: memory.slot(linear.out),
            };
            let to = tiles.get(i + 1).map_or(u32::MAX, |next| next.from_tokens - 1);
            let settings = self
                .tile_settings(tile)
                .with("FORMAT", fragment_of(rows.matrix.format))
                .with("NORM", norm.is_some())
                .with("GATED", linear.is_gated())
                .with("ADD", matches!(linear.end, LinearEnd::Add { .. }))
                .with("ACTIVATION", linear.activation_setting());
            let blocks = if norm.is_some() { tile.norm_blocks } else { 1 };
            let params = table::linear::Params { blocks, ..params };
            let x = params.rows.div_ceil(tile.lanes * tile.rows).div_ceil(blocks);
            let grid = Grid::PerTile { x, tokens: tile.tokens * tile.token_lanes };
            let when = When::RowsBetween(self.rows(linear.x), tile.from_tokens, to);
            self.dispatch(bindings, params, settings, when, grid);
        }
        Ok(())
    }

    /// The shapes, with what a user's kernel fixes of them.
    fn tiles(&self) -> Result<Vec<LinearTile>, DeviceError> {
        self.tuning("linear").linear.iter().map(|tile| self.linear_tile(tile)).collect()
    }

    fn tile_settings(&self, tile: &LinearTile) -> Settings {
        // Slices that lanes share cost nothing; a single lane walks them for the sake of equal bits only.
        let keep_splits = tile.split_lanes || self.target.gpu.batch_invariant();
        let splits = if keep_splits { self.tuning("linear").splits } else { 1 };
        Settings::new()
            .with("LOAD", self.load_fragment(tile))
            .with("INPUT", self.input_fragment(tile))
            .with("ROWS", tile.rows)
            .with("TOKENS", tile.tokens)
            .with("LANES", tile.lanes)
            .with("TOKEN_LANES", tile.token_lanes)
            .with("SPLITS", splits)
            .with("SPLIT_LANES", if tile.split_lanes { splits } else { 1 })
    }

    /// How a lane loads its rows.
    fn load_fragment(&self, tile: &LinearTile) -> &'static str {
        let can = self.target.gpu.has_64_bit_integers() && tile.rows.is_multiple_of(8);
        if self.tuning("linear").dear_loads && can { "wide" } else { "narrow" }
    }

    /// How a lane comes by its tokens' values.
    fn input_fragment(&self, tile: &LinearTile) -> &'static str {
        let same_values = tile.lanes.is_multiple_of(SHARING_LANES) && tile.token_lanes == 1 && !tile.split_lanes;
        let can = self.target.gpu.has_subgroups() && same_values;
        if self.tuning("linear").dear_loads && can { "shared" } else { "own" }
    }

    /// The table's shape, with what a user's kernel fixes of it.
    ///
    /// # Errors
    /// It does not divide a panel, or covers more tokens than slots are padded to.
    fn linear_tile(&self, tile: &LinearTile) -> Result<LinearTile, DeviceError> {
        let shape = |name: &str, tuned: u32| self.shape("linear", name, tuned);
        let (rows, lanes) = (shape("ROWS", tile.rows), shape("LANES", tile.lanes));
        let (tokens, token_lanes) = (shape("TOKENS", tile.tokens), shape("TOKEN_LANES", tile.token_lanes));
        let divides = |a: u32, b: u32, whole: u32| a.checked_mul(b).is_some_and(|n| n > 0 && whole.is_multiple_of(n));
        if !divides(rows, lanes, PANEL as u32) || !divides(tokens, token_lanes, PAD_ROWS) {
            return Err(DeviceError::Failed(format!(
                "linear: ROWS {rows} * LANES {lanes} and TOKENS {tokens} * TOKEN_LANES {token_lanes} must divide {PANEL}"
            )));
        }
        Ok(LinearTile { rows, lanes, tokens, token_lanes, ..*tile })
    }
}
