//! `kernel check`: a kernel over its rows of the op case table, against the reference, every access watched.
//!
//! Invariant: a case counts only if the kernel ran in it; a kernel passes if it ran at all, every case is within its tolerance
//! and no index was out of bounds. Nothing of the device survives a check but what the caller holds.

use std::fmt;

use runtime::backend::cases::{BuiltCase, Case, Observed, SAMPLE_COLUMNS, Tolerance, build_case, run_built};
use runtime::backend::reference::ReferenceBackend;
use serde::Serialize;

use super::cases::may_take;
use super::probe::{Fault, Probe};
use super::{CustomKernel, KernelError, Lab};
use crate::backend::WgpuBackend;
use crate::pipelines::Pipelines;

/// What a check found.
#[derive(Clone, Debug, Serialize)]
pub struct CheckReport {
    /// The kernel whose place it takes.
    pub kernel: &'static str,
    /// Its file.
    pub file: String,
    /// The device in words.
    pub device: String,
    /// Cases in which the kernel ran.
    pub num_cases: usize,
    /// Cases that run with other values of what the kernel fixes, and so with the built-in kernel.
    pub num_other_cases: usize,
    /// The largest of all cases: root mean square of the error over that of the expected output.
    pub relative_rms: f64,
    /// The largest of all cases: largest error of one element over root mean square of the expected output.
    pub relative_max: f64,
    /// Cases that failed.
    pub failures: Vec<Failure>,
    /// Indices out of bounds, by place, with the case that met each first.
    pub faults: Vec<(Fault, String)>,
}

/// A case that failed.
#[derive(Clone, Debug, Serialize)]
pub struct Failure {
    /// The case.
    pub case: String,
    /// How far off its output is, or what the device said.
    pub problem: String,
    /// The first element that is wrong, where there is an output.
    pub first_wrong: Option<WrongElement>,
}

/// One wrong element of an output `[rows, columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WrongElement {
    /// Its row.
    pub row: usize,
    /// Its column.
    pub column: usize,
    /// What the kernel gave.
    pub got: f32,
    /// What the reference says.
    pub expected: f32,
    /// Wrong elements of the case in all.
    pub num_wrong: usize,
}

impl CheckReport {
    /// Whether the kernel may serve.
    pub fn passed(&self) -> bool {
        self.num_cases > 0 && self.failures.is_empty() && self.faults.is_empty()
    }
}

impl fmt::Display for CheckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, file, device, num_cases, .. } = self;
        for (fault, case) in &self.faults {
            writeln!(f, "{fault}\n  in case {case}")?;
        }
        for failure in self.failures.iter().take(SHOWN) {
            writeln!(f, "{file}: {}\n  in case {}", failure.problem, failure.case)?;
            if let Some(WrongElement { row, column, got, expected, num_wrong }) = failure.first_wrong {
                writeln!(
                    f,
                    "  first of {num_wrong} wrong elements: row {row}, column {column}: got {got}, expected {expected}"
                )?;
            }
        }
        if self.failures.len() > SHOWN {
            writeln!(f, "{} more cases failed", self.failures.len() - SHOWN)?;
        }
        let failed = self.failures.len();
        let verdict = if self.passed() { "passed" } else { "FAILED" };
        write!(
            f,
            "{file} as '{kernel}' on {device}: {verdict}: {num_cases} cases, {failed} wrong, {} places out of bounds, ",
            self.faults.len()
        )?;
        write!(f, "error at most {:.1e} rms, {:.1e} max", self.relative_rms, self.relative_max)?;
        if self.num_other_cases > 0 {
            write!(f, " ({} other cases run with the built-in kernel)", self.num_other_cases)?;
        }
        Ok(())
    }
}

/// Failed cases that are printed.
const SHOWN: usize = 3;

