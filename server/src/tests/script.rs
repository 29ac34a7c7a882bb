//! A `StepRunner` that says a fixed text, whatever it is asked.
//!
//! Invariant: the token at output position p of a row is entry p of the script; a row whose seed is s starts s entries
//! later. Steps can be held, the device can fail, and a prompt that contains `CORRUPT` has no finite logits.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};

use runtime::error::DeviceError;
use runtime::ids::{Row, TokenId};
use runtime::request::TokenLogprobs;
use runtime::step::{DrawnToken, LogitRows, NewRow, RowOutput, RowWork, StepOutput, StepPlan, StepRunner};

/// A prompt with this token makes its row corrupt.
pub const CORRUPT: TokenId = TokenId(5);

/// What a test can do to a running script.
#[derive(Clone, Debug, Default)]
pub struct Controls {
    fail: Arc<AtomicBool>,
    panic: Arc<AtomicBool>,
    /// Steps that may still end; `None` is all.
    allowed: Arc<(Mutex<Option<u64>>, Condvar)>,
    num_steps: Arc<AtomicU64>,
}

impl Controls {
    /// The next step fails.
    pub fn fail(&self) {
        self.fail.store(true, Ordering::SeqCst);
    }

    /// The next step panics.
    pub fn panic(&self) {
        self.panic.store(true, Ordering::SeqCst);
    }

    /// After `num_steps` more steps none ends until `release`.
    pub fn hold_after(&self, num_steps: u64) {
        *self.allowed.0.lock().expect("not poisoned") = Some(num_steps);
        self.allowed.1.notify_all();
    }

    /// Steps go on.
    pub fn release(&self) {
        *self.allowed.0.lock().expect("not poisoned") = None;
        self.allowed.1.notify_all();
    }

    /// Steps that were started.
    pub fn num_steps(&self) -> u64 {
        self.num_steps.load(Ordering::SeqCst)
    }
}

/// The runner.
#[derive(Debug)]
pub struct Script {
    says: Vec<TokenId>,
    rows: HashMap<Row, NewRow>,
    plan: Option<StepPlan>,
    controls: Controls,
}

impl Script {
    /// A runner that says `says`, and its controls.
    pub fn new(says: Vec<TokenId>) -> (Self, Controls) {
        let controls = Controls::default();
        (Self { says, rows: HashMap::new(), plan: None, controls: controls.clone() }, controls)
    }

    fn run(&mut self, work: &RowWork) -> RowOutput {
        let row = self.rows.get_mut(&work.row).expect("an admitted row");
        let mut output = RowOutput { corrupt: row.tokens.contains(&CORRUPT), ..RowOutput::default() };
        let end = work.start + work.length;
        if let LogitRows::All { .. } = work.logits {
            let positions = (work.start + 1)..=end;
            let known = positions.filter(|position| *position < row.prompt_len);
            output.prompt_logprobs = known
                .map(|position| logprobs(row.tokens[position as usize], row.params.prompt_logprobs.unwrap_or(0)))
                .collect();
        }
        let draw = matches!(work.logits, LogitRows::Last | LogitRows::All { draw: true });
        if draw && !output.corrupt {
            let shift = row.params.seed.unwrap_or(0) as usize;
            let position = row.tokens.len() - row.prompt_len as usize;
            let id = self.says[(position + shift) % self.says.len()];
            let logprobs = row.params.logprobs.map(|top| Box::new(logprobs(id, top)));
            row.tokens.push(id);
            output.tokens.push(DrawnToken { id, logprobs });
        }
        output
    }
}

/// Log-probabilities as a model could give them, one alternative impossible.
fn logprobs(id: TokenId, top: u32) -> TokenLogprobs {
    let all = [(id, -0.5), (TokenId(id.0 ^ 1), -1.5), (TokenId(id.0 ^ 2), f32::NEG_INFINITY)];
    TokenLogprobs { logprob: -0.5, rank: 1, top: all.into_iter().take(top as usize).collect() }
}

impl StepRunner for Script {
    fn submit(&mut self, plan: &StepPlan) -> Result<(), DeviceError> {
        self.controls.num_steps.fetch_add(1, Ordering::SeqCst);
        self.plan = Some(plan.clone());
        Ok(())
    }

    fn wait(&mut self, output: &mut StepOutput) -> Result<(), DeviceError> {
        let (allowed, changed) = &*self.controls.allowed;
        let allowed = allowed.lock().expect("not poisoned");
        let mut allowed = changed.wait_while(allowed, |allowed| *allowed == Some(0)).expect("not poisoned");
        *allowed = allowed.map(|left| left - 1);
        drop(allowed);
        if self.controls.fail.load(Ordering::SeqCst) {
            return Err(DeviceError::Failed("on purpose".into()));
        }
        assert!(!self.controls.panic.load(Ordering::SeqCst), "a step panics on purpose");
        let plan = self.plan.take().expect("a submitted step");
        for row in &plan.released {
            self.rows.remove(row);
        }
        for row in &plan.admitted {
            self.rows.insert(row.row, row.clone());
        }
        output.rows.clear();
        output.rows.extend(plan.work.iter().map(|work| self.run(work)));
        Ok(())
    }
}
