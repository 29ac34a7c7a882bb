//! `kittiwake devices`: what models can run on here.

use std::io::Write;

use clap::Args;
use kittiwake::device::{self, Candidate};
use serde::Serialize;

/// Arguments of `devices`.
#[derive(Debug, Args)]
pub struct DevicesArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Row {
    name: String,
    description: String,
    /// Why it stands where it stands.
    rank: &'static str,
    /// Taken by `--device auto`.
    default: bool,
}

/// Lists every device, in the order in which `--device auto` takes them.
pub fn run(args: &DevicesArgs) -> anyhow::Result<()> {
    let candidates = device::candidates().into_iter().enumerate();
    let rows: Vec<Row> = candidates
        .map(|(i, Candidate { device, description, rank })| Row {
            name: device.to_string(),
            description,
            rank,
            default: i == 0,
        })
        .collect();
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&rows)?)?;
        return Ok(());
    }
    for Row { name, description, rank, default } in rows {
        writeln!(out, "{name:<10} {description}{}: {rank}", if default { "  (auto)" } else { "" })?;
    }
    Ok(())
}
