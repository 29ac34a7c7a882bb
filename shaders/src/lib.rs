//! The wgpu backend: WGSL kernels on Vulkan, Metal and DX12, and on software Vulkan where there is no GPU.
//!
//! `wgsl/` holds the kernels; `compose` makes one text of a kernel's files and settings; `build.rs` checks every choice and
//! reflects the typed `table`; `tuning` picks shapes by class of device; `lower` turns a program into dispatches and `replay`
//! encodes them, one pass per step; `device` is the only door to wgpu.
//!
//! Invariant: after `compile` nothing is created on the device; a step is one upload, one pass, one readback.

mod adapter;
mod backend;
mod cache;
pub mod compose;
mod device;
pub mod lab;
mod layout;
mod lower;
mod pipelines;
pub mod reflect;
mod replay;
mod selftest;
mod state;
pub mod table;
mod tuned;
mod tuning;
mod weights;

pub use adapter::{AdapterChoice, AdapterInfo, AdapterKind, adapters};
pub use backend::{WgpuBackend, WgpuDevice};
pub use device::{BatchInvariant, GpuOptions};
pub use tuned::{TuningError, TuningFile};
pub use tuning::{AttentionTile, DeviceClass, LinearTile, Tuning};
