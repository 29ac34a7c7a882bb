//! The tensors of a quantised checkpoint by name, with checks: codes, which only a scheme gives a meaning, and floats.
//!
//! Invariant: what a method here returns has the shape and the type that was asked for, and no float of it is a NaN or infinite.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;

use super::super::{HostTensor, WeightFormat};
use crate::error::LoadError;

/// How elements that are no floats by themselves are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum CodeType {
    I8,
    U8,
    I32,
    I64,
    F8E4m3,
}

impl CodeType {
    const ALL: [Self; 5] = [Self::I8, Self::U8, Self::I32, Self::I64, Self::F8E4m3];

    /// The name in safetensors files.
    pub(in super::super) fn name(self) -> &'static str {
        match self {
            Self::I8 => "I8",
            Self::U8 => "U8",
            Self::I32 => "I32",
            Self::I64 => "I64",
            Self::F8E4m3 => "F8_E4M3",
        }
    }

    /// The type of that name.
    pub(in super::super) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Bytes of a tensor of this shape, if that is a number.
    pub(in super::super) fn bytes_of(self, shape: &[usize]) -> Option<usize> {
        let bytes = match self {
            Self::I8 | Self::U8 | Self::F8E4m3 => 1,
            Self::I32 => 4,
            Self::I64 => 8,
        };
        shape.iter().try_fold(bytes, |n: usize, &dim| n.checked_mul(dim))
    }
}

/// A tensor that only a scheme gives a meaning, in a mapped file.
#[derive(Clone, Debug)]
pub(in super::super) struct CodeTensor {
    pub(in super::super) name: String,
    pub(in super::super) kind: CodeType,
    /// Row-major, slowest first.
    pub(in super::super) shape: Vec<usize>,
    file: Arc<Mmap>,
    start: usize,
    len: usize,
}

impl CodeTensor {
    /// # Panics
    /// When the range passes the file's end: the container checks before.
    pub(in super::super) fn mapped(
        name: String,
        kind: CodeType,
        shape: Vec<usize>,
        file: Arc<Mmap>,
        start: usize,
    ) -> Self {
        let len = kind.bytes_of(&shape).expect("shape was checked by the container");
        assert!(start.checked_add(len).is_some_and(|end| end <= file.len()), "range was checked by the container");
        Self { name, kind, shape, file, start, len }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.file[self.start..self.start + self.len]
    }

    /// The little-endian words of a tensor of `I32`.
    pub(super) fn words(&self) -> impl Iterator<Item = u32> + Clone {
        self.bytes().as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word))
    }
}

/// Tensors by name.
pub(super) struct Source<'a> {
    pub(super) path: &'a Path,
    pub(super) tensors: &'a HashMap<String, HostTensor>,
    pub(super) codes: &'a HashMap<String, CodeTensor>,
}

impl<'a> Source<'a> {
    pub(super) fn error(&self, tensor: &str, expected: impl Into<String>, got: impl Into<String>) -> LoadError {
        let (path, tensor) = (self.path.to_path_buf(), tensor.to_string());
        LoadError::Tensor { path, tensor, expected: expected.into(), got: got.into() }
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name) || self.codes.contains_key(name)
    }

    /// What is there under a name, for an error.
    fn found(&self, name: &str) -> String {
        match (self.tensors.get(name), self.codes.get(name)) {
            (Some(tensor), _) => format!("{} {:?}", tensor.format, tensor.shape),
            (None, Some(tensor)) => format!("{} {:?}", tensor.kind.name(), tensor.shape),
            (None, None) => "nothing".into(),
        }
    }

    /// # Errors
    /// It is not there, or of another type or shape.
    pub(super) fn codes(&self, name: &str, kind: CodeType, shape: &[usize]) -> Result<&'a CodeTensor, LoadError> {
        match self.codes.get(name) {
            Some(tensor) if tensor.kind == kind && tensor.shape == shape => Ok(tensor),
            _ => Err(self.error(name, format!("{} {shape:?}", kind.name()), self.found(name))),
        }
    }

    /// A tensor of floats in one of some shapes.
    ///
    /// # Errors
    /// It is not there, of another type or shape, or a value of it is not finite.
    pub(super) fn floats(&self, name: &str, shapes: &[&[usize]]) -> Result<Floats, LoadError> {
        let fits = |tensor: &&HostTensor| tensor.format.block_len() == 1 && shapes.contains(&tensor.shape.as_slice());
        let Some(tensor) = self.tensors.get(name).filter(fits) else {
            let shapes: Vec<String> = shapes.iter().map(|shape| format!("{shape:?}")).collect();
            return Err(self.error(name, format!("floats {}", shapes.join(" or ")), self.found(name)));
        };
        let floats = Floats(tensor.clone());
        match tensor.to_f32().into_iter().find(|value| !value.is_finite()) {
            Some(bad) => Err(self.error(name, "finite numbers", bad.to_string())),
            None => Ok(floats),
        }
    }

    /// `[out_features, in_features]`, the inputs in whole blocks.
    ///
    /// # Errors
    /// Another number of dimensions, or rows that are not whole blocks.
    pub(super) fn rows_and_columns(&self, stem: &str, shape: &[usize]) -> Result<[usize; 2], LoadError> {
        match *shape {
            [rows, cols] if cols.is_multiple_of(BLOCK) && rows > 0 && cols > 0 => Ok([rows, cols]),
            _ => Err(self.error(stem, format!("two dimensions, the last a multiple of {BLOCK}"), format!("{shape:?}"))),
        }
    }
}

/// Elements of a block of every format that a scheme's matrices are in.
pub(super) const BLOCK: usize = 32;

/// A tensor of floats of any type.
#[derive(Clone, Debug)]
pub(super) struct Floats(HostTensor);

impl Floats {
    pub(super) fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    /// Calls `then` with a function that gives the element at an index.
    pub(super) fn with<T>(&self, then: impl FnOnce(&dyn Fn(usize) -> f32) -> T) -> T {
        let bytes = self.0.rows(0..self.0.num_rows());
        match self.0.format {
            WeightFormat::F16 => {
                let elements = bytes.as_chunks::<2>().0;
                then(&|i| half::f16::from_le_bytes(elements[i]).to_f32())
            }
            WeightFormat::Bf16 => {
                let elements = bytes.as_chunks::<2>().0;
                then(&|i| half::bf16::from_le_bytes(elements[i]).to_f32())
            }
            _ => {
                let elements = bytes.as_chunks::<4>().0;
                then(&|i| f32::from_le_bytes(elements[i]))
            }
        }
    }

    /// Whether f16 holds every element.
    pub(super) fn fit_f16(&self) -> bool {
        let fits = |x: f32| half::f16::from_f32(x).to_f32() == x;
        self.0.format == WeightFormat::F16 || self.0.to_f32().into_iter().all(fits)
    }
}
