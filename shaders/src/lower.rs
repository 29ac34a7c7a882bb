//! Lowers a program: slots become ranges of lane buffers, ops become dispatches of kernels with their settings.
//!
//! Invariant: the shape of a kernel is chosen here, in sight, from the tuning table, the op's sizes and the weight's format.
//! Rows of a slot are padded to whole tiles; what lies past a step's rows is garbage that no row ever reads. The program has
//! passed `check`; what this backend cannot run (sizes that are no multiple of 4 or 32) is an error that names the op.

use std::collections::BTreeSet;

use runtime::backend::{Bucket, InputLayout};
use runtime::error::DeviceError;
use runtime::ids::{Layer, Slot, WeightId};
use runtime::program::memory::{self, MemoryPlan};
use runtime::program::{KvDtype, LinearPart, Op, Program, RopePairing, RowDim, View};
use runtime::weights::WeightFormat;

use crate::compose::Settings;
use crate::device::{Buffer, Gpu, Range};
use crate::layout::{GROUP, PANEL, fragment_of};
use crate::pipelines::Pipelines;
use crate::replay::{Grid, Planned, When};
use crate::state::{PlaneState, State};
use crate::table::{self, Bind};
use crate::tuning::{AttentionTile, DeviceClass, LinearTile, Tuning};
use crate::weights::{Matrix, Piece, Weights};

/// Rows of a slot are padded to a multiple of this: no tile covers more tokens.
const PAD_ROWS: u32 = 64;
/// Elements: ranges of slots start at multiples of 256 bytes.
const ALIGN_ELEMENTS: usize = 64;
/// At most this many splits, so that partial sums of long contexts stay small.
const MAX_SPLITS: u32 = 64;

/// The buffers of activations and inputs, shared by all plans.
pub(crate) struct Memory {
    plan: MemoryPlan,
    lanes: Vec<Buffer>,
    pub(crate) inputs: Buffer,
    /// `[tokens]`: see `CheckFinite`.
    pub(crate) flags: Buffer,
    /// Partial sums of attention.
    partials: Buffer,
    /// Bound where a kernel's variant does not touch a binding.
    unused: [Buffer; 2],
    /// Bytes of all of them.
    pub(crate) bytes: u64,
}

impl Memory {
    /// Sizes everything for `layout.bucket`.
    ///
    /// # Errors
    /// Out of memory.
    pub(crate) fn new(gpu: &Gpu, program: &Program, layout: &InputLayout, context: u32) -> Result<Self, DeviceError> {
        use wgpu::BufferUsages as Usage;
        let Bucket { tokens, rows, logit_rows } = layout.bucket;
        let pad = |rows: u32| rows.next_multiple_of(PAD_ROWS);
        let padded = Bucket { tokens: pad(tokens), rows, logit_rows: pad(logit_rows) };
        let plan = memory::plan(program, padded, ALIGN_ELEMENTS);
        let usage = Usage::STORAGE | Usage::COPY_SRC;
        let lanes = plan.lanes.iter().map(|&len| gpu.buffer("activations", 4 * len as u64, usage));
        let lanes = lanes.collect::<Result<Vec<_>, _>>()?;
        let inputs = gpu.buffer("step inputs", 4 * layout.num_words() as u64, Usage::STORAGE | Usage::COPY_DST)?;
        let flags = gpu.buffer("flags", 4 * u64::from(tokens), usage | Usage::COPY_DST)?;
        // The plain variant may take over later: room for either.
        let tunings = [gpu.class().tuning(), DeviceClass::Unknown.tuning()];
        let partial_bytes = tunings.map(|tuning| partial_bytes(tuning, program, layout, context));
        let partials =
            gpu.buffer("partial sums of attention", partial_bytes[0].max(partial_bytes[1]), Usage::STORAGE)?;
        let unused = [gpu.buffer("unused", 256, Usage::STORAGE)?, gpu.buffer("unused", 256, Usage::STORAGE)?];
        let all = lanes.iter().chain([&inputs, &flags, &partials]);
        let bytes = all.map(|buffer| buffer.size()).sum();
        Ok(Self { plan, lanes, inputs, flags, partials, unused, bytes })
    }

