//! The ops that treat rows one by one: embed, norms, sums, rotary embedding, gates, flags, selection.
//!
//! Invariant: none reads another row than its own. Called by `Lowering::op`.

use runtime::error::DeviceError;
use runtime::ids::{Slot, WeightId};
use runtime::program::{Activation, RopePairing, Rotary, RowDim, View};

use super::Lowering;
use super::memory::whole;
use crate::compose::Settings;
use crate::layout::fragment_of;
use crate::replay::{Grid, When};
use crate::table;
use crate::weights::Piece;

/// What `shared/sin_cos.wgsl` takes.
const MAX_POSITIONS: u32 = 1 << 18;

impl Lowering<'_, '_> {
    pub(super) fn embed(&mut self, table: WeightId, scale: f32, out: Slot) -> Result<(), DeviceError> {
        let (memory, weights) = (self.target.memory, self.target.weights);
        let matrix = weights.matrix_of(table)?;
        let width_quads = self.quads("width", self.width(out))?;
        for piece in &matrix.pieces {
            let (settings, grid) = self.flat("embed", width_quads);
            let bindings = table::embed::Bindings {
                token_ids: memory.input(self.target.layout.token_ids()),
                codes: weights.range(piece.codes),
                side: weights.range(piece.side),
                out: memory.slot(out),
            };
            let Piece { first_row, num_rows, .. } = *piece;
            let params = table::embed::Params { width_quads, groups: matrix.groups, first_row, num_rows, scale };
            let settings = settings.with("FORMAT", fragment_of(matrix.format));
            self.dispatch(bindings, params, settings, When::Rows(RowDim::Tokens), grid);
        }
        Ok(())
    }

    pub(super) fn rms_norm(
        &mut self,
        x: Slot,
        (weight, eps): (WeightId, f32),
        out: Slot,
        when: When,
    ) -> Result<(), DeviceError> {
        let memory = self.target.memory;
        let bindings = table::rms_norm::Bindings {
            x: memory.slot(x),
            weight: self.target.weights.vector_of(weight)?,
            out: memory.slot(out),
        };
        let params = table::rms_norm::Params { width_quads: self.quads("width", self.width(x))?, eps };
        let reduce = if self.norms_by_subgroups() { "subgroup" } else { "workgroup" };
        let settings = Settings::new().with("LANES", self.tuning("rms_norm").row_lanes).with("REDUCE", reduce);
        self.dispatch(bindings, params, settings, when, Grid::Row);
        Ok(())
    }

    /// Whether the sum of a norm takes its order from the device.
    pub(super) fn norms_by_subgroups(&self) -> bool {
        self.tuning("rms_norm").subgroups && self.target.gpu.has_subgroups()
    }

    pub(super) fn norm_heads(&mut self, x: View, weight: WeightId, eps: f32) -> Result<(), DeviceError> {
        let head_dim = self.program.weights[weight.index()].shape[0];
        let params = table::norm_heads::Params {
            stride_quads: self.quads("width", self.width(x.slot))?,
            offset_quads: self.quads("column", x.offset)?,
            heads: x.width / head_dim,
            head_quads: self.quads("head_dim", head_dim)?,
            eps,
        };
        let weight = self.target.weights.vector_of(weight)?;
        let bindings = table::norm_heads::Bindings { x: self.target.memory.slot(x.slot), weight };
        let (settings, grid) = self.flat("norm_heads", params.heads);
        self.dispatch(bindings, params, settings, When::Rows(RowDim::Tokens), grid);
        Ok(())
    }

    pub(super) fn add(&mut self, residual: Slot, x: Slot) -> Result<(), DeviceError> {
        let memory = self.target.memory;
        let width_quads = self.quads("width", self.width(x))?;
        let bindings = table::add::Bindings { x: memory.slot(x), residual: memory.slot(residual) };
        let (settings, grid) = self.flat("add", width_quads);
        self.dispatch(bindings, table::add::Params { width_quads }, settings, When::Rows(self.rows(x)), grid);
        Ok(())
    }

    pub(super) fn gated_activation(
        &mut self,
        x: Slot,
        (groups, activation): (u32, Activation),
        out: Slot,
    ) -> Result<(), DeviceError> {
        let memory = self.target.memory;
        let out_quads = self.quads("width", self.width(out))?;
        let bindings = table::gated_activation::Bindings { x: memory.slot(x), out: memory.slot(out) };
        let (settings, grid) = self.flat("gated_activation", out_quads);
        let settings = settings.with("ACTIVATION", activation_setting(activation));
        let group_quads = self.quads("width of a group", self.width(out) / groups)?;
        let params = table::gated_activation::Params { out_quads, group_quads };
        self.dispatch(bindings, params, settings, When::Rows(self.rows(x)), grid);
        Ok(())
    }

