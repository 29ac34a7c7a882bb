//! The reference's ops: one function each, the formula as it stands in `program::Op`.
//!
//! Invariant: sums run in one fixed order (`dot`: 16 interleaved partial sums, then those in order;
//! softmax: see `attention`). Threads only share out whole output rows. Called by `ReferenceBackend::submit`.

use std::sync::{Mutex, PoisonError};

use super::Weight;
use super::attention::{Attend, Scratch};
use super::state::{Entry, LayerState, Side};
use crate::backend::StepInputs;
use crate::backend::pool::Pool;
use crate::backend::route::route;
use crate::error::DeviceError;
use crate::ids::{Layer, Slot, WeightId};
use crate::program::{Activation, LinearPart, Op, RopePairing, Rotary, Router, RowDim, SlotInfo, View};
use crate::sample::{Sample, sample_row};

/// One running step: what the ops read and write.
pub(super) struct Step<'a> {
    pub inputs: &'a StepInputs,
    pub infos: &'a [SlotInfo],
    pub weights: &'a [Option<Weight>],
    pub layers: &'a mut [LayerState],
    pub slots: &'a mut [Vec<f32>],
    /// Products of a linear before they are transposed; grows to the largest.
    pub products: &'a mut Vec<f32>,
    pub non_finite: &'a mut [u32],
    pub samples: &'a mut Vec<Sample>,
    pub pool: &'a mut Pool,
}

impl<'a> Step<'a> {
    /// # Errors
    /// A thread panicked.
    pub fn run(&mut self, op: &Op) -> Result<(), DeviceError> {
        match op {
            Op::Embed { table, scale, out } => self.embed(*table, *scale, *out),
            Op::RmsNorm { x, weight, eps, out } => self.rms_norm(*x, *weight, *eps, *out),
            Op::NormHeads { x, weight, eps } => self.norm_heads(*x, *weight, *eps),
            Op::Add { residual, x } => self.add(*residual, *x),
            Op::RopeStoreKv { .. } | Op::FusedLinear { .. } => {
                unreachable!("fused ops are expanded when a program is compiled")
            }
            Op::Linear { x, parts, out } => return self.linear(*x, parts, *out),
            Op::Rope { x, rotary, head_dim } => self.rope(*x, *rotary, *head_dim as usize),
            Op::StoreKv { k, v, layer } => self.store_kv(*k, *v, *layer),
            Op::Attention { .. } => return self.attention(op),
            Op::GatedActivation { x, groups, activation, out } => {
                self.gated_activation(*x, *groups as usize, *activation, *out);
            }
            Op::MoeRoute { logits, bias, router, out } => self.moe_route(*logits, *bias, router, *out),
            Op::MoeLinear { x, route, parts, out } => return self.moe_linear(*x, *route, parts, *out),
            Op::MoeCombine { x, route, residual } => self.moe_combine(*x, *route, *residual),
            Op::ScaleByPosition { x, beta, period } => self.scale_by_position(*x, *beta, *period),
            Op::SoftCap { x, cap } => self.soft_cap(*x, *cap),
            Op::CheckFinite { x } => self.check_finite(*x),
            Op::SelectRows { x, out } => self.select_rows(*x, *out),
            Op::GatherColumns { x, order, out } => self.gather_columns(*x, *order, *out),
            Op::Sample { logits } => self.sample(*logits),
        }
        Ok(())
    }

    fn width(&self, slot: Slot) -> usize {
        self.infos[slot.index()].width as usize
    }

    /// Rows of a slot as `[width]` slices.
    fn rows(&self, slot: Slot) -> impl Iterator<Item = &[f32]> {
        self.slots[slot.index()].chunks_exact(self.width(slot))
    }

    /// The columns of a view, row by row.
    fn view_rows_mut(&mut self, view: View) -> impl Iterator<Item = &mut [f32]> {
        let (width, columns) = (self.width(view.slot), view.offset as usize..(view.offset + view.width) as usize);
        self.slots[view.slot.index()].chunks_exact_mut(width).map(move |row| &mut row[columns.clone()])
    }

    /// Takes a slot out of the table, zeroed and sized for this step; `give` puts it back.
    fn take_out(&mut self, slot: Slot) -> Vec<f32> {
        let num_rows = match self.infos[slot.index()].rows {
            RowDim::Tokens => self.inputs.num_tokens(),
            RowDim::LogitRows => self.inputs.num_logit_rows(),
        };
        let mut values = std::mem::take(&mut self.slots[slot.index()]);
        values.clear();
        values.resize(num_rows * self.width(slot), 0.0);
        values
    }

