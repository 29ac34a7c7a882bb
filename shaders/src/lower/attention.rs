//! StoreKv, RopeStoreKv and Attention: what meets the paged cache.
//!
//! Invariant: positions are cut into splits of a length that is fixed for the engine's life; whether one lane walks them or
//! each has a lane of its own changes no bit. Called by `Lowering::op`.

use runtime::error::DeviceError;
use runtime::ids::{Layer, Slot, WeightId};
use runtime::program::{Op, Plane, RopePairing, RowDim, StateSpec, View};

use super::Lowering;
use super::memory::{split_len, walk_splits, whole, window_splits};
use crate::compose::Settings;
use crate::device::Range;
use crate::replay::{Grid, When};
use crate::state::PlaneState;
use crate::table;
use crate::tuning::AttentionTile;

/// What `Op::Attention` holds.
pub(super) struct AttentionOp {
    pub(super) q: View,
    pub(super) layer: Layer,
    pub(super) heads: u32,
    pub(super) head_dim: u32,
    pub(super) scale: f32,
    pub(super) window: Option<u32>,
    pub(super) soft_cap: Option<f32>,
    pub(super) sinks: Option<WeightId>,
    pub(super) out: Slot,
}

/// Heads per lane, items per workgroup, lanes per item.
struct Shape {
    lane_heads: u32,
    items: u32,
    parts: u32,
}

/// The planes of a layer.
struct Planes<'a> {
    /// What K and V have in common.
    spec: Plane,
    keys: Range<'a>,
    values: Range<'a>,
    /// Of types that have scales; else what kernels do not touch.
    key_scales: Range<'a>,
    value_scales: Range<'a>,
    /// Whether the keys are the values.
    is_shared: bool,
}

