//! The thread pool of the CPU and the reference backend: a team that runs one job together, with spinning barriers
//! inside the job.
//!
//! Invariant: `Pool::run` returns only when no thread touches the job any more, and a panic in any thread becomes a
//! `DeviceError` for good, never a deadlock: every wait also watches the failure flag. The calling thread is thread 0 of
//! the team, so that N threads keep N cores busy. Workers spin for a short while after a job (the next token is near),
//! then park: an idle engine uses no CPU. The split of work is static and belongs to the job.

use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::DeviceError;

/// How long a worker waits for the next job before it parks: longer than the host's work between two decode steps.
const SPIN_BEFORE_PARK: Duration = Duration::from_micros(150);
/// Spins in a barrier before the thread offers its core to others: a descheduled partner may need it.
const SPINS_BEFORE_YIELD: u32 = 4096;

type Job<'a> = dyn Fn(&Team<'_>) + Sync + 'a;

/// A value on a cache line of its own, so that waiting on it does not slow its neighbours.
#[repr(align(128))]
struct Line<T>(T);

struct Shared {
    threads: usize,
    /// The job of the current epoch; written by `run` only while no worker runs.
    job: UnsafeCell<Option<*const Job<'static>>>,
    epoch: Line<AtomicUsize>,
    running: Line<AtomicUsize>,
    arrived: Line<AtomicUsize>,
    generation: Line<AtomicUsize>,
    stop: AtomicBool,
    failed: AtomicBool,
    failure: Mutex<Option<String>>,
}

// SAFETY: `job` is written before the release store of `epoch` and read after its acquire load, and not written again
// before every worker has left the job (`running` is 0); everything else is Sync by itself.
unsafe impl Sync for Shared {}
// SAFETY: the raw job pointer is used only inside `run`, whose caller keeps the job alive, and the job is Sync.
unsafe impl Send for Shared {}

impl Shared {
    fn fail(&self, panic: &(dyn Any + Send)) {
        let message = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
            .unwrap_or_else(|| "unknown panic".to_owned());
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(message);
        self.failed.store(true, Ordering::Release);
    }
}

/// A fixed set of threads; see the module's head.
pub(super) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// Starts `threads - 1` workers; the thread that calls `run` is the other one.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub(super) fn new(threads: usize) -> Result<Self, DeviceError> {
        let shared = Arc::new(Shared {
            threads: threads.max(1),
            job: UnsafeCell::new(None),
            epoch: Line(AtomicUsize::new(0)),
            running: Line(AtomicUsize::new(0)),
            arrived: Line(AtomicUsize::new(0)),
            generation: Line(AtomicUsize::new(0)),
            stop: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
        });
        let mut pool = Self { shared, workers: Vec::new() };
        for thread in 1..pool.threads() {
            let shared = Arc::clone(&pool.shared);
            let worker = std::thread::Builder::new()
                .name(format!("cpu-{thread}"))
                .spawn(move || work(&shared, thread))
                .map_err(|e| DeviceError::Failed(format!("cannot start CPU worker {thread}: {e}")))?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Size of the team.
    pub(super) fn threads(&self) -> usize {
        self.shared.threads
    }

    /// Runs `job` once on every thread of the team and returns when all have left it.
    ///
    /// # Errors
    /// A thread panicked, now or in an earlier job.
    pub(super) fn run(&mut self, job: &Job<'_>) -> Result<(), DeviceError> {
        let shared = &*self.shared;
        if !shared.failed.load(Ordering::Acquire) {
            // SAFETY: the lifetime is erased for the time of this call only; the wait below ends after the last worker
            // has left the job, and the pointer is cleared then.
            let erased = unsafe { std::mem::transmute::<*const Job<'_>, *const Job<'static>>(job) };
            // SAFETY: no worker reads the cell: all have left the last job, and the epoch has not moved on yet.
            unsafe { *shared.job.get() = Some(erased) };
            shared.running.0.store(self.workers.len(), Ordering::Relaxed);
            shared.epoch.0.fetch_add(1, Ordering::Release);
            for worker in &self.workers {
                worker.thread().unpark();
            }
            run_caught(shared, 0, job);
            wait_until(|| shared.running.0.load(Ordering::Acquire) == 0);
            // SAFETY: as above, no worker is inside.
            unsafe { *shared.job.get() = None };
        }
        if !shared.failed.load(Ordering::Acquire) {
            return Ok(());
        }
        let failure = shared.failure.lock().unwrap_or_else(PoisonError::into_inner);
        Err(DeviceError::Failed(format!("a CPU thread panicked: {}", failure.as_deref().unwrap_or("unknown panic"))))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.epoch.0.fetch_add(1, Ordering::Release);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches every panic of a job; there is nothing to learn from its result.
            let _ = worker.join();
        }
    }
}

