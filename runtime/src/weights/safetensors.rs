//! Hugging Face directories: `model.safetensors`, or the shards that `model.safetensors.index.json` names.
//!
//! ```text
//! header_len u64 | header JSON: name -> {dtype, shape, data_offsets: [begin, end]} | data
//! ```
//! Invariant: the offsets of a file tile its data exactly, so that ranges lie in the file and apart. Only files that the
//! index names are opened, and only inside the directory; other weights in it are not read, with a warning unless they are
//! copies in another layout (`consolidated*`).
//!
//! The header's types come from the `safetensors` crate, its checks are ours: the crate's sum of offsets can overflow.

#[cfg(test)]
mod tests;
pub(crate) mod write;

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::{Component, Path};
use std::sync::Arc;

use ::safetensors::tensor::TensorInfo;
use memmap2::Mmap;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::scheme::{CodeTensor, CodeType};
use super::{HostTensor, WeightFormat, checkpoint};
use crate::error::LoadError;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// The specification's limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const MAX_INDEX_BYTES: u64 = 64 << 20;
const LEN_BYTES: usize = 8;

/// Tensors by name: floats, and what only a quantised checkpoint's scheme gives a meaning.
#[derive(Debug, Default)]
pub(super) struct Tensors {
    pub(super) floats: HashMap<String, HostTensor>,
    pub(super) codes: HashMap<String, CodeTensor>,
}

/// Opens the tensors of a directory.
///
/// # Errors
/// `Io` for files that cannot be mapped, `Malformed` for their contents, `Unsupported` for dtypes that nothing reads, `Tensor`
/// when the index promises what its file does not have.
pub(super) fn open(dir: &Path) -> Result<Tensors, LoadError> {
    let single = dir.join(SINGLE);
    if single.exists() {
        return open_file(&single);
    }
    let index = dir.join(INDEX);
    if index.exists() {
        return open_sharded(dir, &index);
    }
    Err(LoadError::Config {
        path: dir.to_path_buf(),
        key: SINGLE.to_string(),
        problem: format!("not found, and neither is {INDEX}"),
    })
}

fn open_sharded(dir: &Path, index_path: &Path) -> Result<Tensors, LoadError> {
    let index = checkpoint::read_json(index_path, MAX_INDEX_BYTES)?;
    let error = |key: &str, problem: String| LoadError::Config {
        path: index_path.to_path_buf(),
        key: key.to_string(),
        problem,
    };
    let weight_map = index.get("weight_map").and_then(|map| map.as_object());
    let weight_map = weight_map.ok_or_else(|| error("weight_map", "expected an object".to_string()))?;

    let mut names_by_file = BTreeMap::<&str, Vec<&str>>::new();
    for (name, file) in weight_map {
        let file = file.as_str().filter(|file| is_plain_file_name(file));
        let file = file.ok_or_else(|| error(name, "expected the name of a file in the directory".to_string()))?;
        names_by_file.entry(file).or_default().push(name);
    }

    let named: Vec<&str> = names_by_file.keys().copied().collect();
    for file in not_named(dir, &named) {
        tracing::warn!("{}: {INDEX} does not name it, so that nothing of it is read", dir.join(file).display());
    }
    let mut tensors = Tensors::default();
    for (file, names) in names_by_file {
        let path = dir.join(file);
        let mut shard = open_file(&path)?;
        for name in names {
            if let Some(tensor) = shard.floats.remove(name) {
                tensors.floats.insert(name.to_string(), tensor);
            } else if let Some(tensor) = shard.codes.remove(name) {
                tensors.codes.insert(name.to_string(), tensor);
            } else {
                return Err(LoadError::Tensor {
                    path: path.clone(),
                    tensor: name.to_string(),
                    expected: format!("to be in this file, as {INDEX} says"),
                    got: "no such tensor".to_string(),
                });
            }
        }
    }
    Ok(tensors)
}

/// Files of weights in the directory that the index leaves out, in order; copies in another layout (`consolidated*`) aside.
fn not_named(dir: &Path, named: &[&str]) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let is_left_out = |name: &String| {
        name.ends_with(".safetensors") && !name.starts_with("consolidated") && !named.contains(&name.as_str())
    };
    let mut left_out: Vec<String> = names.filter(is_left_out).collect();
    left_out.sort_unstable();
    left_out
}

/// Whether `name` stays in the directory that it is joined to.
fn is_plain_file_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(only)), None) if only == name)
}

