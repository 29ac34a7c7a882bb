//! The row-wise kernels: ops whose row `t` reads and writes row `t` only, run as chains on rows that are still in cache.
//!
//! Invariant: a chain's thread owns its rows from the first op to the last, so that no barrier stands between them; sums
//! run in the lanes' fixed order, so that a row's bits depend on nothing but the row. f32 throughout; against the
//! reference only the order of sums and `exp` (3e-7) differ. `lower` builds the chains, `step` runs them.

use half::{bf16, f16};

use super::cached::Cached;
use super::linear::{QuantGroup, quantise_row};
use super::memory::Shared;
use super::repack::{GROUP, Matrix};
use super::simd::{Kernel, LANES, Simd};
use super::state::LayerState;
use super::step::Step;
use crate::backend::cached::{E4m3, Int8Scale};
use crate::backend::route::route;
use crate::program::{Activation, KvDtype, RopePairing, Router};
use crate::sample::{Sample, sample_row};

/// Columns of a slot: `[rows, width]`, rows `stride` floats apart, from byte `start` of the plan's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Columns {
    pub(super) start: usize,
    pub(super) stride: usize,
    pub(super) width: usize,
}

impl Columns {
    /// One row, to be read.
    ///
    /// # Safety
    /// No thread writes the row meanwhile.
    #[inline(always)]
    pub(super) unsafe fn row<'a>(self, memory: Shared, row: usize) -> &'a [f32] {
        // SAFETY: the caller's promise; the plan's memory outlives the step.
        unsafe { memory.slice(self.start + row * self.stride * size_of::<f32>(), self.width) }
    }

    /// One row, to be written.
    ///
    /// # Safety
    /// No other thread reads or writes the row meanwhile.
    #[inline(always)]
    #[allow(clippy::mut_from_ref, reason = "the split of work excludes, not the borrow checker")]
    pub(super) unsafe fn row_mut<'a>(self, memory: Shared, row: usize) -> &'a mut [f32] {
        // SAFETY: the caller's promise; the plan's memory outlives the step.
        unsafe { memory.slice_mut(self.start + row * self.stride * size_of::<f32>(), self.width) }
    }
}

/// A norm's constants; `weight` names a vector.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm {
    pub(super) weight: usize,
    pub(super) eps: f32,
}

/// A row-wise op with its operands resolved; the formulas stand in `program::Op`.
#[derive(Clone, Debug)]
pub(super) enum RowOp {
    Embed {
        table: usize,
        scale: f32,
        out: Columns,
    },
    RmsNorm {
        x: Columns,
        norm: Norm,
        out: Columns,
    },
    NormHeads {
        x: Columns,
        norm: Norm,
    },
    Add {
        residual: Columns,
        x: Columns,
    },
    /// Cosines, then sines, of a token's angles, times the amplitude: once per step, for all layers.
    Angles {
        inv_freq: usize,
        amplitude: f32,
        out: Columns,
    },
    Rope {
        x: Columns,
        angles: Columns,
        pairing: RopePairing,
        head_dim: usize,
    },
    StoreKv {
        k: Columns,
        /// None where keys are values too.
        v: Option<Columns>,
        layer: usize,
    },
    GatedActivation {
        x: Columns,
        groups: usize,
        activation: Activation,
        out: Columns,
    },
    MoeRoute {
        logits: Columns,
        bias: Option<usize>,
        router: Router,
        out: Columns,
    },
    MoeCombine {
        x: Columns,
        route: Columns,
        residual: Columns,
    },
    ScaleByPosition {
        x: Columns,
        beta: f32,
        period: u32,
    },
    SoftCap {
        x: Columns,
        cap: f32,
    },
    /// Flags from byte `flags`, one word per token.
    CheckFinite {
        x: Columns,
        flags: usize,
    },
    SelectRows {
        x: Columns,
        out: Columns,
    },
    /// `order` names a vector of whole numbers.
    GatherColumns {
        x: Columns,
        order: usize,
        out: Columns,
    },
    /// Samples from byte `samples`, one per logit row that is not read back.
    Sample {
        logits: Columns,
        samples: usize,
    },
    /// The 8-bit activations of the next linear, from byte `start`.
    Quantise {
        x: Columns,
        start: usize,
    },
}