    pub(super) fn scale_by_position(&mut self, x: View, beta: f32, period: u32) -> Result<(), DeviceError> {
        let params = table::scale_by_position::Params {
            stride_quads: self.quads("width", self.width(x.slot))?,
            offset_quads: self.quads("column", x.offset)?,
            width_quads: self.quads("width", x.width)?,
            period,
            beta,
        };
        let memory = self.target.memory;
        let positions = memory.input(self.target.layout.positions());
        let bindings = table::scale_by_position::Bindings { x: memory.slot(x.slot), positions };
        let (settings, grid) = self.flat("scale_by_position", params.width_quads);
        self.dispatch(bindings, params, settings, When::Rows(RowDim::Tokens), grid);
        Ok(())
    }

    pub(super) fn soft_cap(&mut self, x: Slot, cap: f32) -> Result<(), DeviceError> {
        let width_quads = self.quads("width", self.width(x))?;
        let bindings = table::soft_cap::Bindings { x: self.target.memory.slot(x) };
        let (settings, grid) = self.flat("soft_cap", width_quads);
        let params = table::soft_cap::Params { width_quads, cap };
        self.dispatch(bindings, params, settings, When::Rows(self.rows(x)), grid);
        Ok(())
    }

    pub(super) fn check_finite(&mut self, x: Slot) -> Result<(), DeviceError> {
        let memory = self.target.memory;
        let params = table::check_finite::Params { width_quads: self.quads("width", self.width(x))? };
        let bindings = table::check_finite::Bindings { x: memory.slot(x), flags: whole(&memory.flags) };
        let settings = Settings::new().with("LANES", self.tuning("check_finite").row_lanes);
        self.dispatch(bindings, params, settings, When::Rows(RowDim::Tokens), Grid::Row);
        Ok(())
    }

    pub(super) fn select_rows(&mut self, x: Slot, out: Slot) -> Result<(), DeviceError> {
        let memory = self.target.memory;
        let width = self.width(x);
        let rows = memory.input(self.target.layout.logit_rows());
        let bindings = table::select_rows::Bindings { x: memory.slot(x), rows, out: memory.slot(out) };
        let (settings, grid) = self.flat("select_rows", width);
        self.dispatch(bindings, table::select_rows::Params { width }, settings, When::Rows(RowDim::LogitRows), grid);
        Ok(())
    }

    pub(super) fn gather_columns(&mut self, x: Slot, order: WeightId, out: Slot) -> Result<(), DeviceError> {
        let memory = self.target.memory;
        let width = self.width(x);
        let order = self.target.weights.vector_of(order)?;
        let bindings = table::gather_columns::Bindings { x: memory.slot(x), order, out: memory.slot(out) };
        let (settings, grid) = self.flat("gather_columns", width);
        self.dispatch(bindings, table::gather_columns::Params { width }, settings, When::Rows(self.rows(x)), grid);
        Ok(())
    }

    pub(super) fn rope(&mut self, x: View, rotary: Rotary, head_dim: u32) -> Result<(), DeviceError> {
        self.check_positions()?;
        let Rotary { inv_freq, amplitude, pairing } = rotary;
        let (stride, heads, pairs) = (self.width(x.slot), x.width / head_dim, self.num_pairs(rotary));
        let params = table::rope::Params { stride, offset: x.offset, heads, head_dim, pairs, amplitude };
        let bindings = table::rope::Bindings {
            x: self.target.memory.slot(x.slot),
            inv_freq: self.target.weights.vector_of(inv_freq)?,
            positions: self.target.memory.input(self.target.layout.positions()),
        };
        let (settings, grid) = self.flat("rope", pairs);
        let settings = settings.with("INTERLEAVED", pairing == RopePairing::Interleaved);
        self.dispatch(bindings, params, settings, When::Rows(RowDim::Tokens), grid);
        Ok(())
    }

    /// Pairs of a head that are turned.
    pub(super) fn num_pairs(&self, rotary: Rotary) -> u32 {
        self.program.weights[rotary.inv_freq.index()].shape[0]
    }

    /// # Errors
    /// Positions that `shared/sin_cos.wgsl` does not take.
    pub(super) fn check_positions(&self) -> Result<(), DeviceError> {
        if self.target.context > MAX_POSITIONS {
            return Err(DeviceError::Failed(format!(
                "{}: a context of {} tokens, but the wgpu backend turns positions below {MAX_POSITIONS} only",
                self.what, self.target.context
            )));
        }
        Ok(())
    }
}

/// ACTIVATION of `shared/activation.wgsl`.
pub(crate) fn activation_setting(activation: Activation) -> u32 {
    match activation {
        Activation::Silu => 0,
        Activation::GeluTanh => 1,
        Activation::ClampedSwiglu => 2,
    }
}
