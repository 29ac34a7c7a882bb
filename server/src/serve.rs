//! The life of the server: listen, answer, drain, end.
//!
//! Invariant: after the first stop signal no connection and no request is accepted, and what runs may end within the
//! shutdown timeout; a second signal ends at once. When the device fails every live request hears it, then the process
//! ends with an error.

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use runtime::engine::{Engine, Health};
use runtime::text::TextModel;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc};

use crate::config::{ServedModel, ServerConfig};
use crate::io::PatientStream;
use crate::routes::router;
use crate::state::AppState;

/// How often the engine is asked whether it still lives.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);
/// How long answers may take to leave once the engine has nothing more to say.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Why serving ended badly.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// Host and port.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// The device failed while serving.
    #[error("the engine failed: {0}")]
    Engine(String),
    /// The system refused a thread, a signal handler or a socket.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Serves until a stop signal and blocks for as long: two threads for sockets, a few for tokenising.
///
/// # Errors
/// The address is taken, or the device failed.
pub fn run(config: ServerConfig, engine: Engine, text: TextModel, model: ServedModel) -> Result<(), ServeError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        // One more: the end of the engine is waited for there.
        .max_blocking_threads(config.num_blocking_threads.max(1) + 1)
        .thread_name("kittiwake-http")
        .enable_all()
        .build()?;
    let result = runtime.block_on(async {
        let listener = bind(&config.host, config.port).await?;
        let signals = stop_signals()?;
        serve(listener, AppState::new(config, engine, text, model), signals).await
    });
    // Connections that outlived the drain end here.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

async fn bind(host: &str, port: u16) -> Result<TcpListener, ServeError> {
    TcpListener::bind((host, port))
        .await
        .map_err(|source| ServeError::Bind { address: format!("{host}:{port}"), source })
}

/// One message per SIGINT or SIGTERM.
fn stop_signals() -> io::Result<mpsc::Receiver<()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let (sender, receiver) = mpsc::channel(2);
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            if sender.send(()).await.is_err() {
                return;
            }
        }
    });
    Ok(receiver)
}

/// Serves `listener` until `signals` says stop: the first message drains, the second ends at once.
///
/// # Errors
/// The device failed, or the listener did.
pub async fn serve(
    listener: TcpListener,
    state: Arc<AppState>,
    mut signals: mpsc::Receiver<()>,
) -> Result<(), ServeError> {
    let address: SocketAddr = listener.local_addr()?;
    let stop = Notify::new();
    let mut connections = pin!(connections(listener, router(Arc::clone(&state)), state.config.socket_timeout(), &stop));
    tracing::info!("listening on http://{address}");

    let failure = tokio::select! {
        () = &mut connections => return Ok(()),
        why = engine_failure(&state.engine) => Some(why),
        Some(()) = signals.recv() => None,
    };
    match &failure {
        Some(why) => tracing::error!("the engine failed: {why}"),
        None => tracing::info!("draining: running requests may end, new ones are refused"),
    }
    state.draining.store(true, Ordering::Relaxed);
    state.engine.drain();
    stop.notify_one();
    let patience = if failure.is_some() { LAST_WORDS } else { Duration::from_secs(state.config.shutdown_timeout_s) };
    tokio::select! {
        () = &mut connections => {}
        Some(()) = signals.recv() => tracing::warn!("stopped at once by a second signal"),
        () = tokio::time::sleep(patience) => {
            tracing::warn!("requests still run after {} s: aborting them", patience.as_secs());
            end_engine(&state.engine).await;
            // The streams that were cut write their error and end.
            let _ = tokio::time::timeout(LAST_WORDS, &mut connections).await;
        }
    }
    end_engine(&state.engine).await;
    failure.map_or(Ok(()), |why| Err(ServeError::Engine(why)))
}

/// Accepts until `stop`, then ends when the answers that run have been sent. A connection whose next request has no
/// whole head within `patience` is closed, be it idle or drip-fed.
async fn connections(mut listener: TcpListener, router: Router, patience: Duration, stop: &Notify) {
    let open = GracefulShutdown::new();
    loop {
        let stream = tokio::select! {
            // Waits and tries again when the system has no more files.
            (stream, _) = Listener::accept(&mut listener) => stream,
            () = stop.notified() => break,
        };
        // One small packet per token: Nagle's algorithm would hold each back for the last one's acknowledgement.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY not set");
        }
        let connection = http1::Builder::new().timer(TokioTimer::new()).header_read_timeout(patience).serve_connection(
            TokioIo::new(PatientStream::new(stream, patience)),
            TowerToHyperService::new(router.clone()),
        );
        let connection = open.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection broke off");
            }
        });
    }
    drop(listener);
    open.shutdown().await;
}

/// Waits until the engine has failed.
async fn engine_failure(engine: &Engine) -> String {
    loop {
        if let Health::Failed(why) = engine.health() {
            return why;
        }
        tokio::time::sleep(WATCH_INTERVAL).await;
    }
}

/// Joins the engine's thread without holding up the sockets; bounded, since a step may hang in a driver.
async fn end_engine(engine: &Engine) {
    let engine = engine.clone();
    let ended = tokio::task::spawn_blocking(move || engine.shutdown());
    if tokio::time::timeout(LAST_WORDS, ended).await.is_err() {
        tracing::warn!("the engine did not end in time");
    }
}