/// A chain of row-wise ops on some rows.
pub(super) struct Rows<'a> {
    pub(super) step: &'a Step<'a>,
    pub(super) ops: &'a [RowOp],
    pub(super) rows: std::ops::Range<usize>,
}

impl Kernel for Rows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in self.rows {
            for op in self.ops {
                run_row(s, self.step, op, row);
            }
        }
    }
}

#[inline(always)]
fn run_row<S: Simd>(s: S, step: &Step<'_>, op: &RowOp, row: usize) {
    let memory = step.memory;
    // SAFETY: `lower` has put into this chain only ops that touch row `row` of slots (or, for `SelectRows`, rows that no
    // op of the chain writes), and `step` gives a row to one thread: nobody writes what is read, or touches what is
    // written, before the next barrier.
    let read = |columns: Columns| unsafe { columns.row(memory, row) };
    // SAFETY: as above.
    let write = |columns: Columns| unsafe { columns.row_mut(memory, row) };
    match *op {
        RowOp::Embed { table, scale, out } => {
            let (table, out): (&Matrix, _) = (step.weights.matrix(table), write(out));
            table.read_row(&step.weights.arena, step.inputs.token_ids()[row] as usize, out);
            if scale != 1.0 {
                out.iter_mut().for_each(|x| *x *= scale);
            }
        }
        RowOp::RmsNorm { x, norm, out } => rms_norm(s, read(x), step.weights.vector(norm.weight), norm.eps, write(out)),
        RowOp::NormHeads { x, norm } => {
            let weight = step.weights.vector(norm.weight);
            for head in write(x).chunks_exact_mut(weight.len()) {
                let factor = rms_factor(s, head, norm.eps);
                head.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * factor * w);
            }
        }
        RowOp::Add { residual, x } => add(write(residual), read(x)),
        RowOp::Angles { inv_freq, amplitude, out } => {
            let (cos, sin) = write(out).split_at_mut(out.width / 2);
            let position = step.inputs.positions()[row] as f32;
            let frequencies = step.weights.vector(inv_freq);
            for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(frequencies) {
                (*sin, *cos) = (position * frequency).sin_cos();
                (*sin, *cos) = (*sin * amplitude, *cos * amplitude);
            }
        }
        RowOp::Rope { x, angles, pairing, head_dim } => rope(write(x), read(angles), pairing, head_dim),
        RowOp::StoreKv { k, v, layer } => {
            store_kv(&step.layers[layer], step.inputs.slot_map()[row] as usize, read(k), v.map(read));
        }
        RowOp::GatedActivation { x, groups, activation, out } => {
            let n = out.width / groups;
            for (x, out) in read(x).chunks_exact(2 * n).zip(write(out).chunks_exact_mut(n)) {
                gated(s, activation, x, out);
            }
        }
        RowOp::MoeRoute { logits, bias, ref router, out } => {
            route(router, read(logits), bias.map(|bias| step.weights.vector(bias)), write(out));
        }
        RowOp::MoeCombine { x, route, residual } => {
            let (sum, weights) = (write(residual), &read(route)[route.width / 2..]);
            for (x, &weight) in read(x).chunks_exact(sum.len()).zip(weights) {
                sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += weight * x);
            }
        }
        RowOp::ScaleByPosition { x, beta, period } => {
            let factor = 1.0 + beta * (1.0 + (step.inputs.positions()[row] / period) as f32).ln();
            write(x).iter_mut().for_each(|x| *x *= factor);
        }
        RowOp::SoftCap { x, cap } => soft_cap(s, write(x), cap),
        RowOp::CheckFinite { x, flags } => {
            let finite = read(x).iter().fold(true, |finite, x| finite & x.is_finite());
            // SAFETY: the flag of this row, which belongs to this thread.
            let flag = unsafe { memory.slice_mut::<u32>(flags + row * size_of::<u32>(), 1) };
            flag[0] |= u32::from(!finite);
        }
        RowOp::SelectRows { x, out } => {
            let token = step.inputs.logit_rows()[row] as usize;
            // SAFETY: rows of `x` were written before the last barrier: it is a slot of tokens, this chain's are logit rows.
            write(out).copy_from_slice(unsafe { x.row(memory, token) });
        }
        RowOp::GatherColumns { x, order, out } => {
            let (x, order) = (read(x), step.weights.vector(order));
            write(out).iter_mut().zip(order).for_each(|(value, &column)| *value = x[column as usize]);
        }
        RowOp::Sample { logits, samples } => {
            let Some(index) = row.checked_sub(step.inputs.num_read_rows()) else { return };
            let draw = step.inputs.draws().nth(index).expect("a draw per sampled row");
            // SAFETY: the sample of this row, which belongs to this thread.
            let sample = unsafe { memory.slice_mut(samples + index * size_of::<Sample>(), 1) };
            sample[0] = sample_row(read(logits), &draw);
        }
        RowOp::Quantise { x, start } => {
            let groups = x.width / GROUP;
            let start = start + row * groups * size_of::<QuantGroup>();
            // SAFETY: the groups of this row, which belongs to this thread.
            quantise_row(s, read(x), unsafe { memory.slice_mut(start, groups) });
        }
    }
}