    pub(crate) fn slot(&self, slot: Slot) -> Range<'_> {
        let place = self.plan.slots[slot.index()];
        Range { buffer: &self.lanes[place.lane], offset: 4 * place.offset as u64, size: 4 * place.len as u64 }
    }

    fn input(&self, words: std::ops::Range<usize>) -> Range<'_> {
        Range { buffer: &self.inputs, offset: 4 * words.start as u64, size: 4 * words.len() as u64 }
    }
}

fn whole(buffer: &wgpu::Buffer) -> Range<'_> {
    Range { buffer, offset: 0, size: buffer.size() }
}

/// Positions per split: the table's, or more where the context is long. Fixed for the life of an engine.
pub(crate) fn split_len(tuning: &Tuning, context: u32) -> u32 {
    tuning.attention.split.max(context.div_ceil(MAX_SPLITS).next_power_of_two())
}

fn partial_bytes(tuning: &Tuning, program: &Program, layout: &InputLayout, context: u32) -> u64 {
    // At most one more than the context has, where a block reaches past it.
    let positions = layout.max_blocks_per_row.saturating_mul(layout.block_size);
    let splits = u64::from(positions.div_ceil(split_len(tuning, context)));
    let tokens = u64::from(layout.bucket.tokens.min(tuning.attention.max_split_tokens));
    let per_split = program.ops.iter().map(|op| match op {
        Op::Attention { heads, head_dim, .. } => u64::from(*heads) * u64::from(head_dim + 4) * 4,
        _ => 0,
    });
    tokens * splits * per_split.max().unwrap_or(0)
}

/// What a program is lowered with.
pub(crate) struct Target<'a> {
    pub(crate) gpu: &'a Gpu,
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

/// What `Op::Attention` holds.
struct AttentionOp {
    q: View,
    layer: Layer,
    heads: u32,
    head_dim: u32,
    scale: f32,
    out: Slot,
}

