//! The fast CPU backend: SIMD kernels chosen at run time, its own threads, weights repacked once into huge pages.
//!
//! Invariant: bits do not depend on the instruction set, the number of threads, or the rest of the batch: every output
//! element has one owner and one order of operations. A step is one job of the pool: `submit` runs it to its end, the
//! calling thread being one of the team, so that N threads use N cores; `wait` only hands the result out. Nothing is
//! allocated per step.

mod attention;
mod cached;
mod experts;
mod isa;
mod linear;
mod lower;
mod memory;
mod repack;
mod rows;
mod simd;
mod state;
mod step;
#[cfg(test)]
mod tests;

pub use isa::Isa;
pub use memory::available_bytes;

use super::pool::Pool;
use super::{Backend, Bucket, Buckets, Caps, Compiled, DeviceOutput, InputLayout, MemoryReport, StepInputs, Ticket};
use crate::error::DeviceError;
use crate::ids::{BlockId, Layer, PlanId, WeightId};
use crate::program::{Program, StateSpec};
use crate::weights::HostTensor;
use lower::{Lowered, Target};
use memory::HugeBuf;
use repack::Matrix;
use rows::Columns;
use simd::{LANES, Vectors};
use state::LayerState;
use step::{Phase, Step, Weight, Weights};

/// How the CPU is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads of a step, the engine's own included; 0: as many as the process may use cores.
    pub threads: usize,
    /// The kernels' instruction set; `None`: the fastest that the CPU has.
    pub isa: Option<Isa>,
}

/// See the module's head.
pub struct CpuBackend {
    caps: Caps,
    vectors: Vectors,
    pool: Pool,
    weights: Weights,
    layers: Vec<LayerState>,
    plans: Vec<Plan>,
    submitted: u64,
    /// Plan, tokens, read rows and sampled rows of the last step.
    last: Option<(usize, usize, usize, usize)>,
    small_pages_logged: bool,
}

struct Plan {
    phases: Vec<Phase>,
    memory: HugeBuf,
    flags: usize,
    samples: usize,
    logits: Option<Columns>,
    kept: Vec<Columns>,
}

/// The device in words, without starting it.
pub fn describe(options: CpuOptions) -> String {
    let threads = num_threads(options);
    format!("CPU, {threads} {}, {}", if threads == 1 { "thread" } else { "threads" }, isa_of(options).name())
}

fn num_threads(options: CpuOptions) -> usize {
    match options.threads {
        0 => std::thread::available_parallelism().map_or(1, |n| n.get()),
        threads => threads,
    }
}

fn isa_of(options: CpuOptions) -> Isa {
    options.isa.or_else(|| Isa::available().next()).unwrap_or(Isa::Portable)
}

impl CpuBackend {
    /// Starts the threads.
    ///
    /// # Errors
    /// The CPU lacks the instruction set that was asked for, or the system refuses threads.
    pub fn new(options: CpuOptions) -> Result<Self, DeviceError> {
        let isa = isa_of(options);
        let vectors = Vectors::new(isa)
            .ok_or_else(|| DeviceError::Absent("cpu".into(), format!("this CPU has no {}", isa.name())))?;
        let threads = num_threads(options);
        let caps = Caps {
            name: "cpu",
            device: describe(options),
            buckets: Buckets::Exact,
            batch_invariant: true,
            max_binding_bytes: u64::MAX,
            max_bindings: u32::MAX,
            replaced_kernels: Vec::new(),
        };
        Ok(Self {
            caps,
            vectors,
            pool: Pool::new(threads)?,
            weights: Weights::default(),
            layers: Vec::new(),
            plans: Vec::new(),
            submitted: 0,
            last: None,
            small_pages_logged: false,
        })
    }

    /// What the last step left in the slot `Program::kept[index]`: `[tokens, width]`, row-major.
    ///
    /// # Panics
    /// When no step was run, or its program keeps fewer slots.
    pub fn kept(&self, index: usize) -> &[f32] {
        let (plan, num_tokens, ..) = self.last.expect("a step was run");
        let Plan { memory, kept, .. } = &self.plans[plan];
        // SAFETY: no step runs between `submit`'s return and its next call, which needs `&mut self`.
        unsafe { memory.shared().slice(kept[index].start, num_tokens * kept[index].width) }
    }

    /// One line, once, where the system grants no huge pages: decode will be slower.
    fn note_pages(&mut self, huge: bool) {
        if !huge && !self.small_pages_logged {
            self.small_pages_logged = true;
            tracing::warn!("the system grants no huge pages: memory-bound steps will be slower");
        }
    }
}

