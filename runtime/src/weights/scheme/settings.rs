//! Typed access to the objects of `quantization_config`, and the patterns in them.
//!
//! Invariant: a value of another type than its key wants is an error that names file and key, never the default.

use std::path::{Path, PathBuf};

use fancy_regex::Regex;
use serde_json::{Map, Value};

use crate::error::LoadError;

/// An object of a configuration.
pub(super) struct Settings<'a> {
    path: &'a Path,
    /// Where the object is.
    key: String,
    object: &'a Map<String, Value>,
}

impl<'a> Settings<'a> {
    /// The object under `key` of a configuration; `None` where there is none or it is null.
    ///
    /// # Errors
    /// It is not an object.
    pub(super) fn of(path: &'a Path, config: &'a Value, key: &str) -> Result<Option<Self>, LoadError> {
        match config.get(key).filter(|value| !value.is_null()) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(Self { path, key: key.into(), object })),
            Some(other) => Err(LoadError::Config {
                path: path.to_path_buf(),
                key: key.into(),
                problem: format!("expected an object, got {other}"),
            }),
        }
    }

    pub(super) fn error(&self, key: &str, problem: impl Into<String>) -> LoadError {
        LoadError::Config { path: self.path.into(), key: format!("{}.{key}", self.key), problem: problem.into() }
    }

    pub(super) fn unsupported(&self, what: &'static str, name: impl Into<String>, supported: &str) -> LoadError {
        LoadError::Unsupported { path: self.path.into(), what, name: name.into(), supported: supported.into() }
    }

    /// A value that is there and not null.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// A value that is there, read as a type whose name is `expected`.
    fn read<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, LoadError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.error(key, format!("expected {expected}, got {value}")))
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<i64>, LoadError> {
        self.read(key, "a whole number", Value::as_i64)
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, LoadError> {
        self.read(key, "true or false", Value::as_bool)
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, LoadError> {
        self.read(key, "a string", Value::as_str)
    }

    /// A list of strings, empty where there is none.
    pub(super) fn texts(&self, key: &str) -> Result<Vec<&'a str>, LoadError> {
        let strings = |value: &'a Value| value.as_array()?.iter().map(Value::as_str).collect::<Option<Vec<_>>>();
        Ok(self.read(key, "a list of strings", strings)?.unwrap_or_default())
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<Self>, LoadError> {
        let object = self.read(key, "an object", Value::as_object)?;
        Ok(object.map(|object| Self { path: self.path, key: format!("{}.{key}", self.key), object }))
    }

    /// Its keys, in the order of the file.
    pub(super) fn keys(&self) -> impl Iterator<Item = &'a String> {
        self.object.keys()
    }

    /// The size of a group of inputs under `key`; -1 is one group of all of them, `None`.
    ///
    /// # Errors
    /// It is not a multiple of 32.
    pub(super) fn group_size(&self, key: &str) -> Result<Option<usize>, LoadError> {
        match self.number(key)? {
            None => Err(self.error(key, "missing")),
            Some(-1) => Ok(None),
            Some(size) => match usize::try_from(size) {
                Ok(size) if size > 0 && size.is_multiple_of(super::source::BLOCK) => Ok(Some(size)),
                _ => Err(self.error(key, format!("{size}: groups of a multiple of 32 inputs, or -1, are supported"))),
            },
        }
    }

    /// A pattern that `re.match` of Python would be given: it must match from the start, not to the end.
    ///
    /// # Errors
    /// It is no regular expression.
    pub(super) fn pattern(&self, key: &str, text: &str) -> Result<Pattern, LoadError> {
        let regex = Regex::new(&format!("^(?:{text})")).map_err(|error| self.error(key, format!("{text}: {error}")))?;
        Ok(Pattern { regex, path: self.path.into(), key: format!("{}.{key}", self.key) })
    }
}

/// A regular expression for names of modules, and where it stands.
#[derive(Debug)]
pub(super) struct Pattern {
    regex: Regex,
    path: PathBuf,
    key: String,
}

impl Pattern {
    /// # Errors
    /// The expression takes too many steps on this name.
    pub(super) fn matches(&self, name: &str) -> Result<bool, LoadError> {
        self.regex.is_match(name).map_err(|error| LoadError::Config {
            path: self.path.clone(),
            key: self.key.clone(),
            problem: format!("{name}: {error}"),
        })
    }
}
