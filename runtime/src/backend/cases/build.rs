//! A case becomes a tiny program: `Embed` brings f32 activations in, the op runs, `SelectRows` brings its output out.
//!
//! Invariant: only ops and trait methods that every backend has are needed to run it. Called by `run_case` and by tests
//! that compute an expectation of their own from the parts.

use super::random::Random;
use super::sample::build_sample;
use super::{AttentionCase, BlockMoves, Case, CaseOp, FusedCase, FusedEnd, HeadsCase, MoeCase, PartCase, TurnCase};
use crate::backend::{Bucket, InputLayout, StepInputs, TreeToken};
use crate::ids::{BlockId, Layer, Slot, WeightId};
use crate::program::{
    FusedNorm, LinearEnd, LinearPart, Op, Plane, Program, Rotary, RowDim, SlotInfo, StateSpec, View, WeightInfo,
};
use crate::weights::HostTensor;

/// Under the root of every norm of the table.
const EPS: f32 = 1e-5;
/// Input ranges start at multiples of this, as device buffers want it.
const ALIGN_WORDS: usize = 64;

/// Everything needed to run a case.
#[derive(Clone, Debug)]
pub struct BuiltCase {
    /// The op between its helpers.
    pub program: Program,
    /// By `WeightId`.
    pub tensors: Vec<HostTensor>,
    /// A step that stores the positions before the case's own.
    pub history: Option<StepInputs>,
    /// Block moves between the two steps.
    pub moves: (BlockMoves, Vec<(BlockId, BlockId)>),
    /// The step whose output counts.
    pub step: StepInputs,
    /// Blocks to allocate.
    pub num_blocks: u32,
    /// Where the output is.
    pub observed: Observed,
}

/// Where a case's output is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Observed {
    /// `DeviceOutput::logits`.
    Logits,
    /// `DeviceOutput::samples`.
    Samples,
    /// `DeviceOutput::non_finite`.
    NonFinite,
}

/// One row of a step in the making.
struct StepRow {
    token_ids: std::ops::Range<u32>,
    start: u32,
    block_table: Vec<u32>,
    /// Of each token of a tree row; empty in a causal one.
    parents: Vec<Option<u32>>,
}

pub(super) struct Builder {
    pub(super) program: Program,
    tensors: Vec<HostTensor>,
    pub(super) seed: u64,
}

/// Builds a case.
pub fn build_case(case: &Case) -> BuiltCase {
    let mut builder = Builder { program: Program::default(), tensors: Vec::new(), seed: case.seed };
    builder.program.name = "case".into();
    match &case.op {
        CaseOp::Attention(attention) => build_attention(builder, attention),
        CaseOp::CheckFinite { width, tokens } => build_check_finite(builder, *width, *tokens),
        CaseOp::Sample(sample) => build_sample(builder, sample),
        CaseOp::SelectRows { width, tokens, logit_rows } => {
            let x = builder.activations("x", *width, *tokens);
            let mut random = Random::new(case.seed, 1000);
            let chosen: Vec<u32> = (0..*logit_rows).map(|_| (random.next_u64() % u64::from(*tokens)) as u32).collect();
            builder.finish(x, 0, *tokens, Some(chosen))
        }
        CaseOp::Rope { start, tokens, .. } | CaseOp::ScaleByPosition { start, tokens, .. } => {
            let output = builder.simple_op(&case.op);
            builder.finish(output, *start, *tokens, None)
        }
        CaseOp::Embed { tokens, .. }
        | CaseOp::RmsNorm { tokens, .. }
        | CaseOp::NormHeads { tokens, .. }
        | CaseOp::Add { tokens, .. }
        | CaseOp::Linear { tokens, .. }
        | CaseOp::FusedLinear(FusedCase { tokens, .. })
        | CaseOp::GatherColumns { tokens, .. }
        | CaseOp::GatedActivation { tokens, .. }
        | CaseOp::SoftCap { tokens, .. }
        | CaseOp::MoeRoute { tokens, .. }
        | CaseOp::Moe(MoeCase { tokens, .. })
        | CaseOp::Heads(HeadsCase { tokens, .. }) => {
            let output = builder.simple_op(&case.op);
            builder.finish(output, 0, *tokens, None)
        }
    }
}