impl Backend for CpuBackend {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn memory(&self) -> MemoryReport {
        let activations: usize = self.plans.iter().map(|plan| plan.memory.len()).sum();
        let state: usize = self.layers.iter().map(LayerState::num_bytes).sum();
        MemoryReport {
            weights_bytes: self.weights.arena.used_bytes as u64,
            state_bytes: state as u64,
            activations_bytes: activations as u64,
            available_bytes: available_bytes(),
        }
    }

    fn upload(&mut self, id: WeightId, tensor: &HostTensor) -> Result<(), DeviceError> {
        let weight = if tensor.shape.len() < 2 {
            Weight::Vector(tensor.to_f32())
        } else {
            // Each expert's rows begin with a panel.
            let tensor = &tensor.with_padded_matrices(LANES);
            let matrix = Matrix::reserve(tensor, &mut self.weights.arena)?;
            let out = self.weights.arena.shared(matrix.range);
            self.pool.run(&|team| matrix.pack(tensor, team.share(matrix.num_panels()), out))?;
            Weight::Matrix(matrix)
        };
        let entries = &mut self.weights.entries;
        entries.resize_with(entries.len().max(id.index() + 1), || None);
        entries[id.index()] = Some(weight);
        self.note_pages(self.weights.arena.huge());
        Ok(())
    }

    fn alloc_state(&mut self, specs: &[StateSpec], num_blocks: u32, block_size: u32) -> Result<(), DeviceError> {
        self.layers.clear();
        for (layer, spec) in specs.iter().enumerate() {
            self.layers.push(LayerState::new(layer, spec, num_blocks as usize, block_size as usize)?);
        }
        self.note_pages(self.layers.iter().all(LayerState::huge));
        Ok(())
    }

    fn compile(
        &mut self,
        program: &Program,
        bucket: Bucket,
        layout: &InputLayout,
        _progress: Compiled<'_>,
    ) -> Result<PlanId, DeviceError> {
        debug_assert_eq!(bucket, layout.bucket, "one plan, the layout's");
        let target = Target { weights: &self.weights, layers: &self.layers, layout, num_threads: self.pool.threads() };
        let Lowered { phases, memory_bytes, flags, samples, logits, kept } = lower::lower(program, &target)?;
        let memory = HugeBuf::new(memory_bytes, "activations")?;
        self.plans.push(Plan { phases, memory, flags, samples, logits, kept });
        Ok(PlanId(self.plans.len() as u32 - 1))
    }

    fn submit(&mut self, plan: PlanId, inputs: &StepInputs) -> Result<Ticket, DeviceError> {
        let num_tokens = inputs.num_tokens();
        let plan_index = plan.index();
        let plan = &mut self.plans[plan_index];
        let flags = plan.flags..plan.flags + num_tokens * size_of::<u32>();
        plan.memory.bytes()[flags].fill(0);
        let step = Step {
            memory: plan.memory.shared(),
            inputs,
            weights: &self.weights,
            layers: &self.layers,
            vectors: self.vectors,
        };
        let phases = &plan.phases;
        self.pool.run(&|team| {
            // An abandoned step is reported by the pool, with the panic's message.
            let _ = step.run(phases, team);
        })?;
        self.submitted += 1;
        self.last = Some((plan_index, num_tokens, inputs.num_read_rows(), inputs.num_sampled_rows()));
        Ok(Ticket(self.submitted))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<DeviceOutput<'_>, DeviceError> {
        assert_eq!(ticket.0, self.submitted, "the CPU backend runs one step at a time");
        let Some((plan, num_tokens, num_read_rows, num_sampled_rows)) = self.last else {
            return Err(DeviceError::Failed("no step was submitted".into()));
        };
        let plan = &self.plans[plan];
        let memory = plan.memory.shared();
        // SAFETY: no step runs between `submit`'s return and its next call, which needs `&mut self`.
        let non_finite = unsafe { memory.slice(plan.flags, num_tokens) };
        // SAFETY: as above.
        let samples = unsafe { memory.slice(plan.samples, num_sampled_rows) };
        let logits = match plan.logits {
            // SAFETY: as above.
            Some(logits) => unsafe { memory.slice(logits.start, num_read_rows * logits.width) },
            None => &[],
        };
        Ok(DeviceOutput { logits, samples, non_finite })
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
        for &(from, to) in pairs {
            self.layers.iter_mut().for_each(|layer| layer.copy_block(from.index(), to.index()));
        }
        Ok(())
    }

    fn read_block(&mut self, layer: Layer, block: BlockId, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        out.clear();
        self.layers[layer.index()].read_block(block.index(), out);
        Ok(())
    }

    fn write_block(&mut self, layer: Layer, block: BlockId, bytes: &[u8]) -> Result<(), DeviceError> {
        self.layers[layer.index()].write_block(block.index(), bytes)
    }
}
