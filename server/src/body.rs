//! Reading a request's body and making typed JSON of it.
//!
//! Invariant: no more than the limit is ever held; whatever is wrong with the bytes is 400, 408, 413 or 415 in the error
//! shape, and `param` is the path of the value that is to blame. Nesting is bounded by serde_json (128).

use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use futures_core::Stream;
use serde::de::DeserializeOwned;

use crate::error::{ApiError, shorten};

/// How long a client may send nothing in the middle of a body.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Most characters of a parser's message, which may quote the input.
const MAX_DETAIL_CHARS: usize = 200;

/// Reads a JSON body of at most `max_bytes`.
///
/// # Errors
/// 415 for another content type, 413 when it is longer, 408 when the client stalls, 400 when it breaks off.
pub async fn read_json(request: Request, max_bytes: usize) -> Result<Bytes, ApiError> {
    if !is_json(request.headers()) {
        let message = "the content type must be application/json";
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    let announced = request.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    let mut too_long = announced.is_some_and(|length: u64| length > max_bytes as u64);
    let mut body = request.into_body().into_data_stream();
    let mut bytes = Vec::new();
    let mut discarded = 0usize;
    while let Some(chunk) = next_chunk(&mut body).await? {
        too_long |= bytes.len() + chunk.len() > max_bytes;
        if !too_long {
            bytes.extend_from_slice(&chunk);
            continue;
        }
        // Most clients read no answer before they have sent everything: take and drop a bounded rest.
        bytes = Vec::new();
        discarded += chunk.len();
        if discarded > max_bytes {
            break;
        }
    }
    if too_long {
        let message = format!("the request body is longer than {max_bytes} bytes");
        return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message));
    }
    Ok(bytes.into())
}

async fn next_chunk(body: &mut axum::body::BodyDataStream) -> Result<Option<Bytes>, ApiError> {
    let chunk = poll_fn(|cx| Pin::new(&mut *body).poll_next(cx));
    match tokio::time::timeout(READ_TIMEOUT, chunk).await {
        Ok(None) => Ok(None),
        Ok(Some(Ok(chunk))) => Ok(Some(chunk)),
        Ok(Some(Err(_))) => Err(ApiError::new(StatusCode::BAD_REQUEST, "the request body breaks off")),
        Err(_) => Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "the request body did not arrive in time")),
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()) else { return false };
    let essence = value.split(';').next().unwrap_or_default().trim();
    essence.eq_ignore_ascii_case("application/json")
}

/// Parses a whole body as `T`.
///
/// # Errors
/// 400; `param` is the path of the first value that does not fit.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        describe(error.inner(), Some(path).filter(|path| path != "."))
    })?;
    json.end().map_err(|error| describe(&error, None))?;
    Ok(value)
}

fn describe(error: &serde_json::Error, path: Option<String>) -> ApiError {
    let detail = shorten(error.to_string(), MAX_DETAIL_CHARS);
    if !error.is_data() {
        return ApiError::new(StatusCode::BAD_REQUEST, format!("the body is not valid JSON: {detail}"));
    }
    match path.or_else(|| missing_field(&detail)) {
        Some(path) => {
            let shown = shorten(path.clone(), MAX_DETAIL_CHARS);
            ApiError::invalid(path, format!("{shown}: {detail}"))
        }
        None => ApiError::new(StatusCode::BAD_REQUEST, detail),
    }
}

/// A field that is not there has no path; serde names it in the message.
fn missing_field(detail: &str) -> Option<String> {
    let (name, _) = detail.strip_prefix("missing field `")?.split_once('`')?;
    Some(name.to_owned())
}
