//! One request on its way through the engine: its choices' events come in, text deltas go out.
//!
//! Invariant: dropping a `Generation` aborts every choice that has not ended, so that a client that leaves (queued, in
//! prefill, in decode, streaming or not) frees its blocks within one step. The event queue holds all that the engine may
//! say, so that the engine never waits. Handlers and stream bodies own one each; detokenising happens here.

mod job;

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use runtime::error::RequestError;
use runtime::ids::{SeqId, TokenId};
use runtime::request::{Event, EventSink, FinishReason, Request, SamplingParams, Times, TokenLogprobs};
use runtime::text::TextStream;
use tokio::sync::mpsc;

pub use self::job::{Delta, Job, OutputToken, StopCause, TokenCounts};
use crate::error::ApiError;
use crate::metrics::FinishedChoice;
use crate::state::AppState;

/// An event, stamped on the engine's thread, so that latencies do not depend on how fast a client reads.
#[derive(Debug)]
struct Stamped {
    choice: usize,
    at: Instant,
    event: Event,
}

#[derive(Debug)]
struct Choice {
    seq: SeqId,
    prompt: usize,
    text: TextStream,
    /// Not yet handed out.
    pending: Delta,
    num_pending: u32,
    num_tokens: u32,
    num_cached: u32,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    stop_token: Option<TokenId>,
    prompt_logprobs: Vec<Option<TokenLogprobs>>,
    /// The client has its last delta.
    done: bool,
    /// The engine has said its last word.
    closed: bool,
}

/// A request in flight.
#[derive(Debug)]
pub struct Generation {
    state: Arc<AppState>,
    job: Job,
    events: mpsc::Receiver<Stamped>,
    choices: Vec<Choice>,
    num_open: usize,
    ready: VecDeque<Result<Delta, ApiError>>,
}

/// Sends a choice's events to its request's task.
struct Sink {
    choice: usize,
    sender: mpsc::Sender<Stamped>,
}

impl EventSink for Sink {
    fn send(&mut self, event: Event) -> bool {
        self.sender.try_send(Stamped { choice: self.choice, at: Instant::now(), event }).is_ok()
    }
}

impl Generation {
    /// Submits all choices of a job, or none.
    ///
    /// # Errors
    /// What the engine refuses.
    pub fn start(state: Arc<AppState>, job: Job) -> Result<Self, ApiError> {
        let (sender, events) = mpsc::channel(job.queue_len());
        let mut choices = Vec::new();
        let mut requests: Vec<(Request, Box<dyn EventSink>)> = Vec::new();
        for (prompt, (ids, max_tokens)) in job.prompts.iter().enumerate() {
            for i in 0..job.n {
                let seq = state.engine.next_id();
                let params = SamplingParams {
                    max_tokens: *max_tokens,
                    seed: job.params.seed.map(|seed| seed.wrapping_add(u64::from(i))),
                    ..job.params.clone()
                };
                let request = Request { id: seq, prompt: Arc::clone(ids), params, cache_salt: job.cache_salt.clone() };
                let choice = choices.len();
                requests.push((request, Box::new(Sink { choice, sender: sender.clone() })));
                choices.push(Choice::new(seq, prompt, choice, state.text.stream(&job.text)));
            }
        }
        state.engine.submit_all(requests).map_err(|error| {
            if let RequestError::Overloaded { reason, .. } = &error {
                state.metrics.rejected(reason);
            }
            ApiError::from(error)
        })?;
        for (_, max_tokens) in &job.prompts {
            state.metrics.submitted(job.n, *max_tokens);
        }
        state.num_in_flight.fetch_add(1, Ordering::Relaxed);
        let num_open = choices.len();
        Ok(Self { state, job, events, choices, num_open, ready: VecDeque::new() })
    }

    /// Waits for the first delta, at most for `patience`, so that an early failure can still be an HTTP status.
    ///
    /// # Errors
    /// The request failed before its first token.
    pub async fn first(&mut self, patience: Option<Duration>) -> Result<(), ApiError> {
        let first = poll_fn(|cx| self.poll_delta(cx));
        let delta = match patience {
            None => first.await,
            Some(patience) => match tokio::time::timeout(patience, first).await {
                Ok(delta) => delta,
                Err(_) => return Ok(()),
            },
        };
        if let Some(delta) = delta {
            self.ready.push_front(Ok(delta?));
        }
        Ok(())
    }

