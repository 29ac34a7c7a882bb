//! The engine thread: takes commands between steps, then folds schedule, run, apply; without work it sleeps.
//!
//! Invariant: every accepted request hears exactly one last event, `Finished` or `Failed`, whatever happens to the device
//! or to this code: a panic is caught, told to every request, and the engine counts as failed. Started by `Engine::start`.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::{Admission, EngineConfig, Health, Shared, Stats};
use crate::error::DeviceError;
use crate::ids::SeqId;
use crate::kv::KvCacheManager;
use crate::request::{Event, EventSink, Request};
use crate::scheduler::{Counters, Scheduler, SeqEvent};
use crate::step::{StepOutput, StepRunner};

/// What handles ask of the engine thread.
pub(super) enum Command {
    Submit(Vec<(Request, Box<dyn EventSink>)>),
    Abort(SeqId),
    Finish(SeqId),
    ResetPrefixCache,
    Shutdown,
}

impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Command")
    }
}

/// The listening side of a request.
struct Listener {
    /// `None`: nobody listens any more.
    sink: Option<Box<dyn EventSink>>,
    num_prompt_tokens: u64,
    /// Counted in `Admission::num_queued`.
    is_queued: bool,
}

/// Everything that the engine thread owns.
pub(super) struct Worker {
    scheduler: Scheduler,
    kv: KvCacheManager,
    runner: Box<dyn StepRunner>,
    output: StepOutput,
    /// Indexed by the scheduler's slots.
    listeners: Vec<Option<Listener>>,
    /// Sequences whose listener has gone.
    unheard: Vec<SeqId>,
    commands: Receiver<Command>,
    shared: Arc<Shared>,
    clock: Instant,
}

impl Worker {
    /// A worker without requests; `config` has passed `EngineConfig::fit`.
    pub(super) fn new(runner: Box<dyn StepRunner>, config: &EngineConfig, commands: Receiver<Command>) -> Self {
        let scheduler = Scheduler::new(config.scheduler());
        let kv = KvCacheManager::new(config.num_blocks, config.block_size, config.enable_prefix_caching);
        let admission = Admission { health: Health::Ready, num_live: 0, num_queued: 0, num_queued_tokens: 0 };
        let counters = scheduler.counters().clone();
        let stats = Stats { num_total_blocks: kv.num_total_blocks(), counters, ..Stats::default() };
        let shared = Shared { admission: Mutex::new(admission), stats: Mutex::new(stats) };
        Self {
            scheduler,
            kv,
            runner,
            output: StepOutput::default(),
            listeners: Vec::new(),
            unheard: Vec::new(),
            commands,
            shared: Arc::new(shared),
            clock: Instant::now(),
        }
    }

