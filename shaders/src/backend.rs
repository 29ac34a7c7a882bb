//! `Backend` over wgpu: one upload, one pass and one readback per step, through two sets of transfer buffers used in turn.
//!
//! Invariant: a transfer buffer is mapped when a step begins to use it and is mapped again as soon as its submission is done.
//! Commands do not depend on values, only on counts, so that those of the next decode step are encoded while this one runs.
//! Nothing reaches the host after the device was lost: `wait` looks before it reads.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use runtime::backend::{
    Backend, Bucket, Buckets, Caps, Compiled, DeviceOutput, InputLayout, MemoryReport, StepInputs, Ticket,
};
use runtime::error::DeviceError;
use runtime::ids::{BlockId, Layer, PlanId, WeightId};
use runtime::program::{Program, StateSpec};
use runtime::sample::Sample;
use runtime::weights::HostTensor;

use crate::adapter::{AdapterChoice, AdapterInfo};
use crate::compose::Settings;
use crate::device::{Buffer, Gpu, GpuOptions, MAX_BINDINGS};
use crate::lab::Reloader;
use crate::lower::{Memory, Target, lower, split_len};
use crate::pipelines::Pipelines;
use crate::replay::{Counts, MAX_GRID, Planned, Replay};
use crate::selftest;
use crate::state::State;
use crate::tuning::Tuning;
use crate::weights::Weights;

/// An open device with its compiled kernels, which backends share.
#[derive(Clone)]
pub struct WgpuDevice {
    pub(crate) gpu: Rc<Gpu>,
    /// Shapes of the kernels.
    pub(crate) tuning: Rc<Tuning>,
    pub(crate) pipelines: Rc<RefCell<Pipelines>>,
    pub(crate) reloader: Option<Rc<RefCell<Reloader>>>,
    /// Steps so far whose commands had been encoded while the step before ran.
    encoded_ahead: Rc<Cell<u64>>,
}

impl WgpuDevice {
    /// Opens an adapter.
    ///
    /// # Errors
    /// There is no such adapter, or it cannot be opened.
    pub fn open(choice: &AdapterChoice, options: GpuOptions) -> Result<Self, DeviceError> {
        let files = options.kernels.clone();
        let gpu = Rc::new(Gpu::open(choice, options)?);
        if files.is_empty() {
            return Ok(Self::with_pipelines(gpu, Pipelines::default()));
        }
        let (kernels, reloader) =
            Reloader::start(&gpu, &files).map_err(|error| DeviceError::Failed(error.to_string()))?;
        let device = Self::with_pipelines(gpu, Pipelines::with_custom(kernels, None));
        Ok(Self { reloader: Some(Rc::new(RefCell::new(reloader))), ..device })
    }

    pub(crate) fn with_pipelines(gpu: Rc<Gpu>, pipelines: Pipelines) -> Self {
        let tuning = Rc::new(gpu.tuning.clone());
        Self { gpu, tuning, pipelines: Rc::new(RefCell::new(pipelines)), reloader: None, encoded_ahead: Rc::default() }
    }

    /// The adapter that it is.
    pub fn adapter(&self) -> &AdapterInfo {
        &self.gpu.adapter
    }

    /// Shapes of its kernels: the tuning table's, or measured ones.
    pub fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// What takes the device away from those who use it, on any thread, as a driver does that is reset: for tests.
    pub fn destroyer(&self) -> impl Fn() + Send + use<> {
        let device = self.gpu.device.clone();
        move || device.destroy()
    }

    /// Steps so far whose commands had been encoded while the step before ran.
    pub fn num_encoded_ahead(&self) -> u64 {
        self.encoded_ahead.get()
    }

    /// Buffers, bind groups and pipelines created so far: a step adds none.
    pub fn num_created(&self) -> u64 {
        self.gpu.num_created()
    }

    /// Bytes of all buffers that live on the device: what its cap is held against.
    pub fn memory_bytes(&self) -> u64 {
        self.gpu.memory_bytes()
    }

    /// Kernels with their settings that programs have asked for so far.
    pub fn variants(&self) -> Vec<(&'static str, Settings)> {
        self.pipelines.borrow().variants().collect()
    }
}

/// See the module's head.
pub struct WgpuBackend {
    caps: Caps,
    device: WgpuDevice,
    gpu: Rc<Gpu>,
    /// Kernels that run their plain variant.
    plain: BTreeSet<&'static str>,
    /// The longest context, where it is not the inputs': the self-test runs small steps with the shapes of large ones.
    context: Option<u32>,
    self_test: bool,
    weights: Weights,
    state: State,
    pipelines: Rc<RefCell<Pipelines>>,
    plans: Vec<Plan>,
    submitted: u64,
    /// The step that was submitted and not waited for.
    running: Option<Step>,
    /// What the next step is likely to be.
    ahead: Option<(Step, wgpu::CommandBuffer)>,
    logits: Vec<f32>,
    samples: Vec<Sample>,
    non_finite: Vec<u32>,
}

