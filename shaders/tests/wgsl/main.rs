//! The WGSL backend from outside: what its memory does, and what its kernels are for other compilers.
//!
//! What its kernels compute is held in the workspace's `tests/`: `ops.rs`, `golden.rs`, `engine.rs`, `demo.rs`.

mod cache;
#[path = "../../../tests/support/gpu.rs"]
mod gpu;
mod lost;
mod memory;
mod targets;
mod tuning;
