//! `kernel tune`: flags and a table for `Lab::tune`, and the file that later runs find.
//!
//! Invariant: nothing is measured here; what is in the file of other devices stays, and without a change nothing is written.

use std::io::Write;

use anyhow::bail;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use runtime::program::KvDtype;
use runtime::weights::Checkpoint;
use shaders::lab::{Choice, TuneOptions, TuneReport, Workload};

use super::Where;
use crate::cli::kernel_files::KernelFiles;
use crate::cli::{model, note};

/// Arguments of `kernel tune`.
#[derive(Debug, Args)]
pub struct TuneArgs {
    /// Measure the sizes of this model: a directory, a .gguf file, or `demo` [default: a layer of 2048].
    #[arg(long)]
    model: Option<String>,
    #[command(flatten)]
    source: model::Source,
    #[command(flatten)]
    device: Where,
    #[command(flatten)]
    files: KernelFiles,
    /// Begin nothing after so many seconds; what was found until then counts.
    #[arg(long, default_value_t = 120.0, value_name = "SECONDS")]
    max_seconds: f64,
    /// Measure no more candidates than this [default: all that the time allows].
    #[arg(long)]
    max_candidates: Option<usize>,
    /// Also choose what changes the order of sums (slices of linears, splits and parts of attention, lanes of norms): faster perhaps,
    /// but answers differ in their last bits from those of this device without the file.
    #[arg(long)]
    allow_new_order: bool,
    /// Write nothing.
    #[arg(long)]
    dry_run: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Measures, prints and writes.
pub fn run(args: &TuneArgs) -> anyhow::Result<()> {
    let file = args.files.tuning_file();
    if file.is_none() && !args.dry_run {
        bail!("there is nowhere to write to: name a file by --kernel-tuning, or say --dry-run");
    }
    if args.max_seconds.is_nan() {
        bail!("--max-seconds {}: expected a number", args.max_seconds);
    }
    let workload = match &args.model {
        None => Workload::default_shapes(),
        Some(model) => {
            let path = args.source.locate(model)?;
            let model = runtime::model::load(&Checkpoint::open(&path)?, KvDtype::F16)?;
            Workload::of_model(&model.program, &model.weights)
        }
    };
    let lab = args.device.open()?;
    // Before the work: a file that is not sound is not to be overwritten.
    let mut table =
        file.as_ref().filter(|file| file.exists()).map(|file| shaders::TuningFile::read(file)).transpose()?;
    let style = ProgressStyle::with_template("tuning {bar:40} {pos}/{len} {elapsed} {msg}").expect("a valid template");
    let bar = ProgressBar::new(0).with_style(style); // draws on a terminal only
    let options = TuneOptions {
        max_seconds: args.max_seconds,
        max_candidates: args.max_candidates.unwrap_or(usize::MAX),
        order_is_free: args.allow_new_order,
    };
    let report = lab.tune(&workload, options, &mut |progress| {
        bar.set_length(progress.total as u64);
        bar.set_position(progress.done as u64);
        bar.set_message(format!("{}, {} candidates so far", progress.name, progress.num_measured));
    })?;
    bar.finish_and_clear();
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    } else {
        print(&mut out, &report)?;
    }
    let is_changed = report.choices.iter().any(|choice| choice.is_changed);
    match file.filter(|_| !args.dry_run && is_changed) {
        Some(file) => {
            let table = table.get_or_insert_default();
            table.set(lab.adapter(), report.tuning);
            table.write(&file)?;
            note(format_args!("written to {}\n", file.display()));
        }
        None => note(format_args!("nothing was written\n")),
    }
    Ok(())
}

fn print(out: &mut dyn Write, report: &TuneReport) -> std::io::Result<()> {
    writeln!(out, "{}, by the {}'s clock, {} candidates measured", report.device, report.clock, report.num_measured)?;
    writeln!(out, "{:>12} {:>12} {:>8}  choice", "before us", "after us", "faster")?;
    for Choice { name, before_us, after_us, is_changed } in &report.choices {
        let faster = if *is_changed { format!("{:.2} x", before_us / after_us) } else { "-".into() };
        writeln!(out, "{before_us:>12.1} {after_us:>12.1} {faster:>8}  {name}")?;
    }
    for rejected in &report.rejected {
        writeln!(out, "rejected: {rejected}")?;
    }
    if report.is_cut_short {
        writeln!(out, "not everything was tried: --max-seconds gives more time")?;
    }
    if report.runtime_checks {
        writeln!(out, "this build compiles runtime checks into kernels: tune with a release build")?;
    }
    Ok(())
}