struct Plan {
    replay: Replay,
    memory: Memory,
    transfers: [Transfer; 2],
    /// Where the logits are, in bytes of which lane, and how many of a row.
    logits: Option<Logits>,
    vocab: usize,
}

/// What a plan is lowered for.
struct Sizes<'a> {
    memory: &'a Memory,
    layout: &'a InputLayout,
    /// Longest context in tokens.
    context: u32,
}

struct Logits {
    buffer: wgpu::Buffer,
    offset: u64,
}

/// Buffers that the host maps.
struct Transfer {
    upload: Buffer,
    /// Flags, then samples, then logits of the rows that are read back.
    readback: Buffer,
}

/// All that a step's commands depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    plan: usize,
    transfer: usize,
    counts: Counts,
    upload_bytes: u64,
}

impl Step {
    /// The step after this one, if every row of it decodes one token and goes on.
    fn next(self) -> Option<Self> {
        let Self { counts, transfer, .. } = self;
        let next = Counts { max_kv_len: counts.max_kv_len + 1, ..counts };
        (counts.tokens == counts.logit_rows).then_some(Self { counts: next, transfer: 1 - transfer, ..self })
    }
}

impl WgpuBackend {
    /// A backend of its own memory on a device.
    pub fn new(device: &WgpuDevice) -> Self {
        let gpu = Rc::clone(&device.gpu);
        let caps = Caps {
            name: "wgpu",
            device: format!("{} ({}, {})", gpu.adapter.name, gpu.adapter.api, gpu.adapter.driver),
            buckets: Buckets::Exact,
            batch_invariant: gpu.batch_invariant(),
            max_binding_bytes: gpu.max_binding_bytes(),
            max_bindings: MAX_BINDINGS,
            replaced_kernels: Vec::new(),
        };
        Self {
            caps,
            device: device.clone(),
            self_test: gpu.self_test(),
            gpu,
            plain: BTreeSet::new(),
            context: None,
            weights: Weights::default(),
            state: State::default(),
            pipelines: Rc::clone(&device.pipelines),
            plans: Vec::new(),
            submitted: 0,
            running: None,
            ahead: None,
            logits: Vec::new(),
            samples: Vec::new(),
            non_finite: Vec::new(),
        }
    }

    /// As `new`, for a kernel whose test this is.
    pub(crate) fn untested(device: &WgpuDevice) -> Self {
        Self { self_test: false, ..Self::new(device) }
    }

    /// Encodes some kernels of a plan's step, for measuring; the inputs are those of the last step.
    pub(crate) fn encode_only(
        &self,
        plan: PlanId,
        counts: Counts,
        pass: &mut wgpu::ComputePass<'_>,
        is_wanted: &dyn Fn(&str) -> bool,
    ) {
        self.plans[plan.index()].replay.encode_only(&self.pipelines.borrow(), counts, pass, is_wanted);
    }

