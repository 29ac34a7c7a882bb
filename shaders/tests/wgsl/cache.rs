//! Compiled kernels on disk: written by one start, read by the next, and nothing that may stand there does harm.

use std::hash::Hasher;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use runtime::backend::cases::{Case, CaseOp, EXACT, run_case};
use shaders::{GpuOptions, WgpuBackend};

use crate::gpu;

/// A folder that goes with its test.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kittiwake {name} {}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a temporary folder");
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Opens the device, compiles a kernel and runs it.
fn start(cache_dir: &Path) -> Option<Vec<f32>> {
    let device = gpu::device(GpuOptions { cache_dir: Some(cache_dir.into()), ..GpuOptions::default() })?;
    let case = Case { op: CaseOp::Add { width: 64, tokens: 5 }, tolerance: EXACT, seed: 1 };
    Some(run_case(&mut WgpuBackend::new(&device), &case).expect("the device works"))
}

/// The one file there, or none where the adapter's API has no such cache.
fn file(folder: &Path) -> Option<PathBuf> {
    let mut files = std::fs::read_dir(folder).ok()?.map(|entry| entry.expect("a file").path());
    let only = files.next();
    assert_eq!(files.next(), None, "nothing is left beside it");
    only
}

/// What a file holds and when it was written.
fn state(file: &Path) -> (Vec<u8>, SystemTime) {
    let written = std::fs::metadata(file).and_then(|data| data.modified()).expect("a file");
    (std::fs::read(file).expect("a file"), written)
}

/// A whole file around other data.
fn sealed(file: &[u8], data: &[u8]) -> Vec<u8> {
    let mut hasher = std::hash::DefaultHasher::new();
    hasher.write(data);
    [&file[..8], &hasher.finish().to_le_bytes(), data].concat()
}

#[test]
fn compiled_kernels_outlive_the_process() {
    let scratch = Scratch::new("compiled kernels");
    let folder = scratch.0.join("made/when needed");
    let Some(expected) = start(&folder) else { return };
    let Some(file) = file(&folder) else {
        gpu::skip("this adapter's API does not hand out what it compiled");
        return;
    };
    let (bytes, written) = state(&file);
    assert!(bytes.len() > 16, "{} bytes", bytes.len());
    assert_eq!(start(&folder).as_ref(), Some(&expected));
    assert_eq!(state(&file), (bytes.clone(), written), "a file that is read and holds all is not written again");

    let mut flipped = bytes.clone();
    *flipped.last_mut().expect("it is not empty") ^= 1;
    let data = &bytes[16..];
    let (mut other_adapter, mut other_version) = (data.to_vec(), data.to_vec());
    other_adapter[20] ^= 1;
    other_version[8] ^= 1;
    for (what, bad) in [
        ("empty", Vec::new()),
        ("garbage", b"no kernels at all".to_vec()),
        ("cut short", bytes[..bytes.len() - 5].to_vec()),
        ("a flipped bit", flipped),
        ("another adapter's", sealed(&bytes, &other_adapter)),
        ("another version's", sealed(&bytes, &other_version)),
        ("nothing inside", sealed(&bytes, &[])),
    ] {
        std::fs::write(&file, bad).expect("it is ours");
        assert_eq!(start(&folder).as_ref(), Some(&expected), "{what}");
        assert!(state(&file).0 == bytes, "{what}: it was not replaced");
    }
}

/// Where nothing can be written the kernels run all the same.
#[test]
fn a_folder_that_cannot_be_made_is_no_failure() {
    let scratch = Scratch::new("no folder");
    let blocked = scratch.0.join("a file");
    std::fs::write(&blocked, "in the way").expect("a temporary file");
    start(&blocked.join("below"));
}
