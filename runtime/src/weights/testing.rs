//! What the tests of both containers share.

use std::ops::Deref;
use std::path::{Path, PathBuf};

/// A directory of one test's own, removed with everything in it when dropped.
pub(crate) struct TempDir(PathBuf);

impl TempDir {
    /// `test` tells the tests of one process apart.
    pub(crate) fn new(test: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("kittiwake-{test}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }
}

impl Deref for TempDir {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
