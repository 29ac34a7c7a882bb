//! The file of compiled kernels: what a driver made of them at one start, for the next.
//!
//! Invariant: a file that is not whole, or not ours, is as good as none, and is replaced; it is written beside its place and
//! renamed, so that no reader sees half of it. That it cannot be written costs time at the next start and nothing else.

use std::hash::Hasher;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// What a file begins with; then a checksum of eight bytes and the data.
const MAGIC: &[u8; 8] = b"KWKERN01";

/// A file of compiled kernels and what wgpu keeps of it.
pub(crate) struct PipelineFile {
    pub(crate) cache: wgpu::PipelineCache,
    path: PathBuf,
    /// What the file holds.
    stored: Mutex<Option<Vec<u8>>>,
}

impl PipelineFile {
    pub(crate) fn new(path: PathBuf, cache: wgpu::PipelineCache, stored: Option<Vec<u8>>) -> Self {
        Self { cache, path, stored: Mutex::new(stored) }
    }

    /// Writes what the driver has compiled so far, if the file holds anything else.
    pub(crate) fn save(&self) {
        let mut stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(data) = self.cache.get_data().filter(|data| stored.as_ref() != Some(data)) else { return };
        match write(&self.path, &data) {
            Ok(()) => *stored = Some(data),
            Err(error) => tracing::warn!("compiled kernels are not kept: {}: {error}", self.path.display()),
        }
    }
}

/// The hasher's algorithm may change with the toolchain: then a file is not ours any more, and is replaced.
fn checksum(data: &[u8]) -> [u8; 8] {
    let mut hasher = std::hash::DefaultHasher::new();
    hasher.write(data);
    hasher.finish().to_le_bytes()
}

/// What a file holds, if it is whole and ours.
pub(crate) fn read(path: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(path).ok()?;
    let (sum, data) = bytes.strip_prefix(MAGIC)?.split_first_chunk::<8>()?;
    let is_whole = *sum == checksum(data);
    if !is_whole {
        tracing::debug!("{} is not whole: kernels are compiled anew", path.display());
    }
    is_whole.then(|| data.to_vec())
}

fn write(path: &Path, data: &[u8]) -> io::Result<()> {
    write_whole(path, &[MAGIC, &checksum(data), data].concat())
}

/// Writes a file, with its folder, that is there whole or not at all.
///
/// # Errors
/// What the system says.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}", std::process::id()));
    let beside = PathBuf::from(beside);
    let written = std::fs::write(&beside, bytes).and_then(|()| std::fs::rename(&beside, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&beside);
    }
    written
}