impl Builder {
    pub(super) fn slot(&mut self, name: &str, rows: RowDim, width: u32) -> Slot {
        self.program.slots.push(SlotInfo { name: name.into(), rows, width });
        Slot(self.program.slots.len() as u32 - 1)
    }

    pub(super) fn tokens_slot(&mut self, name: &str, width: u32) -> Slot {
        self.slot(name, RowDim::Tokens, width)
    }

    /// Each tensor has its own random stream, so that one tensor's size does not change another's values.
    pub(super) fn random(&self) -> Random {
        Random::new(self.seed, self.tensors.len() as u64)
    }

    pub(super) fn weight(&mut self, tensor: HostTensor) -> WeightId {
        let shape = tensor.shape.iter().map(|&d| d as u32).collect();
        self.program.weights.push(WeightInfo { name: tensor.name.clone(), shape });
        self.tensors.push(tensor);
        WeightId(self.tensors.len() as u32 - 1)
    }

    pub(super) fn vector(&mut self, name: &str, len: u32) -> WeightId {
        let values = self.random().values(len as usize);
        self.weight(HostTensor::from_f32(name, vec![len as usize], &values))
    }

    /// Ops that read activations: an f32 table whose row i is token i's.
    pub(super) fn activations(&mut self, name: &str, width: u32, tokens: u32) -> Slot {
        let values = self.random().values(width as usize * tokens as usize);
        self.activations_of(name, width, &values)
    }

    pub(super) fn activations_of(&mut self, name: &str, width: u32, values: &[f32]) -> Slot {
        let shape = vec![values.len() / width as usize, width as usize];
        let table = self.weight(HostTensor::from_f32(name, shape, values));
        let out = self.tokens_slot(name, width);
        self.program.ops.push(Op::Embed { table, scale: 1.0, out });
        out
    }

    /// Pushes the ops of a case without state; the slot holds its output.
    fn simple_op(&mut self, op: &CaseOp) -> Slot {
        match *op {
            CaseOp::Embed { format, width, tokens, scale } => {
                let tensor = self.random().tensor("table", format, vec![tokens as usize, width as usize]);
                let table = self.weight(tensor);
                let out = self.tokens_slot("out", width);
                self.program.ops.push(Op::Embed { table, scale, out });
                out
            }
            CaseOp::RmsNorm { width, tokens } => {
                let x = self.activations("x", width, tokens);
                let (weight, out) = (self.vector("weight", width), self.tokens_slot("out", width));
                self.program.ops.push(Op::RmsNorm { x, weight, eps: EPS, out });
                out
            }
            CaseOp::NormHeads { heads, head_dim, offset, tokens } => {
                let width = heads * head_dim;
                let slot = self.activations("x", offset + width + offset, tokens);
                let weight = self.vector("weight", head_dim);
                self.program.ops.push(Op::NormHeads { x: View { slot, offset, width }, weight, eps: EPS });
                slot
            }
            CaseOp::Add { width, tokens } => {
                let residual = self.activations("residual", width, tokens);
                let x = self.activations("x", width, tokens);
                self.program.ops.push(Op::Add { residual, x });
                residual
            }
            CaseOp::Linear { in_features, ref parts, tokens } => {
                let (x, parts, width) = self.linear_operands(in_features, parts, tokens);
                let out = self.tokens_slot("out", width);
                self.program.ops.push(Op::Linear { x, parts, out });
                out
            }
            CaseOp::FusedLinear(ref case) => self.fused_linear(case),
            CaseOp::Rope { heads, head_dim, offset, turn, tokens, .. } => {
                let slot = self.activations("x", offset + heads * head_dim + offset, tokens);
                let x = View { slot, offset, width: heads * head_dim };
                let rotary = self.rotary(turn);
                self.program.ops.push(Op::Rope { x, rotary, head_dim });
                slot
            }
            CaseOp::GatedActivation { width, tokens, activation } => {
                // Gates up to ±20: where the exponential saturates, too.
                let values: Vec<f32> = self.random().values((2 * width * tokens) as usize);
                let gates = values.iter().enumerate().map(|(i, v)| {
                    let is_gate = i as u32 % (2 * width) < width;
                    if is_gate { v * v * v * 20.0 } else { *v }
                });
                let x = self.activations_of("x", 2 * width, &gates.collect::<Vec<f32>>());
                let out = self.tokens_slot("out", width);
                self.program.ops.push(Op::GatedActivation { x, groups: 1, activation, out });
                out
            }
            CaseOp::SoftCap { width, tokens, cap } => {
                // Up to three times the cap, where the curve is flat.
                let values: Vec<f32> = self.random().values((width * tokens) as usize);
                let x = self.activations_of("x", width, &values.iter().map(|v| v * 3.0 * cap).collect::<Vec<f32>>());
                self.program.ops.push(Op::SoftCap { x, cap });
                x
            }
            CaseOp::ScaleByPosition { width, offset, period, tokens, .. } => {
                let slot = self.activations("x", offset + width + offset, tokens);
                self.program.ops.push(Op::ScaleByPosition { x: View { slot, offset, width }, beta: 0.1, period });
                slot
            }
            CaseOp::MoeRoute { experts, router, bias, tokens } => self.moe_route(experts, router, bias, tokens),
            CaseOp::Moe(ref case) => self.moe(case),
            CaseOp::Heads(ref case) => self.per_head(case),
            CaseOp::GatherColumns { width, tokens } => {
                let x = self.activations("x", width, tokens);
                let mut random = self.random();
                let order: Vec<f32> = (0..width).map(|_| (random.next_u64() % u64::from(width)) as f32).collect();
                let order = self.weight(HostTensor::from_f32("order", vec![order.len()], &order));
                let out = self.tokens_slot("out", width);
                self.program.ops.push(Op::GatherColumns { x, order, out });
                out
            }
            CaseOp::Attention(_) | CaseOp::CheckFinite { .. } | CaseOp::SelectRows { .. } | CaseOp::Sample(_) => {
                unreachable!("built by functions of their own")
            }
        }
    }

