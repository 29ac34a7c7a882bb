//! The key-value section of a GGUF file: values, and typed getters.
//!
//! Invariant: a getter never guesses. An absent key is `None`, a value of another type is an error that names file and
//! key. Model configuration and tokeniser are built from it.

use std::collections::HashMap;
use std::path::PathBuf;

use crate::error::LoadError;

/// One metadata value; arrays are flat and of one type.
#[derive(Clone, Debug, PartialEq)]
pub enum MetaValue {
    /// Any unsigned or signed integer type that fits.
    Int(i64),
    /// u64 values past `i64::MAX`.
    Uint(u64),
    /// f32 or f64.
    Float(f64),
    /// bool.
    Bool(bool),
    /// UTF-8.
    Str(String),
    /// Array of integers.
    Ints(Vec<i64>),
    /// Array of floats.
    Floats(Vec<f32>),
    /// Array of bools.
    Bools(Vec<bool>),
    /// Array of strings.
    Strs(Vec<String>),
}

impl MetaValue {
    fn kind(&self) -> &'static str {
        match self {
            Self::Int(_) | Self::Uint(_) => "an integer",
            Self::Float(_) => "a float",
            Self::Bool(_) => "a bool",
            Self::Str(_) => "a string",
            Self::Ints(_) => "an array of integers",
            Self::Floats(_) => "an array of floats",
            Self::Bools(_) => "an array of bools",
            Self::Strs(_) => "an array of strings",
        }
    }
}

/// The key-value section of a GGUF file (of a split set: of its first file), with typed getters.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    /// The file, for error messages.
    pub path: PathBuf,
    /// By key.
    pub values: HashMap<String, MetaValue>,
}

/// The only value of an array that repeats it: files may give per layer what is the same for all layers.
fn uniform<T: Copy + PartialEq>(values: &[T]) -> Option<T> {
    let first = *values.first()?;
    values.iter().all(|&value| value == first).then_some(first)
}

impl Metadata {
    /// An error about `key`.
    pub fn error(&self, key: &str, problem: impl Into<String>) -> LoadError {
        LoadError::Config { path: self.path.clone(), key: key.to_string(), problem: problem.into() }
    }

    fn wrong_type(&self, key: &str, expected: &str, got: &MetaValue) -> LoadError {
        self.error(key, format!("expected {expected}, got {}", got.kind()))
    }

    fn not_uniform(&self, key: &str) -> LoadError {
        self.error(key, "expected one value, got an array of different ones (or of none)")
    }

    /// `key` as an unsigned 64-bit integer; a per-layer array counts if all its values are equal.
    ///
    /// # Errors
    /// Another type, a negative number, an array of different values.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, LoadError> {
        let value = match self.values.get(key) {
            None => return Ok(None),
            Some(MetaValue::Uint(value)) => return Ok(Some(*value)),
            Some(MetaValue::Int(value)) => *value,
            Some(MetaValue::Ints(values)) => uniform(values).ok_or_else(|| self.not_uniform(key))?,
            Some(other) => return Err(self.wrong_type(key, "an integer", other)),
        };
        u64::try_from(value).map(Some).map_err(|_| self.error(key, format!("{value} is negative")))
    }

    /// `key` as an unsigned 32-bit integer, like `u64`.
    ///
    /// # Errors
    /// As `u64`, and a number that does not fit.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, LoadError> {
        let Some(value) = self.u64(key)? else { return Ok(None) };
        u32::try_from(value).map(Some).map_err(|_| self.error(key, format!("{value} does not fit into 32 bits")))
    }

    /// `key` as a float; a per-layer array counts if all its values are equal.
    ///
    /// # Errors
    /// Another type, a value that is not finite, an array of different values.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, LoadError> {
        let value = match self.values.get(key) {
            None => return Ok(None),
            Some(MetaValue::Float(value)) => *value as f32,
            Some(MetaValue::Floats(values)) => uniform(values).ok_or_else(|| self.not_uniform(key))?,
            Some(other) => return Err(self.wrong_type(key, "a float", other)),
        };
        if !value.is_finite() {
            return Err(self.error(key, format!("{value} is not a finite 32-bit float")));
        }
        Ok(Some(value))
    }

    /// `key` as a number of either kind, like `u64` and `f32`.
    ///
    /// # Errors
    /// As `u64` and `f32`.
    pub fn number(&self, key: &str) -> Result<Option<f64>, LoadError> {
        match self.values.get(key) {
            Some(MetaValue::Float(_) | MetaValue::Floats(_)) => Ok(self.f32(key)?.map(f64::from)),
            _ => Ok(self.u64(key)?.map(|value| value as f64)),
        }
    }

    /// `key` as a bool; a per-layer array counts if all its values are equal.
    ///
    /// # Errors
    /// Another type, an array of different values.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, LoadError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(MetaValue::Bool(value)) => Ok(Some(*value)),
            Some(MetaValue::Bools(values)) => uniform(values).map(Some).ok_or_else(|| self.not_uniform(key)),
            Some(other) => Err(self.wrong_type(key, "a bool", other)),
        }
    }

    /// `key` as a string.
    ///
    /// # Errors
    /// Another type.
    pub fn str(&self, key: &str) -> Result<Option<&str>, LoadError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(MetaValue::Str(value)) => Ok(Some(value)),
            Some(other) => Err(self.wrong_type(key, "a string", other)),
        }
    }

    /// `key` as an array of strings.
    ///
    /// # Errors
    /// Another type.
    pub fn strs(&self, key: &str) -> Result<Option<&[String]>, LoadError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(MetaValue::Strs(values)) => Ok(Some(values)),
            Some(other) => Err(self.wrong_type(key, "an array of strings", other)),
        }
    }

    /// `key` as an array of integers.
    ///
    /// # Errors
    /// Another type.
    pub fn ints(&self, key: &str) -> Result<Option<&[i64]>, LoadError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(MetaValue::Ints(values)) => Ok(Some(values)),
            Some(other) => Err(self.wrong_type(key, "an array of integers", other)),
        }
    }

    /// `key` as an array of floats.
    ///
    /// # Errors
    /// Another type.
    pub fn f32s(&self, key: &str) -> Result<Option<&[f32]>, LoadError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(MetaValue::Floats(values)) => Ok(Some(values)),
            Some(other) => Err(self.wrong_type(key, "an array of floats", other)),
        }
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, LoadError> {
        value.ok_or_else(|| self.error(key, "missing"))
    }

    /// `key` as an unsigned 32-bit integer.
    ///
    /// # Errors
    /// As `u32`, and when the key is absent.
    pub fn require_u32(&self, key: &str) -> Result<u32, LoadError> {
        self.required(key, self.u32(key)?)
    }

    /// `key` as a float.
    ///
    /// # Errors
    /// As `f32`, and when the key is absent.
    pub fn require_f32(&self, key: &str) -> Result<f32, LoadError> {
        self.required(key, self.f32(key)?)
    }

    /// `key` as a string.
    ///
    /// # Errors
    /// As `str`, and when the key is absent.
    pub fn require_str(&self, key: &str) -> Result<&str, LoadError> {
        self.required(key, self.str(key)?)
    }

    /// `key` as an array of strings.
    ///
    /// # Errors
    /// As `strs`, and when the key is absent.
    pub fn require_strs(&self, key: &str) -> Result<&[String], LoadError> {
        self.required(key, self.strs(key)?)
    }
}