impl<'a> Lowering<'a, '_> {
    fn op(&mut self, op: &Op) -> Result<(), DeviceError> {
        match *op {
            Op::Embed { table, out } => self.embed(table, out),
            Op::RmsNorm { x, weight, eps, out } => self.rms_norm(x, None, (weight, eps), out),
            Op::AddRmsNorm { residual, x, weight, eps, out } => self.rms_norm(x, Some(residual), (weight, eps), out),
            Op::NormHeads { x, weight, eps } => self.norm_heads(x, weight, eps),
            Op::Add { residual, x } => self.add(residual, x),
            Op::Linear { x, ref parts, out } => self.linear(x, parts, out),
            Op::Rope { x, inv_freq, pairing, head_dim } => self.rope(x, inv_freq, pairing, head_dim),
            Op::StoreKv { k, v, layer } => self.store_kv(k, v, layer),
            Op::Attention { q, layer, heads, head_dim, scale, out } => {
                self.attention(&AttentionOp { q, layer, heads, head_dim, scale, out })
            }
            Op::GatedActivation { x, out, .. } => self.gated_activation(x, out),
            Op::CheckFinite { x } => self.check_finite(x),
            Op::SelectRows { x, out } => self.select_rows(x, out),
        }
    }

    fn dispatch<B: Bind<'a>>(&mut self, bindings: B, params: B::Params, settings: Settings, when: When, grid: Grid) {
        let pipeline = self.pipelines.ask(self.target.gpu, B::KERNEL, settings);
        let params = bytemuck::bytes_of(&params).to_vec();
        self.planned.push(Planned { pipeline, params, ranges: bindings.ranges(), when, grid });
    }

    /// The row of the tuning table for a kernel.
    fn tuning(&self, kernel: &str) -> &'static Tuning {
        match self.target.plain.contains(kernel) {
            true => DeviceClass::Unknown.tuning(),
            false => self.target.gpu.class().tuning(),
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
        let lanes = self.pipelines.shape(kernel, "LANES", self.tuning(kernel).flat_lanes).max(1);
        (Settings::new().with("LANES", lanes), Grid::PerRow { x: size.div_ceil(lanes) })
    }

    fn embed(&mut self, table: WeightId, out: Slot) -> Result<(), DeviceError> {
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
            let params = table::embed::Params { width_quads, groups: matrix.groups, first_row, num_rows };
            let settings = settings.with("FORMAT", fragment_of(matrix.format));
            self.dispatch(bindings, params, settings, When::Rows(RowDim::Tokens), grid);
        }
        Ok(())
    }

    fn rms_norm(
        &mut self,
        x: Slot,
        residual: Option<Slot>,
        (weight, eps): (WeightId, f32),
        out: Slot,
    ) -> Result<(), DeviceError> {
        let memory = self.target.memory;
        let bindings = table::rms_norm::Bindings {
            x: memory.slot(x),
            residual: residual.map_or(whole(&memory.unused[0]), |residual| memory.slot(residual)),
            weight: self.target.weights.vector_of(weight)?,
            out: memory.slot(out),
        };
        let params = table::rms_norm::Params { width_quads: self.quads("width", self.width(x))?, eps };
        let tuning = self.tuning("rms_norm");
        let reduce = if tuning.subgroups && self.target.gpu.has_subgroups() { "subgroup" } else { "workgroup" };
        let settings =
            Settings::new().with("ADD", residual.is_some()).with("LANES", tuning.row_lanes).with("REDUCE", reduce);
        self.dispatch(bindings, params, settings, When::Rows(self.rows(x)), Grid::Row);
        Ok(())
    }

    fn norm_heads(&mut self, x: View, weight: WeightId, eps: f32) -> Result<(), DeviceError> {
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

    fn add(&mut self, residual: Slot, x: Slot) -> Result<(), DeviceError> {
        let memory = self.target.memory;
        let width_quads = self.quads("width", self.width(x))?;
        let bindings = table::add::Bindings { x: memory.slot(x), residual: memory.slot(residual) };
        let (settings, grid) = self.flat("add", width_quads);
        self.dispatch(bindings, table::add::Params { width_quads }, settings, When::Rows(self.rows(x)), grid);
        Ok(())
    }

    fn gated_activation(&mut self, x: Slot, out: Slot) -> Result<(), DeviceError> {
        let memory = self.target.memory;
        let out_quads = self.quads("width", self.width(out))?;
        let bindings = table::gated_activation::Bindings { x: memory.slot(x), out: memory.slot(out) };
        let (settings, grid) = self.flat("gated_activation", out_quads);
        let params = table::gated_activation::Params { out_quads };
        self.dispatch(bindings, params, settings, When::Rows(self.rows(x)), grid);
        Ok(())
    }

    fn check_finite(&mut self, x: Slot) -> Result<(), DeviceError> {
        let memory = self.target.memory;
        let params = table::check_finite::Params { width_quads: self.quads("width", self.width(x))? };
        let bindings = table::check_finite::Bindings { x: memory.slot(x), flags: whole(&memory.flags) };
        let settings = Settings::new().with("LANES", self.tuning("check_finite").row_lanes);
        self.dispatch(bindings, params, settings, When::Rows(RowDim::Tokens), Grid::Row);
        Ok(())
    }

    fn select_rows(&mut self, x: Slot, out: Slot) -> Result<(), DeviceError> {
        let memory = self.target.memory;
        let width = self.width(x);
        let rows = memory.input(self.target.layout.logit_rows());
        let bindings = table::select_rows::Bindings { x: memory.slot(x), rows, out: memory.slot(out) };
        let (settings, grid) = self.flat("select_rows", width);
        self.dispatch(bindings, table::select_rows::Params { width }, settings, When::Rows(RowDim::LogitRows), grid);
        Ok(())
    }

    fn rope(&mut self, x: View, inv_freq: WeightId, pairing: RopePairing, head_dim: u32) -> Result<(), DeviceError> {
        let (stride, pairs) = (self.width(x.slot), head_dim / 2);
        let params = table::rope::Params { stride, offset: x.offset, heads: x.width / head_dim, pairs };
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

    fn store_kv(&mut self, k: View, v: View, layer: Layer) -> Result<(), DeviceError> {
        let (memory, state) = (self.target.memory, self.target.state);
        let (keys, values) = self.planes(layer)?;
        let plane = keys.spec;
        let params = table::store_kv::Params {
            k_stride_quads: self.quads("width", self.width(k.slot))?,
            k_offset_quads: self.quads("column", k.offset)?,
            v_stride_quads: self.quads("width", self.width(v.slot))?,
            v_offset_quads: self.quads("column", v.offset)?,
            heads: plane.heads,
            head_quads: self.quads("head_dim", plane.dim)?,
            block_size: state.block_size,
        };
        let bindings = table::store_kv::Bindings {
            k: memory.slot(k.slot),
            v: memory.slot(v.slot),
            slots: memory.input(self.target.layout.slot_map()),
            keys: keys.range(),
            values: values.range(),
        };
        let (settings, grid) = self.flat("store_kv", plane.heads * params.head_quads);
        let settings = settings.with("KV", kv_fragment(plane.dtype));
        self.dispatch(bindings, params, settings, When::Rows(RowDim::Tokens), grid);
        Ok(())
    }

    /// The K and V planes of a layer.
    fn planes(&self, layer: Layer) -> Result<(&'a PlaneState, &'a PlaneState), DeviceError> {
        match self.target.state.layers.get(layer.index()).map(Vec::as_slice) {
            Some([keys, values]) if keys.spec == values.spec => Ok((keys, values)),
            _ => Err(DeviceError::Failed(format!("{}: layer {layer} has no pair of equal planes", self.what))),
        }
    }

    fn attention(&mut self, op: &AttentionOp) -> Result<(), DeviceError> {
        let (memory, layout, tuning) = (self.target.memory, self.target.layout, self.tuning("attention"));
        let tile = tuning.attention;
        let (keys, values) = self.planes(op.layer)?;
        let plane = keys.spec;
        let split = split_len(tuning, self.target.context);
        let head_quads = self.quads("head_dim", op.head_dim)?;
        let group = op.heads / plane.heads;
        let most = (tile.max_values / op.head_dim).max(1);
        let fits = |heads: &u32| *heads > 0 && group.is_multiple_of(*heads);
        let tuned_heads = (1..=group.min(most)).rev().find(fits).unwrap_or(1);
        let lane_heads =
            Some(self.pipelines.shape("attention", "HEADS", tuned_heads)).filter(fits).unwrap_or(tuned_heads);
        let items = self.pipelines.shape("attention", "ITEMS", tile.items).max(1);
        let parts = self.attention_parts(tile, lane_heads, op.head_dim);
        let params = table::attention::Params {
            q_stride_quads: self.quads("width", self.width(op.q.slot))?,
            q_offset_quads: self.quads("column", op.q.offset)?,
            heads: op.heads,
            kv_heads: plane.heads,
            scale: op.scale,
            block_size: self.target.state.block_size,
            max_blocks: layout.max_blocks_per_row,
            positions: layout.positions().start as u32,
            token_rows: layout.token_rows().start as u32,
            block_tables: layout.block_tables() as u32,
        };
        let bindings = |out| table::attention::Bindings {
            q: memory.slot(op.q.slot),
            keys: keys.range(),
            values: values.range(),
            step: whole(&memory.inputs),
            out,
        };
        let settings = Settings::new()
            .with("KV", kv_fragment(plane.dtype))
            .with("HEAD_DIM", op.head_dim)
            .with("HEADS", lane_heads)
            .with("SPLIT", split)
            .with("ITEMS", items)
            .with("PARTS", parts);
        let per_token = op.heads / lane_heads;
        let whole_when = When::Whole { len: split, max_tokens: tile.max_split_tokens };
        let split_when = When::Split { len: split, max_tokens: tile.max_split_tokens };
        let out = memory.slot(op.out);
        self.dispatch(bindings(out), params, settings.clone(), whole_when, Grid::Items { per_token, items });
        let partials = whole(&memory.partials);
        let grid = Grid::SplitItems { per_token, items, len: split };
        self.dispatch(bindings(partials), params, settings.with("PARTIAL", true), split_when, grid);
        let combine = table::attention_combine::Bindings { partials, step: whole(&memory.inputs), out };
        let combine_params =
            table::attention_combine::Params { heads: op.heads, head_quads, positions: params.positions };
        let (settings, grid) = self.flat("attention_combine", op.heads * head_quads);
        self.dispatch(combine, combine_params, settings.with("SPLIT", split), split_when, grid);
        Ok(())
    }

    /// Lanes per item: the table's, or fewer where their sums do not fit workgroup memory.
    fn attention_parts(&self, tile: AttentionTile, lane_heads: u32, head_dim: u32) -> u32 {
        let bytes = |parts: u32| tile.items * parts * lane_heads * (4 * head_dim + 8);
        let limit = self.target.gpu.limits.max_compute_workgroup_storage_size;
        let mut parts = tile.parts;
        while parts > 1 && bytes(parts) > limit {
            parts /= 2;
        }
        parts
    }

    fn linear(&mut self, x: Slot, parts: &[LinearPart], out: Slot) -> Result<(), DeviceError> {
        let (memory, weights) = (self.target.memory, self.target.weights);
        let in_features = self.width(x);
        if !in_features.is_multiple_of(GROUP as u32) {
            return Err(DeviceError::Failed(format!(
                "{}: in_features {in_features} is not a multiple of {GROUP}, as the wgpu backend needs",
                self.what
            )));
        }
        let mut first_column = 0;
        for (matrix, bias) in self.matrices(parts)? {
            for piece in &matrix.pieces {
                let bindings = table::linear::Bindings {
                    x: memory.slot(x),
                    codes: weights.range(piece.codes),
                    side: weights.range(piece.side),
                    bias: bias.map_or(whole(&memory.unused[0]), |bias| bias.after(4 * u64::from(piece.first_row))),
                    out: memory.slot(out),
                };
                let params = table::linear::Params {
                    groups: matrix.groups,
                    rows: piece.num_rows,
                    out_stride: self.width(out),
                    out_column: first_column + piece.first_row,
                    has_bias: u32::from(bias.is_some()),
                };
                self.linear_tiles(bindings, params, matrix.format, self.rows(x))?;
            }
            first_column += matrix.rows;
        }
        Ok(())
    }

    /// The matrices of a linear with their biases; such as lie behind each other (q, k and v, gate and up) become one.
    fn matrices(&self, parts: &[LinearPart]) -> Result<Vec<(Matrix, Option<Range<'a>>)>, DeviceError> {
        let weights = self.target.weights;
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
        format: WeightFormat,
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

    /// The table's shape, with what a user's kernel fixes of it.
    ///
    /// # Errors
    /// It does not divide a panel, or covers more tokens than slots are padded to.
    fn linear_tile(&self, tile: &LinearTile) -> Result<LinearTile, DeviceError> {
        let shape = |name: &str, tuned: u32| self.pipelines.shape("linear", name, tuned);
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

fn kv_fragment(dtype: KvDtype) -> &'static str {
    match dtype {
        KvDtype::F32 => "f32",
        KvDtype::F16 => "f16",
    }
}
