//! Refuses a program that no backend could run, or that this device cannot, before anything is uploaded.
//!
//! Invariant: after `check` every index is in range, every shape agrees, every slot is written once before it is read, and
//! an op that writes a slot touches it nowhere else, so that backends lower ops without checks. After `check_limits` the
//! program fits the device. Called when a model is loaded.

use std::path::{Path, PathBuf};

use super::{AccessKind, LinearPart, Op, Plane, Program, Router, RowDim, SlotInfo, StateSpec, View};
use crate::backend::{Bucket, Caps};
use crate::error::LoadError;
use crate::ids::{Layer, Slot, WeightId};

/// Experts of a token at most, and groups of experts: what the kernels keep of them.
const MAX_TOP_K: u32 = 32;
pub(crate) const MAX_GROUPS: u32 = 32;

/// Checks structure and shapes. `path` is the model's, for the message.
///
/// # Errors
/// `Tensor`, naming the op's index and kind and the slot or weight that is wrong.
pub fn check(program: &Program, path: &Path) -> Result<(), LoadError> {
    let mut written = vec![false; program.slots.len()];
    for (index, op) in program.ops.iter().enumerate() {
        let checker = Checker { program, path, index, op };
        checker.order(&mut written)?;
        checker.shapes()?;
    }
    let end = Checker { program, path, index: program.ops.len(), op: &Op::CheckFinite { x: Slot(0) } };
    let Some(logits) = program.logits else {
        return Err(end.error("logits", "a slot", "none"));
    };
    let info = end.slot(logits)?;
    if info.rows != RowDim::LogitRows || !written[logits.index()] {
        return Err(end.error(&info.name, "logits written, one row per logit row", "something else"));
    }
    Ok(())
}

/// Checks the device's limits for steps of up to `bucket` and `num_blocks` KV blocks. Weights are not checked: a backend
/// cuts by rows what is larger than a binding.
///
/// # Errors
/// `Limit`, naming op, tensor and limit.
pub fn check_limits(program: &Program, sizes: Sizes, caps: &Caps) -> Result<(), LoadError> {
    let limit_bytes = |what: String, needed: u64| {
        if needed <= caps.max_binding_bytes {
            return Ok(());
        }
        Err(LoadError::Limit {
            what,
            needed: format!("{needed} bytes in one buffer"),
            limit: format!("{} bytes (max_binding_bytes of {})", caps.max_binding_bytes, caps.name),
        })
    };
    for (index, op) in program.ops.iter().enumerate() {
        let at = format!("op {index} ({})", op.kind());
        let planes = op.layer().map_or(0, |layer| {
            let StateSpec::Paged { planes } = &program.states[layer.index()];
            planes.len()
        });
        let bindings = |op: &Op| op.accesses().len() + op.weights().len() + planes + usize::from(op.uses_inputs());
        // What a fused op's kernel binds is its backend's matter; all can run the expansion.
        let bindings = op.expand().iter().map(bindings).max().unwrap_or(0);
        if bindings > caps.max_bindings as usize {
            return Err(LoadError::Limit {
                what: at,
                needed: format!("{bindings} bindings"),
                limit: format!("{} bindings (max_bindings of {})", caps.max_bindings, caps.name),
            });
        }
        for access in op.accesses() {
            let SlotInfo { name, rows, width } = &program.slots[access.slot.index()];
            let rows = match rows {
                RowDim::Tokens => sizes.bucket.tokens,
                RowDim::LogitRows => sizes.bucket.logit_rows,
            };
            let needed = u64::from(rows).saturating_mul(u64::from(*width)).saturating_mul(4);
            limit_bytes(format!("{at}, slot '{name}'"), needed)?;
        }
    }
    for (layer, StateSpec::Paged { planes }) in program.states.iter().enumerate() {
        for plane in planes {
            let block = StateSpec::Paged { planes: vec![*plane] }.block_bytes(sizes.block_size);
            let needed = block.saturating_mul(u64::from(sizes.num_blocks));
            limit_bytes(format!("KV cache of layer {layer}, {} blocks", sizes.num_blocks), needed)?;
        }
    }
    Ok(())
}

/// What `check_limits` sizes buffers for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// The largest step.
    pub bucket: Bucket,
    /// KV blocks, block 0 included.
    pub num_blocks: u32,
    /// Tokens per block.
    pub block_size: u32,
}

