//! `GET /openapi.json`: what the routes take and answer, as an OpenAPI 3.1 document that is written by hand.
//!
//! Invariant: it says what is so. `tests/openapi.rs` compares it with the routes and with the fields of the wire types, and
//! `tests/http/test_openapi.py` with real answers.

use serde_json::{Map, Value};

use crate::state::AppState;

const DOCUMENT: &str = include_str!("openapi.json");

/// The document of this server: with its names and bounds, without what is not enabled.
pub fn document(state: &AppState) -> Value {
    let mut document: Value = serde_json::from_str(DOCUMENT).expect("our own document is JSON");
    document["info"]["version"] = env!("CARGO_PKG_VERSION").into();
    let bounds = state.engine.config();
    let schemas = &mut document["components"]["schemas"];
    schemas["ModelName"]["enum"] =
        state.names().iter().map(|name| Value::from(name.as_str())).chain([Value::Null]).collect();
    schemas["NumChoices"]["maximum"] = state.config.max_choices(bounds).into();
    schemas["NumLogprobs"]["maximum"] = bounds.max_logprobs.into();
    schemas["TokenId"]["maximum"] = (bounds.vocab_size - 1).into();
    let paths = document["paths"].as_object_mut().expect("our own document has paths");
    if !state.config.enable_admin {
        paths.remove("/reset_prefix_cache");
    }
    if state.config.api_keys.is_empty() {
        for operation in paths.values_mut().filter_map(Value::as_object_mut).flat_map(Map::values_mut) {
            operation.as_object_mut().map(|operation| operation.remove("security"));
        }
    }
    document
}
