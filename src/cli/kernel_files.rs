//! Files that runs on a GPU leave and find: compiled kernels, and shapes that were measured on this device.
//!
//! Invariant: both save time and change no answer. A file that was named must be sound; the one that is found by itself may
//! be absent.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::Args;
use shaders::TuningFile;

use super::args::Environment;

/// The flag of the folder, as `args::parse` is told its default.
pub const DIR_FLAG: &str = "kernel-cache-dir";

/// Where they are.
#[derive(Debug, Args)]
pub struct KernelFiles {
    /// Where compiled kernels of the wgpu device and tuning.json are kept; `none`: nowhere [default: kittiwake in the user's cache
    /// directory].
    #[arg(long, value_name = "DIR")]
    kernel_cache_dir: Option<PathBuf>,
    /// Shapes of kernels that `kittiwake kernel tune` has measured on this device, and where it writes them; `none`: the built-in ones [default: tuning.json
    /// in --kernel-cache-dir].
    #[arg(long, value_name = "FILE")]
    kernel_tuning: Option<PathBuf>,
}

impl KernelFiles {
    /// The folder of compiled kernels.
    pub fn dir(&self) -> Option<PathBuf> {
        named(self.kernel_cache_dir.as_deref()).map(Path::to_owned)
    }

    /// The file of measured shapes.
    pub fn tuning_file(&self) -> Option<PathBuf> {
        match &self.kernel_tuning {
            Some(file) => named(Some(file)).map(Path::to_owned),
            None => Some(self.dir()?.join("tuning.json")),
        }
    }

    /// The measured shapes, where there are some.
    ///
    /// # Errors
    /// The file was named and is not there, or what is there is not sound.
    pub fn tuning(&self) -> anyhow::Result<Option<TuningFile>> {
        let file = self.tuning_file().filter(|file| self.kernel_tuning.is_some() || file.exists());
        Ok(file.map(|file| TuningFile::read(&file)).transpose()?)
    }
}

fn named(path: Option<&Path>) -> Option<&Path> {
    path.filter(|path| !path.as_os_str().is_empty() && *path != "none")
}

/// Kittiwake's folder in the user's cache directory: by the conventions of freedesktop.org, Apple and Microsoft.
pub fn default_dir(environment: Environment) -> Option<OsString> {
    let of = |name: &str| environment(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = if cfg!(windows) {
        of("LOCALAPPDATA")?
    } else if cfg!(target_os = "macos") {
        of("HOME")?.join("Library/Caches")
    } else {
        of("XDG_CACHE_HOME").or_else(|| Some(of("HOME")?.join(".cache")))?
    };
    Some(cache.join("kittiwake").into_os_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_is_found_or_none() {
        let dir = |set: &[(&str, &str)]| {
            let lookup = |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
            default_dir(&lookup).map(PathBuf::from)
        };
        assert_eq!(dir(&[]), None);
        if cfg!(target_os = "linux") {
            assert_eq!(dir(&[("HOME", "/h")]), Some("/h/.cache/kittiwake".into()));
            assert_eq!(dir(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/c")]), Some("/c/kittiwake".into()));
            assert_eq!(dir(&[("HOME", "/h"), ("XDG_CACHE_HOME", "")]), Some("/h/.cache/kittiwake".into()));
        }
    }

    #[test]
    fn none_is_nowhere_and_the_table_is_beside_the_kernels() {
        let files = |dir: Option<&str>, tuning: Option<&str>| KernelFiles {
            kernel_cache_dir: dir.map(PathBuf::from),
            kernel_tuning: tuning.map(PathBuf::from),
        };
        assert_eq!(files(Some("none"), None).dir(), None);
        assert_eq!(files(Some(""), None).tuning_file(), None);
        assert_eq!(files(Some("d"), None).tuning_file(), Some("d/tuning.json".into()));
        assert_eq!(files(Some("none"), Some("t.json")).tuning_file(), Some("t.json".into()));
        assert_eq!(files(Some("d"), Some("none")).tuning_file(), None);
        let absent = Some("/no/such/folder");
        assert_eq!(files(absent, None).tuning().expect("what is found by itself may be absent"), None);
        let said = files(absent, Some("/no/such.json")).tuning().expect_err("it was named").to_string();
        assert!(said.contains("/no/such.json"), "{said}");
    }
}