impl Lab {
    /// Runs a kernel over some cases, watched; `goes_on` sees the report so far before each and says whether to run it.
    ///
    /// # Errors
    /// The device failed; what is wrong with the kernel is in the report.
    pub fn check(
        &self,
        kernel: &CustomKernel,
        cases: &[Case],
        goes_on: &mut dyn FnMut(&CheckReport) -> bool,
    ) -> Result<CheckReport, KernelError> {
        let probe = Probe::new(&self.gpu)?;
        let device = self.device_with(Pipelines::with_custom(vec![kernel.clone()], Some(probe)));
        let mut report = CheckReport {
            kernel: kernel.kernel.name,
            file: kernel.file.clone(),
            device: self.name(),
            num_cases: 0,
            num_other_cases: 0,
            relative_rms: 0.0,
            relative_max: 0.0,
            failures: Vec::new(),
            faults: Vec::new(),
        };
        let mut asked = 0;
        for case in cases {
            if !goes_on(&report) {
                break;
            }
            if !may_take(kernel, &case.op) {
                report.num_other_cases += 1;
                continue;
            }
            let built = build_case(case);
            let got = run_built(&mut WgpuBackend::untested(&device), &built);
            self.gpu.check()?;
            let now = device.pipelines.borrow().num_custom_asked();
            if std::mem::replace(&mut asked, now) == now {
                report.num_other_cases += 1;
                continue;
            }
            report.num_cases += 1;
            let failure = match got {
                Ok(got) => {
                    let expected = run_built(&mut ReferenceBackend::new(self.threads), &built)?;
                    report.compare(case, &built, &got, &expected)
                }
                Err(error) => Some((error.to_string(), None)),
            };
            if let Some((problem, first_wrong)) = failure {
                report.failures.push(Failure { case: case.to_string(), problem, first_wrong });
            }
            for fault in
                device.pipelines.borrow().probe().map(|probe| probe.take(&self.gpu)).transpose()?.unwrap_or_default()
            {
                let place = |fault: &Fault| (fault.file.clone(), fault.line, fault.column);
                if !report.faults.iter().any(|(known, _)| place(known) == place(&fault)) {
                    report.faults.push((fault, case.to_string()));
                }
            }
        }
        Ok(report)
    }
}

impl CheckReport {
    /// Takes in the errors of a case; what is wrong with it, if anything.
    fn compare(
        &mut self,
        case: &Case,
        built: &BuiltCase,
        got: &[f32],
        expected: &[f32],
    ) -> Option<(String, Option<WrongElement>)> {
        let (rms, max, scale) = errors(got, expected);
        // Written so that a NaN stays.
        self.relative_rms = if rms <= self.relative_rms { self.relative_rms } else { rms };
        self.relative_max = if max <= self.relative_max { self.relative_max } else { max };
        let problem = case.tolerance.check(got, expected).err()?;
        let columns = match (built.observed, built.program.logits) {
            (Observed::Logits, Some(slot)) => built.program.slots[slot.index()].width as usize,
            (Observed::Samples, _) => SAMPLE_COLUMNS,
            _ => 1,
        };
        Some((problem, first_wrong(case.tolerance, got, expected, scale, columns)))
    }
}

/// Relative root mean square and largest error, and the scale that they are relative to, as `Tolerance::check` has them.
fn errors(got: &[f32], expected: &[f32]) -> (f64, f64, f64) {
    let mean_square = |sum: f64| (sum / expected.len().max(1) as f64).sqrt();
    let scale = mean_square(expected.iter().map(|&e| f64::from(e).powi(2)).sum()).max(f64::from(f32::MIN_POSITIVE));
    let error = |(&g, &e): (&f32, &f32)| (f64::from(g) - f64::from(e)).abs();
    let rms = mean_square(got.iter().zip(expected).map(error).map(|e| e * e).sum()) / scale;
    let max = got.iter().zip(expected).map(error).fold(0.0, |worst, e| if e <= worst { worst } else { e }) / scale;
    (rms, max, scale)
}

/// The first element further off than one may be; where only the mean is off, than the mean may be.
fn first_wrong(
    tolerance: Tolerance,
    got: &[f32],
    expected: &[f32],
    scale: f64,
    columns: usize,
) -> Option<WrongElement> {
    let wrong = |allowed: f32| {
        let is_wrong = move |i: &usize| {
            let off = (f64::from(got[*i]) - f64::from(expected[*i])).abs() / scale;
            off > f64::from(allowed) || off.is_nan()
        };
        (0..got.len().min(expected.len())).filter(is_wrong).collect::<Vec<usize>>()
    };
    let mut all = wrong(tolerance.relative_max);
    if all.is_empty() {
        all = wrong(tolerance.relative_rms);
    }
    let first = *all.first()?;
    let (row, column) = (first / columns, first % columns);
    Some(WrongElement { row, column, got: got[first], expected: expected[first], num_wrong: all.len() })
}
