//! From the MODEL argument to a file or directory, and to a loaded model.
//!
//! Invariant: a path that exists wins, then a name inside the download directory, then a name of the hub; `demo` names the model
//! that `examples/quickstart.sh` fetches.

use std::ops::Deref;
use std::path::PathBuf;

use anyhow::{anyhow, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
#[cfg(feature = "hub")]
use kittiwake::hub::HubName;
use kittiwake::{Loaded, Options, Progress};

#[cfg(feature = "hub")]
use super::hub_args::HubArgs;

const DEMO_FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// Where models are looked for.
#[derive(Debug, Args)]
pub struct Source {
    /// Where `demo` and relative names are looked up.
    #[arg(long, default_value = "models", value_name = "DIR")]
    download_dir: PathBuf,
    /// Branch, tag or commit of a model of the hub [default: main].
    #[arg(long)]
    revision: Option<String>,
    #[cfg(feature = "hub")]
    #[command(flatten)]
    hub: HubArgs,
}

impl Source {
    /// Finds MODEL: a path, a name inside the download directory, `demo`, or `org/name[@revision][:file-or-quant]` of the hub, which
    /// is fetched where it is not cached.
    ///
    /// # Errors
    /// Nothing is there; the message says where it was looked for and what to run.
    pub fn locate(&self, model: &str) -> anyhow::Result<PathBuf> {
        if model == "demo" {
            let path = self.download_dir.join(DEMO_FILE);
            if !path.is_file() {
                bail!(
                    "the demo model is not at {}; run examples/quickstart.sh once, or point --download-dir at it",
                    path.display()
                );
            }
            return self.local(path);
        }
        let (direct, inside) = (PathBuf::from(model), self.download_dir.join(model));
        if let Some(path) = [&direct, &inside].into_iter().find(|path| path.exists()) {
            return self.local(path.clone());
        }
        #[cfg(feature = "hub")]
        if let Some(name) = HubName::parse(model) {
            return self.fetch(name);
        }
        bail!(
            "no model at {} or {} (MODEL is a directory, a .gguf file, `demo`, which examples/quickstart.sh fetches, or \
             org/name[@revision][:file-or-quant] of the hub)",
            direct.display(),
            inside.display()
        )
    }

    /// # Errors
    /// A revision is asked for of what has none.
    fn local(&self, path: PathBuf) -> anyhow::Result<PathBuf> {
        match self.revision.as_deref() {
            None | Some("main") => Ok(path),
            Some(revision) => {
                bail!("--revision {revision}: {} is a local path, which has no revisions", path.display())
            }
        }
    }

    /// Fetches a model of the hub, with a progress bar on a terminal.
    ///
    /// # Errors
    /// What `Hub::fetch` says.
    #[cfg(feature = "hub")]
    pub fn fetch(&self, mut name: HubName) -> anyhow::Result<PathBuf> {
        if let Some(revision) = &self.revision {
            if name.revision != "main" && name.revision != *revision {
                bail!("--revision {revision}: {name} names another one");
            }
            name.revision.clone_from(revision);
        }
        let style =
            ProgressStyle::with_template("{msg} {bar:40} {bytes}/{total_bytes} {eta}").expect("a valid template");
        let bar = ProgressBar::new(0).with_style(style); // draws on a terminal only
        let path = self.hub.hub()?.fetch(&name, &mut |file, done_bytes, total_bytes| {
            bar.set_message(file.to_owned());
            show(&bar, done_bytes, total_bytes);
        });
        bar.finish_and_clear();
        Ok(path?)
    }
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