fn open_file(path: &Path) -> Result<Tensors, LoadError> {
    let file: Arc<Mmap> = checkpoint::map_file(path)?;
    let mut tensors = Tensors::default();
    for Tensor { name, kind, shape, start } in parse(path, &file)? {
        match kind {
            Kind::Float(format) => {
                let tensor = HostTensor::mapped(name.clone(), format, shape, file.clone(), start);
                tensors.floats.insert(name, tensor);
            }
            Kind::Code(kind) => {
                let tensor = CodeTensor::mapped(name.clone(), kind, shape, file.clone(), start);
                tensors.codes.insert(name, tensor);
            }
        }
    }
    Ok(tensors)
}

/// What the elements of a tensor are.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Float(WeightFormat),
    Code(CodeType),
}

impl Kind {
    fn named(dtype: &str) -> Option<Self> {
        let float = WeightFormat::from_safetensors_dtype(dtype).map(Self::Float);
        float.or_else(|| CodeType::named(dtype).map(Self::Code))
    }

    fn bytes_of(self, shape: &[usize]) -> Option<usize> {
        match self {
            Self::Float(format) => format.bytes_of(shape),
            Self::Code(kind) => kind.bytes_of(shape),
        }
    }
}

/// Where a tensor lies.
#[derive(Debug)]
struct Tensor {
    name: String,
    kind: Kind,
    shape: Vec<usize>,
    /// Bytes from the start of the file.
    start: usize,
}

fn parse(path: &Path, bytes: &[u8]) -> Result<Vec<Tensor>, LoadError> {
    let malformed = |field: &str, offset: usize, problem: String| LoadError::Malformed {
        path: path.to_path_buf(),
        field: field.to_string(),
        offset: offset as u64,
        problem,
    };
    let Some((len, rest)) = bytes.split_first_chunk::<LEN_BYTES>() else {
        return Err(malformed("header length", 0, format!("the file ends after {} bytes", bytes.len())));
    };
    let header_len = u64::from_le_bytes(*len);
    if header_len > MAX_HEADER_BYTES || header_len > rest.len() as u64 {
        let problem = format!("{header_len} bytes, {} follow and {MAX_HEADER_BYTES} are allowed", rest.len());
        return Err(malformed("header length", 0, problem));
    }
    let (header, data) = rest.split_at(header_len as usize);
    let Header(mut entries) =
        serde_json::from_slice(header).map_err(|error| malformed("header", LEN_BYTES, error.to_string()))?;
    entries.sort_by_key(|(_, info)| info.data_offsets);

    let data_start = LEN_BYTES + header.len();
    let mut tensors = Vec::with_capacity(entries.len());
    let mut end_of_last = 0;
    for (name, TensorInfo { dtype, shape, data_offsets: (begin, end) }) in entries {
        let dtype = dtype.to_string();
        let kind = Kind::named(&dtype).ok_or_else(|| LoadError::Unsupported {
            path: path.to_path_buf(),
            what: "tensor type",
            name: format!("{dtype} of {name:?}"),
            supported: "F32, F16, BF16; in quantised checkpoints I8, U8, I32, I64, F8_E4M3".to_string(),
        })?;
        let field = || format!("tensor {name:?}");
        if begin != end_of_last || end < begin || end > data.len() {
            let problem = format!("data {begin}..{end} does not follow {end_of_last} within {} bytes", data.len());
            return Err(malformed(&field(), LEN_BYTES, problem));
        }
        if kind.bytes_of(&shape) != Some(end - begin) {
            return Err(malformed(&field(), LEN_BYTES, format!("{dtype} {shape:?} is not {} bytes", end - begin)));
        }
        end_of_last = end;
        tensors.push(Tensor { name, kind, shape, start: data_start + begin });
    }
    if end_of_last != data.len() {
        let problem = format!("{} bytes after the last tensor", data.len() - end_of_last);
        return Err(malformed("data", data_start + end_of_last, problem));
    }
    Ok(tensors)
}

/// The header's entries but `__metadata__`; a name that is there twice is an error.
struct Header(Vec<(String, TensorInfo)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut entries = HashMap::<String, TensorInfo>::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    match entries.entry(name) {
                        Entry::Vacant(entry) => entry.insert(map.next_value()?),
                        Entry::Occupied(entry) => {
                            let name = entry.key();
                            return Err(serde::de::Error::custom(format!("tensor {name:?} is there twice")));
                        }
                    };
                }
                Ok(Header(entries.into_iter().collect()))
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}
