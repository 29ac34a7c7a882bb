//! The reference backend: obvious f32 loops, one function per op. It is the oracle of every other backend.
//!
//! Invariant: each output element is computed in f32 in one fixed order that depends on nothing but the op's own shapes,
//! so that neither batch mates nor the number of threads change a bit of it. Fused ops run as their expansion.
//! Called by the op tests, by golden tests, and by `--device reference`.

mod attention;
mod ops;
mod state;

use std::ops::Range;

use crate::backend::pool::Pool;
use crate::backend::{
    Backend, Bucket, Buckets, Caps, Compiled, DeviceOutput, InputLayout, MemoryReport, StepInputs, Ticket,
};
use crate::error::DeviceError;
use crate::ids::{BlockId, Layer, PlanId, Slot, WeightId};
use crate::program::{Op, Program, SlotInfo, StateSpec};
use crate::sample::Sample;
use crate::weights::HostTensor;
use ops::Step;
use state::LayerState;

/// Rows of a weight that are asked for together: computed ones share cache lines of their file.
const ROWS_PER_READ: usize = 16;

/// A backend of plain loops over weights that are kept as f32.
pub struct ReferenceBackend {
    caps: Caps,
    num_threads: usize,
    /// Started when first needed: `new` has no error to give.
    pool: Option<Pool>,
    weights: Vec<Option<Weight>>,
    layers: Vec<LayerState>,
    plans: Vec<Plan>,
    /// By slot of any plan; they grow to the largest step and stay.
    slots: Vec<Vec<f32>>,
    products: Vec<f32>,
    non_finite: Vec<u32>,
    samples: Vec<Sample>,
    logits: Range<usize>,
    logits_slot: Option<Slot>,
    submitted: u64,
}

/// A weight, dequantised.
struct Weight {
    /// `[num_rows, row_len]`.
    values: Vec<f32>,
    row_len: usize,
    /// More than one where each expert has its own.
    num_matrices: usize,
}

impl Weight {
    fn num_rows(&self) -> usize {
        self.values.len() / self.row_len
    }

    fn num_matrices(&self) -> usize {
        self.num_matrices
    }

    fn rows_per_matrix(&self) -> usize {
        self.num_rows() / self.num_matrices
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.row_len..][..self.row_len]
    }
}

struct Plan {
    slots: Vec<SlotInfo>,
    ops: Vec<Op>,
    logits: Option<Slot>,
}

impl ReferenceBackend {
    /// Splits rows of a matrix over `num_threads` threads; their number does not change any result.
    pub fn new(num_threads: usize) -> Self {
        let caps = Caps {
            name: "reference",
            device: "reference interpreter (f32)".into(),
            buckets: Buckets::Exact,
            batch_invariant: true,
            max_binding_bytes: u64::MAX,
            max_bindings: u32::MAX,
            replaced_kernels: Vec::new(),
        };
        Self {
            caps,
            num_threads,
            pool: None,
            weights: Vec::new(),
            layers: Vec::new(),
            plans: Vec::new(),
            slots: Vec::new(),
            products: Vec::new(),
            non_finite: Vec::new(),
            samples: Vec::new(),
            logits: 0..0,
            logits_slot: None,
            submitted: 0,
        }
    }
}

fn started(pool: &mut Option<Pool>, num_threads: usize) -> Result<&mut Pool, DeviceError> {
    match pool {
        Some(pool) => Ok(pool),
        None => Ok(pool.insert(Pool::new(num_threads)?)),
    }
}

impl Backend for ReferenceBackend {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn memory(&self) -> MemoryReport {
        MemoryReport {
            weights_bytes: self.weights.iter().flatten().map(|w| size_of_val(w.values.as_slice()) as u64).sum(),
            state_bytes: self.layers.iter().map(LayerState::num_bytes).sum(),
            activations_bytes: self.slots.iter().map(|s| size_of_val(s.as_slice()) as u64).sum(),
            available_bytes: None,
        }
    }

