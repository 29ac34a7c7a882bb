//! Lowers a program: slots get places in one buffer, ops become phases with every operand resolved.
//!
//! Invariant: consecutive row-wise ops form one chain without a barrier only if no two slots of the chain share memory
//! while one of them is written (a thread may be ahead of another by several ops). Called by `CpuBackend::compile`.

use std::ops::Range;

use super::attention::{Attention, Scratch, Shape};
use super::experts::{ExpertPart, ExpertsPhase, ExpertsScratch};
use super::linear::QuantGroup;
use super::repack::GROUP;
use super::rows::{Columns, Norm, RowOp};
use super::state::LayerState;
use super::step::{LinearPhase, Part, Phase, Weight, Weights};
use crate::backend::InputLayout;
use crate::error::DeviceError;
use crate::ids::{Slot, WeightId};
use crate::program::memory::{self, Placement};
use crate::program::{Op, Program, Rotary, RowDim, View};
use crate::sample::Sample;

const ALIGN_BYTES: usize = 64;
const FLOAT: usize = size_of::<f32>();

/// A lowered program: phases over one buffer of `memory_bytes`.
pub(super) struct Lowered {
    pub(super) phases: Vec<Phase>,
    pub(super) memory_bytes: usize,
    /// Byte where the flags of `CheckFinite` are, one word per token.
    pub(super) flags: usize,
    /// Byte where the samples are, one per sampled row.
    pub(super) samples: usize,
    pub(super) logits: Option<Columns>,
    /// As `Program::kept` has them.
    pub(super) kept: Vec<Columns>,
}

/// What a program is lowered for.
pub(super) struct Target<'a> {
    pub(super) weights: &'a Weights,
    pub(super) layers: &'a [LayerState],
    pub(super) layout: &'a InputLayout,
    pub(super) num_threads: usize,
}

/// Lowers a program that `program::check` has passed.
///
/// # Errors
/// A weight or a layer's state is not there yet, or is of another kind than the op needs.
pub(super) fn lower(program: &Program, target: &Target<'_>) -> Result<Lowered, DeviceError> {
    let mut lowering = Lowering::new(program, target)?;
    for op in &program.ops {
        lowering.op(op)?;
    }
    lowering.end_chain();
    Ok(Lowered {
        logits: program.logits.map(|slot| lowering.columns(slot)),
        kept: program.kept.iter().map(|&slot| lowering.columns(slot)).collect(),
        phases: lowering.phases,
        memory_bytes: lowering.next,
        flags: lowering.flags,
        samples: lowering.samples,
    })
}

struct Lowering<'a> {
    program: &'a Program,
    target: &'a Target<'a>,
    lane_starts: Vec<usize>,
    places: Vec<Placement>,
    /// First free byte.
    next: usize,
    flags: usize,
    samples: usize,
    quantised_start: usize,
    scratch: Scratch,
    /// Per frequency table and amplitude, where its angles are, and how many of a token.
    angles: Vec<((usize, f32), Columns)>,
    phases: Vec<Phase>,
    chain: Vec<RowOp>,
    chain_rows: RowDim,
    /// Slots that the chain touches, and whether it writes them.
    chain_slots: Vec<(Slot, bool)>,
}

impl<'a> Lowering<'a> {
    fn new(program: &'a Program, target: &'a Target<'a>) -> Result<Self, DeviceError> {
        let bucket = target.layout.bucket;
        let plan = memory::plan(program, bucket, ALIGN_BYTES / FLOAT);
        let mut lowering = Self {
            program,
            target,
            lane_starts: Vec::new(),
            places: plan.slots,
            next: 0,
            flags: 0,
            samples: 0,
            quantised_start: 0,
            scratch: Scratch::default(),
            angles: Vec::new(),
            phases: Vec::new(),
            chain: Vec::new(),
            chain_rows: RowDim::Tokens,
            chain_slots: Vec::new(),
        };
        for len in plan.lanes {
            let start = lowering.reserve(len * FLOAT);
            lowering.lane_starts.push(start);
        }
        lowering.flags = lowering.reserve(bucket.tokens as usize * size_of::<u32>());
        lowering.samples = lowering.reserve(bucket.logit_rows as usize * size_of::<Sample>());
        let quantised_bytes = lowering.quantised_bytes()?;
        lowering.quantised_start = lowering.reserve(quantised_bytes);
        lowering.place_scratch()?;
        Ok(lowering)
    }

