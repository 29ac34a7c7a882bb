//! `GET /v1/models` and `/v1/models/{id}`: one card per name that requests may use.
//!
//! Invariant: `max_model_len` is what the engine really has, which clients read to size their prompts.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use serde::Serialize;

use crate::error::ApiError;
use crate::state::AppState;

/// A model, as clients see it.
#[derive(Debug, Serialize)]
pub struct ModelCard {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    root: String,
    parent: Option<String>,
    max_model_len: u32,
    permission: [Permission; 1],
}

#[derive(Debug, Serialize)]
struct Permission {
    id: String,
    object: &'static str,
    created: u64,
    allow_create_engine: bool,
    allow_sampling: bool,
    allow_logprobs: bool,
    allow_search_indices: bool,
    allow_view: bool,
    allow_fine_tuning: bool,
    organization: &'static str,
    group: Option<String>,
    is_blocking: bool,
}

/// A list of cards.
#[derive(Debug, Serialize)]
pub struct ModelList {
    object: &'static str,
    data: Vec<ModelCard>,
}

fn card(state: &AppState, name: &str) -> ModelCard {
    let permission = Permission {
        id: format!("modelperm-{name}"),
        object: "model_permission",
        created: state.started_unix_s,
        allow_create_engine: false,
        allow_sampling: true,
        allow_logprobs: true,
        allow_search_indices: false,
        allow_view: true,
        allow_fine_tuning: false,
        organization: "*",
        group: None,
        is_blocking: false,
    };
    ModelCard {
        id: name.to_owned(),
        object: "model",
        created: state.started_unix_s,
        owned_by: "kittiwake",
        root: state.model.root.clone(),
        parent: None,
        max_model_len: state.engine.config().max_model_len,
        permission: [permission],
    }
}

/// All names.
pub async fn list(State(state): State<Arc<AppState>>) -> Json<ModelList> {
    Json(ModelList { object: "list", data: state.names().iter().map(|name| card(&state, name)).collect() })
}

/// One name, which may contain `/`.
///
/// # Errors
/// 404 for a name that is not served, 400 for a path that is not UTF-8.
pub async fn get(
    State(state): State<Arc<AppState>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<ModelCard>, ApiError> {
    let Path(name) = name.map_err(|problem| ApiError::new(problem.status(), problem.body_text()))?;
    if !state.names().contains(&name) {
        return Err(ApiError::unknown_model(&name));
    }
    Ok(Json(card(&state, &name)))
}