    fn upload(&mut self, id: WeightId, tensor: &HostTensor) -> Result<(), DeviceError> {
        let len: usize = tensor.shape.iter().product();
        let mut values = state::zeroed(len).ok_or_else(|| DeviceError::OutOfMemory {
            what: tensor.name.clone(),
            needed_bytes: (len as u64).saturating_mul(size_of::<f32>() as u64),
        })?;
        let pool = started(&mut self.pool, self.num_threads)?;
        let row_len = tensor.row_len();
        let num_matrices = tensor.shape.iter().rev().skip(2).product();
        ops::for_each_chunk(pool, &mut values, row_len, |first_row, chunk| {
            for (i, rows) in chunk.chunks_mut(ROWS_PER_READ * row_len).enumerate() {
                let first = first_row + i * ROWS_PER_READ;
                tensor.dequantize_rows(first..first + rows.len() / row_len, rows);
            }
        })?;
        self.weights.resize_with(self.weights.len().max(id.index() + 1), || None);
        self.weights[id.index()] = Some(Weight { values, row_len, num_matrices });
        Ok(())
    }

    fn alloc_state(&mut self, specs: &[StateSpec], num_blocks: u32, block_size: u32) -> Result<(), DeviceError> {
        self.layers = specs
            .iter()
            .enumerate()
            .map(|(i, spec)| LayerState::new(i, spec, num_blocks as usize, block_size as usize))
            .collect::<Result<_, _>>()?;
        Ok(())
    }

    fn compile(
        &mut self,
        program: &Program,
        _bucket: Bucket,
        _layout: &InputLayout,
        _progress: Compiled<'_>,
    ) -> Result<PlanId, DeviceError> {
        for (i, info) in program.weights.iter().enumerate() {
            let uploaded = self.weights.get(i).is_some_and(Option::is_some);
            assert!(uploaded, "weight '{}' was not uploaded before compile", info.name);
        }
        self.plans.push(Plan {
            slots: program.slots.clone(),
            ops: program.ops.iter().flat_map(Op::expand).collect(),
            logits: program.logits,
        });
        Ok(PlanId(self.plans.len() as u32 - 1))
    }

    fn submit(&mut self, plan: PlanId, inputs: &StepInputs) -> Result<Ticket, DeviceError> {
        let plan = &self.plans[plan.index()];
        let pool = started(&mut self.pool, self.num_threads)?;
        self.slots.resize_with(self.slots.len().max(plan.slots.len()), Vec::new);
        self.non_finite.clear();
        self.non_finite.resize(inputs.num_tokens(), 0);
        self.samples.clear();
        let mut step = Step {
            inputs,
            infos: &plan.slots,
            weights: &self.weights,
            layers: &mut self.layers,
            slots: &mut self.slots,
            products: &mut self.products,
            non_finite: &mut self.non_finite,
            samples: &mut self.samples,
            pool,
        };
        for op in &plan.ops {
            step.run(op)?;
        }
        self.logits_slot = plan.logits;
        self.logits = match plan.logits {
            Some(slot) => 0..inputs.num_read_rows() * plan.slots[slot.index()].width as usize,
            None => 0..0,
        };
        self.submitted += 1;
        Ok(Ticket(self.submitted))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<DeviceOutput<'_>, DeviceError> {
        assert_eq!(ticket.0, self.submitted, "the reference backend runs one step at a time");
        let logits = self.logits_slot.map_or(&[][..], |slot| &self.slots[slot.index()][self.logits.clone()]);
        Ok(DeviceOutput { logits, samples: &self.samples, non_finite: &self.non_finite })
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
        for &(from, to) in pairs {
            for layer in &mut self.layers {
                let mut bytes = Vec::new();
                layer.read_block(from.index(), &mut bytes);
                layer.write_block(to.index(), &bytes);
            }
        }
        Ok(())
    }

    fn read_block(&mut self, layer: Layer, block: BlockId, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        out.clear();
        self.layers[layer.index()].read_block(block.index(), out);
        Ok(())
    }

    fn write_block(&mut self, layer: Layer, block: BlockId, bytes: &[u8]) -> Result<(), DeviceError> {
        self.layers[layer.index()].write_block(block.index(), bytes);
        Ok(())
    }
}