    fn reserve(&mut self, bytes: usize) -> usize {
        let start = self.next;
        self.next = (start + bytes).next_multiple_of(ALIGN_BYTES);
        start
    }

    fn max_rows(&self, rows: RowDim) -> usize {
        let bucket = self.target.layout.bucket;
        (match rows {
            RowDim::Tokens => bucket.tokens,
            RowDim::LogitRows => bucket.logit_rows,
        }) as usize
    }

    fn rows(&self, slot: Slot) -> RowDim {
        self.program.slots[slot.index()].rows
    }

    fn width(&self, slot: Slot) -> usize {
        self.program.slots[slot.index()].width as usize
    }

    /// Room for the 8-bit activations of the largest linear.
    fn quantised_bytes(&self) -> Result<usize, DeviceError> {
        let mut most = 0;
        for op in &self.program.ops {
            if let Op::Linear { x, .. } | Op::FusedLinear { x, .. } | Op::MoeLinear { x, .. } = op {
                most = most.max(self.max_rows(self.rows(*x)) * (self.width(*x) / GROUP) * size_of::<QuantGroup>());
            }
        }
        Ok(most)
    }

    fn place_scratch(&mut self) -> Result<(), DeviceError> {
        let layout = self.target.layout;
        let max_positions = (layout.max_blocks_per_row * layout.block_size) as usize;
        for op in &self.program.ops {
            if let Op::Attention { layer, heads, .. } = op {
                let shape = self.attention_shape(layer.index(), *heads as usize)?;
                self.scratch.grow(shape, max_positions);
            }
        }
        // Each thread's area starts on a cache line of its own.
        self.scratch.thread_len = self.scratch.thread_len.next_multiple_of(ALIGN_BYTES / FLOAT);
        self.scratch.threads_start = self.reserve(self.target.num_threads * self.scratch.thread_len * FLOAT);
        self.scratch.partials_start = self.reserve(self.scratch.partials_bytes());
        Ok(())
    }

    fn attention_shape(&self, layer: usize, heads: usize) -> Result<Shape, DeviceError> {
        let state = self.target.layers.get(layer).ok_or_else(|| missing(format!("state of layer {layer}")))?;
        if state.block_size != self.target.layout.block_size as usize {
            return Err(DeviceError::Failed(format!("block size of layer {layer} differs from the inputs'")));
        }
        Ok(Shape { heads, kv_heads: state.heads, dim: state.dim })
    }

    fn bytes(&self, slot: Slot) -> Range<usize> {
        let place = &self.places[slot.index()];
        let start = self.lane_starts.get(place.lane).map_or(0, |lane| lane + place.offset * FLOAT);
        start..start + place.len * FLOAT
    }

    fn columns(&self, slot: Slot) -> Columns {
        Columns { start: self.bytes(slot).start, stride: self.width(slot), width: self.width(slot) }
    }

    fn view(&self, view: View) -> Columns {
        let whole = self.columns(view.slot);
        Columns { start: whole.start + view.offset as usize * FLOAT, width: view.width as usize, ..whole }
    }

    fn weight(&self, id: WeightId) -> Result<&Weight, DeviceError> {
        let uploaded = self.target.weights.entries.get(id.index()).and_then(Option::as_ref);
        uploaded.ok_or_else(|| missing(format!("weight '{}'", self.weight_name(id))))
    }

    fn weight_name(&self, id: WeightId) -> &str {
        self.program.weights.get(id.index()).map_or("?", |info| &info.name)
    }

    fn matrix(&self, id: WeightId) -> Result<usize, DeviceError> {
        match self.weight(id)? {
            Weight::Matrix(_) => Ok(id.index()),
            Weight::Vector(_) => Err(missing(format!("matrix '{}'", self.weight_name(id)))),
        }
    }

    fn vector(&self, id: WeightId) -> Result<usize, DeviceError> {
        match self.weight(id)? {
            Weight::Vector(_) => Ok(id.index()),
            Weight::Matrix(_) => Err(missing(format!("vector '{}'", self.weight_name(id)))),
        }
    }

