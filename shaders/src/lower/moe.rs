//! Mixtures of experts: the choice, the linears of chosen experts, the weighted sum.
//!
//! Invariant: each choice of a token is computed by workgroups of its own, so that what else is in the batch changes no bit.
//! Called by `Lowering::op`.

use runtime::error::DeviceError;
use runtime::ids::{Slot, WeightId};
use runtime::program::{LinearPart, Router, RouterScore, RowDim};

use super::Lowering;
use crate::compose::Settings;
use crate::layout::{GROUP, PANEL, fragment_of};
use crate::replay::{Grid, When};
use crate::table;

/// Rows of a lane, and lanes of a workgroup, of `moe_linear.wgsl`.
const EXPERT_ROWS: u32 = 4;
const EXPERT_LANES: u32 = 16;

impl Lowering<'_, '_> {
    pub(super) fn moe_route(
        &mut self,
        logits: Slot,
        bias: Option<WeightId>,
        router: &Router,
        out: Slot,
    ) -> Result<(), DeviceError> {
        let memory = self.target.memory;
        let bindings = table::moe_route::Bindings {
            logits: memory.slot(logits),
            bias: bias.map_or(Ok(memory.unused(0)), |bias| self.target.weights.vector_of(bias))?,
            out: memory.slot(out),
        };
        let params = table::moe_route::Params {
            experts: self.width(logits),
            top_k: router.top_k,
            groups: router.groups,
            top_groups: router.top_groups,
            renormalise: u32::from(router.renormalise),
            has_bias: u32::from(bias.is_some()),
            scale: router.scale,
        };
        let settings = Settings::new().with("SIGMOID", router.score == RouterScore::Sigmoid);
        self.dispatch(bindings, params, settings, When::Rows(RowDim::Tokens), Grid::Row);
        Ok(())
    }

    /// One dispatch for each piece of each part's matrices.
    pub(super) fn moe_linear(
        &mut self,
        x: Slot,
        route: Option<Slot>,
        parts: &[LinearPart],
        out: Slot,
    ) -> Result<(), DeviceError> {
        let (memory, weights) = (self.target.memory, self.target.weights);
        let num_matrices = |part: &LinearPart| self.program.weights[part.weight.index()].shape[0];
        let top_k = route.map_or_else(|| num_matrices(&parts[0]), |route| self.width(route) / 2);
        let panel = PANEL as u32;
        let (lane_rows, lanes) = self.expert_shape()?;
        let mut column = 0;
        for part in parts {
            let &[_, rows, in_features] = self.program.weights[part.weight.index()].shape.as_slice() else {
                unreachable!("check has passed the program");
            };
            if !in_features.is_multiple_of(GROUP as u32) {
                return Err(DeviceError::Failed(format!(
                    "{}: in_features {in_features} is not a multiple of {GROUP}, as the wgpu backend needs",
                    self.what
                )));
            }
            let matrix = weights.matrix_of(part.weight)?;
            let panels = rows.div_ceil(panel);
            for piece in &matrix.pieces {
                let bindings = table::moe_linear::Bindings {
                    x: memory.slot(x),
                    route: route.map_or(memory.unused(1), |route| memory.slot(route)),
                    codes: weights.range(piece.codes),
                    side: weights.range(piece.side),
                    bias: part.bias.map_or(Ok(memory.unused(0)), |bias| weights.vector_of(bias))?,
                    out: memory.slot(out),
                };
                let params = table::moe_linear::Params {
                    groups: matrix.groups,
                    rows,
                    top_k,
                    per_choice: u32::from(self.width(x) != in_features),
                    first_expert: piece.first_row / (panels * panel),
                    num_experts: piece.num_rows / (panels * panel),
                    out_stride: self.width(out) / top_k,
                    out_column: column,
                    has_bias: u32::from(part.bias.is_some()),
                };
                let settings = Settings::new()
                    .with("FORMAT", fragment_of(matrix.format))
                    .with("ROWS", lane_rows)
                    .with("LANES", lanes)
                    .with("EACH", route.is_none());
                let grid = Grid::PerRow { x: panels * (panel / (lane_rows * lanes)) * top_k };
                self.dispatch(bindings, params, settings, When::Rows(RowDim::Tokens), grid);
            }
            column += rows;
        }
        Ok(())
    }

    /// ROWS and LANES, with what a user's kernel fixes of them.
    ///
    /// # Errors
    /// They do not divide a panel.
    fn expert_shape(&self) -> Result<(u32, u32), DeviceError> {
        let rows = self.shape("moe_linear", "ROWS", EXPERT_ROWS);
        let lanes = self.shape("moe_linear", "LANES", EXPERT_LANES);
        if rows.checked_mul(lanes).is_some_and(|n| n > 0 && (PANEL as u32).is_multiple_of(n)) {
            return Ok((rows, lanes));
        }
        Err(DeviceError::Failed(format!("moe_linear: ROWS {rows} * LANES {lanes} must divide {PANEL}")))
    }

    pub(super) fn moe_combine(&mut self, x: Slot, route: Slot, residual: Slot) -> Result<(), DeviceError> {
        let memory = self.target.memory;
        let width_quads = self.quads("width", self.width(residual))?;
        let params = table::moe_combine::Params { width_quads, top_k: self.width(route) / 2 };
        let (x, route) = (memory.slot(x), memory.slot(route));
        let bindings = table::moe_combine::Bindings { x, route, residual: memory.slot(residual) };
        let (settings, grid) = self.flat("moe_combine", width_quads);
        self.dispatch(bindings, params, settings, When::Rows(RowDim::Tokens), grid);
        Ok(())
    }
}
