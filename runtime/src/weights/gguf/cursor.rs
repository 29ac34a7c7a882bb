//! A bounded reader over the bytes of one file: every read is checked against what is left.
//!
//! Invariant: nothing is reserved on the word of a count. `count` refuses what cannot be in the bytes left, and
//! `capacity` never asks for more memory than there are bytes left. Used by the GGUF header reader.

use std::path::Path;

use crate::error::LoadError;

pub(super) struct Cursor<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(path: &'a Path, bytes: &'a [u8]) -> Self {
        Self { path, bytes, at: 0 }
    }

    /// Bytes from the start of the file to the next read.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// An error of this file: what was read, where it starts, what is wrong.
    pub(super) fn malformed(&self, field: &str, offset: usize, problem: impl Into<String>) -> LoadError {
        LoadError::Malformed {
            path: self.path.to_path_buf(),
            field: field.to_string(),
            offset: offset as u64,
            problem: problem.into(),
        }
    }

    fn take(&mut self, len: usize, field: &str) -> Result<&'a [u8], LoadError> {
        if len > self.left() {
            let problem = format!("the file ends: {len} bytes needed, {} left", self.left());
            return Err(self.malformed(field, self.at, problem));
        }
        let taken = &self.bytes[self.at..self.at + len];
        self.at += len;
        Ok(taken)
    }

    /// The next `N` bytes.
    pub(super) fn array<const N: usize>(&mut self, field: &str) -> Result<[u8; N], LoadError> {
        let bytes = self.take(N, field)?;
        Ok(bytes.try_into().expect("take returns N bytes"))
    }

    pub(super) fn u32(&mut self, field: &str) -> Result<u32, LoadError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    pub(super) fn u64(&mut self, field: &str) -> Result<u64, LoadError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    /// A 64-bit count of things that take at least `min_bytes_each` of the bytes after it, at most `max`.
    pub(super) fn count(&mut self, field: &str, min_bytes_each: usize, max: usize) -> Result<usize, LoadError> {
        let at = self.at;
        let count = self.u64(field)?;
        let fits = self.left() / min_bytes_each;
        match usize::try_from(count) {
            Ok(count) if count <= fits.min(max) => Ok(count),
            _ if count > fits as u64 => {
                Err(self.malformed(field, at, format!("{count} do not fit into the {} bytes left", self.left())))
            }
            _ => Err(self.malformed(field, at, format!("{count} is more than the {max} that are allowed"))),
        }
    }

    /// A length-prefixed UTF-8 string of at most `max` bytes.
    pub(super) fn string(&mut self, field: &str, max: usize) -> Result<String, LoadError> {
        let len = self.count(field, 1, max)?;
        let at = self.at;
        let bytes = self.take(len, field)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_string()),
            Err(error) => Err(self.malformed(field, at, format!("not UTF-8: {error}"))),
        }
    }

    /// How many `T` to reserve for `count` of them that are about to be read: never more memory than bytes left.
    pub(super) fn capacity<T>(&self, count: usize) -> usize {
        count.min(self.left() / size_of::<T>().max(1))
    }
}
