//! API keys and request ids: the two middlewares that look at headers only.
//!
//! Invariant: a key is compared as a SHA-256 digest in constant time with every configured key; only `/v1` and the admin
//! route are guarded, so that probes and scrapers need no key, and OPTIONS is free for browsers.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use crate::error::ApiError;
use crate::state::AppState;

/// Longest request id that is echoed.
const MAX_REQUEST_ID_BYTES: usize = 256;

/// Digests of the configured keys.
#[derive(Debug)]
pub struct ApiKeys(Vec<[u8; 32]>);

impl ApiKeys {
    /// Digests of `keys`; none: every request may pass.
    pub fn new(keys: &[String]) -> Self {
        Self(keys.iter().map(|key| Sha256::digest(key.as_bytes()).into()).collect())
    }

    fn allow(&self, request: &Request) -> bool {
        let path = request.uri().path();
        let guarded = path == "/v1" || path.starts_with("/v1/") || path == "/reset_prefix_cache";
        if self.0.is_empty() || !guarded || request.method() == Method::OPTIONS {
            return true;
        }
        let header = request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
        let Some((scheme, key)) = header.and_then(|header| header.split_at_checked(7)) else { return false };
        let digest = Sha256::digest(key);
        let known = self.0.iter().fold(Choice::from(0), |known, key| known | key[..].ct_eq(&digest[..]));
        scheme.eq_ignore_ascii_case(b"bearer ") && bool::from(known)
    }
}

/// Refuses requests without a key: 401.
pub async fn require_key(State(state): State<Arc<AppState>>, request: Request, next: Next) -> Response {
    if state.keys.allow(&request) {
        return next.run(request).await;
    }
    ApiError::new(StatusCode::UNAUTHORIZED, "missing or wrong API key: send 'Authorization: Bearer KEY'")
        .into_response()
}

/// Puts the client's `X-Request-Id`, or a fresh one, on the answer.
pub async fn echo_request_id(State(state): State<Arc<AppState>>, request: Request, next: Next) -> Response {
    const NAME: HeaderName = HeaderName::from_static("x-request-id");
    let given = request.headers().get(NAME).filter(|id| !id.is_empty() && id.len() <= MAX_REQUEST_ID_BYTES).cloned();
    let id = given.or_else(|| HeaderValue::try_from(state.ids.next("")).ok());
    let mut response = next.run(request).await;
    if let Some(id) = id {
        response.headers_mut().insert(NAME, id);
    }
    response
}