    /// The next delta; `None` when every choice has ended.
    pub async fn next(&mut self) -> Option<Result<Delta, ApiError>> {
        poll_fn(|cx| self.poll_delta(cx)).await
    }

    /// Whole answers, by choice.
    ///
    /// # Errors
    /// One of the choices failed; the others are aborted.
    pub async fn collect(&mut self) -> Result<Vec<Delta>, ApiError> {
        let mut answers: Vec<Delta> =
            (0..self.choices.len()).map(|choice| Delta { choice, ..Delta::default() }).collect();
        while let Some(delta) = self.next().await {
            let Delta { choice, text, tokens, finish } = delta?;
            let answer = &mut answers[choice];
            answer.text.push_str(&text);
            answer.tokens.extend(tokens);
            answer.finish = answer.finish.take().or(finish);
        }
        Ok(answers)
    }

    /// As `next`; nothing comes after an error.
    pub fn poll_delta(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Delta, ApiError>>> {
        loop {
            if let Some(delta) = self.ready.pop_front() {
                return Poll::Ready(Some(delta));
            }
            if self.num_open == 0 {
                return Poll::Ready(None);
            }
            match ready!(self.events.poll_recv(cx)) {
                Some(stamped) => self.take(stamped),
                None => self.fail(ApiError::internal("the engine has stopped"), FinishReason::Error),
            }
        }
    }

    /// The prompt of a choice.
    pub fn prompt(&self, choice: usize) -> &Arc<[TokenId]> {
        &self.job.prompts[self.choices[choice].prompt].0
    }

    /// Number of choices, over all prompts.
    pub fn num_choices(&self) -> usize {
        self.choices.len()
    }

    /// Log-probabilities of a choice's prompt; whole once its first delta is there.
    pub fn prompt_logprobs(&self, choice: usize) -> &[Option<TokenLogprobs>] {
        &self.choices[choice].prompt_logprobs
    }

    /// Tokens of one choice so far.
    pub fn counts_of(&self, choice: usize) -> TokenCounts {
        let choice = &self.choices[choice];
        let prompt = self.job.prompts[choice.prompt].0.len();
        TokenCounts { prompt, cached: choice.num_cached as usize, output: choice.num_tokens as usize }
    }

    /// Tokens of the request so far: each prompt once, all outputs.
    pub fn counts(&self) -> TokenCounts {
        let mut counts = TokenCounts::default();
        for (index, choice) in self.choices.iter().enumerate() {
            counts.output += choice.num_tokens as usize;
            if index % self.job.n as usize == 0 {
                counts.prompt += self.job.prompts[choice.prompt].0.len();
                counts.cached += choice.num_cached as usize;
            }
        }
        counts
    }

    fn take(&mut self, Stamped { choice: index, at, event }: Stamped) {
        let choice = &mut self.choices[index];
        match event {
            Event::Started { cached_tokens } => choice.num_cached = cached_tokens,
            Event::PromptLogprobs(more) => choice.prompt_logprobs.extend(more),
            Event::Token { id, logprobs } if !choice.done => self.take_token(index, at, id, logprobs),
            Event::Token { .. } => {}
            Event::Finished { reason, times, num_preemptions } => {
                choice.closed = true;
                self.num_open -= 1;
                self.record(index, at, reason, times, num_preemptions);
                self.end(index, reason);
            }
            Event::Failed(message) => self.fail(ApiError::internal(message), FinishReason::Error),
        }
    }

    fn take_token(&mut self, index: usize, at: Instant, id: TokenId, logprobs: Option<Box<TokenLogprobs>>) {
        let choice = &mut self.choices[index];
        match choice.last_token {
            None => self.state.metrics.first_token(at.saturating_duration_since(self.job.arrived)),
            Some(last) => self.state.metrics.next_token(at.saturating_duration_since(last)),
        }
        choice.first_token.get_or_insert(at);
        choice.last_token = Some(at);
        choice.num_tokens += 1;
        choice.num_pending += 1;
        let delta = if self.job.params.is_stop(id) {
            choice.stop_token = Some(id);
            choice.text.push_stop_token(id)
        } else {
            choice.text.push(id)
        };
        choice.pending.text.push_str(&delta.text);
        choice.pending.tokens.push(OutputToken { id, offset_chars: delta.offset_chars, logprobs });
        if let Some(stop) = delta.stop {
            choice.done = true;
            choice.pending.finish = Some((FinishReason::Stop, Some(StopCause::Text(self.job.text.stop[stop].clone()))));
            self.state.engine.finish(choice.seq);
        }
        if choice.done || choice.num_tokens == 1 || choice.num_pending >= self.job.interval {
            self.ready.push_back(Ok(choice.hand_out()));
        }
    }

    /// The engine has ended a choice: its last delta, unless a stop string has ended it before.
    fn end(&mut self, index: usize, reason: FinishReason) {
        let choice = &mut self.choices[index];
        if std::mem::replace(&mut choice.done, true) {
            return;
        }
        match reason {
            FinishReason::Stop | FinishReason::Length => {}
            FinishReason::Abort => {
                return self
                    .fail(ApiError::unavailable("the request was aborted: the server is shutting down"), reason);
            }
            FinishReason::Error => {
                let message = "the model's output for this request was not finite (NaN or infinity)";
                return self.fail(ApiError::internal(message), reason);
            }
        }
        let rest = choice.text.finish();
        choice.pending.text.push_str(&rest.text);
        let named = |id: &TokenId| self.job.params.stop_token_ids.contains(id);
        choice.pending.finish = Some(match rest.stop {
            Some(stop) => (FinishReason::Stop, Some(StopCause::Text(self.job.text.stop[stop].clone()))),
            None if reason == FinishReason::Stop => (reason, choice.stop_token.filter(named).map(StopCause::Token)),
            None => (reason, None),
        });
        self.ready.push_back(Ok(choice.hand_out()));
    }

    /// Ends the whole request with an error; choices that still run are aborted.
    fn fail(&mut self, error: ApiError, reason: FinishReason) {
        for choice in self.choices.iter_mut().filter(|choice| !choice.closed) {
            choice.closed = true;
            self.state.engine.abort(choice.seq);
            self.state.metrics.ended(if choice.done { FinishReason::Stop } else { reason });
        }
        self.num_open = 0;
        self.ready.push_back(Err(error));
    }

    fn record(&self, index: usize, at: Instant, reason: FinishReason, times: Times, num_preemptions: u32) {
        let choice = &self.choices[index];
        self.state.metrics.finished(&FinishedChoice {
            reason,
            times,
            num_preemptions,
            num_prompt_tokens: self.prompt(index).len(),
            num_cached_tokens: choice.num_cached,
            num_tokens: choice.num_tokens,
            first_token: choice.first_token.map(|first| first.saturating_duration_since(self.job.arrived)),
            whole: at.saturating_duration_since(self.job.arrived),
        });
        let siblings = self.choices.iter().filter(|other| other.prompt == choice.prompt);
        if siblings.clone().all(|other| other.closed) {
            let longest = siblings.map(|other| other.num_tokens).max().unwrap_or(0);
            self.state.metrics.longest_choice(longest);
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        for choice in self.choices.iter().filter(|choice| !choice.closed) {
            self.state.engine.abort(choice.seq);
            self.state.metrics.ended(if choice.done { FinishReason::Stop } else { FinishReason::Abort });
        }
        self.state.num_in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Choice {
    fn new(seq: SeqId, prompt: usize, index: usize, text: TextStream) -> Self {
        Self {
            seq,
            prompt,
            text,
            pending: Delta { choice: index, ..Delta::default() },
            num_pending: 0,
            num_tokens: 0,
            num_cached: 0,
            first_token: None,
            last_token: None,
            stop_token: None,
            prompt_logprobs: Vec::new(),
            done: false,
            closed: false,
        }
    }

    fn hand_out(&mut self) -> Delta {
        self.num_pending = 0;
        let next = Delta { choice: self.pending.choice, ..Delta::default() };
        std::mem::replace(&mut self.pending, next)
    }
}
