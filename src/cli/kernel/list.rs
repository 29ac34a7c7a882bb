//! `kernel list` and `kernel new`: what kernels there are, and a text to start from.
//!
//! Invariant: no device is needed; a file that is there is never overwritten.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use shaders::lab::{KernelInfo, SettingRow, kernel_named, list, template};

/// Arguments of `kernel list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Only this kernel.
    op: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Prints the kernels.
pub fn run(args: &ListArgs) -> anyhow::Result<()> {
    let mut kernels = list();
    if let Some(op) = &args.op {
        kernel_named(op)?;
        kernels.retain(|kernel| kernel.name == op);
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&kernels)?)?;
        return Ok(());
    }
    for (i, kernel) in kernels.iter().enumerate() {
        if i > 0 {
            writeln!(out)?;
        }
        print(&mut out, kernel)?;
    }
    Ok(())
}

fn print(out: &mut dyn Write, kernel: &KernelInfo) -> std::io::Result<()> {
    writeln!(out, "{}: {}", kernel.name, kernel.formula)?;
    for line in kernel.about.lines() {
        writeln!(out, "    {line}")?;
    }
    for (i, binding) in kernel.bindings.iter().enumerate() {
        let number = i + 1;
        writeln!(out, "  @binding({number}) {}: {}, {}", binding.name, binding.wgsl_type, binding.access)?;
    }
    writeln!(out, "  params: {}", kernel.params.join(", "))?;
    for SettingRow { name, default, about, values, required } in &kernel.settings {
        let values = if values.is_empty() { String::new() } else { format!(" ({})", values.join(", ")) };
        let required = if *required { "" } else { "; may be left out" };
        writeln!(out, "  {name} = {default}{values}: {about}{required}")?;
    }
    let tolerance = &kernel.tolerance;
    let (rms, max) = (tolerance.relative_rms, tolerance.relative_max);
    writeln!(out, "  {} cases, relative error at most {rms:.0e} rms and {max:.0e} max", kernel.num_cases)?;
    writeln!(out, "  targets: {}", kernel.targets.join(", "))
}

/// Arguments of `kernel new`.
#[derive(Debug, Args)]
pub struct NewArgs {
    /// The built-in kernel whose place it is for (`kernel list`).
    #[arg(long)]
    op: String,
    /// Where to write it; a file that is there is left alone [default: standard output].
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Writes a kernel to start from.
pub fn new(args: &NewArgs) -> anyhow::Result<()> {
    let text = template(&args.op)?;
    match &args.output {
        None => std::io::stdout().lock().write_all(text.as_bytes())?,
        Some(path) => {
            let what = || path.display().to_string();
            let mut file = std::fs::File::create_new(path).with_context(what)?;
            file.write_all(text.as_bytes()).with_context(what)?;
        }
    }
    Ok(())
}
