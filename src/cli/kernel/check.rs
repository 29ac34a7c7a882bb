//! `kernel check` and `kernel watch`: findings to standard output, in the form that editors read (file:line:column: …).
//!
//! Invariant: a kernel that may not serve is exit code 1 of `check`; `watch` survives anything that a file can hold.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use runtime::backend::cases::Case;
use shaders::lab::{CheckReport, CustomKernel, KernelError, Lab, cases_of, quick_cases_of};

use super::{Subject, Where, kernel};
use crate::cli::note;

/// Arguments of `kernel check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// The kernel.
    file: PathBuf,
    #[command(flatten)]
    subject: Subject,
    #[command(flatten)]
    device: Where,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Arguments of `kernel watch`.
#[derive(Debug, Args)]
pub struct WatchArgs {
    /// The kernel.
    file: PathBuf,
    #[command(flatten)]
    subject: Subject,
    #[command(flatten)]
    device: Where,
}

/// Checks once.
pub fn run(args: &CheckArgs) -> anyhow::Result<()> {
    let lab = args.device.open()?;
    let checked = check(&lab, &args.file, &args.subject, |kernel| cases_of(kernel.kernel().name));
    let mut out = std::io::stdout().lock();
    let passed = match &checked {
        Ok(report) => {
            if args.json {
                writeln!(out, "{}", serde_json::to_string(report)?)?;
            } else {
                writeln!(out, "{report}")?;
            }
            report.passed()
        }
        Err(error @ (KernelError::Invalid(_) | KernelError::Contract { .. })) => {
            if args.json {
                writeln!(out, "{}", serde_json::json!({ "error": error.to_string() }))?;
            } else {
                writeln!(out, "{error}")?;
            }
            false
        }
        Err(_) => {
            checked?;
            return Ok(());
        }
    };
    if passed {
        return Ok(());
    }
    bail!("{} failed its check", args.file.display())
}

/// Reads the file and runs some of its cases.
fn check(
    lab: &Lab,
    file: &Path,
    subject: &Subject,
    cases: impl Fn(&CustomKernel) -> Vec<Case>,
) -> Result<CheckReport, KernelError> {
    let kernel = kernel(Some(&file.to_owned()), subject)?;
    let cases = cases(&kernel);
    let is_watched = std::io::stderr().is_terminal();
    let report = lab.check(&kernel, &cases, &mut |so_far| {
        if is_watched {
            let at = so_far.num_cases + so_far.num_other_cases + 1;
            note(format_args!("\rcase {at} of {}", cases.len()));
        }
        true
    });
    if is_watched {
        note(format_args!("\r\x1b[K"));
    }
    report
}

/// How often the file is looked at.
const PERIOD: Duration = Duration::from_millis(200);

/// Checks at each save, until the process is ended.
pub fn watch(args: &WatchArgs) -> anyhow::Result<()> {
    let mut lab = args.device.open()?;
    let stamp = || {
        let metadata = std::fs::metadata(&args.file).ok()?;
        Some((metadata.modified().ok()?, metadata.len()))
    };
    let mut last = None;
    // What was wrong with the arguments will be so after the next save, too.
    shaders::lab::kernel_named(&args.subject.op)?;
    std::fs::metadata(&args.file).map_err(|source| KernelError::Read { file: args.file.clone(), source })?;
    loop {
        let now = stamp();
        if now != last {
            last = now;
            let text = match check(&lab, &args.file, &args.subject, quick_cases_of) {
                Ok(report) => report.to_string(),
                Err(KernelError::Device(error)) => {
                    lab = args.device.open()?;
                    error.to_string()
                }
                Err(error) => error.to_string(),
            };
            let mut out = std::io::stdout().lock();
            writeln!(out, "{text}\n")?;
            out.flush()?;
        }
        std::thread::sleep(PERIOD);
    }
}
