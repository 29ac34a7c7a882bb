//! The OpenAI-compatible HTTP layer over `runtime::engine::Engine`.
