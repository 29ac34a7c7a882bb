//! `kittiwake devices`: what models can run on here.

use std::io::Write;

use clap::Args;
use kittiwake::{Device, device};
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
    name: Device,
    description: String,
    /// Taken by `--device auto`.
    default: bool,
}

/// Opens every device once and describes it.
pub fn run(args: &DevicesArgs) -> anyhow::Result<()> {
    let best = device::choose(None)?;
    let mut rows = Vec::new();
    for name in Device::ALL {
        let description = device::open(name, None)?.caps().device.clone();
        rows.push(Row { name, description, default: name == best });
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&rows)?)?;
    } else {
        for row in rows {
            writeln!(
                out,
                "{:<10} {}{}",
                row.name.to_string(),
                row.description,
                if row.default { "  (auto)" } else { "" }
            )?;
        }
    }
    Ok(())
}