    /// Runs the self-test once, with the shapes that `program` will use. All kernels are compiled before, together.
    fn test_kernels(
        &mut self,
        program: &Program,
        sizes: &Sizes<'_>,
        progress: Compiled<'_>,
    ) -> Result<(), DeviceError> {
        let Sizes { context, .. } = *sizes;
        let tuning = Rc::clone(&self.device.tuning);
        let split = split_len(&self.gpu, &tuning, context);
        let checks = selftest::checks(program, &self.weights, &self.state, &tuning, (split, self.gpu.is_software()))?;
        let backend = |plain: &BTreeSet<&'static str>| {
            let new = Self::new(&self.device);
            Self { plain: plain.clone(), context: Some(context), self_test: false, ..new }
        };
        self.lower(program, sizes)?;
        let (mut num_compiled, num_checks) = (0, checks.len() as u32);
        let compiled = self.pipelines.borrow_mut().compile(&self.gpu, &mut |done, total| {
            num_compiled = total;
            progress(done, total + num_checks);
        });
        if let Err(error) = compiled {
            // The test meets it again, and replaces the kernel.
            tracing::debug!("{error}");
        }
        let mut tested = |done: usize| progress(num_compiled + done as u32, num_compiled + num_checks);
        let mut plain = self.plain.clone();
        self.caps.replaced_kernels = selftest::run(&checks, &mut plain, &backend, &mut tested)?;
        self.plain = plain;
        self.self_test = false;
        Ok(())
    }

    /// Takes other shapes for the plans to come: to measure them.
    pub(crate) fn set_tuning(&mut self, tuning: Tuning) {
        self.device.tuning = Rc::new(tuning);
    }

    /// Plans every dispatch of a program and asks for its pipelines.
    fn lower<'a>(&'a self, program: &'a Program, sizes: &Sizes<'a>) -> Result<Vec<Planned<'a>>, DeviceError> {
        let Sizes { memory, layout, context } = *sizes;
        let Self { gpu, device, weights, state, plain, .. } = self;
        let target = Target { gpu, tuning: &device.tuning, weights, state, memory, layout, context, plain };
        lower(program, &target, &mut self.pipelines.borrow_mut())
    }

    /// The commands of a step, with its transfers.
    fn encode(&self, step: Step) -> wgpu::CommandBuffer {
        let Step { plan, transfer, counts, upload_bytes } = step;
        let plan = &self.plans[plan];
        let Transfer { upload, readback } = &plan.transfers[transfer];
        let mut encoder = self.gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.copy_buffer_to_buffer(upload, 0, &plan.memory.inputs, 0, upload_bytes);
        encoder.clear_buffer(&plan.memory.flags, 0, None);
        {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            plan.replay.encode(&self.pipelines.borrow(), counts, &mut pass);
        }
        let [samples_at, logits_at, end] = plan.output_ends(counts);
        encoder.copy_buffer_to_buffer(&plan.memory.flags, 0, readback, 0, samples_at);
        if logits_at > samples_at {
            encoder.copy_buffer_to_buffer(&plan.memory.samples, 0, readback, samples_at, logits_at - samples_at);
        }
        if let (Some(logits), true) = (&plan.logits, end > logits_at) {
            encoder.copy_buffer_to_buffer(&logits.buffer, logits.offset, readback, logits_at, end - logits_at);
        }
        encoder.map_buffer_on_submit(readback, wgpu::MapMode::Read, 0..end, |_| ());
        encoder.map_buffer_on_submit(upload, wgpu::MapMode::Write, .., |_| ());
        encoder.finish()
    }

    /// Submits a step, then encodes the one that is likely to follow.
    fn start(&mut self, step: Step, words: &[u32]) -> Result<(), DeviceError> {
        let ahead = self.ahead.take().filter(|(expected, _)| *expected == step);
        self.device.encoded_ahead.update(|num_steps| num_steps + u64::from(ahead.is_some()));
        let commands = ahead.map_or_else(|| self.encode(step), |(_, commands)| commands);
        let upload = &self.plans[step.plan].transfers[step.transfer].upload;
        {
            let mut view = upload.get_mapped_range_mut(0..step.upload_bytes).map_err(not_mapped)?;
            view.copy_from_slice(bytemuck::cast_slice(words));
        }
        upload.unmap();
        self.gpu.queue.submit([commands]);
        // A kernel that is exchanged between steps leaves no commands behind.
        if self.device.reloader.is_none() {
            self.ahead = step.next().map(|next| (next, self.encode(next)));
        }
        self.gpu.check()
    }
}

impl Plan {
    /// Where flags, samples and logits end among the bytes that a step reads back.
    fn output_ends(&self, counts: Counts) -> [u64; 3] {
        let flags = 4 * u64::from(counts.tokens);
        let samples = flags + u64::from(counts.sampled_rows) * size_of::<Sample>() as u64;
        [flags, samples, samples + 4 * u64::from(counts.read_rows) * self.vocab as u64]
    }
}

fn not_mapped(error: impl std::fmt::Display) -> DeviceError {
    DeviceError::Failed(format!("a transfer buffer is not mapped: {error}"))
}

impl Backend for WgpuBackend {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn memory(&self) -> MemoryReport {
        MemoryReport {
            weights_bytes: self.weights.bytes,
            state_bytes: self.state.bytes,
            activations_bytes: self.plans.iter().map(|plan| plan.memory.bytes).sum(),
            available_bytes: None,
        }
    }

    fn upload(&mut self, id: WeightId, tensor: &HostTensor) -> Result<(), DeviceError> {
        self.weights.upload(&self.gpu, id, tensor)
    }

    fn alloc_state(&mut self, specs: &[StateSpec], num_blocks: u32, block_size: u32) -> Result<(), DeviceError> {
        self.state = State::new(&self.gpu, specs, num_blocks, block_size)?;
        Ok(())
    }