    fn fused_linear(&mut self, case: &FusedCase) -> Slot {
        let (x, parts, width) = self.linear_operands(case.in_features, &case.parts, case.tokens);
        let norm = case.norm.then(|| FusedNorm {
            weight: self.vector("norm", case.in_features),
            eps: EPS,
            normed: self.tokens_slot("normed", case.in_features),
        });
        let (end, out) = match case.end {
            FusedEnd::Store => (LinearEnd::Store, self.tokens_slot("out", width)),
            FusedEnd::Gate(activation) => {
                let product = self.tokens_slot("product", width);
                (LinearEnd::Gate { activation, product }, self.tokens_slot("out", width / 2))
            }
            FusedEnd::Add => {
                let residual = self.activations("residual", width, case.tokens);
                (LinearEnd::Add { product: self.tokens_slot("product", width) }, residual)
            }
        };
        self.program.ops.push(Op::FusedLinear { x, norm, parts, end, out });
        out
    }

    /// The activations, the parts and their width.
    fn linear_operands(&mut self, in_features: u32, parts: &[PartCase], tokens: u32) -> (Slot, Vec<LinearPart>, u32) {
        let mut values = self.random().values((in_features * tokens) as usize);
        // The second token has a group of zeros, which has no scale.
        values.iter_mut().skip(in_features as usize).take(in_features.min(32) as usize).for_each(|x| *x = 0.0);
        let x = self.activations_of("x", in_features, &values);
        let mut linear = Vec::new();
        for (i, part) in parts.iter().enumerate() {
            let shape = vec![part.out_features as usize, in_features as usize];
            let tensor = self.random().tensor(&format!("part{i}"), part.format, shape);
            let weight = self.weight(tensor);
            let bias = part.bias.then(|| self.vector(&format!("bias{i}"), part.out_features));
            linear.push(LinearPart { weight, bias });
        }
        (x, linear, parts.iter().map(|p| p.out_features).sum())
    }

    fn rotary(&mut self, TurnCase { pairing, pairs, amplitude }: TurnCase) -> Rotary {
        let inv_freq: Vec<f32> = (0..pairs).map(|i| 10_000f32.powf(-(i as f32) / pairs as f32)).collect();
        let inv_freq = self.weight(HostTensor::from_f32("inv_freq", vec![inv_freq.len()], &inv_freq));
        Rotary { inv_freq, amplitude, pairing }
    }

