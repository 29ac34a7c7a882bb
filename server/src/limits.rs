//! The bounded pool for work that would block the event loop: tokenising and template rendering.
//!
//! Invariant: at most `num_threads` jobs run and at most `max_waiting` wait; one more is refused with 503, and a job that
//! panics costs its own request only.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Semaphore;

use crate::error::ApiError;

/// Runs jobs on tokio's blocking threads, a few at a time.
#[derive(Debug)]
pub struct WorkPool {
    permits: Arc<Semaphore>,
    num_waiting: AtomicUsize,
    max_waiting: usize,
}

/// Counts one waiting job for as long as it lives.
struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl WorkPool {
    /// A pool of `num_threads` (at least one).
    pub fn new(num_threads: usize, max_waiting: usize) -> Self {
        Self { permits: Arc::new(Semaphore::new(num_threads.max(1))), num_waiting: AtomicUsize::new(0), max_waiting }
    }

    /// Runs `job` when a thread is free.
    ///
    /// # Errors
    /// 503 when too many wait, 500 when the job panicked.
    pub async fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
        let permit = {
            let before = self.num_waiting.fetch_add(1, Ordering::Relaxed);
            let _waiting = Waiting(&self.num_waiting);
            if before >= self.max_waiting {
                return Err(ApiError::unavailable("too many requests are waiting to be tokenised"));
            }
            let permit = Arc::clone(&self.permits).acquire_owned().await;
            permit.map_err(|_| ApiError::unavailable("the server is shutting down"))?
        };
        let job = tokio::task::spawn_blocking(move || {
            // The permit belongs to the thread: a client that leaves does not free a thread that is still busy.
            let _permit = permit;
            job()
        });
        job.await.map_err(|error| {
            tracing::error!(%error, "a job of the tokenising pool failed");
            ApiError::internal("the request could not be prepared: internal error")
        })
    }
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;

    use super::*;

    #[tokio::test]
    async fn a_job_beyond_the_bound_is_refused_and_a_panic_stays_in_its_job() {
        let pool = Arc::new(WorkPool::new(1, 1));
        let (release, hold) = std::sync::mpsc::channel::<()>();
        let (started, has_started) = tokio::sync::oneshot::channel();
        let running = tokio::spawn({
            let pool = Arc::clone(&pool);
            async move {
                pool.run(move || {
                    started.send(()).expect("the test waits");
                    hold.recv()
                })
                .await
            }
        });
        has_started.await.expect("the first job runs");
        let waiting = tokio::spawn({
            let pool = Arc::clone(&pool);
            async move { pool.run(|| 5).await }
        });
        while pool.num_waiting.load(Ordering::Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(pool.run(|| 6).await.expect_err("full").status, StatusCode::SERVICE_UNAVAILABLE);
        release.send(()).expect("the first job waits");
        assert!(running.await.expect("joined").is_ok());
        assert_eq!(waiting.await.expect("joined"), Ok(5));
        let panicked = pool.run(|| panic!("on purpose")).await.map(|()| 0);
        assert_eq!(panicked.expect_err("panicked").status, StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(pool.run(|| 7).await, Ok(7));
    }
}