    fn compile(
        &mut self,
        program: &Program,
        bucket: Bucket,
        layout: &InputLayout,
        progress: Compiled<'_>,
    ) -> Result<PlanId, DeviceError> {
        use wgpu::BufferUsages as Usage;
        debug_assert_eq!(bucket, layout.bucket, "one plan, the layout's");
        if bucket.tokens > MAX_GRID {
            let problem =
                format!("steps of {} tokens, but a grid of the wgpu backend ends at {MAX_GRID}", bucket.tokens);
            return Err(DeviceError::Failed(problem));
        }
        let context = self.context.unwrap_or(layout.max_blocks_per_row.saturating_mul(layout.block_size));
        let memory = Memory::new(&self.gpu, &self.device.tuning, program, layout, context)?;
        let sizes = Sizes { memory: &memory, layout, context };
        if self.self_test {
            self.test_kernels(program, &sizes, progress)?;
        }
        let planned = self.lower(program, &sizes)?;
        let gpu = &*self.gpu;
        let replay = Replay::new(gpu, &mut self.pipelines.borrow_mut(), planned, progress)?;
        let vocab = program.logits.map_or(0, |slot| program.slots[slot.index()].width as usize);
        let logits = program.logits.map(|slot| memory.slot(slot));
        let logits = logits.map(|range| Logits { buffer: range.buffer.clone(), offset: range.offset });
        let row_bytes = (4 * vocab).max(size_of::<Sample>()) as u64;
        let output_bytes = 4 * u64::from(bucket.tokens) + u64::from(bucket.logit_rows) * row_bytes;
        let transfer = || -> Result<Transfer, DeviceError> {
            let upload = gpu.buffer("upload", 4 * layout.num_words() as u64, Usage::MAP_WRITE | Usage::COPY_SRC)?;
            upload.map_async(wgpu::MapMode::Write, .., |_| ());
            Ok(Transfer { upload, readback: gpu.buffer("readback", output_bytes, Usage::MAP_READ | Usage::COPY_DST)? })
        };
        let transfers = [transfer()?, transfer()?];
        gpu.wait()?;
        if self.context.is_none() {
            gpu.save_compiled();
        }
        self.plans.push(Plan { replay, memory, transfers, logits, vocab });
        Ok(PlanId(self.plans.len() as u32 - 1))
    }

    fn submit(&mut self, plan: PlanId, inputs: &StepInputs) -> Result<Ticket, DeviceError> {
        assert!(self.running.is_none(), "the wgpu backend runs one step at a time");
        if let Some(reloader) = &self.device.reloader {
            reloader.borrow_mut().look(&self.gpu, &self.pipelines);
        }
        let words = inputs.used_words();
        let (counts, upload_bytes) = (Counts::of(inputs), 4 * words.len() as u64);
        let step = Step { plan: plan.index(), transfer: (self.submitted % 2) as usize, counts, upload_bytes };
        self.start(step, words)?;
        self.submitted += 1;
        self.running = Some(step);
        Ok(Ticket(self.submitted))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<DeviceOutput<'_>, DeviceError> {
        assert_eq!(ticket.0, self.submitted, "the wgpu backend runs one step at a time");
        let Some(Step { plan, transfer, counts, .. }) = self.running.take() else {
            return Err(DeviceError::Failed("no step was submitted".into()));
        };
        self.gpu.wait()?;
        let plan = &self.plans[plan];
        let readback = &plan.transfers[transfer].readback;
        let [samples_at, logits_at, end] = plan.output_ends(counts);
        {
            let view = readback.get_mapped_range(0..end).map_err(not_mapped)?;
            let (flags, others) = view.split_at(samples_at as usize);
            let (samples, logits) = others.split_at((logits_at - samples_at) as usize);
            self.non_finite.clear();
            self.non_finite.extend_from_slice(bytemuck::cast_slice(flags));
            self.samples.clear();
            self.samples.extend_from_slice(bytemuck::cast_slice(samples));
            self.logits.clear();
            self.logits.extend_from_slice(bytemuck::cast_slice(logits));
        }
        readback.unmap();
        Ok(DeviceOutput { logits: &self.logits, samples: &self.samples, non_finite: &self.non_finite })
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
        self.state.copy_blocks(&self.gpu, pairs);
        self.gpu.check()
    }

    fn read_block(&mut self, layer: Layer, block: BlockId, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        out.clear();
        self.state.read_block(&self.gpu, layer.index(), block, out)
    }

    fn write_block(&mut self, layer: Layer, block: BlockId, bytes: &[u8]) -> Result<(), DeviceError> {
        self.state.write_block(&self.gpu, layer.index(), block, bytes)
    }
}
