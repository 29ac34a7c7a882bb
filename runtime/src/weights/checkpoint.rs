//! A model on disk, whatever its container: tensors by name, and the metadata that says what they are.
//!
//! Invariant: opening reads headers only; tensor bytes stay in the mapped files.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::HostTensor;
use super::gguf;
use crate::error::LoadError;

/// What surrounds the tensors.
#[derive(Clone, Debug)]
pub enum Container {
    /// One GGUF file (or a split set) and its metadata.
    Gguf(gguf::Metadata),
    /// A Hugging Face directory.
    HuggingFace {
        /// config.json.
        config: serde_json::Value,
    },
}

/// A model on disk.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// The file or directory.
    pub path: PathBuf,
    /// Its metadata.
    pub container: Container,
    /// By the name in the file.
    pub tensors: HashMap<String, HostTensor>,
}

impl Checkpoint {
    /// Opens a `.gguf` file or a Hugging Face directory.
    ///
    /// # Errors
    /// Any `LoadError` but `Device`; nothing is allocated beyond the size of the headers.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let _ = path;
        todo!("helper weights")
    }
}
