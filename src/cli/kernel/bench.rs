//! `kernel bench`: flags and a table for `Lab::bench`.
//!
//! Invariant: nothing is measured here; sizes are refused before a device is opened.

use std::io::Write;
use std::path::PathBuf;

use anyhow::anyhow;
use clap::Args;
use shaders::lab::{BenchReport, Measured, shape};

use super::{Subject, Where, kernel, pair};

/// Arguments of `kernel bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// The kernel [default: the built-in one alone].
    file: Option<PathBuf>,
    #[command(flatten)]
    subject: Subject,
    /// Sizes of the op, e.g. tokens=8,format=q8_0; a wrong name lists what there is.
    #[arg(long, value_name = "NAME=VALUE", value_delimiter = ',', value_parser = pair)]
    shape: Vec<(String, String)>,
    #[command(flatten)]
    device: Where,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Measures and prints.
pub fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let table_kernel = shaders::lab::kernel_named(&args.subject.op)?.name;
    let shape = shape(table_kernel, &args.shape).map_err(|problem| anyhow!("--shape: {problem}"))?;
    // Without a file and without a pinned setting there is nothing to compare with.
    let is_custom = args.file.is_some() || !args.subject.set.is_empty();
    let custom = is_custom.then(|| kernel(args.file.as_ref(), &args.subject)).transpose()?;
    let report = args.device.open()?.bench(table_kernel, custom.as_ref(), &shape)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    } else {
        print(&mut out, &report)?;
    }
    Ok(())
}

fn print(out: &mut dyn Write, report: &BenchReport) -> std::io::Result<()> {
    let shape: Vec<String> = report.shape.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let roofline = report.roofline;
    writeln!(out, "{} {} on {}, by the {}'s clock", report.kernel, shape.join(" "), report.device, report.clock)?;
    writeln!(
        out,
        "roofline: copy {:.1} GB/s, multiply-add {:.1} GFLOP/s; a dispatch is {} bytes, {} operations",
        roofline.copy_gb_per_s, roofline.fma_gflop_per_s, report.bytes, report.flops
    )?;
    writeln!(
        out,
        "{:>12} {:>12} {:>10} {:>10} {:>22}  kernel",
        "median us", "fastest us", "GB/s", "GFLOP/s", "of the roofline"
    )?;
    for Measured { name, us, min_us, gb_per_s, gflop_per_s, roofline_percent, bound } in &report.kernels {
        let of = format!("{roofline_percent:.1} % ({bound})");
        writeln!(out, "{us:>12.1} {min_us:>12.1} {gb_per_s:>10.2} {gflop_per_s:>10.2} {of:>22}  {name}")?;
    }
    if report.runtime_checks {
        writeln!(out, "this build compiles runtime checks into kernels: measure with a release build")?;
    }
    if let Some(speedup) = report.speedup {
        writeln!(out, "{speedup:.2} times as fast as the built-in kernel")?;
    }
    Ok(())
}
