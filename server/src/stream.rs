//! Server-sent events: a `Generation` as the body of an answer.
//!
//! Invariant: the headers go out only when the first token is there (or the client has waited one keep-alive interval);
//! then come chunks, each choice's last one with its `finish_reason`, the usage chunk if it was asked for, and `[DONE]`. An
//! error ends the stream without `[DONE]`. Silence is broken by comment lines, never by chunks. Dropping the body aborts.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures_core::Stream;
use serde::Serialize;
use tokio::time::{Instant, Sleep, sleep};

use crate::error::ApiError;
use crate::generate::{Delta, Generation};

/// Bytes after which events that are ready are handed to the socket.
const FLUSH_BYTES: usize = 16 << 10;

/// Writes the chunks of one endpoint.
pub trait Chunks: Send + Unpin + 'static {
    /// What comes before any delta.
    fn open(&mut self, generation: &Generation, out: &mut Events);
    /// One delta.
    fn delta(&mut self, generation: &Generation, delta: Delta, out: &mut Events);
    /// What comes after all choices.
    fn close(&mut self, generation: &Generation, out: &mut Events);
}

/// Events, written as they will be sent.
#[derive(Debug, Default)]
pub struct Events(Vec<u8>);

impl Events {
    /// Adds one event whose data is JSON.
    pub fn json(&mut self, value: &impl Serialize) {
        self.0.extend_from_slice(b"data: ");
        let start = self.0.len();
        if let Err(error) = serde_json::to_writer(&mut self.0, value) {
            // Our own types serialise; a chunk that did not would be a bug, not a reason to send half of one.
            tracing::error!(%error, "a chunk was not serialised");
            self.0.truncate(start);
            self.0.extend_from_slice(b"{}");
        }
        self.0.extend_from_slice(b"\n\n");
    }
}

/// Answers with a stream.
///
/// # Errors
/// The request failed before its first token.
pub async fn respond(
    mut generation: Generation,
    chunks: impl Chunks,
    keep_alive: Option<Duration>,
) -> Result<Response, ApiError> {
    generation.first(keep_alive).await?;
    let body = SseBody {
        generation,
        chunks,
        stage: Stage::Opening,
        keep_alive: keep_alive.map(|interval| (interval, Box::pin(sleep(interval)))),
    };
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (header::HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    Ok((headers, Body::from_stream(body)).into_response())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Opening,
    Running,
    Ended,
}

struct SseBody<C> {
    generation: Generation,
    chunks: C,
    stage: Stage,
    keep_alive: Option<(Duration, Pin<Box<Sleep>>)>,
}

impl<C: Chunks> SseBody<C> {
    /// Writes all that is ready.
    fn fill(&mut self, cx: &mut Context<'_>, out: &mut Events) {
        if self.stage == Stage::Opening {
            self.stage = Stage::Running;
            self.chunks.open(&self.generation, out);
        }
        while self.stage == Stage::Running && out.0.len() < FLUSH_BYTES {
            match self.generation.poll_delta(cx) {
                Poll::Pending => return,
                Poll::Ready(Some(Ok(delta))) => self.chunks.delta(&self.generation, delta, out),
                Poll::Ready(Some(Err(error))) => {
                    out.json(&error.body());
                    self.stage = Stage::Ended;
                }
                Poll::Ready(None) => {
                    self.chunks.close(&self.generation, out);
                    out.0.extend_from_slice(b"data: [DONE]\n\n");
                    self.stage = Stage::Ended;
                }
            }
        }
    }
}

impl<C: Chunks> Stream for SseBody<C> {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let mut out = Events::default();
        this.fill(cx, &mut out);
        if out.0.is_empty() && this.stage == Stage::Ended {
            return Poll::Ready(None);
        }
        if let Some((interval, timer)) = &mut this.keep_alive {
            if out.0.is_empty() && timer.as_mut().poll(cx).is_ready() {
                out.0.extend_from_slice(b": keep-alive\n\n");
            }
            if !out.0.is_empty() {
                timer.as_mut().reset(Instant::now() + *interval);
            }
        }
        if out.0.is_empty() { Poll::Pending } else { Poll::Ready(Some(Ok(out.0.into()))) }
    }
}
