//! Pipelines by kernel and settings: asked for while a program is lowered, compiled together, in parallel.
//!
//! Invariant: a variant is compiled once per device, whatever number of ops and plans use it. A user's kernel takes the place
//! of the table's in the variants that it takes (`CustomKernel`); all kernels of one place share a layout, so that exchanging
//! them leaves bind groups alone.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use runtime::backend::Compiled;
use runtime::error::DeviceError;

use crate::compose::Settings;
use crate::device::Gpu;
use crate::lab::{CustomKernel, KernelError, Probe};
use crate::table::Kernel;

/// A variant's place in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PipelineId(usize);

/// One variant of a kernel.
struct Variant {
    kernel: &'static Kernel,
    settings: Settings,
    /// The built-in kernel, whatever a user has put in its place.
    built_in: bool,
    pipeline: Option<wgpu::ComputePipeline>,
}

/// All variants of a device.
#[derive(Default)]
pub(crate) struct Pipelines {
    variants: Vec<Variant>,
    by_key: HashMap<(&'static str, Settings, bool), PipelineId>,
    layouts: HashMap<&'static str, wgpu::BindGroupLayout>,
    /// Users' kernels, at most one for each place.
    custom: Vec<CustomKernel>,
    /// Watches the users' kernels, in the kernel lab's check.
    probe: Option<Probe>,
    /// Times that a user's kernel was asked for.
    num_custom_asked: u64,
}

impl Pipelines {
    /// With users' kernels, watched by a probe or not.
    pub(crate) fn with_custom(custom: Vec<CustomKernel>, probe: Option<Probe>) -> Self {
        Self { custom, probe, ..Self::default() }
    }

    /// The place of a variant that `compile` will make; with `built_in` a user's kernel does not come into question.
    pub(crate) fn ask(&mut self, gpu: &Gpu, kernel: &'static str, settings: Settings, built_in: bool) -> PipelineId {
        self.num_custom_asked += u64::from(!built_in && custom_for(&self.custom, kernel, &settings).is_some());
        let variants = &mut self.variants;
        *self.by_key.entry((kernel, settings.clone(), built_in)).or_insert_with(|| {
            let kernel = Kernel::named(kernel).expect("the table names its kernels");
            self.layouts.entry(kernel.name).or_insert_with(|| gpu.layout(kernel));
            variants.push(Variant { kernel, settings, built_in, pipeline: None });
            PipelineId(variants.len() - 1)
        })
    }

    /// The number that a user's kernel fixes for a setting that the grid depends on; else what the tuning table says.
    pub(crate) fn shape(&self, kernel: &str, setting: &str, tuned: u32) -> u32 {
        self.custom(kernel).and_then(|custom| custom.shape(setting)).unwrap_or(tuned)
    }

    /// The user's kernel in this place.
    pub(crate) fn custom(&self, kernel: &str) -> Option<&CustomKernel> {
        self.custom.iter().find(|custom| custom.kernel.name == kernel)
    }

    /// Compiles what was asked for since the last time, on all cores. `progress(done, total)` is told of variants.
    ///
    /// # Errors
    /// The first that the device refuses; the others are there.
    pub(crate) fn compile(&mut self, gpu: &Gpu, progress: Compiled<'_>) -> Result<(), DeviceError> {
        let missing: Vec<usize> =
            (0..self.variants.len()).filter(|&index| self.variants[index].pipeline.is_none()).collect();
        let mut first_error = Ok(());
        for (index, made) in self.compile_all(gpu, &self.custom, &missing, progress) {
            match made {
                Ok(pipeline) => self.variants[index].pipeline = Some(pipeline),
                Err(error) => first_error = first_error.and(Err(error)),
            }
        }
        first_error
    }

    /// Compiles some variants on all cores; `custom` goes before the table.
    fn compile_all(
        &self,
        gpu: &Gpu,
        custom: &[CustomKernel],
        wanted: &[usize],
        progress: Compiled<'_>,
    ) -> Vec<(usize, Result<wgpu::ComputePipeline, DeviceError>)> {
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let work = |report: &mut dyn FnMut(usize)| {
            let mut made = Vec::new();
            while let Some(&index) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
                made.push((index, self.compile_one(gpu, custom, &self.variants[index])));
                report(done.fetch_add(1, Ordering::Relaxed) + 1);
            }
            made
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(wanted.len());
        std::thread::scope(|scope| {
            let workers: Vec<_> = (1..threads).map(|_| scope.spawn(|| work(&mut |_| ()))).collect();
            // Only this thread reports, of all.
            let mut made = work(&mut |done| progress(done as u32, wanted.len() as u32));
            for worker in workers {
                made.extend(worker.join().expect("compiling a pipeline does not panic"));
            }
            if !wanted.is_empty() {
                progress(wanted.len() as u32, wanted.len() as u32);
            }
            made
        })
    }