    fn norm(&self, weight: WeightId, eps: f32) -> Result<Norm, DeviceError> {
        Ok(Norm { weight: self.vector(weight)?, eps })
    }

    /// Appends one op of the program.
    fn op(&mut self, op: &Op) -> Result<(), DeviceError> {
        let row_op = match *op {
            Op::Embed { table, scale, out } => {
                RowOp::Embed { table: self.matrix(table)?, scale, out: self.columns(out) }
            }
            Op::RmsNorm { x, weight, eps, out } => {
                RowOp::RmsNorm { x: self.columns(x), norm: self.norm(weight, eps)?, out: self.columns(out) }
            }
            Op::NormHeads { x, weight, eps } => RowOp::NormHeads { x: self.view(x), norm: self.norm(weight, eps)? },
            Op::Add { residual, x } => RowOp::Add { residual: self.columns(residual), x: self.columns(x) },
            Op::Rope { x, rotary, head_dim } => {
                let angles = self.angles(rotary)?;
                RowOp::Rope { x: self.view(x), angles, pairing: rotary.pairing, head_dim: head_dim as usize }
            }
            Op::StoreKv { k, v, layer } => {
                let layer = layer.index();
                self.attention_shape(layer, 1)?;
                RowOp::StoreKv { k: self.view(k), v: v.map(|v| self.view(v)), layer }
            }
            Op::GatedActivation { x, groups, activation, out } => {
                let (x, groups, out) = (self.columns(x), groups as usize, self.columns(out));
                RowOp::GatedActivation { x, groups, activation, out }
            }
            Op::MoeRoute { logits, bias, router, out } => {
                let bias = bias.map(|bias| self.vector(bias)).transpose()?;
                RowOp::MoeRoute { logits: self.columns(logits), bias, router, out: self.columns(out) }
            }
            Op::MoeCombine { x, route, residual } => {
                RowOp::MoeCombine { x: self.columns(x), route: self.columns(route), residual: self.columns(residual) }
            }
            Op::MoeLinear { x, route, ref parts, out } => return self.experts(x, route, parts, out),
            Op::ScaleByPosition { x, beta, period } => RowOp::ScaleByPosition { x: self.view(x), beta, period },
            Op::SoftCap { x, cap } => RowOp::SoftCap { x: self.columns(x), cap },
            Op::CheckFinite { x } => RowOp::CheckFinite { x: self.columns(x), flags: self.flags },
            Op::GatherColumns { x, order, out } => {
                RowOp::GatherColumns { x: self.columns(x), order: self.vector(order)?, out: self.columns(out) }
            }
            Op::SelectRows { x, out } => RowOp::SelectRows { x: self.columns(x), out: self.columns(out) },
            Op::Sample { logits } => RowOp::Sample { logits: self.columns(logits), samples: self.samples },
            Op::Linear { x, ref parts, out } => return self.linear(x, parts, out),
            // Chains have no barrier between their ops, so that nothing is won by a kernel for both.
            Op::RopeStoreKv { .. } | Op::FusedLinear { .. } => {
                return op.expand().iter().try_for_each(|op| self.op(op));
            }
            Op::Attention { q, layer, heads, scale, window, soft_cap, sinks, out, .. } => {
                self.end_chain();
                let attention = Attention {
                    q: self.view(q),
                    out: self.columns(out),
                    layer: layer.index(),
                    heads: heads as usize,
                    scale,
                    window: window.map_or(usize::MAX, |window| window as usize),
                    soft_cap,
                    sinks: sinks.map(|sinks| self.vector(sinks)).transpose()?,
                    scratch: self.scratch,
                };
                self.phases.push(Phase::Attention(attention));
                return Ok(());
            }
        };
        let accesses: Vec<(Slot, bool)> = op.accesses().iter().map(|a| (a.slot, a.kind.writes())).collect();
        // The rows of the last operand: `SelectRows` runs once per logit row.
        let rows = accesses.last().map_or(RowDim::Tokens, |&(slot, _)| self.rows(slot));
        self.chain_op(row_op, rows, &accesses);
        Ok(())
    }

