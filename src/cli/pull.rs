//! `kittiwake pull`: fetch a model from the hub, and do nothing with it.
//!
//! Invariant: what it prints is the path that the model is loaded from, so that scripts need not know the cache's layout.

use std::io::Write;

use anyhow::bail;
use clap::Args;
use kittiwake::hub::HubName;

use super::model::Source;

/// Arguments of `pull`.
#[derive(Debug, Args)]
pub struct PullArgs {
    /// `org/name[@revision][:file-or-quant]`, e.g. `:Q4_K_M` where there are several GGUF files.
    model: String,
    #[command(flatten)]
    source: Source,
}

/// Fetches and prints where it is.
pub fn run(args: &PullArgs) -> anyhow::Result<()> {
    let Some(name) = HubName::parse(&args.model) else {
        bail!("'{}' is no model of the hub: expected org/name[@revision][:file-or-quant]", args.model);
    };
    let path = args.source.fetch(name)?;
    writeln!(std::io::stdout(), "{}", path.display())?;
    Ok(())
}