fn work(shared: &Shared, thread: usize) {
    let mut seen = 0;
    loop {
        let idle_since = Instant::now();
        loop {
            let epoch = shared.epoch.0.load(Ordering::Acquire);
            if epoch != seen {
                seen = epoch;
                break;
            }
            if idle_since.elapsed() < SPIN_BEFORE_PARK {
                (0..16).for_each(|_| std::hint::spin_loop());
            } else {
                std::thread::park();
            }
        }
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        // SAFETY: the epoch was advanced after the cell was written, and `run` does not write it again, nor let the job
        // go, before `running` is back at 0.
        if let Some(job) = unsafe { *shared.job.get() } {
            // SAFETY: as above, the job outlives this call.
            run_caught(shared, thread, unsafe { &*job });
        }
        shared.running.0.fetch_sub(1, Ordering::Release);
    }
}

fn run_caught(shared: &Shared, thread: usize, job: &Job<'_>) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(&Team { shared, thread }))) {
        shared.fail(&*panic);
    }
}

fn wait_until(ready: impl Fn() -> bool) {
    let mut spins = 0u32;
    while !ready() {
        spins += 1;
        if spins < SPINS_BEFORE_YIELD {
            std::hint::spin_loop();
        } else {
            spins = 0;
            std::thread::yield_now();
        }
    }
}

/// Another thread of the team has panicked: leave the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Abandoned;

/// What one thread of a running job knows of its team.
pub(super) struct Team<'a> {
    shared: &'a Shared,
    /// From 0 to `threads() - 1`; 0 is the thread that called `run`.
    pub(super) thread: usize,
}

impl Team<'_> {
    /// Size of the team.
    pub(super) fn threads(&self) -> usize {
        self.shared.threads
    }

    /// This thread's contiguous share of `count` equal things.
    pub(super) fn share(&self, count: usize) -> Range<usize> {
        count * self.thread / self.threads()..count * (self.thread + 1) / self.threads()
    }

    /// Waits for all threads of the team; what they wrote before is visible after.
    ///
    /// # Errors
    /// A thread panicked and will never arrive.
    pub(super) fn barrier(&self) -> Result<(), Abandoned> {
        let shared = self.shared;
        let generation = shared.generation.0.load(Ordering::Acquire);
        if shared.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == shared.threads {
            shared.arrived.0.store(0, Ordering::Relaxed);
            shared.generation.0.fetch_add(1, Ordering::Release);
            return Ok(());
        }
        wait_until(|| {
            shared.generation.0.load(Ordering::Acquire) != generation || shared.failed.load(Ordering::Relaxed)
        });
        if shared.generation.0.load(Ordering::Acquire) == generation { Err(Abandoned) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn barrier_orders_the_phases_of_a_job() {
        for threads in 1..=4 {
            let mut pool = Pool::new(threads).unwrap();
            let cells: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            for round in 1..=200 {
                pool.run(&|team| {
                    cells[team.thread].fetch_add(1, Ordering::Relaxed);
                    team.barrier().unwrap();
                    assert!(cells.iter().all(|c| c.load(Ordering::Relaxed) == round));
                    team.barrier().unwrap();
                })
                .unwrap();
            }
        }
    }

    #[test]
    fn shares_cover_everything_once() {
        let mut pool = Pool::new(3).unwrap();
        for count in [0, 1, 2, 3, 7, 36] {
            let hits: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
            pool.run(&|team| {
                for i in team.share(count) {
                    hits[i].fetch_add(1, Ordering::Relaxed);
                }
            })
            .unwrap();
            assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1), "count {count}");
        }
    }

    #[test]
    fn panic_in_any_thread_is_an_error_and_no_deadlock() {
        for culprit in 0..3 {
            let mut pool = Pool::new(3).unwrap();
            let error = pool
                .run(&|team| {
                    assert!(team.thread != culprit, "thread {culprit} breaks");
                    let _ = team.barrier();
                })
                .unwrap_err();
            assert_eq!(error, DeviceError::Failed(format!("a CPU thread panicked: thread {culprit} breaks")));
            assert_eq!(pool.run(&|_| ()), Err(error), "a failed team stays failed");
        }
    }
}
