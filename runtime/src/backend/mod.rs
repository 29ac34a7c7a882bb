//! What a device must be able to do, as one object-safe trait, and the step inputs that every device reads.
//!
//! Invariant: after `alloc_state` and `compile` nothing is allocated on the device; what changes from step to step is in
//! `StepInputs`, uploaded once. `runner` is the only caller.

mod cached;
pub mod cases;
pub mod cpu;
pub mod inputs;
mod pool;
pub mod reference;
mod route;

pub use inputs::{InputLayout, MAX_TREE_TOKENS, StepInputs, TreeToken};

use crate::error::DeviceError;
use crate::ids::{BlockId, Layer, PlanId, WeightId};
use crate::program::{Program, StateSpec};
use crate::sample::Sample;
use crate::weights::HostTensor;

/// The padded size of one compiled plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Bucket {
    /// Tokens of the step.
    pub tokens: u32,
    /// Sequences of the step.
    pub rows: u32,
    /// Tokens whose logits are asked for.
    pub logit_rows: u32,
}

/// Which buckets a backend wants plans for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Buckets {
    /// One plan of the largest size; real sizes are read from the step inputs, nothing is padded.
    Exact,
    /// Token counts, ascending; a step takes the smallest that holds it and is padded up to it.
    Padded(Vec<u32>),
}

/// What a backend can do, as a value.
#[derive(Clone, Debug)]
pub struct Caps {
    /// `cpu`, `reference`, later `wgpu`, `cuda`.
    pub name: &'static str,
    /// The device in words, for logs, `/health` and `kittiwake devices`.
    pub device: String,
    /// See `Buckets`.
    pub buckets: Buckets,
    /// Whether one row's result never depends on the rest of the batch, bitwise.
    pub batch_invariant: bool,
    /// The largest buffer an op may bind, in bytes; `u64::MAX` where there is no limit.
    pub max_binding_bytes: u64,
    /// The most storage buffers one op may bind.
    pub max_bindings: u32,
    /// Kernels that the start-up self-test has replaced by slower ones, and why; known after `compile`.
    pub replaced_kernels: Vec<String>,
}

/// Device memory in bytes, as far as the device tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryReport {
    /// Bytes that weights occupy.
    pub weights_bytes: u64,
    /// Bytes that paged state occupies.
    pub state_bytes: u64,
    /// Bytes that activations and inputs occupy.
    pub activations_bytes: u64,
    /// Bytes still free on the device; `None` where it does not tell.
    pub available_bytes: Option<u64>,
}

/// A started step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(pub u64);

/// What a finished step left for the host.
#[derive(Clone, Copy, Debug)]
pub struct DeviceOutput<'a> {
    /// `[read_rows, vocab]`, row-major: of those logit rows that are read back.
    pub logits: &'a [f32],
    /// `[sampled_rows]`: what `Sample` found in the others, without padding rows.
    pub samples: &'a [Sample],
    /// `[tokens]`: not 0 where `CheckFinite` met a NaN or an infinity.
    pub non_finite: &'a [u32],
}

/// Hears how many kernels of how many are compiled and tested: `(done, total)`.
pub type Compiled<'a> = &'a mut dyn FnMut(u32, u32);

/// A device that runs programs. Implementations: `reference`, `cpu`; later the `shaders` and `cuda` crates.
pub trait Backend {
    /// What it can do.
    fn caps(&self) -> &Caps;

    /// What it holds and what is left.
    fn memory(&self) -> MemoryReport;

    /// Takes one weight (once; programs share it), repacking it as it likes.
    ///
    /// # Errors
    /// Out of memory, or the device failed.
    fn upload(&mut self, id: WeightId, tensor: &HostTensor) -> Result<(), DeviceError>;

    /// Allocates every layer's state for `num_blocks` blocks of `block_size` tokens, block 0 (padding) included.
    ///
    /// # Errors
    /// Out of memory, or the device failed.
    fn alloc_state(&mut self, specs: &[StateSpec], num_blocks: u32, block_size: u32) -> Result<(), DeviceError>;

    /// Prepares a program that `program::check` has passed for steps of up to `bucket`; the inputs' layout is fixed here. Where
    /// that takes long, `progress` hears of it.
    ///
    /// # Errors
    /// Out of memory, or the device failed.
    fn compile(
        &mut self,
        program: &Program,
        bucket: Bucket,
        layout: &InputLayout,
        progress: Compiled<'_>,
    ) -> Result<PlanId, DeviceError>;

    /// Starts one step and returns at once where the device works on its own.
    ///
    /// # Errors
    /// The device failed.
    fn submit(&mut self, plan: PlanId, inputs: &StepInputs) -> Result<Ticket, DeviceError>;

    /// Waits for a started step.
    ///
    /// # Errors
    /// The device failed.
    fn wait(&mut self, ticket: Ticket) -> Result<DeviceOutput<'_>, DeviceError>;

    /// Copies whole blocks of every layer's state, in order.
    ///
    /// # Errors
    /// The device failed.
    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError>;

    /// Reads one block of one layer, all planes back to back.
    ///
    /// # Errors
    /// The device failed.
    fn read_block(&mut self, layer: Layer, block: BlockId, out: &mut Vec<u8>) -> Result<(), DeviceError>;

    /// Writes one block of one layer, as `read_block` gave it.
    ///
    /// # Errors
    /// The device failed.
    fn write_block(&mut self, layer: Layer, block: BlockId, bytes: &[u8]) -> Result<(), DeviceError>;
}
