//! Linear: one dispatch per matrix and shape; a step runs the shape that fits its number of tokens.
//!
//! Invariant: what decides the order of sums (`SPLITS`) does not depend on the number of tokens where the device is batch
//! invariant. Called by `Lowering::op`.

use runtime::error::DeviceError;
use runtime::ids::Slot;
use runtime::program::{LinearPart, RowDim};
use runtime::weights::WeightFormat;

use super::Lowering;
use super::memory::{PAD_ROWS, whole};
use crate::compose::Settings;
use crate::device::Range;
use crate::layout::{GROUP, PANEL, fragment_of};
use crate::replay::{Grid, When};
use crate::table;
use crate::tuning::LinearTile;
use crate::weights::{Matrix, Piece};

impl<'a> Lowering<'a, '_> {
    pub(super) fn linear(&mut self, x: Slot, parts: &[LinearPart], out: Slot) -> Result<(), DeviceError> {
        let mut first_column = 0;
        for (matrix, bias) in self.matrices(x, parts)? {
            for piece in &matrix.pieces {
                let bindings = self.linear_bindings((x, out), piece, bias);
                let params = table::linear::Params {
                    groups: matrix.groups,
                    rows: piece.num_rows,
                    out_stride: self.width(out),
                    out_column: first_column + piece.first_row,
                    has_bias: u32::from(bias.is_some()),
                };
                self.linear_tiles(bindings, params, (matrix.format, false), self.rows(x))?;
            }
            first_column += matrix.rows;
        }
        Ok(())
    }

    /// Gates and ups in one dispatch, where they lie behind each other in whole panels; says whether they do.
    pub(super) fn gated_linear(&mut self, x: Slot, parts: &[LinearPart], out: Slot) -> Result<bool, DeviceError> {
        let rows = self.width(out);
        let matrices = self.matrices(x, parts)?;
        let [(Matrix { format, groups, pieces, .. }, None)] = matrices.as_slice() else { return Ok(false) };
        let [piece] = pieces.as_slice() else { return Ok(false) };
        let bindings = self.linear_bindings((x, out), piece, None);
        let params = table::linear::Params { groups: *groups, rows, out_stride: rows, out_column: 0, has_bias: 0 };
        self.linear_tiles(bindings, params, (*format, true), self.rows(x))?;
        Ok(true)
    }

    /// The buffers of one piece of a matrix.
    fn linear_bindings(
        &self,
        (x, out): (Slot, Slot),
        piece: &Piece,
        bias: Option<Range<'a>>,
    ) -> table::linear::Bindings<'a> {
        let (memory, weights) = (self.target.memory, self.target.weights);
        table::linear::Bindings {
            x: memory.slot(x),
            codes: weights.range(piece.codes),
            side: weights.range(piece.side),
            bias: bias.map_or(whole(&memory.unused), |bias| bias.after(4 * u64::from(piece.first_row))),
            out: memory.slot(out),
        }
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
        bindings: table::linear::Bindings<'a>,
        params: table::linear::Params,
        (format, is_gated): (WeightFormat, bool),
        rows: RowDim,
    ) -> Result<(), DeviceError> {
        let tuning = self.tuning("linear");
        for (i, tile) in tuning.linear.iter().enumerate() {
            let tile = &self.linear_tile(tile)?;
            let to = tuning.linear.get(i + 1).map_or(u32::MAX, |next| next.from_tokens - 1);
            // Slices that lanes share cost nothing; a single lane walks them for the sake of equal bits only.
            let keep_splits = tile.split_lanes || self.target.gpu.batch_invariant();
            let splits = if keep_splits { tuning.splits } else { 1 };
            let settings = Settings::new()
                .with("FORMAT", fragment_of(format))
                .with("GATED", is_gated)
                .with("LOAD", self.load_fragment(tile))
                .with("INPUT", self.input_fragment(tile))
                .with("ROWS", tile.rows)
                .with("TOKENS", tile.tokens)
                .with("LANES", tile.lanes)
                .with("TOKEN_LANES", tile.token_lanes)
                .with("SPLITS", splits)
                .with("SPLIT_LANES", if tile.split_lanes { splits } else { 1 });
            let panels = params.rows.div_ceil(PANEL as u32);
            let x = panels * (PANEL as u32 / (tile.lanes * tile.rows));
            let grid = Grid::PerTile { x, tokens: tile.tokens * tile.token_lanes };
            self.dispatch(bindings, params, settings, When::RowsBetween(rows, tile.from_tokens, to), grid);
        }
        Ok(())
    }

    /// How a lane loads its rows.
    fn load_fragment(&self, tile: &LinearTile) -> &'static str {
        let can = self.target.gpu.has_64_bit_integers() && tile.rows.is_multiple_of(8);
        if self.tuning("linear").dear_loads && can { "wide" } else { "narrow" }
    }

    /// How a lane comes by its tokens' values.
    fn input_fragment(&self, tile: &LinearTile) -> &'static str {
        let same_values = tile.lanes.is_multiple_of(8) && tile.token_lanes == 1 && !tile.split_lanes;
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