    fn give(&mut self, slot: Slot, values: Vec<f32>) {
        self.slots[slot.index()] = values;
    }

    fn weight(&self, id: WeightId) -> &'a Weight {
        self.weights[id.index()].as_ref().expect("compile saw every weight uploaded")
    }

    fn embed(&mut self, table: WeightId, scale: f32, out: Slot) {
        let mut values = self.take_out(out);
        for (row, &id) in values.chunks_exact_mut(self.width(out)).zip(self.inputs.token_ids()) {
            let stored = self.weight(table).row(id as usize);
            row.iter_mut().zip(stored).for_each(|(x, stored)| *x = stored * scale);
        }
        self.give(out, values);
    }

    fn rms_norm(&mut self, x: Slot, weight: WeightId, eps: f32, out: Slot) {
        let mut values = self.take_out(out);
        let weight = &self.weight(weight).values;
        for (row, x) in values.chunks_exact_mut(weight.len()).zip(self.rows(x)) {
            row.copy_from_slice(x);
            normalize(row, weight, eps);
        }
        self.give(out, values);
    }

    fn norm_heads(&mut self, x: View, weight: WeightId, eps: f32) {
        let weight = &self.weight(weight).values;
        for row in self.view_rows_mut(x) {
            for head in row.chunks_exact_mut(weight.len()) {
                normalize(head, weight, eps);
            }
        }
    }

    fn add(&mut self, residual: Slot, x: Slot) {
        let mut values = std::mem::take(&mut self.slots[residual.index()]);
        for (sum, term) in values.iter_mut().zip(&self.slots[x.index()]) {
            *sum += term;
        }
        self.give(residual, values);
    }

    fn linear(&mut self, x: Slot, parts: &[LinearPart], out: Slot) -> Result<(), DeviceError> {
        let mut values = self.take_out(out);
        let (in_features, width) = (self.width(x), self.width(out));
        let x = &self.slots[x.index()];
        let num_rows = x.len() / in_features;
        let mut first_column = 0;
        for part in parts {
            let weight = self.weight(part.weight);
            let bias = part.bias.map(|bias| &self.weight(bias).values);
            // Transposed, `[out_features, rows]`, so that each weight row is read once and owned by one thread.
            self.products.clear();
            self.products.resize(weight.num_rows() * num_rows, 0.0);
            for_each_chunk(self.pool, self.products, num_rows, |first_feature, chunk| {
                for (i, products) in chunk.chunks_exact_mut(num_rows).enumerate() {
                    let bias = bias.map_or(0.0, |bias| bias[first_feature + i]);
                    for (product, x) in products.iter_mut().zip(x.chunks_exact(in_features)) {
                        *product = dot(weight.row(first_feature + i), x) + bias;
                    }
                }
            })?;
            for (feature, products) in self.products.chunks_exact(num_rows.max(1)).enumerate() {
                for (row, &product) in products.iter().enumerate() {
                    values[row * width + first_column + feature] = product;
                }
            }
            first_column += weight.num_rows();
        }
        self.give(out, values);
        Ok(())
    }

    fn rope(&mut self, x: View, rotary: Rotary, head_dim: usize) {
        let inv_freq = &self.weight(rotary.inv_freq).values;
        let inputs = self.inputs;
        for (row, &position) in self.view_rows_mut(x).zip(inputs.positions()) {
            for (i, &frequency) in inv_freq.iter().enumerate() {
                let (sin, cos) = (position as f32 * frequency).sin_cos();
                let (sin, cos) = (sin * rotary.amplitude, cos * rotary.amplitude);
                let (first, second) = match rotary.pairing {
                    RopePairing::Half => (i, i + inv_freq.len()),
                    RopePairing::Interleaved => (2 * i, 2 * i + 1),
                };
                for head in row.chunks_exact_mut(head_dim) {
                    let (a, b) = (head[first], head[second]);
                    head[first] = a * cos - b * sin;
                    head[second] = b * cos + a * sin;
                }
            }
        }
    }

    fn store_kv(&mut self, k: View, v: Option<View>, layer: Layer) {
        let layer = &mut self.layers[layer.index()];
        let dim = layer.dim();
        for (side, view) in [(Side::Keys, k)].into_iter().chain(v.map(|v| (Side::Values, v))) {
            let width = self.infos[view.slot.index()].width as usize;
            let rows = self.slots[view.slot.index()].chunks_exact(width);
            for (row, &slot) in rows.zip(self.inputs.slot_map()) {
                let columns = &row[view.offset as usize..][..view.width as usize];
                for (head, values) in columns.chunks_exact(dim).enumerate() {
                    layer.store(side, Entry { slot: slot as usize, head }, values);
                }
            }
        }
    }

    fn attention(&mut self, op: &Op) -> Result<(), DeviceError> {
        let &Op::Attention { q, layer, scale, window, soft_cap, sinks, out, .. } = op else {
            unreachable!("called for attention");
        };
        let mut values = self.take_out(out);
        let (q_width, out_width) = (self.width(q.slot), self.width(out));
        let q_rows = &self.slots[q.slot.index()];
        let layer = &self.layers[layer.index()];
        let sinks = sinks.map(|sinks| self.weight(sinks).values.as_slice());
        let attend = Attend { inputs: self.inputs, layer, scale, window, soft_cap, sinks };
        let starts = self.inputs.row_starts();
        for_each_chunk(self.pool, &mut values, out_width, |first_token, chunk| {
            let mut scratch = Scratch::default();
            for (i, out) in chunk.chunks_exact_mut(out_width).enumerate() {
                let token = first_token + i;
                // Padding tokens belong to no row; theirs stays zero.
                if let Some(row) = starts.windows(2).position(|w| (w[0]..w[1]).contains(&(token as u32))) {
                    let q = &q_rows[token * q_width + q.offset as usize..][..q.width as usize];
                    attend.token(q, (token, row), &mut scratch, out);
                }
            }
        })?;
        self.give(out, values);
        Ok(())
    }

    fn gated_activation(&mut self, x: Slot, groups: usize, activation: Activation, out: Slot) {
        let mut values = self.take_out(out);
        let n = self.width(out) / groups;
        let x = self.slots[x.index()].chunks_exact(2 * n);
        for (group, x) in values.chunks_exact_mut(n).zip(x) {
            for (i, value) in group.iter_mut().enumerate() {
                *value = gated(activation, x[i], x[n + i]);
            }
        }
        self.give(out, values);
    }

    fn moe_route(&mut self, logits: Slot, bias: Option<WeightId>, router: &Router, out: Slot) {
        let mut values = self.take_out(out);
        let bias = bias.map(|bias| self.weight(bias).values.as_slice());
        for (row, logits) in values.chunks_exact_mut(self.width(out)).zip(self.rows(logits)) {
            route(router, logits, bias, row);
        }
        self.give(out, values);
    }

    fn moe_linear(&mut self, x: Slot, route: Option<Slot>, parts: &[LinearPart], out: Slot) -> Result<(), DeviceError> {
        let mut values = self.take_out(out);
        let weights = self.weights;
        let weight = |id: WeightId| weights[id.index()].as_ref().expect("compile saw every weight uploaded");
        let top_k = match route {
            Some(route) => self.width(route) / 2,
            None => weight(parts[0].weight).num_matrices(),
        };
        let (width, x_width) = (self.width(out), self.width(x));
        let (x, route) = (&self.slots[x.index()], route.map(|route| &self.slots[route.index()]));
        for_each_chunk(self.pool, &mut values, width / top_k, |first, chunk| {
            for (i, out) in chunk.chunks_exact_mut(width / top_k).enumerate() {
                let (token, choice) = ((first + i) / top_k, (first + i) % top_k);
                let expert = route.map_or(choice, |route| route[token * 2 * top_k + choice] as usize);
                let mut column = 0;
                for part in parts {
                    let matrix = weight(part.weight);
                    let rows = matrix.rows_per_matrix();
                    let start = if x_width == matrix.row_len { 0 } else { choice * matrix.row_len };
                    let x = &x[token * x_width + start..][..matrix.row_len];
                    for row in 0..rows {
                        let at = expert * rows + row;
                        let bias = part.bias.map_or(0.0, |bias| weight(bias).values[at]);
                        out[column + row] = dot(matrix.row(at), x) + bias;
                    }
                    column += rows;
                }
            }
        })?;
        self.give(out, values);
        Ok(())
    }

    fn moe_combine(&mut self, x: Slot, route: Slot, residual: Slot) {
        let mut values = std::mem::take(&mut self.slots[residual.index()]);
        let (n, top_k) = (self.width(residual), self.width(route) / 2);
        for ((sum, x), route) in values.chunks_exact_mut(n).zip(self.rows(x)).zip(self.rows(route)) {
            for (x, weight) in x.chunks_exact(n).zip(&route[top_k..]) {
                sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += weight * x);
            }
        }
        self.give(residual, values);
    }

    fn scale_by_position(&mut self, x: View, beta: f32, period: u32) {
        let inputs = self.inputs;
        for (row, &position) in self.view_rows_mut(x).zip(inputs.positions()) {
            let factor = 1.0 + beta * (1.0 + (position / period) as f32).ln();
            row.iter_mut().for_each(|x| *x *= factor);
        }
    }

    fn soft_cap(&mut self, x: Slot, cap: f32) {
        self.slots[x.index()].iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
    }

    fn check_finite(&mut self, x: Slot) {
        let width = self.width(x);
        for (flag, row) in self.non_finite.iter_mut().zip(self.slots[x.index()].chunks_exact(width)) {
            *flag |= u32::from(row.iter().any(|value| !value.is_finite()));
        }
    }

    fn select_rows(&mut self, x: Slot, out: Slot) {
        let mut values = self.take_out(out);
        let width = self.width(x);
        let x = &self.slots[x.index()];
        for (row, &token) in values.chunks_exact_mut(width).zip(self.inputs.logit_rows()) {
            row.copy_from_slice(&x[token as usize * width..][..width]);
        }
        self.give(out, values);
    }

    fn gather_columns(&mut self, x: Slot, order: WeightId, out: Slot) {
        let mut values = self.take_out(out);
        let order = &self.weight(order).values;
        for (row, x) in values.chunks_exact_mut(order.len()).zip(self.rows(x)) {
            row.iter_mut().zip(order).for_each(|(value, &column)| *value = x[column as usize]);
        }
        self.give(out, values);
    }

    fn sample(&mut self, logits: Slot) {
        let inputs = self.inputs;
        let width = self.width(logits);
        let rows = self.slots[logits.index()].chunks_exact(width).skip(inputs.num_read_rows());
        self.samples.extend(rows.zip(inputs.draws()).map(|(row, draw)| sample_row(row, &draw)));
    }
}