    fn compile_one(
        &self,
        gpu: &Gpu,
        custom: &[CustomKernel],
        variant: &Variant,
    ) -> Result<wgpu::ComputePipeline, DeviceError> {
        let Variant { kernel, settings, built_in, .. } = variant;
        let custom = if *built_in { &[] } else { custom };
        let layout = &self.layouts[kernel.name];
        let failed = |error: &dyn std::fmt::Display| DeviceError::Failed(error.to_string());
        match (custom_for(custom, kernel.name, settings), &self.probe) {
            (Some(custom), Some(probe)) => {
                let composed = custom.compose(settings).map_err(|error| failed(&error))?;
                probe.pipeline(gpu, kernel, &composed, layout)
            }
            (Some(custom), None) => {
                let composed = custom.compose(settings).map_err(|error| failed(&error))?;
                gpu.pipeline(kernel, &composed, layout)
            }
            (None, _) => gpu.pipeline(kernel, &kernel.compose(settings).map_err(|error| failed(&error))?, layout),
        }
    }

    /// Whether a newer text runs the same variants on the same grids as the one whose place it is to take.
    ///
    /// # Errors
    /// What it fixes is not what the older one fixes.
    pub(crate) fn keeps_grid(&self, newer: &CustomKernel) -> Result<(), KernelError> {
        let older = self.custom(newer.kernel.name);
        let words = |kernel: &CustomKernel| {
            let fixed: Vec<String> = kernel.fixed().iter().map(|(name, value)| format!("{name}={value}")).collect();
            if fixed.is_empty() { "nothing".to_owned() } else { fixed.join(" ") }
        };
        match older {
            Some(older) if older.fixed() != newer.fixed() => {
                let (now, before) = (words(newer), words(older));
                let problem =
                    format!("fixes {now} where it fixed {before}, and grids follow that: restart to serve with it");
                Err(KernelError::Wrong { file: newer.file.clone(), problem })
            }
            _ => Ok(()),
        }
    }

    /// Puts a newer text in the place of a user's kernel, everywhere or nowhere.
    ///
    /// # Errors
    /// The device refuses a variant; the older text stays.
    pub(crate) fn replace(&mut self, gpu: &Gpu, newer: CustomKernel) -> Result<(), DeviceError> {
        let name = newer.kernel.name;
        let custom = [newer];
        let is_its = |variant: &Variant| !variant.built_in && custom_for(&custom, name, &variant.settings).is_some();
        let wanted: Vec<usize> = (0..self.variants.len())
            .filter(|&index| self.variants[index].kernel.name == name && is_its(&self.variants[index]))
            .collect();
        let made = self.compile_all(gpu, &custom, &wanted, &mut |_, _| ());
        let made = made.into_iter().map(|(index, made)| Ok((index, made?))).collect::<Result<Vec<_>, DeviceError>>()?;
        for (index, pipeline) in made {
            self.variants[index].pipeline = Some(pipeline);
        }
        self.custom.retain(|older| older.kernel.name != name);
        self.custom.extend(custom);
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

    /// The kernel that a variant is one of.
    pub(crate) fn kernel(&self, id: PipelineId) -> &'static str {
        self.variants[id.0].kernel.name
    }

    /// Times that a user's kernel was asked for.
    pub(crate) fn num_custom_asked(&self) -> u64 {
        self.num_custom_asked
    }

    /// Notes of the probe.
    pub(crate) fn probe(&self) -> Option<&Probe> {
        self.probe.as_ref()
    }
}

/// The user's kernel that runs a variant.
fn custom_for<'a>(custom: &'a [CustomKernel], kernel: &str, settings: &Settings) -> Option<&'a CustomKernel> {
    custom.iter().find(|custom| custom.kernel.name == kernel && custom.takes(settings))
}