    pub(super) fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }

    /// Serves until it is told to stop, the last handle is gone, or it fails.
    pub(super) fn run(mut self) {
        let problem = match catch_unwind(AssertUnwindSafe(|| self.serve())) {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(panic) => {
                format!("internal error before step {}: {}", self.scheduler.next_step(), panic_message(&*panic))
            }
        };
        self.fail(&problem);
    }

    fn serve(&mut self) -> Result<(), DeviceError> {
        while self.take_commands() {
            self.step()?;
        }
        let now_us = self.now_us();
        self.scheduler.abort_all(&mut self.kv, now_us);
        self.publish();
        self.dispatch();
        Ok(())
    }

    /// Takes all commands that have come, and waits for one where there is nothing else to do. `false`: stop.
    fn take_commands(&mut self) -> bool {
        loop {
            let command = if self.scheduler.has_work() {
                match self.commands.try_recv() {
                    Ok(command) => command,
                    Err(TryRecvError::Empty) => return true,
                    Err(TryRecvError::Disconnected) => return false,
                }
            } else {
                match self.commands.recv() {
                    Ok(command) => command,
                    Err(_) => return false,
                }
            };
            if !self.take(command) {
                return false;
            }
        }
    }

    fn take(&mut self, command: Command) -> bool {
        let now_us = self.now_us();
        match command {
            Command::Submit(requests) => {
                requests.into_iter().for_each(|(request, sink)| self.add(request, sink, now_us))
            }
            Command::Abort(id) => self.scheduler.abort(&mut self.kv, id, now_us),
            Command::Finish(id) => self.scheduler.finish(&mut self.kv, id, now_us),
            Command::ResetPrefixCache => self.kv.reset(),
            Command::Shutdown => return false,
        }
        self.publish();
        self.dispatch();
        true
    }

    fn add(&mut self, request: Request, mut sink: Box<dyn EventSink>, now_us: u64) {
        let num_prompt_tokens = request.prompt.len() as u64;
        if self.scheduler.contains(request.id) {
            sink.send(Event::Failed(format!("request id {} is in use", request.id)));
            let refused = Listener { sink: None, num_prompt_tokens, is_queued: true };
            return self.shared.admission().end(&refused);
        }
        let slot = self.scheduler.add(request, now_us).index();
        if self.listeners.len() <= slot {
            self.listeners.resize_with(slot + 1, || None);
        }
        self.listeners[slot] = Some(Listener { sink: Some(sink), num_prompt_tokens, is_queued: true });
    }

    fn step(&mut self) -> Result<(), DeviceError> {
        let now_us = self.now_us();
        let plan = self.scheduler.schedule(&mut self.kv, now_us);
        if plan.work.is_empty() {
            return Ok(());
        }
        self.publish();
        self.dispatch();
        self.runner.submit(&plan)?;
        self.runner.wait(&mut self.output)?;
        let now_us = self.now_us();
        self.scheduler.apply(&mut self.kv, plan, &mut self.output, now_us);
        if cfg!(debug_assertions) {
            self.scheduler.check_invariants(&self.kv);
        }
        self.publish();
        self.dispatch();
        Ok(())
    }

    /// Hands the scheduler's events to their listeners, and aborts the sequences of those that have gone.
    fn dispatch(&mut self) {
        loop {
            for SeqEvent { slot, id, event } in self.scheduler.drain_events() {
                let place = &mut self.listeners[slot.index()];
                let listener = place.as_mut().expect("a listener stays until its last event");
                let is_last = matches!(event, Event::Finished { .. });
                // Counted before it is told: who hears the end of a request finds its place free.
                match event {
                    Event::Started { .. } => self.shared.admission().start(listener),
                    Event::Finished { .. } => self.shared.admission().end(listener),
                    _ => (),
                }
                if let Some(sink) = &mut listener.sink
                    && !sink.send(event)
                    && !is_last
                {
                    listener.sink = None;
                    self.unheard.push(id);
                }
                if is_last {
                    *place = None;
                }
            }
            if self.unheard.is_empty() {
                return;
            }
            let now_us = self.now_us();
            for id in self.unheard.drain(..) {
                self.scheduler.abort(&mut self.kv, id, now_us);
            }
            self.publish();
        }
    }

    /// Puts the current numbers where handles read them; before the events that follow from them are told.
    fn publish(&self) {
        let mut stats = self.shared.stats();
        stats.num_running = self.scheduler.num_running();
        stats.num_waiting = self.scheduler.num_waiting();
        stats.num_used_blocks = self.kv.num_used_blocks();
        // The histogram's buffer is kept: this runs every step.
        let counters = self.scheduler.counters();
        let mut step_tokens_histogram = std::mem::take(&mut stats.counters.step_tokens_histogram);
        step_tokens_histogram.copy_from_slice(&counters.step_tokens_histogram);
        stats.counters = Counters { step_tokens_histogram, ..*counters };
    }

    /// Tells every request, also those that still lie in the channel. Scheduler and cache are not touched: they may have
    /// been left in the middle of something.
    fn fail(mut self, problem: &str) {
        tracing::error!(problem, "the engine has failed");
        self.shared.admission().health = Health::Failed(problem.to_owned());
        let tell = |sink: &mut dyn EventSink| {
            // A sink that panics must not keep the others from hearing it.
            drop(catch_unwind(AssertUnwindSafe(|| sink.send(Event::Failed(problem.to_owned())))));
        };
        for sink in self.listeners.drain(..).flatten().filter_map(|listener| listener.sink) {
            tell(&mut *{ sink });
        }
        // Since the health is `Failed`, nothing more comes.
        while let Ok(command) = self.commands.try_recv() {
            if let Command::Submit(requests) = command {
                requests.into_iter().for_each(|(_, mut sink)| tell(&mut *sink));
            }
        }
        let mut admission = self.shared.admission();
        (admission.num_live, admission.num_queued, admission.num_queued_tokens) = (0, 0, 0);
        let mut stats = self.shared.stats();
        (stats.num_running, stats.num_waiting, stats.num_used_blocks) = (0, 0, 0);
        drop((admission, stats));
        // The destructor of a lost device may panic as well.
        drop(catch_unwind(AssertUnwindSafe(move || drop(self.runner))));
    }

    fn now_us(&self) -> u64 {
        self.clock.elapsed().as_micros() as u64
    }
}

impl Admission {
    fn start(&mut self, listener: &mut Listener) {
        if std::mem::take(&mut listener.is_queued) {
            self.num_queued -= 1;
            self.num_queued_tokens -= listener.num_prompt_tokens;
        }
    }

    fn end(&mut self, listener: &Listener) {
        self.num_live -= 1;
        if listener.is_queued {
            self.num_queued -= 1;
            self.num_queued_tokens -= listener.num_prompt_tokens;
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("unknown panic")
}
