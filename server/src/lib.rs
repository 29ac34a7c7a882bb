//! The OpenAI-compatible HTTP layer over `runtime::engine::Engine`.
//!
//! Invariant: text lives on this side only. A handler reads a body, makes ids of it on a bounded pool, submits them, and
//! turns the events that come back into JSON or server-sent events; nothing here knows a model's shapes, and nothing
//! that a client sends can stop the process. The command line (`kittiwake serve`) calls `run`, tests call `router`.

mod auth;
mod body;
mod config;
mod error;
mod generate;
mod id;
mod io;
mod limits;
mod metrics;
mod openai;
mod openapi;
mod routes;
mod serve;
mod state;
mod stream;
mod tokenize;

#[cfg(test)]
mod tests;

pub use config::{ServedModel, ServerConfig};
pub use routes::router;
pub use serve::{ServeError, run, serve};
pub use state::AppState;