    /// Ends the program with a copy of `output` into the logits.
    fn select(&mut self, output: Slot) {
        let width = self.program.slots[output.index()].width;
        let logits = self.slot("logits", RowDim::LogitRows, width);
        self.program.ops.push(Op::SelectRows { x: output, out: logits });
        self.program.logits = Some(logits);
    }

    /// A case of one row at `start` with no state. Token i reads row i of every table.
    fn finish(mut self, output: Slot, start: u32, tokens: u32, chosen: Option<Vec<u32>>) -> BuiltCase {
        self.select(output);
        let chosen = chosen.unwrap_or_else(|| (0..tokens).collect());
        self.finish_with(start, tokens, chosen.len() as u32, Observed::Logits, |step| {
            chosen.iter().for_each(|&token| step.push_logit_row(token));
        })
    }

    /// The same for a program that ends with logits; `choose` pushes its logit rows.
    pub(super) fn finish_with(
        self,
        start: u32,
        tokens: u32,
        logit_rows: u32,
        observed: Observed,
        choose: impl FnOnce(&mut StepInputs),
    ) -> BuiltCase {
        let block_size = 16;
        let num_blocks = (start + tokens).div_ceil(block_size) + 1;
        let layout = InputLayout::new(Bucket { tokens, rows: 1, logit_rows }, num_blocks, block_size, ALIGN_WORDS);
        let block_table = (1..num_blocks).collect();
        let row = StepRow { token_ids: 0..tokens, start, block_table, parents: Vec::new() };
        BuiltCase {
            program: self.program,
            tensors: self.tensors,
            history: None,
            moves: (BlockMoves::None, Vec::new()),
            step: step_inputs(layout, &[row], choose),
            num_blocks,
            observed,
        }
    }
}

fn step_inputs(layout: InputLayout, rows: &[StepRow], choose: impl FnOnce(&mut StepInputs)) -> StepInputs {
    let mut inputs = StepInputs::new(layout);
    inputs.clear();
    for row in rows.iter().filter(|row| !row.token_ids.is_empty()) {
        if row.parents.is_empty() {
            inputs.push_row(row.token_ids.clone(), row.start, &row.block_table);
            continue;
        }
        assert_eq!(row.token_ids.len(), row.parents.len(), "a tree names the parent of each token of its row");
        let tokens = row.token_ids.clone().zip(&row.parents).map(|(id, &parent)| TreeToken { id, parent });
        inputs.push_tree_row(&tokens.collect::<Vec<_>>(), row.start, &row.block_table);
    }
    choose(&mut inputs);
    inputs.pad(layout.bucket);
    inputs
}

fn build_check_finite(mut builder: Builder, width: u32, tokens: u32) -> BuiltCase {
    let mut values = builder.random().values(width as usize * tokens as usize);
    // Every third token is bad, each time elsewhere in its row and in another way; the largest finite value is not bad.
    let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    for (i, row) in values.chunks_exact_mut(width as usize).enumerate() {
        let column = (i * 7 + width as usize - 1) % width as usize;
        row[column] = if i % 3 == 0 { bad[i / 3 % 3] } else { f32::MAX };
    }
    let x = builder.activations_of("x", width, &values);
    builder.program.ops.push(Op::CheckFinite { x });
    BuiltCase { observed: Observed::NonFinite, ..builder.finish(x, 0, tokens, None) }
}

