//! `kernel bench`: the time of a kernel at one shape, beside the built-in one, against what this device can do.
//!
//! Invariant: both kernels, copy bandwidth and peak arithmetic are measured in one run on one device; the two kernels take
//! turns, and the median of each counts. A sample is many dispatches in one pass, timed by the device's own clock where
//! it has one.

use std::collections::BTreeMap;

use runtime::backend::Backend;
use runtime::backend::cases::build_case;
use runtime::ids::{PlanId, WeightId};
use serde::Serialize;

use super::timer::Timer;
use super::{CustomKernel, KernelError, Lab, Shape};
use crate::backend::WgpuBackend;
use crate::pipelines::Pipelines;
use crate::replay::Counts;

/// Samples of each kernel.
const ROUNDS: usize = 11;
/// Seconds of one sample, about.
const SAMPLE_S: f64 = 0.02;

/// What a bench measured.
#[derive(Clone, Debug, Serialize)]
pub struct BenchReport {
    /// The kernel of the table.
    pub kernel: &'static str,
    /// The device in words.
    pub device: String,
    /// `device` or `host`: whose clock.
    pub clock: &'static str,
    /// Whether this build compiles runtime checks into kernels, which slows them down.
    pub runtime_checks: bool,
    /// Sizes of the op.
    pub shape: BTreeMap<&'static str, String>,
    /// Bytes that cross memory in one dispatch at least.
    pub bytes: u64,
    /// Operations on floats in one dispatch.
    pub flops: u64,
    /// What the device can do.
    pub roofline: Roofline,
    /// The user's kernel if there is one, then the built-in one.
    pub kernels: Vec<Measured>,
    /// Time of the built-in kernel over that of the user's.
    pub speedup: Option<f64>,
}

/// What a device can do, measured with two tiny kernels.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Roofline {
    /// Bytes read and written by a copy of buffers too large for caches, in 10^9 per second.
    pub copy_gb_per_s: f64,
    /// Multiply-adds of f32 in registers, in 10^9 operations per second.
    pub fma_gflop_per_s: f64,
}

/// One kernel's speed.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// `built-in`, or the user's file.
    pub name: String,
    /// Median time of one dispatch, in microseconds.
    pub us: f64,
    /// Fastest sample.
    pub min_us: f64,
    /// 10^9 bytes per second.
    pub gb_per_s: f64,
    /// 10^9 operations per second.
    pub gflop_per_s: f64,
    /// Time that the roofline allows over the time taken, in percent. Above 100 where caches hold the data.
    pub roofline_percent: f64,
    /// What the roofline is bounded by here: `memory` or `arithmetic`.
    pub bound: &'static str,
}

impl Lab {
    /// Measures the kernel of the table called `kernel`, and a user's beside it.
    ///
    /// # Errors
    /// The device failed, or does not take the shape.
    pub fn bench(
        &self,
        kernel: &'static str,
        custom: Option<&CustomKernel>,
        shape: &Shape,
    ) -> Result<BenchReport, KernelError> {
        let timer = Timer::new(&self.gpu)?;
        let roofline = super::roofline::measure(&self.gpu, &timer)?;
        let mut subjects = Vec::new();
        if let Some(custom) = custom {
            subjects.push((custom.file.clone(), Subject::new(self, kernel, Some(custom), shape)?));
        }
        subjects.push(("built-in".to_owned(), Subject::new(self, kernel, None, shape)?));
        let mut samples = vec![Vec::new(); subjects.len()];
        let repeats: Vec<u32> =
            subjects.iter().map(|(_, subject)| subject.repeats(&timer)).collect::<Result<_, _>>()?;
        for _ in 0..ROUNDS {
            for (i, (_, subject)) in subjects.iter().enumerate() {
                samples[i].push(subject.seconds(&timer, repeats[i])?);
            }
        }
        let kernels: Vec<Measured> = subjects
            .into_iter()
            .zip(samples)
            .map(|((name, _), samples)| measured(name, samples, shape, roofline))
            .collect();
        let speedup = match kernels.as_slice() {
            [custom, built_in] => Some(built_in.us / custom.us),
            _ => None,
        };
        Ok(BenchReport {
            kernel,
            device: self.name(),
            clock: timer.clock(),
            runtime_checks: cfg!(debug_assertions),
            shape: shape.sizes.clone(),
            bytes: shape.bytes,
            flops: shape.flops,
            roofline,
            kernels,
            speedup,
        })
    }
}

