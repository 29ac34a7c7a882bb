//! Every error that a client can see: one JSON shape, one status, OpenAI's type names.
//!
//! Invariant: a message names the thing and never holds more than a short piece of the client's input; an answer that is
//! not 2xx always has this shape. All handlers return it.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use runtime::error::RequestError;
use serde::Serialize;

/// Most characters of a message; bodies may be large, answers about them may not.
const MAX_MESSAGE_CHARS: usize = 600;
/// Seconds after which a refused client may try again.
const RETRY_AFTER_S: u32 = 1;

/// An error on its way to a client.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    /// The HTTP status.
    pub status: StatusCode,
    /// What went wrong, for a person.
    pub message: String,
    /// Path of the parameter that is to blame.
    pub param: Option<String>,
}

/// The JSON shape: `{"error": {…}}`.
#[derive(Debug, Serialize)]
pub struct ErrorBody<'a> {
    error: ErrorFields<'a>,
}

#[derive(Debug, Serialize)]
struct ErrorFields<'a> {
    message: &'a str,
    r#type: &'static str,
    param: Option<&'a str>,
    code: u16,
}

impl ApiError {
    /// An error without a parameter.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: shorten(message.into(), MAX_MESSAGE_CHARS), param: None }
    }

    /// 400 that names a parameter.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(shorten(param.into(), 200)), ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    /// 500 with a message that is safe to show.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// 503 for a server that cannot take the request now.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }

    /// 404 for a model name that is not served.
    pub fn unknown_model(name: &str) -> Self {
        let name = shorten(name.to_owned(), 200);
        Self {
            param: Some("model".into()),
            ..Self::new(StatusCode::NOT_FOUND, format!("the model '{name}' does not exist"))
        }
    }

    /// The body, as in an answer and in an error event of a stream.
    pub fn body(&self) -> ErrorBody<'_> {
        ErrorBody {
            error: ErrorFields {
                message: &self.message,
                r#type: type_name(self.status),
                param: self.param.as_deref(),
                code: self.status.as_u16(),
            },
        }
    }
}

fn type_name(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::NOT_IMPLEMENTED => "not_supported_error",
        StatusCode::SERVICE_UNAVAILABLE => "unavailable_error",
        status if status.is_server_error() => "server_error",
        _ => "invalid_request_error",
    }
}

/// At most `max_chars` characters of `text`.
pub fn shorten(mut text: String, max_chars: usize) -> String {
    if let Some((end, _)) = text.char_indices().nth(max_chars) {
        text.truncate(end);
        text.push('…');
    }
    text
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        match error {
            RequestError::Invalid { param, message } => Self { param, ..Self::new(StatusCode::BAD_REQUEST, message) },
            RequestError::Overloaded { message, .. } | RequestError::Unavailable(message) => Self::unavailable(message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER_S));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