fn build_attention(mut builder: Builder, case: &AttentionCase) -> BuiltCase {
    let (q_width, kv_width) = (case.heads * case.head_dim, case.kv_heads * case.head_dim);
    let width = q_width + if case.is_shared { kv_width } else { 2 * kv_width };
    // Rows of their own streams: a row's values depend neither on its mates nor on how it is cut into chunks.
    let mut values = Vec::new();
    for (i, &(start, length)) in case.rows.iter().enumerate() {
        let mut random = Random::new(builder.seed, 1000 + i as u64);
        values.extend(random.values((start + length) as usize * width as usize));
    }
    let qkv = builder.activations_of("qkv", width, &values);
    let view = |offset, width| View { slot: qkv, offset, width };
    let plane = Plane { heads: case.kv_heads, dim: case.head_dim, dtype: case.dtype };
    builder.program.states.push(if case.is_shared { StateSpec::shared(plane) } else { StateSpec::kv(plane) });
    let (k, v) = (view(q_width, kv_width), view(q_width + kv_width, kv_width));
    let layer = Layer(0);
    let store = match case.rope {
        None => Op::StoreKv { k, v: (!case.is_shared).then_some(v), layer },
        Some(turn) => {
            let (x, head_dim) = (view(0, q_width + kv_width), case.head_dim);
            Op::RopeStoreKv { x, v, rotary: builder.rotary(turn), head_dim, layer }
        }
    };
    builder.program.ops.push(store);
    let sinks = case.sinks.then(|| {
        // Among the scores, which reach as far: they take from nothing to nearly all of a softmax.
        let values: Vec<f32> = builder.random().values(case.heads as usize).iter().map(|x| 8.0 * x).collect();
        builder.weight(HostTensor::from_f32("sinks", vec![values.len()], &values))
    });
    let out = builder.slot("out", RowDim::Tokens, q_width);
    builder.program.ops.push(Op::Attention {
        q: view(0, q_width),
        layer: Layer(0),
        heads: case.heads,
        head_dim: case.head_dim,
        // Larger than 1 / sqrt(head_dim), so that the softmax of uniform values has peaks.
        scale: 6.0 / (case.head_dim as f32).sqrt(),
        window: case.window,
        soft_cap: case.soft_cap,
        sinks,
        out,
    });
    builder.select(out);

    let (rows, moved, num_blocks) = attention_rows(case, builder.seed);
    let total = |f: fn(&(u32, u32)) -> u32| case.rows.iter().map(f).sum::<u32>();
    let (num_history, num_new) = (total(|r| r.0), total(|r| r.1));
    let bucket = Bucket { tokens: num_history.max(num_new), rows: case.rows.len() as u32, logit_rows: num_new };
    let max_blocks = rows.iter().map(|row| row.block_table.len() as u32).max().unwrap_or(1);
    let layout = InputLayout::new(bucket, max_blocks, case.block_size, ALIGN_WORDS);
    let before: Vec<StepRow> = rows
        .iter()
        .map(|row| StepRow {
            token_ids: row.token_ids.start..row.token_ids.start + row.start,
            start: 0,
            block_table: row.block_table.clone(),
            parents: Vec::new(),
        })
        .collect();
    let now: Vec<StepRow> = rows
        .into_iter()
        .zip(&moved)
        .map(|(mut row, &(_, to))| {
            if case.moves != BlockMoves::None {
                row.block_table[0] = to.0;
            }
            row.token_ids.start += row.start;
            row
        })
        .collect();
    BuiltCase {
        program: builder.program,
        tensors: builder.tensors,
        history: (num_history > 0).then(|| step_inputs(layout, &before, |_| ())),
        moves: (case.moves, moved),
        step: step_inputs(layout, &now, |step| (0..num_new).for_each(|token| step.push_logit_row(token))),
        num_blocks,
        observed: Observed::Logits,
    }
}

/// Rows (their ids from position 0 on) with block tables in a shuffled order, where each row's first block may move to, and the number of blocks.
fn attention_rows(case: &AttentionCase, seed: u64) -> (Vec<StepRow>, Vec<(BlockId, BlockId)>, u32) {
    let blocks_of = |&(start, length): &(u32, u32)| (start + length).div_ceil(case.block_size);
    let num_rows = case.rows.len() as u32;
    let num_blocks = 1 + case.rows.iter().map(blocks_of).sum::<u32>() + num_rows;
    let mut free: Vec<u32> = (1..num_blocks).collect();
    Random::new(seed, 999).shuffle(&mut free);
    let (mut rows, mut moved, mut first_id) = (Vec::new(), Vec::new(), 0);
    for (i, row) in case.rows.iter().enumerate() {
        let token_ids = first_id..first_id + row.0 + row.1;
        first_id = token_ids.end;
        let block_table = free.split_off(free.len() - blocks_of(row) as usize);
        let spare = free.pop().expect("one spare block per row was counted");
        moved.push((BlockId(block_table[0]), BlockId(spare)));
        let parents = case.trees.get(i).cloned().unwrap_or_default();
        rows.push(StepRow { token_ids, start: row.0, block_table, parents });
    }
    (rows, moved, num_blocks)
}
