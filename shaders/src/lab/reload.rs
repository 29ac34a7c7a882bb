//! `--kernel NAME=FILE`: users' kernels in a backend that serves, read again between steps when their files change.
//!
//! Invariant: a kernel runs in a step only after it has kept the contract and passed a self-test on this device; one that
//! fails leaves the older one in its place, and the log says why. A text whose grid would differ is refused: grids of
//! running plans are fixed.

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use super::{CustomKernel, KernelError, Lab, quick_cases_of};
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
    let report = Lab::on(Rc::clone(gpu)).check(&kernel, &quick_cases_of(&kernel), &mut |_| ())?;
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