#[inline(always)]
fn add(residual: &mut [f32], x: &[f32]) {
    residual.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
}

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
fn rms_factor<S: Simd>(s: S, x: &[f32], eps: f32) -> f32 {
    let (chunks, tail) = x.as_chunks::<LANES>();
    let mut acc = s.splat(0.0);
    for chunk in chunks {
        let v = s.load(chunk);
        acc = s.fma(v, v, acc);
    }
    let v = s.load_part(tail);
    let mean = s.sum(s.fma(v, v, acc)) / x.len() as f32;
    1.0 / (mean + eps).sqrt()
}

#[inline(always)]
fn rms_norm<S: Simd>(s: S, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let factor = rms_factor(s, x, eps);
    for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
        *out = x * factor * w;
    }
}

#[inline(always)]
fn rope(x: &mut [f32], angles: &[f32], pairing: RopePairing, head_dim: usize) {
    let (cos, sin) = angles.split_at(angles.len() / 2);
    for head in x.chunks_exact_mut(head_dim) {
        match pairing {
            RopePairing::Half => {
                let (first, second) = head.split_at_mut(cos.len());
                for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                }
            }
            RopePairing::Interleaved => {
                for (([a, b], cos), sin) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
                    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                }
            }
        }
    }
}

/// Stores one token's keys and values, rounded to the planes' type.
#[inline(always)]
fn store_kv(layer: &LayerState, slot: usize, k: &[f32], v: Option<&[f32]>) {
    match layer.dtype {
        KvDtype::F32 => store_kv_as::<f32>(layer, slot, k, v),
        KvDtype::F16 => store_kv_as::<f16>(layer, slot, k, v),
        KvDtype::Bf16 => store_kv_as::<bf16>(layer, slot, k, v),
        KvDtype::Fp8E4m3 => store_kv_as::<E4m3>(layer, slot, k, v),
        KvDtype::Int8PerTokenHead => store_kv_as::<i8>(layer, slot, k, v),
    }
}

#[inline(always)]
fn store_kv_as<E: Cached>(layer: &LayerState, slot: usize, k: &[f32], v: Option<&[f32]>) {
    let (block, offset) = (slot / layer.block_size, slot % layer.block_size);
    for (head, k) in k.chunks_exact(layer.dim).enumerate() {
        let scale = store_scale::<E>(layer, 0, (block, offset, head), k);
        // SAFETY: the slot belongs to this token, and the entries of a slot are its own bytes of the planes; elements
        // that lie between a key's are not touched: the slice is written through a raw pointer below.
        let keys = unsafe { layer.head_ptr::<E>(0, block, head) };
        for (d, &k) in k.iter().enumerate() {
            // SAFETY: `d < dim` and `offset < block_size`: inside the head's `dim * block_size` elements.
            unsafe { keys.add(d * layer.block_size + offset).write(E::round(k, scale)) };
        }
    }
    for (head, v) in v.into_iter().flat_map(|v| v.chunks_exact(layer.dim)).enumerate() {
        let scale = store_scale::<E>(layer, 1, (block, offset, head), v);
        // SAFETY: as above.
        let values = unsafe { layer.head_ptr::<E>(1, block, head) };
        for (d, &v) in v.iter().enumerate() {
            // SAFETY: as above.
            unsafe { values.add(offset * layer.dim + d).write(E::round(v, scale)) };
        }
    }
}

