//! GGUF v2 and v3: a bounded reader with checked arithmetic, over one mapped file or a split set.
//!
//! Invariant: only headers are read; what `open` returns lies inside its files. `Checkpoint::open` calls it.

mod cursor;
mod header;
mod metadata;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::{Path, PathBuf};

pub use metadata::{MetaValue, Metadata};

use super::{HostTensor, checkpoint};
use crate::error::LoadError;

/// Opens a GGUF file; of a split set, any of its files opens them all.
///
/// # Errors
/// `Io` for a file (also of the set) that cannot be mapped, `Malformed` and `Unsupported` for its contents, `Config` for
/// `split.*` keys that contradict the files.
pub(super) fn open(path: &Path) -> Result<(Metadata, HashMap<String, HostTensor>), LoadError> {
    let mut tensors = HashMap::new();
    let metadata = read_file(path, &mut tensors)?;
    let Some(split) = Split::of(&metadata)? else { return Ok((metadata, tensors)) };

    // The set's metadata is in its first file, whichever of them was given.
    tensors.clear();
    let mut first = None;
    for index in 0..split.count {
        let metadata = read_file(&split.path_of(index), &mut tensors)?;
        let found = Split::of(&metadata)?;
        if found.as_ref().map(|found| (found.index, found.count)) != Some((index, split.count)) {
            return Err(metadata.error(SPLIT_NO, format!("expected file {index} of {}", split.count)));
        }
        first.get_or_insert(metadata);
    }
    let first = first.expect("a split set has files");
    match first.u64(SPLIT_TENSORS)? {
        Some(expected) if expected != tensors.len() as u64 => {
            Err(first.error(SPLIT_TENSORS, format!("expected {expected} tensors, got {}", tensors.len())))
        }
        _ => Ok((first, tensors)),
    }
}

fn read_file(path: &Path, tensors: &mut HashMap<String, HostTensor>) -> Result<Metadata, LoadError> {
    let file = checkpoint::map_file(path)?;
    let header = header::parse(path, &file)?;
    for info in header.tensors {
        let tensor = HostTensor::mapped(info.name.clone(), info.format, info.shape, file.clone(), info.start);
        match tensors.entry(info.name) {
            Entry::Vacant(entry) => entry.insert(tensor),
            Entry::Occupied(entry) => {
                return Err(LoadError::Malformed {
                    path: path.to_path_buf(),
                    field: format!("tensor {:?}", entry.key()),
                    offset: info.start as u64,
                    problem: "is there twice".to_string(),
                });
            }
        };
    }
    Ok(Metadata { path: path.to_path_buf(), values: header.values })
}

const SPLIT_NO: &str = "split.no";
const SPLIT_COUNT: &str = "split.count";
const SPLIT_TENSORS: &str = "split.tensors.count";

/// A file's place in a set of files named `PREFIX-00001-of-00003.gguf`.
struct Split {
    prefix: PathBuf,
    /// From 0; file names count from 1.
    index: u32,
    count: u32,
}

impl Split {
    /// `None` for a file that is not one of several.
    fn of(metadata: &Metadata) -> Result<Option<Self>, LoadError> {
        let count = metadata.u32(SPLIT_COUNT)?.unwrap_or(0);
        if count <= 1 {
            return Ok(None);
        }
        let index = metadata.require_u32(SPLIT_NO)?;
        let ending = Self::ending(u64::from(index), count);
        let name = metadata.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        match name.strip_suffix(&ending) {
            Some(prefix) if index < count => {
                Ok(Some(Self { prefix: metadata.path.with_file_name(prefix), index, count }))
            }
            _ => Err(metadata.error(SPLIT_NO, format!("file {index} (from 0) of {count} must be named *{ending}"))),
        }
    }

    fn ending(index: u64, count: u32) -> String {
        format!("-{:05}-of-{count:05}.gguf", index + 1)
    }

    fn path_of(&self, index: u32) -> PathBuf {
        let mut path = self.prefix.clone().into_os_string();
        path.push(Self::ending(u64::from(index), self.count));
        path.into()
    }
}
