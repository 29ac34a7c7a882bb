//! Reading a request's body and making typed JSON of it.
//!
//! Invariant: no more than the limit is ever held; whatever is wrong with the bytes is 400, 408, 413 or 415 in the error
//! shape, and `param` is the path of the value that is to blame. Nesting is bounded by serde_json (128).

use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

use axum::body::{BodyDataStream, Bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use futures_core::Stream;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, timeout, timeout_at};

use crate::error::{ApiError, shorten};

/// What each byte that has come adds to the client's time: a body of any length comes at a kilobyte per second at least.
const SLOWEST_BYTE: Duration = Duration::from_millis(1);
/// How long the rest of a body that is too long is waited for.
const REST_TIMEOUT: Duration = Duration::from_secs(2);
/// Most characters of a parser's message, which may quote the input.
const MAX_DETAIL_CHARS: usize = 200;

/// Reads a JSON body of at most `max_bytes` from a client that may be silent for `patience`.
///
/// # Errors
/// 415 for another content type, 413 when it is longer, 408 when the client is too slow, 400 when it breaks off.
pub async fn read_json(request: Request, max_bytes: usize, patience: Duration) -> Result<Bytes, ApiError> {
    check_headers(request.headers())?;
    let announced = request.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    let mut body = request.into_body().into_data_stream();
    if announced.is_some_and(|length: u64| length > max_bytes as u64) {
        return Err(too_long(&mut body, max_bytes).await);
    }
    let start = Instant::now();
    let mut bytes = Vec::new();
    loop {
        let received = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let deadline = start + patience + SLOWEST_BYTE * received;
        match timeout_at(deadline, next_chunk(&mut body)).await {
            Ok(None) => return Ok(bytes.into()),
            Ok(Some(Ok(chunk))) if bytes.len() + chunk.len() > max_bytes => {
                return Err(too_long(&mut body, max_bytes).await);
            }
            Ok(Some(Ok(chunk))) => bytes.extend_from_slice(&chunk),
            Ok(Some(Err(_))) => return Err(ApiError::new(StatusCode::BAD_REQUEST, "the request body breaks off")),
            Err(_) => {
                let message = "the request body did not arrive in time";
                return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, message));
            }
        }
    }
}

/// 413, after the rest. Most clients read no answer before they have sent everything: a bounded rest is taken and dropped.
async fn too_long(body: &mut BodyDataStream, max_bytes: usize) -> ApiError {
    let discard = async {
        let mut discarded = 0;
        while discarded <= max_bytes
            && let Some(Ok(chunk)) = next_chunk(body).await
        {
            discarded += chunk.len();
        }
    };
    // A client that sends nothing more is answered all the same.
    let _ = timeout(REST_TIMEOUT, discard).await;
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the request body is longer than {max_bytes} bytes"))
}

async fn next_chunk(body: &mut BodyDataStream) -> Option<Result<Bytes, axum::Error>> {
    poll_fn(|cx| Pin::new(&mut *body).poll_next(cx)).await
}

fn check_headers(headers: &HeaderMap) -> Result<(), ApiError> {
    let value = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let essence = value(header::CONTENT_TYPE).and_then(|value| value.split(';').next()).unwrap_or_default().trim();
    let problem = if !essence.eq_ignore_ascii_case("application/json") {
        "the content type must be application/json"
    } else if headers.contains_key(header::CONTENT_ENCODING) && value(header::CONTENT_ENCODING) != Some("identity") {
        "a request body must not be compressed"
    } else {
        return Ok(());
    };
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, problem))
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
    match path.or_else(|| named_field(&detail)) {
        Some(path) => {
            let shown = shorten(path.clone(), MAX_DETAIL_CHARS);
            ApiError::invalid(path, format!("{shown}: {detail}"))
        }
        None => ApiError::new(StatusCode::BAD_REQUEST, detail),
    }
}

/// A field that is not there, or there twice, has no path; serde names it in the message.
fn named_field(detail: &str) -> Option<String> {
    let named = detail.strip_prefix("missing field `").or_else(|| detail.strip_prefix("duplicate field `"));
    Some(named?.split_once('`')?.0.to_owned())
}
