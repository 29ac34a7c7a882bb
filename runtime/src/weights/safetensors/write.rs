//! Writing `model.safetensors`, or shards and the index that names them.
//!
//! Invariant: a tensor's bytes are made when its turn comes and dropped when they are written, so that a model is never in
//! memory. What is written depends on the tensors only.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashMap;
use std::path::Path;

use ::safetensors::tensor::{View, serialize_to_file};
use ::safetensors::{Dtype, SafeTensorError};
use serde_json::{Map, json};

use super::{INDEX, SINGLE};
use crate::error::LoadError;

/// A tensor that is to be written.
pub(crate) struct NewTensor<'a> {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    /// Makes its bytes.
    pub(crate) bytes: Box<dyn Fn() -> Cow<'a, [u8]> + 'a>,
}

impl NewTensor<'_> {
    fn num_bytes(&self) -> u64 {
        (self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8) as u64
    }
}

/// Hears how many bytes of how many are written.
pub(crate) type Written<'a> = &'a mut dyn FnMut(u64, u64);

/// The next tensor of a shard, for the crate that asks for its bytes.
struct Next<'a, 'b, F> {
    tensor: &'a NewTensor<'b>,
    written: &'a RefCell<F>,
}

impl<F: FnMut(u64)> View for Next<'_, '_, F> {
    fn dtype(&self) -> Dtype {
        self.tensor.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.tensor.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = (self.tensor.bytes)();
        (self.written.borrow_mut())(bytes.len() as u64);
        bytes
    }

    fn data_len(&self) -> usize {
        self.tensor.num_bytes() as usize
    }
}

/// Writes tensors, in the order of their names, to files of at most `max_bytes` (a larger tensor has one of its own).
///
/// # Errors
/// `Io`.
pub(crate) fn write(
    dir: &Path,
    mut tensors: Vec<NewTensor<'_>>,
    max_bytes: u64,
    progress: Written<'_>,
) -> Result<(), LoadError> {
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let total: u64 = tensors.iter().map(NewTensor::num_bytes).sum();
    let mut shards: Vec<Vec<NewTensor<'_>>> = Vec::new();
    let mut room = 0;
    for tensor in tensors {
        let size = tensor.num_bytes();
        if shards.is_empty() || size > room {
            shards.push(Vec::new());
            room = max_bytes;
        }
        room = room.saturating_sub(size);
        shards.last_mut().expect("one was just made").push(tensor);
    }
    let mut done = 0;
    let mut written = |bytes| {
        done += bytes;
        progress(done, total);
    };
    if let [only] = shards.as_slice() {
        return write_file(&dir.join(SINGLE), only, &mut written);
    }
    let mut weight_map = Map::new();
    for (i, shard) in shards.iter().enumerate() {
        let file = format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len());
        write_file(&dir.join(&file), shard, &mut written)?;
        weight_map.extend(shard.iter().map(|tensor| (tensor.name.clone(), file.clone().into())));
    }
    let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
    let path = dir.join(INDEX);
    std::fs::write(&path, format!("{index:#}\n")).map_err(|source| LoadError::Io { path, source })
}

fn write_file(path: &Path, tensors: &[NewTensor<'_>], written: impl FnMut(u64)) -> Result<(), LoadError> {
    let error = |source| LoadError::Io { path: path.to_path_buf(), source };
    // The crate writes to a file that only its owner may read; others of this process show what the user wants.
    let permissions = std::fs::File::create(path).and_then(|file| file.metadata()).map_err(error)?.permissions();
    let written = RefCell::new(written);
    let views = tensors.iter().map(|tensor| (&tensor.name, Next { tensor, written: &written }));
    // What transformers asks for.
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    serialize_to_file(views, Some(metadata), path).map_err(|problem| match problem {
        SafeTensorError::IoError(source) => error(source),
        other => error(std::io::Error::other(other.to_string())),
    })?;
    std::fs::set_permissions(path, permissions).map_err(error)
}
