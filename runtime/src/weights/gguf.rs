//! GGUF v2 and v3: a bounded reader with checked arithmetic.

use std::collections::HashMap;

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

/// The key-value section of a GGUF file, with typed getters whose errors name file and key.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    /// The file, for error messages.
    pub path: std::path::PathBuf,
    /// By key.
    pub values: HashMap<String, MetaValue>,
}