/// One op under check.
struct Checker<'a> {
    program: &'a Program,
    path: &'a Path,
    index: usize,
    op: &'a Op,
}

impl Checker<'_> {
    fn error(&self, tensor: &str, expected: impl std::fmt::Display, got: impl std::fmt::Display) -> LoadError {
        LoadError::Tensor {
            path: PathBuf::from(self.path),
            tensor: format!("{tensor} (op {}, {})", self.index, self.op.kind()),
            expected: expected.to_string(),
            got: got.to_string(),
        }
    }

    fn slot(&self, slot: Slot) -> Result<&SlotInfo, LoadError> {
        let num_slots = self.program.slots.len();
        let info = self.program.slots.get(slot.index());
        info.ok_or_else(|| self.error(&format!("slot {slot}"), format!("an index below {num_slots}"), slot))
    }

    /// Written once, before it is read; what is written is touched once.
    fn order(&self, written: &mut [bool]) -> Result<(), LoadError> {
        let accesses = self.op.accesses();
        for access in &accesses {
            let name = &self.slot(access.slot)?.name;
            let touched = accesses.iter().filter(|other| other.slot == access.slot).count();
            if access.kind.writes() && touched > 1 {
                return Err(self.error(name, "an output that is no other operand", "the same slot twice"));
            }
            let is_written = &mut written[access.slot.index()];
            match access.kind {
                AccessKind::Read | AccessKind::ReadWrite if !*is_written => {
                    return Err(self.error(name, "a slot that was written before", "one that was not"));
                }
                AccessKind::Write if *is_written => {
                    return Err(self.error(name, "a slot that is written once", "a second write"));
                }
                AccessKind::Read | AccessKind::ReadWrite => {}
                AccessKind::Write => *is_written = true,
            }
        }
        Ok(())
    }

    fn shapes(&self) -> Result<(), LoadError> {
        match self.op {
            Op::Embed { table, scale, out } => {
                self.finite("scale", *scale)?;
                let width = self.rows_of(*out, RowDim::Tokens)?;
                let shape = self.weight_shape(*table, 2)?;
                self.equal(&self.program.weights[table.index()].name, "row length", width, shape[1])
            }
            Op::RmsNorm { x, weight, out, .. } => {
                self.same_shape(*x, *out)?;
                self.vector(*weight, self.slot(*x)?.width)
            }
            Op::Add { residual, x } => self.same_shape(*x, *residual),
            Op::NormHeads { x, weight, .. } => {
                let head_dim = self.weight_shape(*weight, 1)?[0];
                self.heads(*x, head_dim).map(drop)
            }
            Op::Linear { x, parts, out } => {
                let mut width = 0u64;
                for part in parts {
                    let shape = self.weight_shape(part.weight, 2)?;
                    let name = &self.program.weights[part.weight.index()].name;
                    self.equal(name, "in_features", self.slot(*x)?.width, shape[1])?;
                    part.bias.map_or(Ok(()), |bias| self.vector(bias, shape[0]))?;
                    width += u64::from(shape[0]);
                }
                self.rows_of(*out, self.slot(*x)?.rows)?;
                self.equal(&self.slot(*out)?.name, "width", width, self.slot(*out)?.width)
            }
            Op::Rope { x, rotary, head_dim } => {
                self.heads(*x, *head_dim)?;
                self.finite("amplitude", rotary.amplitude)?;
                let pairs = self.weight_shape(rotary.inv_freq, 1)?[0];
                if pairs > head_dim / 2 {
                    return Err(self.error("inv_freq", format!("at most {} pairs", head_dim / 2), pairs));
                }
                Ok(())
            }
            Op::StoreKv { k, v, layer } => {
                let plane = self.plane(*layer)?;
                let has_values = !self.program.states[layer.index()].is_shared();
                self.equal("v", "values of their own:", has_values, v.is_some())?;
                for (name, view) in [("k", Some(k)), ("v", v.as_ref())] {
                    let Some(view) = view else { continue };
                    self.heads(*view, plane.dim)?;
                    self.equal(name, "width of the plane", u64::from(plane.heads) * u64::from(plane.dim), view.width)?;
                }
                Ok(())
            }
            Op::Attention { q, layer, heads, head_dim, window, soft_cap, sinks, out, .. } => {
                let key = self.plane(*layer)?;
                self.equal("q", "head_dim of the plane", key.dim, *head_dim)?;
                let num_heads = self.heads(*q, *head_dim)?;
                self.equal("q", "heads", *heads, num_heads)?;
                if key.heads == 0 || !heads.is_multiple_of(key.heads) {
                    return Err(self.error("q", format!("a multiple of {} KV heads", key.heads), heads));
                }
                if *window == Some(0) {
                    return Err(self.error("window", "at least 1 position", 0));
                }
                soft_cap.map_or(Ok(()), |cap| self.soft_cap(cap))?;
                sinks.map_or(Ok(()), |sinks| self.vector(sinks, *heads))?;
                self.equal(&self.slot(*out)?.name, "width", q.width, self.rows_of(*out, RowDim::Tokens)?)
            }
            Op::GatedActivation { x, groups, out, .. } => {
                let width = self.rows_of(*x, RowDim::Tokens)?;
                let half = self.rows_of(*out, RowDim::Tokens)?;
                if half.checked_rem(*groups) != Some(0) {
                    return Err(self.error(&self.slot(*out)?.name, format!("columns of {groups} groups"), half));
                }
                self.equal(&self.slot(*x)?.name, "width", u64::from(half) * 2, width)
            }
            Op::MoeRoute { logits, bias, router, out } => {
                let experts = self.rows_of(*logits, RowDim::Tokens)?;
                bias.map_or(Ok(()), |bias| self.vector(bias, experts))?;
                self.router(router, experts)?;
                self.equal(&self.slot(*out)?.name, "width", 2 * router.top_k, self.rows_of(*out, RowDim::Tokens)?)
            }
            Op::MoeLinear { x, route, parts, out } => self.experts(*x, *route, parts, *out),
            Op::MoeCombine { x, route, residual } => {
                let top_k = self.rows_of(*route, RowDim::Tokens)? / 2;
                let width = u64::from(self.rows_of(*residual, RowDim::Tokens)?) * u64::from(top_k);
                self.equal(&self.slot(*x)?.name, "width", width, self.rows_of(*x, RowDim::Tokens)?)
            }
            Op::RopeStoreKv { .. } | Op::FusedLinear { .. } => {
                self.op.expand().iter().try_for_each(|op| Checker { op, ..*self }.shapes())
            }
            Op::ScaleByPosition { x, beta, period } => {
                self.finite("beta", *beta)?;
                self.heads(*x, x.width)?;
                if *period == 0 { Err(self.error("period", "at least 1 position", 0)) } else { Ok(()) }
            }
            Op::SoftCap { x, cap } => {
                self.soft_cap(*cap)?;
                self.rows_of(*x, self.slot(*x)?.rows).map(drop)
            }
            Op::CheckFinite { x } => self.rows_of(*x, RowDim::Tokens).map(drop),
            Op::SelectRows { x, out } => {
                let width = self.rows_of(*x, RowDim::Tokens)?;
                self.equal(&self.slot(*out)?.name, "width", width, self.rows_of(*out, RowDim::LogitRows)?)
            }
            Op::GatherColumns { x, order, out } => {
                self.same_shape(*x, *out)?;
                self.vector(*order, self.slot(*x)?.width)
            }
            Op::Sample { logits } => self.rows_of(*logits, RowDim::LogitRows).map(drop),
        }
    }

    fn router(&self, router: &Router, experts: u32) -> Result<(), LoadError> {
        let Router { top_k, groups, top_groups, scale, .. } = *router;
        self.finite("scale", scale)?;
        let whole = experts.checked_rem(groups) == Some(0) && (1..=groups).contains(&top_groups);
        if !whole || groups > MAX_GROUPS || !(1..=MAX_TOP_K).contains(&top_k) || top_k > experts / groups * top_groups {
            return Err(self.error("router", format!("a choice among {experts} experts"), format!("{router:?}")));
        }
        Ok(())
    }

    fn experts(&self, x: Slot, route: Option<Slot>, parts: &[LinearPart], out: Slot) -> Result<(), LoadError> {
        let top_k = match route {
            Some(route) => self.rows_of(route, RowDim::Tokens)? / 2,
            None => parts.first().map_or(Ok(0), |part| self.weight_shape(part.weight, 3).map(|shape| shape[0]))?,
        };
        let in_width = self.rows_of(x, RowDim::Tokens)?;
        let (mut width, mut num_experts) = (0u64, None);
        for part in parts {
            let shape = self.weight_shape(part.weight, 3)?;
            let name = &self.program.weights[part.weight.index()].name;
            if in_width != shape[2] && u64::from(in_width) != u64::from(top_k) * u64::from(shape[2]) {
                return Err(self.error(name, format!("in_features of {in_width} columns"), shape[2]));
            }
            self.equal(name, "experts", *num_experts.get_or_insert(shape[0]), shape[0])?;
            part.bias.map_or(Ok(()), |bias| self.vector(bias, shape[0].saturating_mul(shape[1])))?;
            width += u64::from(shape[1]);
        }
        self.equal(&self.slot(out)?.name, "width", width * u64::from(top_k), self.rows_of(out, RowDim::Tokens)?)
    }

    fn finite(&self, name: &str, value: f32) -> Result<(), LoadError> {
        if value.is_finite() { Ok(()) } else { Err(self.error(name, "a finite number", value)) }
    }

    fn soft_cap(&self, cap: f32) -> Result<(), LoadError> {
        if cap.is_normal() && cap > 0.0 { Ok(()) } else { Err(self.error("soft cap", "a number above 0", cap)) }
    }

    fn equal<A: ToString, B: ToString>(&self, name: &str, what: &str, expected: A, got: B) -> Result<(), LoadError> {
        let (expected, got) = (expected.to_string(), got.to_string());
        if expected == got { Ok(()) } else { Err(self.error(name, format!("{what} {expected}"), got)) }
    }

    /// The width of a slot of the wanted kind of rows.
    fn rows_of(&self, slot: Slot, rows: RowDim) -> Result<u32, LoadError> {
        let info = self.slot(slot)?;
        if info.rows != rows || info.width == 0 {
            let got = format!("{:?} of width {}", info.rows, info.width);
            return Err(self.error(&info.name, format!("{rows:?} of some width"), got));
        }
        Ok(info.width)
    }

    fn same_shape(&self, a: Slot, b: Slot) -> Result<(), LoadError> {
        let width = self.rows_of(b, self.slot(a)?.rows)?;
        self.equal(&self.slot(b)?.name, "width", self.slot(a)?.width, width)
    }

    fn weight_shape(&self, id: WeightId, num_dims: usize) -> Result<&[u32], LoadError> {
        let num_weights = self.program.weights.len();
        let Some(info) = self.program.weights.get(id.index()) else {
            return Err(self.error(&format!("weight {id}"), format!("an index below {num_weights}"), id));
        };
        if info.shape.len() != num_dims || info.shape.contains(&0) {
            return Err(self.error(&info.name, format!("{num_dims} dimensions above 0"), format!("{:?}", info.shape)));
        }
        Ok(&info.shape)
    }

    fn vector(&self, id: WeightId, len: u32) -> Result<(), LoadError> {
        let got = self.weight_shape(id, 1)?[0];
        self.equal(&self.program.weights[id.index()].name, "length", len, got)
    }

    /// The number of heads in a view that lies inside its slot.
    fn heads(&self, view: View, head_dim: u32) -> Result<u32, LoadError> {
        let width = self.rows_of(view.slot, RowDim::Tokens)?;
        let name = &self.slot(view.slot)?.name;
        if view.offset.checked_add(view.width).is_none_or(|end| end > width) || view.width == 0 {
            return Err(self.error(name, format!("columns within {width}"), format!("{view:?}")));
        }
        if head_dim == 0 || !view.width.is_multiple_of(head_dim) {
            return Err(self.error(name, format!("a multiple of head_dim {head_dim}"), view.width));
        }
        Ok(view.width / head_dim)
    }

    /// The plane that K and V of a layer have in common.
    fn plane(&self, layer: Layer) -> Result<Plane, LoadError> {
        let state = self.program.states.get(layer.index());
        state
            .and_then(StateSpec::kv_plane)
            .ok_or_else(|| self.error(&format!("state {layer}"), "equal planes of K and V", format!("{state:?}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Buckets;
    use crate::backend::cases::{all_cases, build_case};
    use crate::program::Activation;

    fn built(pick: fn(&Op) -> bool) -> crate::backend::cases::BuiltCase {
        let mut all = all_cases().into_iter().map(|case| build_case(&case));
        all.find(|case| case.program.ops.iter().any(pick)).expect("the table has every op")
    }

    fn error(change: impl FnOnce(&mut Program)) -> String {
        let mut program = built(|op| matches!(op, Op::Linear { .. })).program;
        change(&mut program);
        check(&program, Path::new("m.gguf")).expect_err("the program is wrong").to_string()
    }

    #[test]
    fn every_case_of_the_table_passes() {
        for case in all_cases() {
            check(&build_case(&case).program, Path::new("case")).unwrap_or_else(|e| panic!("{case}: {e}"));
        }
    }

    #[test]
    fn errors_name_op_and_tensor() {
        let shape = error(|program| program.weights[1].shape[1] += 32);
        assert_eq!(shape, "m.gguf: tensor 'part0 (op 1, Linear)': expected in_features 32, got 64");
        assert!(
            error(|program| program.ops.swap(0, 1)).contains("'x (op 0, Linear)': expected a slot that was written")
        );
        assert!(error(|program| program.logits = None).contains("logits"));
        assert!(error(|program| program.ops.insert(1, program.ops[0].clone())).contains("second write"));
        let in_place = Op::GatedActivation { x: Slot(0), groups: 1, activation: Activation::Silu, out: Slot(0) };
        assert!(error(|program| program.ops.insert(1, in_place)).contains("the same slot twice"));
        let stray = Op::CheckFinite { x: Slot(99) };
        assert!(error(|program| program.ops.push(stray)).contains("slot 99 (op 3, CheckFinite)"));
        assert!(error(|program| program.slots[1].width += 1).contains("width"));
        let store = View { slot: Slot(0), offset: u32::MAX, width: 2 };
        let store = Op::StoreKv { k: store, v: Some(store), layer: Layer(0) };
        assert!(error(|program| program.ops.insert(1, store)).contains("state 0"));
    }

    #[test]
    fn what_attention_sees_is_checked() {
        let built = built(|op| matches!(op, Op::Attention { sinks: Some(_), .. }));
        let problem = |change: fn(&mut Op)| {
            let mut program = built.program.clone();
            let op = program.ops.iter_mut().find(|op| matches!(op, Op::Attention { .. })).expect("it was picked so");
            change(op);
            check(&program, Path::new("m.gguf")).expect_err("the program is wrong").to_string()
        };
        let set_window = |op: &mut Op| {
            if let Op::Attention { window, .. } = op {
                *window = Some(0);
            }
        };
        assert!(problem(set_window).contains("'window (op 2, Attention)': expected at least 1 position, got 0"));
        let set_cap = |op: &mut Op| {
            if let Op::Attention { soft_cap, .. } = op {
                *soft_cap = Some(f32::NAN);
            }
        };
        assert!(problem(set_cap).contains("'soft cap (op 2, Attention)': expected a number above 0, got NaN"));
        let mut program = built.program.clone();
        let info = program.weights.iter_mut().find(|info| info.name == "sinks").expect("it has sinks");
        info.shape[0] += 1;
        let sinks = check(&program, Path::new("m.gguf")).expect_err("one sink too many").to_string();
        assert!(sinks.contains("'sinks (op 2, Attention)': expected length "), "{sinks}");
    }

    #[test]
    fn limits_name_what_they_limit() {
        let case = built(|op| matches!(op, Op::Attention { .. }));
        let sizes = Sizes { bucket: case.step.layout().bucket, num_blocks: 1000, block_size: 16 };
        let caps = |max_binding_bytes, max_bindings| Caps {
            name: "small",
            device: String::new(),
            buckets: Buckets::Exact,
            batch_invariant: true,
            max_binding_bytes,
            max_bindings,
            replaced_kernels: Vec::new(),
        };
        let problem = |caps: &Caps| check_limits(&case.program, sizes, caps).err().map(|e| e.to_string());
        assert_eq!(problem(&caps(u64::MAX, 8)), None);
        assert_eq!(
            problem(&caps(u64::MAX, 4)).as_deref(),
            Some("op 2 (Attention): needs 5 bindings, limit 4 bindings (max_bindings of small)")
        );
        assert!(problem(&caps(100, 8)).is_some_and(|p| p.starts_with("op 0 (Embed), slot 'qkv': needs ")));
        let kv = problem(&caps(100_000, 8)).expect("1000 blocks of KV are more");
        assert!(kv.starts_with("KV cache of layer 0, 1000 blocks: needs "), "{kv}");
    }
}
