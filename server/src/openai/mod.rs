//! The OpenAI protocol: request bodies, their rules, and the JSON of answers.
//!
//! Invariant: every rule of a parameter is checked before the engine hears of the request, and its refusal names the
//! parameter as the client wrote it.

pub mod answer;
pub mod chat;
pub mod chat_wire;
pub mod completion_wire;
pub mod completions;
pub mod fields;
pub mod messages;
pub mod models;
pub mod params;
pub mod prepare;
pub mod unsupported;
