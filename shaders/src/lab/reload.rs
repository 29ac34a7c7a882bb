//! `--kernel NAME=FILE`: users' kernels in a backend that serves, read again between steps when their files change.
//!
//! Invariant: a kernel runs in a step only after it has kept the contract and passed a self-test on this device; one that
//! fails leaves the older one in its place, and the log says why. A text whose grid would differ is refused: grids of
//! running plans are fixed.

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use super::{CheckReport, CustomKernel, KernelError, Lab, quick_cases_of};
use crate::compose::Settings;
use crate::device::Gpu;
use crate::pipelines::Pipelines;

/// A user's kernel by its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelFile {
    /// The kernel of the table whose place it takes.
    pub kernel: String,
    /// The file.
    pub file: PathBuf,
}

/// Files are looked at no more often.
const PERIOD: Duration = Duration::from_millis(200);

/// Watches the files of a backend's kernels.
pub(crate) struct Reloader {
    watched: Vec<Watched>,
    looked: Instant,
}

struct Watched {
    file: KernelFile,
    stamp: Stamp,
}

/// What changes when a file does: its time and its length.
type Stamp = Option<(SystemTime, u64)>;

fn stamp(file: &KernelFile) -> Stamp {
    let metadata = std::fs::metadata(&file.file).ok()?;
    Some((metadata.modified().ok()?, metadata.len()))
}

/// Reads a kernel and tries it on the device.
fn load(gpu: &Rc<Gpu>, file: &KernelFile) -> Result<CustomKernel, KernelError> {
    let kernel = CustomKernel::load(&file.kernel, &file.file, &Settings::new())?;
    // Requests wait meanwhile: the first finding is enough.
    let is_clean = &mut |report: &CheckReport| report.failures.is_empty() && report.faults.is_empty();
    let report = Lab::on(Rc::clone(gpu)).check(&kernel, &quick_cases_of(&kernel), is_clean)?;
    if report.passed() {
        return Ok(kernel);
    }
    Err(KernelError::Wrong { file: kernel.file, problem: format!("failed the self-test\n{report}") })
}

impl Reloader {
    /// Reads and tries the kernels that a backend starts with.
    ///
    /// # Errors
    /// The first that may not serve.
    pub(crate) fn start(gpu: &Rc<Gpu>, files: &[KernelFile]) -> Result<(Vec<CustomKernel>, Self), KernelError> {
        let watched = files.iter().map(|file| Watched { file: file.clone(), stamp: stamp(file) }).collect();
        let kernels = files.iter().map(|file| load(gpu, file)).collect::<Result<Vec<_>, _>>()?;
        for kernel in &kernels {
            let fixed: Vec<String> = kernel.fixed().iter().map(|(name, value)| format!("{name}={value}")).collect();
            tracing::info!(kernel = kernel.kernel.name, file = %kernel.file, fixed = fixed.join(" "), "kernel loaded");
        }
        Ok((kernels, Self { watched, looked: Instant::now() }))
    }

    /// Takes in what changed; called between steps.
    pub(crate) fn look(&mut self, gpu: &Rc<Gpu>, pipelines: &RefCell<Pipelines>) {
        if self.watched.is_empty() || self.looked.elapsed() < PERIOD {
            return;
        }
        self.looked = Instant::now();
        for Watched { file, stamp: last } in &mut self.watched {
            let now = stamp(file);
            if now == *last {
                continue;
            }
            *last = now;
            let (kernel, path) = (file.kernel.as_str(), file.file.display());
            let replaced = load(gpu, file).and_then(|newer| {
                let mut pipelines = pipelines.borrow_mut();
                pipelines.keeps_grid(&newer)?;
                Ok(pipelines.replace(gpu, newer)?)
            });
            match replaced {
                Ok(()) => tracing::info!(kernel, file = %path, "kernel reloaded"),
                Err(error) => tracing::warn!(kernel, file = %path, "the kernel from before stays: {error}"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use runtime::backend::cases::{Case, CaseOp, Tolerance, build_case, run_built};

    use super::*;
    use crate::adapter::AdapterChoice;
    use crate::backend::{WgpuBackend, WgpuDevice};
    use crate::device::GpuOptions;
    use crate::lab::template;

    /// A file that goes with its test.
    struct Wgsl(PathBuf);

    impl Wgsl {
        fn write(&self, text: &str) {
            std::fs::write(&self.0, text).expect("a scratch file");
        }
    }

    impl Drop for Wgsl {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn a_changed_file_runs_from_the_next_step_on_unless_it_is_wrong() {
        let wgsl = Wgsl(std::env::temp_dir().join(format!("kittiwake reload {}.wgsl", std::process::id())));
        let right = template("select_rows").expect("a kernel");
        // Wrong where no case of the self-test looks, so that one can see which text runs.
        let marked = right.replace("= x[", "= u32(params.width == 12u) ^ x[");
        wgsl.write(&right);
        let file = KernelFile { kernel: "select_rows".into(), file: wgsl.0.clone() };
        let options = GpuOptions { kernels: vec![file], self_test: false, ..GpuOptions::default() };
        let device = WgpuDevice::open(&AdapterChoice::Best, options.clone()).expect("software Vulkan");
        let tolerance = Tolerance { relative_rms: 0.0, relative_max: 0.0, reason: "not compared" };
        let op = CaseOp::SelectRows { width: 12, tokens: 3, logit_rows: 2 };
        let run = || {
            // Not so soon that nobody looks.
            device.reloader.as_ref().expect("there is a file").borrow_mut().looked -= PERIOD;
            let built = build_case(&Case { op: op.clone(), tolerance, seed: 1 });
            run_built(&mut WgpuBackend::new(&device), &built).expect("it runs")
        };
        let before = run();
        wgsl.write(&marked);
        let after = run();
        assert!(before.iter().zip(&after).all(|(a, b)| a.to_bits() ^ b.to_bits() == 1), "{before:?} {after:?}");
        // Not WGSL, wrong, out of bounds, another grid: what ran before runs on.
        let wrong = right.replace("= x[", "= 1u ^ x[");
        let outside = right.replace("if id.x", "out[arrayLength(&out)] = 0u;\n    if id.x");
        let other_grid = right.replace("= 32u; //!set lanes", "= 16u; // lanes");
        for text in ["nonsense", &wrong, &outside, &other_grid] {
            assert_ne!(text, right);
            wgsl.write(text);
            assert_eq!(run(), after, "{text}");
        }
        // Nor may a backend start with it.
        assert!(
            WgpuDevice::open(&AdapterChoice::Best, options.clone()).is_ok(),
            "another grid is one's own before the start"
        );
        wgsl.write(&wrong);
        let error = WgpuDevice::open(&AdapterChoice::Best, options).err().expect("refused").to_string();
        assert!(error.contains("failed the self-test") && error.contains("first of "), "{error}");
        wgsl.write(&right);
        assert_eq!(run(), before);
    }
}
