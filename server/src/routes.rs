//! The router: which path goes where, and what stands before every handler.
//!
//! Invariant: every answer that is not 2xx has the error shape, also for paths and methods that do not exist; a handler
//! that panics answers 500 and the process lives.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::extract::State;
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, any, get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowOrigin, Any as AnyHeader, CorsLayer};

use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::openai::{chat, completions, models};
use crate::state::AppState;
use crate::{auth, openapi, tokenize};

/// Endpoints of the protocols that clients know and this server does not have.
const NOT_HERE: [&str; 16] = [
    "/v1/embeddings",
    "/v1/responses",
    "/v1/responses/{*rest}",
    "/v1/messages",
    "/v1/messages/{*rest}",
    "/v1/audio/{*rest}",
    "/v1/images/{*rest}",
    "/v1/moderations",
    "/v1/files",
    "/v1/batches",
    "/v1/rerank",
    "/v1/score",
    "/v1/realtime",
    "/pooling",
    "/classify",
    "/score",
];

/// A path and what serves it.
type Route = (&'static str, MethodRouter<Arc<AppState>>);

/// All routes over one state.
pub fn router(state: Arc<AppState>) -> Router {
    let mut routes = routes(&state.config);
    routes.extend(NOT_HERE.map(|path| (path, any(not_here))));
    guard(routes, state)
}

/// The routes that there are; `openapi.json` describes each.
pub(crate) fn routes(config: &ServerConfig) -> Vec<Route> {
    let mut routes: Vec<Route> = vec![
        ("/v1/chat/completions", post(chat::chat_completions)),
        ("/v1/completions", post(completions::completions)),
        ("/v1/models", get(models::list)),
        ("/v1/models/{*id}", get(models::get)),
        ("/tokenize", post(tokenize::tokenize)),
        ("/detokenize", post(tokenize::detokenize)),
        ("/health", get(health)),
        ("/ready", get(health)),
        ("/live", get(|| async {})),
        ("/metrics", get(metrics)),
        ("/version", get(version)),
        ("/load", get(load)),
        ("/openapi.json", get(description)),
    ];
    if config.enable_admin {
        routes.push(("/reset_prefix_cache", post(reset_prefix_cache)));
    }
    routes
}

/// Routes behind what stands before every handler.
pub(crate) fn guard(routes: Vec<Route>, state: Arc<AppState>) -> Router {
    let mut router = routes.into_iter().fold(Router::new(), |router, (path, serves)| router.route(path, serves));
    if state.config.enable_request_id_headers {
        router = router.layer(from_fn_with_state(Arc::clone(&state), auth::echo_request_id));
    }
    router = router
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(Arc::clone(&state), auth::require_key))
        .layer(CatchPanicLayer::custom(panicked));
    if let Some(cors) = cors(&state.config.allowed_origins) {
        router = router.layer(cors);
    }
    router.with_state(state)
}

fn cors(origins: &[String]) -> Option<CorsLayer> {
    let allowed = match origins {
        [] => return None,
        origins if origins.iter().any(|origin| origin == "*") => AllowOrigin::any(),
        origins => AllowOrigin::list(origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok())),
    };
    Some(CorsLayer::new().allow_origin(allowed).allow_methods([Method::GET, Method::POST]).allow_headers(AnyHeader))
}

/// 200 while requests are taken, 503 while draining and after a failure. The body names kernels that run slower than they
/// should, one a line; it is empty where all is well.
async fn health(State(state): State<Arc<AppState>>) -> Result<String, ApiError> {
    state.ready().map(|()| state.model.replaced_kernels.join("\n"))
}

async fn metrics(State(state): State<Arc<AppState>>) -> impl IntoResponse {
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], state.metrics.encode())
}

async fn version() -> Json<Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") }))
}

async fn description(State(state): State<Arc<AppState>>) -> Json<Value> {
    Json(openapi::document(&state))
}

async fn load(State(state): State<Arc<AppState>>) -> Json<Value> {
    Json(json!({ "server_load": state.num_in_flight.load(Ordering::Relaxed) }))
}

async fn reset_prefix_cache(State(state): State<Arc<AppState>>) -> Result<(), ApiError> {
    Ok(state.engine.reset_prefix_cache()?)
}

async fn not_here(uri: Uri) -> ApiError {
    ApiError::new(StatusCode::NOT_IMPLEMENTED, format!("{} is not supported by this server", uri.path()))
}

async fn not_found(uri: Uri) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, format!("there is no {}", uri.path()))
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let message = format!("{} does not take {method}", uri.path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message)
}

fn panicked(panic: Box<dyn Any + Send + 'static>) -> Response {
    let what = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    tracing::error!(panic = what.unwrap_or("unknown"), "a handler panicked");
    ApiError::internal("internal error").into_response()
}
