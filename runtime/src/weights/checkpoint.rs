//! A model on disk, whatever its container: tensors by name, and the metadata that says what they are.
//!
//! Invariant: opening reads headers only; tensor bytes stay in the mapped files.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use serde_json::Value;

use super::{HostTensor, Quantised, gguf, safetensors};
use crate::error::LoadError;

const CONFIG: &str = "config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// What surrounds the tensors.
#[derive(Clone, Debug)]
pub enum Container {
    /// One GGUF file (or a split set) and its metadata.
    Gguf(gguf::Metadata),
    /// A Hugging Face directory.
    HuggingFace {
        /// config.json, an object.
        config: Value,
        /// generation_config.json, an object, where there is one.
        generation_config: Option<Value>,
    },
}

impl Container {
    /// Whether it is a Hugging Face directory.
    pub fn is_hf(&self) -> bool {
        matches!(self, Self::HuggingFace { .. })
    }
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
    /// What gives the other tensors of a quantised checkpoint a meaning: see `matrix`.
    pub quantised: Quantised,
    /// Tensors that are absent are made up: right shapes, random values.
    pub dummy: bool,
}

impl Checkpoint {
    /// Opens a `.gguf` file or a Hugging Face directory.
    ///
    /// # Errors
    /// Any `LoadError` but `Device`; nothing is allocated beyond the size of the headers.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let kind = std::fs::metadata(path).map_err(|source| io_error(path, source))?;
        let (container, tensors, quantised) = if kind.is_dir() {
            open_directory(path)?
        } else if kind.is_file() {
            let (metadata, tensors) = gguf::open(path)?;
            (Container::Gguf(metadata), tensors, Quantised::default())
        } else {
            return Err(io_error(path, std::io::Error::other("neither a file nor a directory")));
        };
        Ok(Self { path: path.to_path_buf(), container, tensors, quantised, dummy: false })
    }

    /// Opens a Hugging Face directory's configuration only: `model::load` makes up the weights (`--load-format dummy`).
    ///
    /// # Errors
    /// As `open`, and `Unsupported` for a quantised checkpoint: floats in its place would be another model's speed.
    pub fn open_dummy(dir: &Path) -> Result<Self, LoadError> {
        let (config, generation_config) = read_configs(dir)?;
        if let Some(scheme) = config.get("quantization_config").filter(|scheme| !scheme.is_null()) {
            return Err(LoadError::Unsupported {
                path: dir.to_path_buf(),
                what: "quantization_config without weights",
                name: scheme.get("quant_method").unwrap_or(scheme).to_string(),
                supported: "none".into(),
            });
        }
        let container = Container::HuggingFace { config, generation_config };
        let (tensors, quantised) = (HashMap::new(), Quantised::default());
        Ok(Self { path: dir.to_path_buf(), container, tensors, quantised, dummy: true })
    }
}

fn open_directory(dir: &Path) -> Result<(Container, HashMap<String, HostTensor>, Quantised), LoadError> {
    let (config, generation_config) = read_configs(dir)?;
    let safetensors::Tensors { floats, codes } = safetensors::open(dir)?;
    let quantised = Quantised::read(dir, &config, codes)?;
    Ok((Container::HuggingFace { config, generation_config }, floats, quantised))
}

/// config.json and, where there is one, generation_config.json.
fn read_configs(dir: &Path) -> Result<(Value, Option<Value>), LoadError> {
    let config = dir.join(CONFIG);
    if !config.exists() {
        return Err(LoadError::Config {
            path: dir.to_path_buf(),
            key: CONFIG.to_string(),
            problem: "not found: a model is a .gguf file, or a directory with config.json and model.safetensors".into(),
        });
    }
    let config = read_json(&config, MAX_CONFIG_BYTES)?;
    let generation_config = dir.join(GENERATION_CONFIG);
    let generation_config =
        generation_config.exists().then(|| read_json(&generation_config, MAX_CONFIG_BYTES)).transpose()?;
    Ok((config, generation_config))
}

fn io_error(path: &Path, source: std::io::Error) -> LoadError {
    LoadError::Io { path: path.to_path_buf(), source }
}

/// Maps a whole file for reading.
///
/// # Errors
/// `Io`.
pub(super) fn map_file(path: &Path) -> Result<Arc<Mmap>, LoadError> {
    let file = File::open(path).map_err(|source| io_error(path, source))?;
    // SAFETY: the map is private and read-only, and every byte pattern is a valid u8. What remains is that someone cuts
    // the file short while it is mapped: reading beyond its new end then ends the process (SIGBUS), which is the
    // documented price of not copying weights.
    let map = unsafe { Mmap::map(&file) }.map_err(|source| io_error(path, source))?;
    Ok(Arc::new(map))
}

/// A file that was read and whose `field` is wrong; where it stands is not known.
pub(crate) fn malformed(path: &Path, field: &str, problem: impl Into<String>) -> LoadError {
    LoadError::Malformed { path: path.into(), field: field.into(), offset: 0, problem: problem.into() }
}

/// Reads a whole file of at most `max_bytes`.
///
/// # Errors
/// `Io`, `Malformed` for a larger file.
pub(crate) fn read_file(path: &Path, max_bytes: u64) -> Result<Vec<u8>, LoadError> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|source| io_error(path, source))?;
    file.take(max_bytes + 1).read_to_end(&mut bytes).map_err(|source| io_error(path, source))?;
    if bytes.len() as u64 > max_bytes {
        return Err(malformed(path, "file", format!("more than {max_bytes} bytes")));
    }
    Ok(bytes)
}

/// Reads a JSON object from a file of at most `max_bytes`.
///
/// # Errors
/// As `read_file`, and `Malformed` for text that is not JSON and for a value that is not an object.
pub(crate) fn read_json(path: &Path, max_bytes: u64) -> Result<Value, LoadError> {
    let text = read_file(path, max_bytes)?;
    let value: Value = serde_json::from_slice(&text).map_err(|error| malformed(path, "JSON", error.to_string()))?;
    if !value.is_object() {
        return Err(malformed(path, "JSON", "expected an object"));
    }
    Ok(value)
}