fn gated(activation: Activation, gate: f32, up: f32) -> f32 {
    match activation {
        Activation::Silu => gate / (1.0 + (-gate).exp()) * up,
        Activation::GeluTanh => {
            let inner = GELU_SCALE * (gate + GELU_CUBE * gate * gate * gate);
            0.5 * gate * (1.0 + inner.tanh()) * up
        }
        Activation::ClampedSwiglu => {
            let (gate, up) = (gate.min(SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT));
            gate / (1.0 + (-SWIGLU_ALPHA * gate).exp()) * (up + 1.0)
        }
    }
}

const SWIGLU_LIMIT: f32 = 7.0;
const SWIGLU_ALPHA: f32 = 1.702;
/// `sqrt(2 / pi)`.
const GELU_SCALE: f32 = 0.797_884_6;
const GELU_CUBE: f32 = 0.044_715;

/// `x / sqrt(mean(x^2) + eps) * weight`, in place (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization").
fn normalize(x: &mut [f32], weight: &[f32], eps: f32) {
    let mean = dot(x, x) / x.len() as f32;
    let factor = 1.0 / (mean + eps).sqrt();
    for (x, weight) in x.iter_mut().zip(weight) {
        *x = *x * factor * weight;
    }
}

/// The order of every long sum: lane i takes elements i, i + 16, …; then the lanes in order, then the tail.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut lanes = [0.0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail: f32 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a_chunks.zip(b_chunks) {
        for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += a * b;
        }
    }
    lanes.iter().sum::<f32>() + tail
}

/// Shares whole rows of `out` (`[rows, row_len]`) over threads; `fill` gets its first row and its rows.
///
/// # Errors
/// A thread panicked.
pub(super) fn for_each_chunk(
    pool: &mut Pool,
    out: &mut [f32],
    row_len: usize,
    fill: impl Fn(usize, &mut [f32]) + Sync,
) -> Result<(), DeviceError> {
    if out.is_empty() {
        return Ok(());
    }
    let rows_per_thread = (out.len() / row_len).div_ceil(pool.threads());
    let chunks = Mutex::new(out.chunks_mut(rows_per_thread * row_len).enumerate());
    pool.run(&|_| {
        let chunk = chunks.lock().unwrap_or_else(PoisonError::into_inner).next();
        if let Some((i, chunk)) = chunk {
            fill(i * rows_per_thread, chunk);
        }
    })
}
