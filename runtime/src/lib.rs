//! Kittiwake's engine: scheduler, paged KV cache, programs and the CPU backends.
//!
//! Invariant: this crate knows no GPU, no async runtime and no HTTP. Data walks one way:
//! `Request -> Sequence -> StepPlan -> StepInputs -> Program -> logits -> Sampler -> StepOutput -> Event`.
//! `ARCHITECTURE.md` at the repository's root follows a request through these modules in eight steps.

pub mod backend;
pub mod engine;
pub mod error;
pub mod ids;
pub mod kv;
pub mod model;
pub mod program;
pub mod quantise;
pub mod request;
pub mod runner;
pub mod sample;
pub mod scheduler;
pub mod sequence;
pub mod step;
pub mod text;
pub mod weights;
