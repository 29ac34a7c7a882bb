//! Prints a model's forward pass, one line per op, and where its activations would lie.
//!
//! `cargo run --example program_dump -- models/SmolLM2-135M-Instruct.Q4_1.gguf`

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use runtime::backend::Bucket;
use runtime::program::{KvDtype, memory, segment};
use runtime::weights::Checkpoint;

fn main() -> anyhow::Result<()> {
    let path: PathBuf = std::env::args_os().nth(1).context("usage: program_dump MODEL")?.into();
    let model = runtime::model::load(&Checkpoint::open(&path)?, KvDtype::F16)?;
    let bucket = Bucket { tokens: 512, rows: 64, logit_rows: 64 };
    let plan = memory::plan(&model.program, bucket, 64);
    let segments = segment::segments(&model.program, |_| false);
    let mut out = std::io::stdout().lock();
    write!(out, "{}", model.program)?;
    writeln!(out, "{} weights, {} parameters", model.weights.len(), model.info.num_parameters)?;
    writeln!(out, "{} segments; {} ops", segments.len(), model.program.ops.len())?;
    for (lane, elements) in plan.lanes.iter().enumerate() {
        writeln!(out, "lane {lane}: {} KiB for {} tokens", elements * 4 / 1024, bucket.tokens)?;
    }
    Ok(())
}
