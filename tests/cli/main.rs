//! The command line as its users meet it: the real binary, its output, its exit codes. Everything runs on tiny fixtures, the
//! `demo` name and the progress bar on the demo model.
//!
//! `fetch.rs` and `terminal.rs` need Python (`KITTIWAKE_TEST_PYTHON`, else `python3`), which `tests/run.sh` requires anyway.

mod bench;
mod chat;
mod eval;
mod fetch;
mod flags;
mod generate;
#[cfg(feature = "hub")]
mod hub;
#[cfg(feature = "wgpu")]
mod kernel;
mod models;
mod quantize;
#[path = "../support/mod.rs"]
mod support;
mod terminal;
#[cfg(feature = "wgpu")]
mod tune;

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::process::{Command, Output, Stdio};

use support::fixture;

/// The binary with no `KITTIWAKE_*` variable set, in the repository's root.
fn command() -> Command {
    isolated(env!("CARGO_BIN_EXE_kittiwake"))
}

/// A program that does not see the `KITTIWAKE_*` variables of whoever runs the tests.
fn isolated(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(env!("CARGO_MANIFEST_DIR")).stdin(Stdio::null());
    let is_ours = |name: &str| ["KITTIWAKE_", "HF_"].iter().any(|prefix| name.starts_with(prefix));
    for (name, _) in std::env::vars_os().filter(|(name, _)| is_ours(&name.to_string_lossy())) {
        command.env_remove(name);
    }
    // Tests have no network.
    command.env("HF_HUB_OFFLINE", "1");
    // Nor does it find, or leave, anything in that user's folders.
    command.env("KITTIWAKE_KERNEL_CACHE_DIR", "none");
    command
}

fn python() -> OsString {
    std::env::var_os("KITTIWAKE_TEST_PYTHON").unwrap_or_else(|| "python3".into())
}

/// What a finished process said.
#[derive(Debug)]
struct Said {
    code: Option<i32>,
    out: String,
    err: String,
}

impl From<Output> for Said {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).expect("whole UTF-8");
        Self { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }
}

impl Said {
    /// Standard output of a success.
    fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{}", self.err);
        self.out
    }

    /// One JSON object, alone on standard output.
    fn json(self) -> serde_json::Value {
        let out = self.ok();
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}"))
    }

    /// The message of a failure that says all of `words`, prints no answer and is not a panic.
    fn refused(self, words: &[&str]) -> String {
        assert!(matches!(self.code, Some(1 | 2)), "{self:?}");
        assert_eq!(self.out, "", "a refusal prints no answer");
        for word in words {
            assert!(self.err.contains(word), "'{word}' is not in: {}", self.err);
        }
        self.err
    }
}

/// Runs the binary to its end.
fn kittiwake<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Said {
    let output = command().args(arguments).output();
    output.expect("the binary runs").into()
}

/// Runs the binary with `input` on standard input.
fn kittiwake_hears(input: &[u8], arguments: &[&str]) -> Said {
    let mut command = command();
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary runs");
    // A process that refuses its arguments does not read; its message is what counts then.
    let _ = child.stdin.take().expect("piped").write_all(input);
    child.wait_with_output().expect("the binary ends").into()
}

/// The keys of a JSON object, sorted.
fn keys(object: &serde_json::Value) -> Vec<&str> {
    let mut keys: Vec<&str> = object.as_object().expect("an object").keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

/// The tiny model that most tests use: 512 tokens of vocabulary and of context.
fn tiny() -> String {
    fixture("llama-tiny").display().to_string()
}

/// A directory of its own that goes with its test.
struct Scratch(std::path::PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kittiwake {name} {}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a scratch directory");
        Self(path)
    }

    /// Writes a file and returns its path.
    fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).expect("a scratch file");
        path.display().to_string()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
