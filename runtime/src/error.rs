//! The three error types of the engine: loading, one request, the device.
//!
//! Invariant: every error names the thing (file, tensor, parameter) and what was expected. A broken
//! invariant of our own is an assertion, not an error.

use std::path::PathBuf;

use thiserror::Error;

/// Why a model could not be loaded.
#[derive(Debug, Error)]
pub enum LoadError {
    /// A file could not be opened, mapped or read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file's bytes break its format.
    #[error("{}: {field} at byte {offset}: {problem}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The field that was read.
        field: String,
        /// Where it starts, in bytes from the start of the file (0 where a text file has no such place).
        offset: u64,
        /// What is wrong with it.
        problem: String,
    },
    /// A file is sound but asks for something that this build does not have.
    #[error("{}: {what} '{name}' is not supported (supported: {supported})", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What kind of thing: "architecture", "tensor type", "pre-tokenizer" ….
        what: &'static str,
        /// Its name in the file.
        name: String,
        /// What would have been accepted.
        supported: String,
    },
    /// A tensor is absent or has the wrong shape or format.
    #[error("{}: tensor '{tensor}': expected {expected}, got {got}", path.display())]
    Tensor {
        /// The file or directory.
        path: PathBuf,
        /// The tensor's name in the file.
        tensor: String,
        /// What the architecture needs.
        expected: String,
        /// What the file has.
        got: String,
    },
    /// A configuration value is missing or out of range.
    #[error("{}: {key}: {problem}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The key, as written in the file.
        key: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The model is sound but a limit of the device or of a flag is passed.
    #[error("{what}: needs {needed}, limit {limit}")]
    Limit {
        /// The op, tensor or flag that meets the limit.
        what: String,
        /// How much is needed, with its unit.
        needed: String,
        /// How much there is, with its unit.
        limit: String,
    },
    /// The device that was asked for is absent, or it failed while loading.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Why a request was refused. Each maps to one HTTP status.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum RequestError {
    /// A value that cannot be served: 400.
    #[error("{message}")]
    Invalid {
        /// Path of the parameter in the request body, as users wrote it.
        param: Option<String>,
        /// What is wrong and what would be right.
        message: String,
    },
    /// A queue is full: 503 with Retry-After.
    #[error("{message}")]
    Overloaded {
        /// Which bound was met.
        message: String,
        /// The flag that sets the bound: the label of `vllm:admission_rejections`.
        reason: &'static str,
    },
    /// The engine has stopped or is draining: 503.
    #[error("{0}")]
    Unavailable(String),
}

impl RequestError {
    /// A refusal of one parameter.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Invalid { param: Some(param.into()), message: message.into() }
    }
}

/// Why the device cannot go on. The engine stops and every live request hears it.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum DeviceError {
    /// The device that was asked for is not on this machine.
    #[error("device '{0}' is not available: {1}")]
    Absent(String, String),
    /// An allocation failed.
    #[error("out of memory: {what} needs {needed_bytes} bytes")]
    OutOfMemory {
        /// What was to be allocated.
        what: String,
        /// Its size.
        needed_bytes: u64,
    },
    /// The device was lost or its driver failed.
    #[error("device failed: {0}")]
    Failed(String),
}
