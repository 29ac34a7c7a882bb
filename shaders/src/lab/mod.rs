//! The kernel lab: a user's WGSL file in the place of a built-in kernel, checked against the reference, measured beside the
//! built-in one, translated to what drivers see, and served with.
//!
//! `CustomKernel` is such a file; `Lab` is a device to try it on. Everything works on software Vulkan.
//!
//! Invariant: a kernel is judged by the backend that serves it: the same lowering, the same buffers, the same settings.

mod bench;
mod cases;
mod check;
mod contract;
mod custom;
mod export;
mod instrument;
mod list;
mod probe;
mod reload;
mod roofline;
mod shape;
mod timer;
mod tune;

use std::rc::Rc;

pub use bench::{BenchReport, Measured, Roofline};
pub(crate) use cases::meets;
pub use cases::{cases_of, quick_cases_of};
pub use check::{CheckReport, Failure, WrongElement};
pub use contract::Difference;
pub use custom::{CustomKernel, KernelError, kernel_named};
pub use export::{Target, export};
pub use list::{BindingRow, KernelInfo, SettingRow, ToleranceRow, list, template};
pub use probe::Fault;
pub(crate) use probe::Probe;
pub use reload::KernelFile;
pub(crate) use reload::Reloader;
pub use shape::{Shape, shape};
pub use tune::{Choice, TuneOptions, TuneProgress, TuneReport, Workload};

use crate::adapter::AdapterChoice;
use crate::backend::WgpuDevice;
use crate::device::{Gpu, GpuOptions};
use crate::pipelines::Pipelines;

/// A device to try kernels on.
pub struct Lab {
    gpu: Rc<Gpu>,
    /// Threads of the reference.
    threads: usize,
}

impl Lab {
    /// Opens an adapter.
    ///
    /// # Errors
    /// There is none, or it cannot be opened.
    pub fn open(choice: &AdapterChoice, options: GpuOptions) -> Result<Self, KernelError> {
        Ok(Self::on(Rc::new(Gpu::open(choice, options)?)))
    }

    pub(crate) fn on(gpu: Rc<Gpu>) -> Self {
        Self { gpu, threads: std::thread::available_parallelism().map_or(1, usize::from) }
    }

    /// The device in words.
    pub fn name(&self) -> String {
        format!("{} ({})", self.gpu.adapter.name, self.gpu.adapter.api)
    }

    fn device_with(&self, pipelines: Pipelines) -> WgpuDevice {
        WgpuDevice::with_pipelines(Rc::clone(&self.gpu), pipelines)
    }
}
