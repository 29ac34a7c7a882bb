//! Lowers a program: slots become ranges of lane buffers, ops become dispatches of kernels with their settings.
//!
//! Invariant: the shape of a kernel is chosen here, in sight, from the tuning table, the op's sizes and the weight's format.
//! Rows of a slot are padded to whole tiles; what lies past a step's rows is garbage that no row ever reads. The program has
//! passed `check`; what this backend cannot run (sizes that are no multiple of 4 or 32) is an error that names the op.

mod attention;
mod linear;
mod memory;
mod moe;
mod rows;
mod sample;

use std::collections::BTreeSet;

use runtime::backend::InputLayout;
use runtime::error::DeviceError;
use runtime::ids::Slot;
use runtime::program::{LinearEnd, Op, Program, RowDim};

use crate::compose::Settings;
use crate::device::Gpu;
use crate::pipelines::Pipelines;
use crate::replay::{Grid, Planned, When};
use crate::state::State;
use crate::table::Bind;
use crate::tuning::{DeviceClass, Tuning};
use crate::weights::Weights;
use attention::AttentionOp;
use linear::Linear;
pub(crate) use memory::{Memory, PAD_ROWS, split_len};
pub(crate) use rows::activation_setting;

/// What a program is lowered with.
pub(crate) struct Target<'a> {
    pub(crate) gpu: &'a Gpu,
    pub(crate) tuning: &'a Tuning,
    pub(crate) weights: &'a Weights,
    pub(crate) state: &'a State,
    pub(crate) memory: &'a Memory,
    pub(crate) layout: &'a InputLayout,
    /// Longest context in tokens.
    pub(crate) context: u32,
    /// Kernels that run their plain variant, because another has failed the self-test.
    pub(crate) plain: &'a BTreeSet<&'static str>,
}

/// Plans every dispatch of a program.
///
/// # Errors
/// A size that the kernels do not take, a weight or state that is not there.
pub(crate) fn lower<'a>(
    program: &'a Program,
    target: &Target<'a>,
    pipelines: &mut Pipelines,
) -> Result<Vec<Planned<'a>>, DeviceError> {
    let mut lowering = Lowering { program, target, pipelines, planned: Vec::new(), what: String::new() };
    for (i, op) in program.ops.iter().enumerate() {
        lowering.what = format!("op {i} ({})", op.kind());
        lowering.op(op)?;
    }
    Ok(lowering.planned)
}

struct Lowering<'a, 't> {
    program: &'a Program,
    target: &'t Target<'a>,
    pipelines: &'t mut Pipelines,
    planned: Vec<Planned<'a>>,
    /// The op, for errors.
    what: String,
}

impl<'a> Lowering<'a, '_> {
    fn op(&mut self, op: &Op) -> Result<(), DeviceError> {
        match *op {
            Op::Embed { table, scale, out } => self.embed(table, scale, out),
            Op::RmsNorm { x, weight, eps, out } => self.rms_norm(x, (weight, eps), out, When::Rows(self.rows(x))),
            Op::NormHeads { x, weight, eps } => self.norm_heads(x, weight, eps),
            Op::Add { residual, x } => self.add(residual, x),
            Op::Linear { x, ref parts, out } => {
                self.linear(&Linear { x, norm: None, parts, end: LinearEnd::Store, out }).map(drop)
            }
            Op::Rope { x, rotary, head_dim } => self.rope(x, rotary, head_dim),
            Op::StoreKv { k, v, layer } => self.store_kv(k, v, layer),
            Op::Attention { q, layer, heads, head_dim, scale, window, soft_cap, sinks, out } => {
                self.attention(&AttentionOp { q, layer, heads, head_dim, scale, window, soft_cap, sinks, out })
            }
            Op::GatedActivation { x, groups, activation, out } => self.gated_activation(x, (groups, activation), out),
            Op::MoeRoute { logits, bias, ref router, out } => self.moe_route(logits, bias, router, out),
            Op::MoeLinear { x, route, ref parts, out } => self.moe_linear(x, route, parts, out),
            Op::MoeCombine { x, route, residual } => self.moe_combine(x, route, residual),
            Op::RopeStoreKv { .. } => self.rope_store_kv(op),
            Op::FusedLinear { x, norm, ref parts, end, out } => {
                match self.linear(&Linear { x, norm, parts, end, out })? {
                    true => Ok(()),
                    false => self.expansion(op),
                }
            }
            Op::ScaleByPosition { x, beta, period } => self.scale_by_position(x, beta, period),
            Op::SoftCap { x, cap } => self.soft_cap(x, cap),
            Op::CheckFinite { x } => self.check_finite(x),
            Op::SelectRows { x, out } => self.select_rows(x, out),
            Op::GatherColumns { x, order, out } => self.gather_columns(x, order, out),
            Op::Sample { logits } => self.sample(logits),
        }
    }

    /// The primitives of a fused op whose kernel does not take it.
    fn expansion(&mut self, op: &Op) -> Result<(), DeviceError> {
        op.expand().iter().try_for_each(|primitive| self.op(primitive))
    }

    fn dispatch<B: Bind<'a>>(&mut self, bindings: B, params: B::Params, settings: Settings, when: When, grid: Grid) {
        let built_in = self.target.plain.contains(B::KERNEL);
        let pipeline = self.pipelines.ask(self.target.gpu, B::KERNEL, settings, built_in);
        let params = bytemuck::bytes_of(&params).to_vec();
        self.planned.push(Planned { pipeline, params, ranges: bindings.ranges(), when, grid });
    }

    /// The row of the tuning table for a kernel.
    fn tuning(&self, kernel: &str) -> &'a Tuning {
        match self.target.plain.contains(kernel) {
            true => DeviceClass::Unknown.tuning(),
            false => self.target.tuning,
        }
    }

    /// What a user's kernel fixes of a shape, else what the table says.
    fn shape(&self, kernel: &str, setting: &str, tuned: u32) -> u32 {
        match self.target.plain.contains(kernel) {
            true => tuned,
            false => self.pipelines.shape(kernel, setting, tuned),
        }
    }

    fn rows(&self, slot: Slot) -> RowDim {
        self.program.slots[slot.index()].rows
    }

    fn width(&self, slot: Slot) -> u32 {
        self.program.slots[slot.index()].width
    }

    /// A size in units of four elements.
    ///
    /// # Errors
    /// It is no multiple of four.
    fn quads(&self, what: &str, size: u32) -> Result<u32, DeviceError> {
        if size.is_multiple_of(4) {
            return Ok(size / 4);
        }
        Err(DeviceError::Failed(format!(
            "{}: {what} {size} is not a multiple of 4, as the wgpu backend needs",
            self.what
        )))
    }

    /// Lanes of a kernel whose lanes share nothing, and the workgroups that cover `size` of them for each row.
    fn flat(&self, kernel: &str, size: u32) -> (Settings, Grid) {
        let lanes = self.shape(kernel, "LANES", self.tuning(kernel).flat_lanes).max(1);
        (Settings::new().with("LANES", lanes), Grid::PerRow { x: size.div_ceil(lanes) })
    }
}
