//! Pipelines by kernel and settings: asked for while a program is lowered, compiled together, in parallel.
//!
//! Invariant: a variant is compiled once per device, whatever number of ops and plans use it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use runtime::error::DeviceError;

use crate::compose::Settings;
use crate::device::Gpu;
use crate::table::Kernel;

/// A variant's place in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PipelineId(usize);

/// One variant of a kernel.
struct Variant {
    kernel: &'static Kernel,
    settings: Settings,
    pipeline: Option<wgpu::ComputePipeline>,
}

/// All variants of a device.
#[derive(Default)]
pub(crate) struct Pipelines {
    variants: Vec<Variant>,
    by_key: HashMap<(&'static str, Settings), PipelineId>,
    layouts: HashMap<&'static str, wgpu::BindGroupLayout>,
}

impl Pipelines {
    /// The place of a variant that `compile` will make.
    pub(crate) fn ask(&mut self, gpu: &Gpu, kernel: &'static str, settings: Settings) -> PipelineId {
        let variants = &mut self.variants;
        *self.by_key.entry((kernel, settings.clone())).or_insert_with(|| {
            let kernel = Kernel::named(kernel).expect("the table names its kernels");
            self.layouts.entry(kernel.name).or_insert_with(|| gpu.layout(kernel));
            variants.push(Variant { kernel, settings, pipeline: None });
            PipelineId(variants.len() - 1)
        })
    }

    /// Compiles what was asked for since the last time, on all cores.
    ///
    /// # Errors
    /// The first that the device refuses.
    pub(crate) fn compile(&mut self, gpu: &Gpu) -> Result<(), DeviceError> {
        let (variants, layouts) = (&self.variants, &self.layouts);
        let missing: Vec<usize> = (0..variants.len()).filter(|&i| variants[i].pipeline.is_none()).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            let mut made = Vec::new();
            while let Some(&index) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                let Variant { kernel, settings, .. } = &variants[index];
                let pipeline = kernel
                    .compose(settings)
                    .map_err(|error| DeviceError::Failed(error.to_string()))
                    .and_then(|composed| gpu.pipeline(kernel, &composed, &layouts[kernel.name]));
                made.push((index, pipeline));
            }
            made
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(missing.len());
        let made: Vec<_> = std::thread::scope(|scope| {
            let workers: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let mut made = work();
            for worker in workers {
                made.extend(worker.join().expect("compiling a pipeline does not panic"));
            }
            made
        });
        for (index, pipeline) in made {
            self.variants[index].pipeline = Some(pipeline?);
        }
        Ok(())
    }

    /// What was asked for so far.
    pub(crate) fn variants(&self) -> impl Iterator<Item = (&'static str, Settings)> {
        self.variants.iter().map(|variant| (variant.kernel.name, variant.settings.clone()))
    }

    pub(crate) fn layout(&self, id: PipelineId) -> &wgpu::BindGroupLayout {
        &self.layouts[self.variants[id.0].kernel.name]
    }

    /// # Panics
    /// Before `compile`.
    pub(crate) fn pipeline(&self, id: PipelineId) -> &wgpu::ComputePipeline {
        self.variants[id.0].pipeline.as_ref().expect("variants are compiled before they run")
    }
}
