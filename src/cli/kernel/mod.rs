//! `kittiwake kernel`: the lab for people who write kernels (list, new, check, watch, bench, tune, export).
//!
//! Invariant: what a kernel is found to be, good or bad, is the answer and goes to standard output; a kernel that may not
//! serve ends with exit code 1. All of it is `shaders::lab`; here are flags and words.

mod bench;
mod check;
mod export;
mod list;
mod tune;

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand};
use kittiwake::Device;
use shaders::compose::Settings;
use shaders::lab::Lab;
use shaders::{AdapterChoice, GpuOptions};

/// Arguments of `kernel`.
#[derive(Debug, Args)]
pub struct KernelArgs {
    #[command(subcommand)]
    command: KernelCommand,
}

#[derive(Debug, Subcommand)]
enum KernelCommand {
    /// What kernels there are: formulas, bindings, settings, tolerances.
    List(list::ListArgs),
    /// Write a kernel to start from.
    New(list::NewArgs),
    /// Validate a kernel, compare its bindings and its numbers with the reference, catch indices out of bounds.
    Check(check::CheckArgs),
    /// Check a dozen cases at each save, until Ctrl-C.
    Watch(check::WatchArgs),
    /// Measure a kernel beside the built-in one.
    Bench(bench::BenchArgs),
    /// Find the shapes of the built-in kernels that are fastest on this device, for later runs.
    Tune(tune::TuneArgs),
    /// Translate a kernel to what a driver sees.
    Export(export::ExportArgs),
}

/// The kernel in question.
#[derive(Debug, Args)]
struct Subject {
    /// The built-in kernel whose place it takes (`kernel list`).
    #[arg(long)]
    op: String,
    /// Pin a setting, e.g. ITEMS=4; may be given several times.
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    set: Vec<(String, String)>,
}

impl Subject {
    fn settings(&self) -> Settings {
        self.set.iter().fold(Settings::new(), |all, (name, value)| all.with(name, value))
    }
}

/// Where kernels are tried.
#[derive(Debug, Args)]
struct Where {
    /// Where to run: wgpu (the best adapter), wgpu:N, wgpu:NAME (`kittiwake devices` lists them).
    #[arg(long, default_value = "wgpu")]
    device: String,
}

impl Where {
    fn open(&self) -> anyhow::Result<Lab> {
        let choice = match self.device.as_str() {
            "auto" => AdapterChoice::Best,
            name => match Device::from_str(name)? {
                Device::Wgpu(choice) => choice,
                other => anyhow::bail!("--device {other}: kernels are WGSL and run on wgpu, wgpu:N or wgpu:NAME"),
            },
        };
        Ok(Lab::open(&choice, GpuOptions::default())?)
    }
}

/// `NAME=VALUE`.
fn pair(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or_else(|| format!("'{text}' is not of the form NAME=VALUE"))?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}

/// The kernel of a file, or the built-in one.
fn kernel(file: Option<&PathBuf>, subject: &Subject) -> Result<shaders::lab::CustomKernel, shaders::lab::KernelError> {
    match file {
        Some(file) => shaders::lab::CustomKernel::load(&subject.op, file, &subject.settings()),
        None => shaders::lab::CustomKernel::built_in(&subject.op, &subject.settings()),
    }
}

/// Runs a subcommand of `kernel`.
pub fn run(args: &KernelArgs) -> anyhow::Result<()> {
    match &args.command {
        KernelCommand::List(args) => list::run(args),
        KernelCommand::New(args) => list::new(args),
        KernelCommand::Check(args) => check::run(args),
        KernelCommand::Watch(args) => check::watch(args),
        KernelCommand::Bench(args) => bench::run(args),
        KernelCommand::Tune(args) => tune::run(args),
        KernelCommand::Export(args) => export::run(args),
    }
}
