//! `kernel export`: a kernel in the language that a driver takes, on standard output or in a file.
//!
//! Invariant: no device is needed; SPIR-V is written as bytes, the others as text.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use shaders::lab::{Target, export};

use super::{Subject, kernel};

/// Arguments of `kernel export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// The kernel [default: the built-in one].
    file: Option<PathBuf>,
    #[command(flatten)]
    subject: Subject,
    /// Language: spirv, msl, hlsl, glsl.
    #[arg(long)]
    target: Target,
    /// Where to write it [default: standard output].
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Translates and writes.
pub fn run(args: &ExportArgs) -> anyhow::Result<()> {
    let bytes = export(&kernel(args.file.as_ref(), &args.subject)?, args.target)?;
    match &args.output {
        Some(path) => std::fs::write(path, bytes).with_context(|| path.display().to_string())?,
        None => std::io::stdout().lock().write_all(&bytes)?,
    }
    Ok(())
}
