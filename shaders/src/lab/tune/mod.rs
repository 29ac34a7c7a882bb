//! `kernel tune`: the shapes of the kernels that are fastest on this device, for the sizes of a model.
//!
//! Invariant: a candidate is measured only after it has passed its rows of the op table, and replaces what there is only
//! where it was faster in turns with it. What changes the order of sums is left alone unless that was asked for, so that
//! a device's answers stay the same, bit for bit, with a table and without.

mod knobs;
mod workload;

use std::time::Instant;

use runtime::backend::Backend;
use runtime::backend::cases::{BuiltCase, Case, Tolerance, build_case, run_built};
use runtime::backend::reference::ReferenceBackend;
use runtime::ids::{PlanId, WeightId};
use serde::Serialize;

use self::knobs::{Knob, gathered, knobs, spread};
pub use self::workload::Workload;
use super::timer::Timer;
use super::{KernelError, Lab};
use crate::adapter::AdapterInfo;
use crate::backend::{WgpuBackend, WgpuDevice};
use crate::pipelines::Pipelines;
use crate::replay::Counts;
use crate::tuning::Tuning;

/// Samples of each of two shapes that are compared.
const ROUNDS: usize = 5;
/// Seconds of one sample, about.
const SAMPLE_S: f64 = 0.01;
/// What a candidate's time must be of the other's: less is noise.
const FASTER: f64 = 0.95;

/// How to tune.
#[derive(Clone, Copy, Debug)]
pub struct TuneOptions {
    /// No candidate is begun after so many seconds.
    pub max_seconds: f64,
    /// No more candidates than so many are measured.
    pub max_candidates: usize,
    /// Whether sums may run in another order than the class's.
    pub order_is_free: bool,
}

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub struct TuneReport {
    /// The device in words.
    pub device: String,
    /// `device` or `host`: whose clock.
    pub clock: &'static str,
    /// Whether this build compiles runtime checks into kernels: then its figures mean little.
    pub runtime_checks: bool,
    /// Candidates that were measured.
    pub num_measured: usize,
    /// Candidates that gave wrong numbers or that the device refused, and what was wrong.
    pub rejected: Vec<String>,
    /// Whether time or candidates were used up before everything was tried.
    pub is_cut_short: bool,
    /// Every choice that was looked at.
    pub choices: Vec<Choice>,
    /// The table: the class's own where nothing was faster.
    pub tuning: Tuning,
}

/// One choice, before and after.
#[derive(Clone, Debug, Serialize)]
pub struct Choice {
    /// What was chosen.
    pub name: String,
    /// Time of its ops in a step with the class's shape, in microseconds.
    pub before_us: f64,
    /// The same with the one that was found.
    pub after_us: f64,
    /// Whether that is another one.
    pub is_changed: bool,
}

/// How far tuning is.
#[derive(Clone, Copy, Debug)]
pub struct TuneProgress<'a> {
    /// The choice that is looked at.
    pub name: &'a str,
    /// Choices that are done, and all.
    pub done: usize,
    /// All of them.
    pub total: usize,
    /// Candidates that were measured.
    pub num_measured: usize,
}

impl Lab {
    /// The device that is tuned.
    pub fn adapter(&self) -> &AdapterInfo {
        &self.gpu.adapter
    }