    /// The table of this step's angles, computed before its first use.
    fn angles(&mut self, rotary: Rotary) -> Result<Columns, DeviceError> {
        let (inv_freq, amplitude) = (self.vector(rotary.inv_freq)?, rotary.amplitude);
        if let Some((_, columns)) = self.angles.iter().find(|(key, _)| *key == (inv_freq, amplitude)) {
            return Ok(*columns);
        }
        let width = 2 * self.target.weights.vector(inv_freq).len();
        let start = self.reserve(self.max_rows(RowDim::Tokens) * width * FLOAT);
        let out = Columns { start, stride: width, width };
        self.angles.push(((inv_freq, amplitude), out));
        self.chain_op(RowOp::Angles { inv_freq, amplitude, out }, RowDim::Tokens, &[]);
        Ok(out)
    }

    fn linear(&mut self, x: Slot, parts: &[crate::program::LinearPart], out: Slot) -> Result<(), DeviceError> {
        let mut lowered = Vec::with_capacity(parts.len());
        let mut column = 0;
        for part in parts {
            let matrix = self.matrix(part.weight)?;
            let bias = part.bias.map(|bias| self.vector(bias)).transpose()?;
            lowered.push(Part { matrix, bias, column });
            column += self.target.weights.matrix(matrix).rows;
        }
        let is_quantised = |part: &Part| self.target.weights.matrix(part.matrix).kind.is_quantised();
        if lowered.iter().any(is_quantised) {
            let op = RowOp::Quantise { x: self.columns(x), start: self.quantised_start };
            self.chain_op(op, self.rows(x), &[(x, false)]);
        }
        self.end_chain();
        self.phases.push(Phase::Linear(LinearPhase {
            rows: self.rows(x),
            x: self.columns(x),
            quantised_start: self.quantised_start,
            parts: lowered,
            out: self.columns(out),
        }));
        Ok(())
    }

    fn experts(
        &mut self,
        x: Slot,
        route: Option<Slot>,
        parts: &[crate::program::LinearPart],
        out: Slot,
    ) -> Result<(), DeviceError> {
        let (mut lowered, mut column, mut num_experts) = (Vec::with_capacity(parts.len()), 0, 0);
        for part in parts {
            let bias = part.bias.map(|bias| self.vector(bias)).transpose()?;
            let shape = &self.program.weights[part.weight.index()].shape;
            num_experts = shape[0] as usize;
            let rows = shape[1] as usize;
            lowered.push(ExpertPart { matrix: self.matrix(part.weight)?, bias, rows, column });
            column += rows;
        }
        if lowered.iter().any(|part| self.target.weights.matrix(part.matrix).kind.is_quantised()) {
            let op = RowOp::Quantise { x: self.columns(x), start: self.quantised_start };
            self.chain_op(op, RowDim::Tokens, &[(x, false)]);
        }
        self.end_chain();
        let top_k = route.map_or(num_experts, |route| self.width(route) / 2);
        let thread_len = num_experts + self.max_rows(RowDim::Tokens) * top_k;
        let start = self.reserve(self.target.num_threads * thread_len * size_of::<u32>());
        self.phases.push(Phase::Experts(ExpertsPhase {
            x: self.columns(x),
            quantised_start: self.quantised_start,
            route: route.map(|route| self.columns(route)),
            num_experts,
            top_k,
            parts: lowered,
            out: self.columns(out),
            scratch: ExpertsScratch { start, thread_len },
        }));
        Ok(())
    }

    /// Appends a row-wise op to the chain, or starts a new one where the op must not overtake.
    fn chain_op(&mut self, op: RowOp, rows: RowDim, accesses: &[(Slot, bool)]) {
        let clashes = accesses.iter().any(|&(slot, writes)| {
            self.chain_slots.iter().any(|&(other, other_writes)| {
                let (a, b) = (self.bytes(slot), self.bytes(other));
                slot != other && (writes || other_writes) && a.start < b.end && b.start < a.end
            })
        });
        if clashes || rows != self.chain_rows {
            self.end_chain();
        }
        self.chain_rows = rows;
        self.chain_slots.extend_from_slice(accesses);
        self.chain.push(op);
    }

    fn end_chain(&mut self) {
        if !self.chain.is_empty() {
            self.phases.push(Phase::Rows { rows: self.chain_rows, ops: std::mem::take(&mut self.chain) });
        }
        self.chain_slots.clear();
    }
}

fn missing(what: String) -> DeviceError {
    DeviceError::Failed(format!("{what} was not given to the CPU backend before compile"))
}