/// Stores the scale of one entry of keys (side 0) or values, where the type has scales, and gives it.
#[inline(always)]
fn store_scale<E: Cached>(
    layer: &LayerState,
    side: usize,
    (block, offset, head): (usize, usize, usize),
    values: &[f32],
) -> Int8Scale {
    if !E::SCALED {
        return Int8Scale::NONE;
    }
    let scale = Int8Scale::of(values);
    // SAFETY: `offset < block_size`: this entry's own scale in the head's `block_size` of them.
    unsafe { layer.head_ptr::<f32>(layer.scales[side], block, head).add(offset).write(scale.scale) };
    scale
}

/// `out = act(gate) * up`, gate and up being the halves of `x`.
#[inline(always)]
fn gated<S: Simd>(s: S, activation: Activation, x: &[f32], out: &mut [f32]) {
    let (gate, up) = x.split_at(out.len());
    let tail = out.len() / LANES * LANES;
    let (gates, ups) = (gate.as_chunks::<LANES>().0, up.as_chunks::<LANES>().0);
    for ((out, gate), up) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(gates).zip(ups) {
        s.store(gate_times(s, activation, s.load(gate), s.load(up)), out);
    }
    let (gate, up) = (s.load_part(&gate[tail..]), s.load_part(&up[tail..]));
    s.store_part(gate_times(s, activation, gate, up), &mut out[tail..]);
}

/// `factor * sigmoid(argument) * up`. A function, not a closure: closures are not compiled for the vectors' instructions.
#[inline(always)]
fn gate_times<S: Simd>(s: S, activation: Activation, gate: S::F, up: S::F) -> S::F {
    let (factor, argument, up) = match activation {
        Activation::Silu => (gate, gate, up),
        Activation::GeluTanh => (gate, gelu_argument(s, gate), up),
        Activation::ClampedSwiglu => clamped(s, gate, up),
    };
    let denominator = s.add(s.splat(1.0), s.exp(s.sub(s.splat(0.0), argument)));
    s.mul(s.div(factor, denominator), up)
}

/// `2 sqrt(2 / pi) (x + 0.044715 x^3)`: half of 1 + tanh(y) is the sigmoid of 2 y.
#[inline(always)]
fn gelu_argument<S: Simd>(s: S, x: S::F) -> S::F {
    let inner = s.fma(s.mul(s.mul(x, x), x), s.splat(0.044_715), x);
    s.mul(inner, s.splat(1.595_769))
}

/// gpt-oss: gates up to 7, ups within ±7; factor, argument and up of `gate_times`.
#[inline(always)]
fn clamped<S: Simd>(s: S, gate: S::F, up: S::F) -> (S::F, S::F, S::F) {
    const LIMIT: f32 = 7.0;
    let gate = s.min(gate, s.splat(LIMIT));
    let up = s.min(s.max(up, s.splat(-LIMIT)), s.splat(LIMIT));
    (gate, s.mul(gate, s.splat(1.702)), s.add(up, s.splat(1.0)))
}

/// `x = cap * tanh(x / cap)`.
#[inline(always)]
fn soft_cap<S: Simd>(s: S, x: &mut [f32], cap: f32) {
    let (chunks, tail) = x.as_chunks_mut::<LANES>();
    for chunk in chunks {
        s.store(capped(s, s.load(chunk), cap), chunk);
    }
    s.store_part(capped(s, s.load_part(tail), cap), tail);
}

#[inline(always)]
fn capped<S: Simd>(s: S, x: S::F, cap: f32) -> S::F {
    s.mul(s.tanh(s.div(x, s.splat(cap))), s.splat(cap))
}