    /// Looks for faster shapes.
    ///
    /// # Errors
    /// The device failed.
    pub fn tune(
        &self,
        workload: &Workload,
        options: TuneOptions,
        progress: &mut dyn FnMut(TuneProgress<'_>),
    ) -> Result<TuneReport, KernelError> {
        let own = self.gpu.class.tuning();
        let mut search = Search {
            lab: self,
            device: self.device_with(Pipelines::default()),
            timer: Timer::new(&self.gpu)?,
            options,
            start: Instant::now(),
            workload,
            num_measured: 0,
            rejected: Vec::new(),
        };
        let (mut tuning, mut choices) = (spread(own), Vec::new());
        let knobs = knobs(workload, options.order_is_free);
        for (done, knob) in knobs.iter().enumerate() {
            if search.is_over() {
                break;
            }
            let num_measured = search.num_measured;
            progress(TuneProgress { name: &knob.name, done, total: knobs.len(), num_measured });
            let (found, choice) = search.turn(knob, &tuning)?;
            choices.push(choice);
            tuning = found;
        }
        // A table that says the same in more rows says nothing.
        let is_changed = choices.iter().any(|choice| choice.is_changed);
        Ok(TuneReport {
            device: self.name(),
            clock: search.timer.clock(),
            runtime_checks: cfg!(debug_assertions),
            num_measured: search.num_measured,
            is_cut_short: search.is_over(),
            rejected: search.rejected,
            choices,
            tuning: if is_changed { gathered(&tuning) } else { own.clone() },
        })
    }
}

struct Search<'a> {
    lab: &'a Lab,
    /// All candidates share its pipelines: a variant is compiled once.
    device: WgpuDevice,
    timer: Timer,
    options: TuneOptions,
    start: Instant,
    workload: &'a Workload,
    num_measured: usize,
    rejected: Vec<String>,
}

/// A case of the op table with what is right.
struct Check {
    case: Case,
    built: BuiltCase,
    expected: Vec<f32>,
}

/// A case that is timed, its weights on the device.
struct Subject {
    backend: WgpuBackend,
    built: BuiltCase,
    weight: f64,
}

/// A shape on every subject: its plans, and dispatches to a sample.
struct Candidate {
    tuning: Tuning,
    plans: Vec<(PlanId, u32)>,
}