fn measured(name: String, mut samples: Vec<f64>, shape: &Shape, roofline: Roofline) -> Measured {
    samples.sort_by(f64::total_cmp);
    let seconds = samples[samples.len() / 2];
    let memory_s = shape.bytes as f64 / (roofline.copy_gb_per_s * 1e9);
    let arithmetic_s = shape.flops as f64 / (roofline.fma_gflop_per_s * 1e9);
    Measured {
        name,
        us: seconds * 1e6,
        min_us: samples[0] * 1e6,
        gb_per_s: shape.bytes as f64 / seconds / 1e9,
        gflop_per_s: shape.flops as f64 / seconds / 1e9,
        roofline_percent: 100.0 * memory_s.max(arithmetic_s) / seconds,
        bound: if memory_s >= arithmetic_s { "memory" } else { "arithmetic" },
    }
}

/// A kernel with everything that it is dispatched on.
struct Subject {
    backend: WgpuBackend,
    counts: Counts,
    kernel: &'static str,
}

impl Subject {
    fn new(lab: &Lab, kernel: &'static str, custom: Option<&CustomKernel>, shape: &Shape) -> Result<Self, KernelError> {
        let device = lab.device_with(Pipelines::with_custom(custom.cloned().into_iter().collect(), None));
        let built = build_case(&shape.case);
        let mut backend = WgpuBackend::untested(&device);
        for (i, tensor) in built.tensors.iter().enumerate() {
            backend.upload(WeightId(i as u32), tensor)?;
        }
        let layout = built.step.layout();
        backend.alloc_state(&built.program.states, built.num_blocks, layout.block_size)?;
        let plan = backend.compile(&built.program, layout.bucket, layout, &mut |_, _| ())?;
        if let Some(custom) = custom.filter(|_| device.pipelines.borrow().num_custom_asked() == 0) {
            let fixed: Vec<String> = custom.fixed().iter().map(|(name, value)| format!("{name}={value}")).collect();
            let problem = format!("fixes {}, and this shape asks for other values", fixed.join(" "));
            return Err(KernelError::Wrong { file: custom.file.clone(), problem });
        }
        // Leaves the step's inputs on the device. What earlier steps would have cached is not computed: zeros take as long.
        let ticket = backend.submit(plan, &built.step)?;
        backend.wait(ticket)?;
        Ok(Self { backend, counts: Counts::of(&built.step), kernel })
    }

    /// Dispatches that take about a sample's time.
    fn repeats(&self, timer: &Timer) -> Result<u32, KernelError> {
        self.seconds(timer, 1)?;
        let once = self.seconds(timer, 1)?;
        let few = (SAMPLE_S / 10.0 / once.max(1e-7)).clamp(1.0, 1000.0) as u32;
        let seconds = self.seconds(timer, few)?;
        Ok((SAMPLE_S / seconds.max(1e-7)).clamp(1.0, 10_000.0) as u32)
    }

    /// Seconds of one dispatch, the mean of `repeats`.
    fn seconds(&self, timer: &Timer, repeats: u32) -> Result<f64, KernelError> {
        // The two halves of split attention are one op.
        let is_wanted = |name: &str| name == self.kernel || self.kernel == "attention" && name == "attention_combine";
        let seconds = timer.seconds(&mut |pass| {
            for _ in 0..repeats {
                self.backend.encode_only(PlanId(0), self.counts, pass, &is_wanted);
            }
        })?;
        Ok(seconds / f64::from(repeats))
    }
}
