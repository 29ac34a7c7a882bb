//! `kittiwake quantize`: a checkpoint of floats in fewer bits, as a directory that this runtime and others load.
//!
//! Invariant: OUT appears when everything in it is written, and not before: what is being made lies beside it under another name,
//! and is removed when something goes wrong.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Args;
use fancy_regex::Regex;
use indicatif::{ProgressBar, ProgressStyle};
use runtime::ids::TokenId;
use runtime::model::{self, Model};
use runtime::program::KvDtype;
use runtime::quantise::{Job, SHARD_BYTES, ScaledGroups, Stage};
use runtime::text::TextModel;
use runtime::weights::{Checkpoint, Packing};

use super::model::Source;
use super::{eval, note};

/// Arguments of `quantize`.
#[derive(Debug, Args)]
#[command(
    long_about = "Write a checkpoint of floats in fewer bits, in compressed-tensors' layout.\n\nLinears of the blocks are rounded; embedding, \
                  norms, head and routers stay. With --calibration the model first runs over that text on the CPU, and channels \
                  are scaled so that those that matter are rounded finer (AWQ, Lin et al. 2023); the inverse goes into the norm \
                  or linear before, so that the model stays the same but for rounding."
)]
pub struct QuantizeArgs {
    /// A Hugging Face directory of F32, F16 or BF16, or `org/name[@revision]` of the hub.
    #[arg(value_name = "IN")]
    model: String,
    /// The directory to write: not there yet, or empty.
    #[arg(value_name = "OUT")]
    out: PathBuf,
    /// int4-gN: 4 bits and a scale for every N inputs (32, 64, 128 …); int4-asym-gN: with a zero point, too; int8: 8 bits and a scale
    /// for every output; fp8: E4M3 and a scale for every output.
    #[arg(long, value_name = "FORMAT")]
    format: Packing,
    /// A text (UTF-8) like those that the model is for: scale channels by what it makes them carry.
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Windows of the calibration text at most, at even distances.
    #[arg(long, default_value_t = 128, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    calibration_samples: u32,
    /// Tokens of a window.
    #[arg(long, default_value_t = 512, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..=1 << 16))]
    calibration_len: u32,
    /// Linears whose name in the file this regular expression is found in stay floats, e.g. `layers\.0\.|down_proj`.
    #[arg(long, value_name = "REGEX")]
    ignore: Option<Regex>,
    /// CPU threads of the calibration [default: one per available core].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    #[command(flatten)]
    source: Source,
}

/// A directory in the making.
struct Unfinished {
    /// Where it will be.
    out: PathBuf,
    dir: PathBuf,
}

impl Unfinished {
    /// # Errors
    /// Something is at `out`, or a directory cannot be made beside it.
    fn new(out: &Path) -> anyhow::Result<Self> {
        match fs::read_dir(out).map(|mut entries| entries.next().is_none()) {
            Ok(true) => {}
            Ok(false) => bail!("OUT {} is there and not empty", out.display()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => bail!("OUT {}: {error}", out.display()),
        }
        let name = out.file_name().with_context(|| format!("OUT {} is no name of a directory", out.display()))?;
        let dir = out.with_file_name(format!(".{}.{}.partial", name.to_string_lossy(), std::process::id()));
        fs::create_dir(&dir).with_context(|| format!("OUT: cannot make {}", dir.display()))?;
        Ok(Self { out: out.to_path_buf(), dir })
    }

    /// # Errors
    /// It cannot be moved to its place.
    fn finish(self) -> anyhow::Result<()> {
        // Not every system moves a directory to where an empty one is.
        let _ = fs::remove_dir(&self.out);
        fs::rename(&self.dir, &self.out).with_context(|| format!("OUT {}", self.out.display()))
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Shows what takes long, and says on standard error when a stage is done.
struct Stages {
    /// Draws on a terminal only.
    bar: ProgressBar,
    now: Option<(Stage, Instant)>,
}

impl Stages {
    fn hear(&mut self, stage: Stage, done: u64, total: u64) {
        if self.now.is_none_or(|(now, _)| now != stage) {
            self.now = Some((stage, Instant::now()));
            let template = match stage {
                Stage::Calibrate => "calibrating {bar:40} {pos}/{len} tokens {eta}",
                Stage::Search => "searching {bar:40} {pos}/{len} inputs {eta}",
                Stage::Write => "writing {bar:40} {bytes}/{total_bytes} {eta}",
            };
            self.bar.set_style(ProgressStyle::with_template(template).expect("a valid template"));
            self.bar.reset();
        }
        self.bar.set_length(total);
        self.bar.set_position(done);
        if let Some((_, start)) = self.now.filter(|_| done == total) {
            self.bar.finish_and_clear();
            let seconds = start.elapsed().as_secs_f64();
            match stage {
                Stage::Calibrate => note(format_args!("calibrated on {total} tokens in {seconds:.1} s\n")),
                Stage::Search => note(format_args!("searched scales of {total} inputs in {seconds:.1} s\n")),
                Stage::Write => note(format_args!("wrote {total} bytes of weights in {seconds:.1} s\n")),
            }
        }
    }
}

/// Quantises and writes.
pub fn run(args: &QuantizeArgs) -> anyhow::Result<()> {
    let path = args.source.locate(&args.model)?;
    let checkpoint = Checkpoint::open(&path)?;
    let model = model::load(&checkpoint, KvDtype::F32)?;
    let mut job = Job::new(&checkpoint, &model, args.format, args.ignore.as_ref())?;
    let unfinished = Unfinished::new(&args.out)?;
    let mut stages = Stages { bar: ProgressBar::new(0), now: None };
    let mut progress = |stage, done, total| stages.hear(stage, done, total);
    if let Some(file) = &args.calibration {
        let windows = windows(args, file, &checkpoint, &model)?;
        let threads = args.threads.unwrap_or(0) as usize;
        let ScaledGroups { scaled, unscaled } = job.scale(&windows, threads, &mut progress)?;
        note(format_args!("scaled the inputs of {scaled} linears, left those of {unscaled} as they are\n"));
    }
    job.write(&unfinished.dir, SHARD_BYTES, &mut progress)?;
    unfinished.finish()
}

/// The calibration text's tokens.
fn windows(
    args: &QuantizeArgs,
    file: &Path,
    checkpoint: &Checkpoint,
    model: &Model,
) -> anyhow::Result<Vec<Vec<TokenId>>> {
    let text = fs::read_to_string(file).with_context(|| format!("--calibration {}", file.display()))?;
    let len = args.calibration_len;
    if len > model.info.max_position {
        bail!("--calibration-len {len}: the model has a context of {} tokens", model.info.max_position);
    }
    let tokenizer = TextModel::load(checkpoint, None, None)?;
    if tokenizer.vocab_size() > model.info.vocab_size as usize {
        bail!("the tokenizer has {} ids, the model {}", tokenizer.vocab_size(), model.info.vocab_size);
    }
    let windows = eval::windows(&tokenizer, &text, len as usize)
        .with_context(|| format!("--calibration {}, --calibration-len {len}", file.display()))?;
    let distance = windows.len().div_ceil(args.calibration_samples as usize);
    Ok(windows.into_iter().step_by(distance).collect())
}