impl Search<'_> {
    fn is_over(&self) -> bool {
        self.num_measured >= self.options.max_candidates
            || self.start.elapsed().as_secs_f64() >= self.options.max_seconds
    }

    /// Climbs from neighbour to faster neighbour.
    fn turn(&mut self, knob: &Knob, from: &Tuning) -> Result<(Tuning, Choice), KernelError> {
        let checks = self.checks(knob)?;
        let mut subjects = self.subjects(knob)?;
        let first = self.candidate(knob, &mut subjects, from)?;
        let (mut best, mut seen) = (self.candidate(knob, &mut subjects, from)?, vec![from.clone()]);
        let mut is_climbing = true;
        while std::mem::take(&mut is_climbing) {
            for tuning in knob.neighbours(&best.tuning, self.workload) {
                if seen.contains(&tuning) || tuning.check(&self.lab.gpu.limits).is_err() {
                    continue;
                }
                if self.is_over() {
                    break;
                }
                seen.push(tuning.clone());
                if !self.passes(knob, &checks, &tuning)? {
                    continue;
                }
                let candidate = self.candidate(knob, &mut subjects, &tuning)?;
                let (before_s, after_s) = self.compare(knob, &subjects, &best, &candidate)?;
                self.num_measured += 1;
                if after_s < FASTER * before_s {
                    // Its neighbours are looked at in the next round.
                    (best, is_climbing) = (candidate, true);
                }
            }
        }
        // Many steps that were luck may add up: the last word is a comparison with where it began.
        let (before_s, after_s) = self.compare(knob, &subjects, &first, &best)?;
        let is_changed = best.tuning != *from && after_s < FASTER * before_s;
        let after_s = if is_changed { after_s } else { before_s };
        let (before_us, after_us) = (1e6 * before_s, 1e6 * after_s);
        let tuning = if is_changed { best.tuning } else { from.clone() };
        Ok((tuning, Choice { name: knob.name.clone(), before_us, after_us, is_changed }))
    }

    fn checks(&self, knob: &Knob) -> Result<Vec<Check>, KernelError> {
        let check = |case: &Case| {
            let built = build_case(case);
            let expected = run_built(&mut ReferenceBackend::new(self.lab.threads), &built)?;
            Ok(Check { case: case.clone(), built, expected })
        };
        knob.checks.iter().map(check).collect()
    }

    fn subjects(&self, knob: &Knob) -> Result<Vec<Subject>, KernelError> {
        let subject = |(case, weight): &(Case, f64)| {
            let built = build_case(case);
            let mut backend = WgpuBackend::untested(&self.device);
            for (i, tensor) in built.tensors.iter().enumerate() {
                backend.upload(WeightId(i as u32), tensor)?;
            }
            backend.alloc_state(&built.program.states, built.num_blocks, built.step.layout().block_size)?;
            Ok(Subject { backend, built, weight: *weight })
        };
        knob.measured.iter().map(subject).collect()
    }

    /// Whether a shape gives the reference's numbers.
    fn passes(&mut self, knob: &Knob, checks: &[Check], tuning: &Tuning) -> Result<bool, KernelError> {
        for Check { case, built, expected } in checks {
            let mut backend = WgpuBackend::untested(&self.device);
            backend.set_tuning(tuning.clone());
            let got = run_built(&mut backend, built);
            self.lab.gpu.check()?;
            let tolerance: Tolerance = case.tolerance;
            let problem = match got {
                Ok(got) => tolerance.check(&got, expected).err(),
                Err(error) => Some(error.to_string()),
            };
            if let Some(problem) = problem {
                self.rejected.push(format!("{}: {case}: {problem}", knob.name));
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Compiles a shape for every subject and sees how long it takes.
    fn candidate(&self, knob: &Knob, subjects: &mut [Subject], tuning: &Tuning) -> Result<Candidate, KernelError> {
        let mut plans = Vec::new();
        for subject in subjects {
            let Subject { backend, built, .. } = subject;
            let layout = built.step.layout();
            backend.set_tuning(tuning.clone());
            let plan = backend.compile(&built.program, layout.bucket, layout, &mut |_, _| ())?;
            // Leaves the step's inputs on the device.
            let ticket = backend.submit(plan, &built.step)?;
            backend.wait(ticket)?;
            let once_s = self.seconds(knob, subject, plan, 1)?.min(self.seconds(knob, subject, plan, 1)?);
            plans.push((plan, (SAMPLE_S / once_s.max(1e-7)).clamp(1.0, 1000.0) as u32));
        }
        Ok(Candidate { tuning: tuning.clone(), plans })
    }

    /// Seconds that each of two shapes takes for a step, the medians of samples in turns.
    fn compare(
        &self,
        knob: &Knob,
        subjects: &[Subject],
        first: &Candidate,
        second: &Candidate,
    ) -> Result<(f64, f64), KernelError> {
        let mut totals = [0.0, 0.0];
        for (i, subject) in subjects.iter().enumerate() {
            let mut samples = [Vec::new(), Vec::new()];
            for _ in 0..ROUNDS {
                for (samples, candidate) in samples.iter_mut().zip([first, second]) {
                    let (plan, repeats) = candidate.plans[i];
                    samples.push(self.seconds(knob, subject, plan, repeats)?);
                }
            }
            for (total, mut samples) in totals.iter_mut().zip(samples) {
                samples.sort_by(f64::total_cmp);
                *total += subject.weight * samples[ROUNDS / 2];
            }
        }
        Ok((totals[0], totals[1]))
    }

    /// Seconds of the knob's kernels in one step, the mean of `repeats`.
    fn seconds(&self, knob: &Knob, subject: &Subject, plan: PlanId, repeats: u32) -> Result<f64, KernelError> {
        let counts = Counts::of(&subject.built.step);
        let seconds = self.timer.seconds(&mut |pass| {
            for _ in 0..repeats {
                subject.backend.encode_only(plan, counts, pass, &|kernel| knob.times(kernel));
            }
        })?;
        Ok(seconds / f64::from(repeats))
    }
}