impl<'a> Lowering<'a, '_> {
    pub(super) fn store_kv(&mut self, k: View, v: Option<View>, layer: Layer) -> Result<(), DeviceError> {
        let (memory, state) = (self.target.memory, self.target.state);
        let planes = self.planes(layer)?;
        let (plane, v) = (planes.spec, v.unwrap_or(k));
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
            keys: planes.keys,
            // What is written may be bound once.
            values: if planes.is_shared { memory.unused(2) } else { planes.values },
            key_scales: planes.key_scales,
            value_scales: if planes.is_shared { memory.unused(1) } else { planes.value_scales },
        };
        let (settings, grid) = self.flat_heads("store_kv", plane, (plane.heads, params.head_quads))?;
        let settings = settings.with("KV", plane.dtype.name()).with("SHARED", planes.is_shared);
        self.dispatch(bindings, params, settings, When::Rows(RowDim::Tokens), grid);
        Ok(())
    }

    /// `RopeStoreKv`: one dispatch where the kernel takes the shapes, else its expansion.
    pub(super) fn rope_store_kv(&mut self, op: &Op) -> Result<(), DeviceError> {
        let &Op::RopeStoreKv { x, v, rotary, head_dim, layer } = op else {
            unreachable!("called for this op only");
        };
        let (pairs, half_quads) = (self.num_pairs(rotary), head_dim / 8);
        if x.slot != v.slot || !head_dim.is_multiple_of(8) || !pairs.is_multiple_of(4) {
            return self.expansion(op);
        }
        self.check_positions()?;
        let (memory, layout) = (self.target.memory, self.target.layout);
        let planes = self.planes(layer)?;
        let plane = planes.spec;
        let params = table::rope_store_kv::Params {
            stride_quads: self.quads("width", self.width(x.slot))?,
            offset_quads: self.quads("column", x.offset)?,
            v_offset_quads: self.quads("column", v.offset)?,
            q_heads: x.width / head_dim - plane.heads,
            kv_heads: plane.heads,
            half_quads,
            pair_quads: pairs / 4,
            amplitude: rotary.amplitude,
            block_size: self.target.state.block_size,
        };
        let bindings = table::rope_store_kv::Bindings {
            x: memory.slot(x.slot),
            inv_freq: self.target.weights.vector_of(rotary.inv_freq)?,
            positions: memory.input(layout.positions()),
            slots: memory.input(layout.slot_map()),
            keys: planes.keys,
            values: planes.values,
            key_scales: planes.key_scales,
            value_scales: planes.value_scales,
        };
        let heads = x.width / head_dim + plane.heads;
        let (settings, grid) = self.flat_heads("rope_store_kv", plane, (heads, half_quads))?;
        let is_interleaved = rotary.pairing == RopePairing::Interleaved;
        let settings = settings.with("KV", plane.dtype.name()).with("INTERLEAVED", is_interleaved);
        self.dispatch(bindings, params, settings, When::Rows(RowDim::Tokens), grid);
        Ok(())
    }

    /// As `flat`, for heads of `head_lanes` lanes each. Where elements have scales, a workgroup holds whole heads: their lanes
    /// look for the largest element together.
    ///
    /// # Errors
    /// A head has more lanes than a workgroup, or a user's kernel fixes a number that cuts heads.
    fn flat_heads(
        &self,
        kernel: &str,
        plane: Plane,
        (heads, head_lanes): (u32, u32),
    ) -> Result<(Settings, Grid), DeviceError> {
        if !plane.dtype.is_scaled() {
            return Ok(self.flat(kernel, heads * head_lanes));
        }
        let tuned = self.tuning(kernel).flat_lanes.max(1).next_multiple_of(head_lanes);
        let most = self.target.gpu.limits.max_compute_invocations_per_workgroup;
        let tuned = if tuned > most { head_lanes } else { tuned };
        let lanes = self.shape(kernel, "LANES", tuned);
        if lanes > most || !lanes.is_multiple_of(head_lanes) {
            return Err(DeviceError::Failed(format!(
                "{}: {kernel} has LANES={lanes}, expected a multiple of {head_lanes}, the lanes of a head, up to {most}",
                self.what
            )));
        }
        Ok((Settings::new().with("LANES", lanes), Grid::PerRow { x: (heads * head_lanes).div_ceil(lanes) }))
    }

    fn planes(&self, layer: Layer) -> Result<Planes<'a>, DeviceError> {
        let (state, memory) = (self.target.state, self.target.memory);
        let planes = state.layers.get(layer.index()).map_or(&[][..], Vec::as_slice);
        let specs = StateSpec::Paged { planes: planes.iter().map(|plane| plane.spec).collect() };
        let Some(spec) = specs.kv_plane() else {
            return Err(DeviceError::Failed(format!("{}: layer {layer} has {specs:?}", self.what)));
        };
        let [key_scales, value_scales] =
            [0, 1].map(|side| planes.get(specs.scale_planes()[side]).map_or(memory.unused(side), PlaneState::range));
        let [keys, values] = [0, specs.value_plane()].map(|plane| planes[plane].range());
        Ok(Planes { spec, keys, values, key_scales, value_scales, is_shared: specs.is_shared() })
    }

    pub(super) fn attention(&mut self, op: &AttentionOp) -> Result<(), DeviceError> {
        let (memory, tuning) = (self.target.memory, self.tuning("attention"));
        let planes = self.planes(op.layer)?;
        let kv_heads = planes.spec.heads;
        let split = split_len(self.target.gpu, tuning, self.target.context);
        let max_splits = window_splits(op.window, split);
        let sinks = op.sinks.map(|sinks| self.target.weights.vector_of(sinks)).transpose()?;
        let sinks = sinks.unwrap_or(memory.unused(0));
        let params = self.attention_params(op, kv_heads, max_splits)?;
        let bindings = |out| table::attention::Bindings {
            q: memory.slot(op.q.slot),
            keys: planes.keys,
            values: planes.values,
            key_scales: planes.key_scales,
            value_scales: planes.value_scales,
            step: whole(&memory.inputs),
            sinks,
            out,
        };
        let Shape { lane_heads, items, parts } = self.attention_shape(tuning.attention, op, kv_heads);
        let settings = Settings::new()
            .with("KV", planes.spec.dtype.name())
            .with("HEAD_DIM", op.head_dim)
            .with("HEADS", lane_heads)
            .with("SPLIT", split)
            .with("ITEMS", items)
            .with("PARTS", parts)
            .with("WINDOW", op.window.is_some())
            .with("SOFT_CAP", op.soft_cap.is_some())
            .with("SINKS", op.sinks.is_some());
        let per_token = op.heads / lane_heads;
        let max_tokens = tuning.attention.max_split_tokens;
        let (out, partials) = (memory.slot(op.out), whole(&memory.partials));
        let walk = walk_splits(self.target.gpu, split, parts, lane_heads, op.head_dim);
        let num_splits = max_splits.min(self.target.context.div_ceil(split));
        let up_to = if num_splits <= walk { u32::MAX } else { walk * split };
        let whole_when = When::Whole { len: split, max_tokens, up_to };
        let whole_grid = Grid::Items { per_token, items };
        self.dispatch(bindings(out), params, settings.clone(), whole_when, whole_grid);
        let split_when = When::Split { len: split, max_tokens };
        let split_grid = Grid::SplitItems { per_token, items, len: split, max_splits };
        self.dispatch(bindings(partials), params, settings.clone().with("PARTIAL", true), split_when, split_grid);
        let mut ends = vec![(split_when, false)];
        if num_splits > walk {
            for first_split in (0..num_splits).step_by(walk as usize) {
                let params = table::attention::Params { first_split, walk_splits: walk, ..params };
                let when = When::Walk { len: split, max_tokens, up_to, from: first_split * split };
                self.dispatch(bindings(partials), params, settings.clone().with("CARRIED", true), when, whole_grid);
            }
            ends.push((When::Walk { len: split, max_tokens, up_to, from: 0 }, true));
        }
        let combine = table::attention_combine::Bindings { partials, step: whole(&memory.inputs), sinks, out };
        let head_quads = op.head_dim / 4;
        let table::attention::Params { heads, positions, window, window_splits, .. } = params;
        let params = table::attention_combine::Params { heads, head_quads, positions, window, window_splits };
        let (settings, grid) = self.flat("attention_combine", op.heads * head_quads);
        let settings =
            settings.with("SPLIT", split).with("WINDOW", op.window.is_some()).with("SINKS", op.sinks.is_some());
        for (when, is_carried) in ends {
            self.dispatch(combine, params, settings.clone().with("CARRIED", is_carried), when, grid);
        }
        Ok(())
    }

    fn attention_params(
        &self,
        op: &AttentionOp,
        kv_heads: u32,
        window_splits: u32,
    ) -> Result<table::attention::Params, DeviceError> {
        self.quads("head_dim", op.head_dim)?;
        let layout = self.target.layout;
        Ok(table::attention::Params {
            q_stride_quads: self.quads("width", self.width(op.q.slot))?,
            q_offset_quads: self.quads("column", op.q.offset)?,
            heads: op.heads,
            kv_heads,
            scale: op.scale,
            block_size: self.target.state.block_size,
            max_blocks: layout.max_blocks_per_row,
            positions: layout.positions().start as u32,
            token_rows: layout.token_rows().start as u32,
            block_tables: layout.block_tables() as u32,
            tree_masks: layout.tree_masks() as u32,
            window: op.window.unwrap_or(u32::MAX),
            window_splits,
            soft_cap: op.soft_cap.unwrap_or_default(),
            first_split: 0,
            walk_splits: 0,
        })
    }

    /// The table's shape, as far as the heads and workgroup memory allow.
    fn attention_shape(&self, tile: AttentionTile, op: &AttentionOp, kv_heads: u32) -> Shape {
        let group = op.heads / kv_heads;
        let most = (tile.max_values / op.head_dim).max(1);
        let fits = |heads: &u32| *heads > 0 && group.is_multiple_of(*heads);
        let tuned_heads = (1..=group.min(most)).rev().find(fits).unwrap_or(1);
        let lane_heads = Some(self.shape("attention", "HEADS", tuned_heads)).filter(fits).unwrap_or(tuned_heads);
        let items = self.shape("attention", "ITEMS", tile.items).max(1);
        Shape { lane_heads, items, parts: self.attention_parts(tile, items * lane_heads, op.head_dim) }
    }

    /// Lanes per item: the table's, or fewer where `sums` for each of them do not fit workgroup memory.
    fn attention_parts(&self, tile: AttentionTile, sums: u32, head_dim: u32) -> u32 {
        let bytes = |parts: u32| sums * parts * (4 * head_dim + 8);
        let limit = self.target.gpu.limits.max_compute_workgroup_storage_size;
        let mut parts = tile.parts;
        while parts > 1 && bytes(parts) > limit {
            parts /= 2;
        }
        parts
    }
}
