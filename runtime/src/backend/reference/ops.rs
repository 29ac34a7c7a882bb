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
use crate::error::DeviceError;
use crate::ids::{Layer, Slot, WeightId};
use crate::program::{Activation, LinearPart, Op, RopePairing, RowDim, SlotInfo, View};
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
            Op::Embed { table, out } => self.embed(*table, *out),
            Op::RmsNorm { x, weight, eps, out } => self.rms_norm(*x, *weight, *eps, *out),
            Op::NormHeads { x, weight, eps } => self.norm_heads(*x, *weight, *eps),
            Op::Add { residual, x } => self.add(*residual, *x),
            Op::RopeStoreKv { .. } | Op::FusedLinear { .. } => {
                unreachable!("fused ops are expanded when a program is compiled")
            }
            Op::Linear { x, parts, out } => return self.linear(*x, parts, *out),
            Op::Rope { x, inv_freq, pairing, head_dim } => self.rope(*x, *inv_freq, *pairing, *head_dim as usize),
            Op::StoreKv { k, v, layer } => self.store_kv(*k, *v, *layer),
            Op::Attention { .. } => return self.attention(op),
            Op::GatedActivation { x, activation, out } => self.gated_activation(*x, *activation, *out),
            Op::CheckFinite { x } => self.check_finite(*x),
            Op::SelectRows { x, out } => self.select_rows(*x, *out),
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

    fn embed(&mut self, table: WeightId, out: Slot) {
        let mut values = self.take_out(out);
        for (row, &id) in values.chunks_exact_mut(self.width(out)).zip(self.inputs.token_ids()) {
            row.copy_from_slice(self.weight(table).row(id as usize));
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

    fn rope(&mut self, x: View, inv_freq: WeightId, pairing: RopePairing, head_dim: usize) {
        let inv_freq = &self.weight(inv_freq).values;
        let inputs = self.inputs;
        for (row, &position) in self.view_rows_mut(x).zip(inputs.positions()) {
            for (i, &frequency) in inv_freq.iter().enumerate() {
                let (sin, cos) = (position as f32 * frequency).sin_cos();
                let (first, second) = match pairing {
                    RopePairing::Half => (i, i + head_dim / 2),
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

    fn store_kv(&mut self, k: View, v: View, layer: Layer) {
        let layer = &mut self.layers[layer.index()];
        let dim = layer.dim();
        for (side, view) in [(Side::Keys, k), (Side::Values, v)] {
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

    fn gated_activation(&mut self, x: Slot, activation: Activation, out: Slot) {
        let mut values = self.take_out(out);
        let n = self.width(out);
        for (row, x) in values.chunks_exact_mut(n).zip(self.rows(x)) {
            for (i, value) in row.iter_mut().enumerate() {
                let gate = match activation {
                    Activation::Silu => x[i] / (1.0 + (-x[i]).exp()),
                };
                *value = gate * x[n + i];
            }
        }
        self.give(out, values);
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

    fn sample(&mut self, logits: Slot) {
        let inputs = self.inputs;
        let width = self.width(logits);
        let rows = self.slots[logits.index()].chunks_exact(width).skip(inputs.num_read_rows());
        self.samples.extend(rows.zip(inputs.draws()).map(|(row, draw)| sample_row(row, &draw)));
    }
}

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
