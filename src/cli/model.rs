//! From the MODEL argument to a file or directory, and to a loaded model.
//!
//! Invariant: only local files are opened; `demo` names the model that `examples/quickstart.sh` fetches.

use std::ops::Deref;
use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail};
use indicatif::{ProgressBar, ProgressStyle};
use kittiwake::{Loaded, Options, Progress};

const DEMO_FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// Finds MODEL: a path, a name inside the download directory, or `demo`.
///
/// # Errors
/// Nothing is there; the message says where it was looked for and what to run.
pub fn locate(model: &str, download_dir: &Path) -> anyhow::Result<PathBuf> {
    if model == "demo" {
        let path = download_dir.join(DEMO_FILE);
        if !path.is_file() {
            bail!(
                "the demo model is not at {}; run examples/quickstart.sh once, or point --download-dir at it",
                path.display()
            );
        }
        return Ok(path);
    }
    let (direct, inside) = (PathBuf::from(model), download_dir.join(model));
    for path in [&direct, &inside] {
        if path.exists() {
            return Ok(path.clone());
        }
    }
    bail!(
        "no model at {} or {} (MODEL is a directory, a .gguf file, or `demo`, \
         which examples/quickstart.sh fetches)",
        direct.display(),
        inside.display()
    )
}

/// The name that `/v1/models` shows when no `--served-model-name` is given.
pub fn default_name(model: &str) -> String {
    model.trim_end_matches('/').to_owned()
}

/// A loaded model, whose engine is shut down when its user is done, whatever way that is: a process that ends while a
/// device's driver is at work may crash.
pub struct Running(Loaded);

impl Deref for Running {
    type Target = Loaded;

    fn deref(&self) -> &Loaded {
        &self.0
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.engine.shutdown();
    }
}

fn show(bar: &ProgressBar, done: u64, total: u64) {
    bar.set_length(total);
    bar.set_position(done);
}

/// Loads a model, with a progress bar on a terminal when it takes long.
///
/// # Errors
/// What `kittiwake::load` says, with the model's path.
pub fn load(options: &Options) -> anyhow::Result<Running> {
    let style = |template| ProgressStyle::with_template(template).expect("a valid template");
    let uploads = style("loading {bar:40} {bytes}/{total_bytes} {eta}");
    let kernels = style("kernels {bar:40} {pos}/{len} {eta}");
    let bar = ProgressBar::new(0).with_style(uploads); // draws on a terminal only
    let mut uploading = true;
    let loaded = kittiwake::load(options, &mut |progress| match progress {
        Progress::Upload { done_bytes, total_bytes } => show(&bar, done_bytes, total_bytes),
        Progress::Compile { done, total } => {
            if std::mem::take(&mut uploading) {
                bar.set_style(kernels.clone());
                bar.reset();
            }
            show(&bar, done.into(), total.into());
        }
    });
    bar.finish_and_clear();
    // Only the error's own text: it names file and cause, and its chain would say the cause again.
    loaded.map(Running).map_err(|error| {
        let (path, problem) = (options.model.display().to_string(), error.to_string());
        match problem.contains(&path) {
            true => anyhow!("cannot load {problem}"),
            false => anyhow!("cannot load {path}: {problem}"),
        }
    })
}
