//! House rules that a machine can check: how files open, who imports whom, where `unsafe` and the environment are.
//!
//! Each rule lists its offenders, so that a failure says what to mend.

use std::fs;
use std::path::{Path, PathBuf};

/// Every tracked kind of source file below `dir`, relative to the repository.
fn files(dir: &str, extension: &str) -> Vec<(String, String)> {
    fn walk(dir: &Path, extension: &str, found: &mut Vec<PathBuf>) {
        let Ok(entries) = fs::read_dir(dir) else { return };
        for entry in entries.flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            if path.is_dir() {
                if !name.starts_with('.') && !["target", "models", "__pycache__"].contains(&name.as_ref()) {
                    walk(&path, extension, found);
                }
            } else if name.ends_with(extension) {
                found.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    walk(&root.join(dir), extension, &mut found);
    found.sort();
    let relative =
        |path: &PathBuf| path.strip_prefix(root).expect("below the root").to_string_lossy().replace('\\', "/");
    found.iter().map(|path| (relative(path), fs::read_to_string(path).expect("readable source"))).collect()
}

/// The part of a Rust file before its unit tests.
fn code(text: &str) -> &str {
    text.split("\n#[cfg(test)]\nmod ").next().unwrap_or(text)
}

fn none(what: &str, offenders: Vec<String>) {
    assert!(offenders.is_empty(), "{what}:\n  {}", offenders.join("\n  "));
}

fn lines_with(files: &[(String, String)], allowed: &[&str], matches: impl Fn(&str) -> bool) -> Vec<String> {
    let mut offenders = Vec::new();
    for (path, text) in files.iter().filter(|(path, _)| !allowed.iter().any(|prefix| path.starts_with(prefix))) {
        for (number, line) in code(text).lines().enumerate() {
            let line = line.trim_start();
            if !line.starts_with("//") && matches(line) {
                offenders.push(format!("{path}:{}: {line}", number + 1));
            }
        }
    }
    offenders
}

#[test]
fn every_file_opens_with_what_it_is() {
    let mut offenders = Vec::new();
    for (path, text) in files(".", ".rs") {
        let header = text.lines().take_while(|line| line.starts_with("//!")).count();
        if header == 0 || header > 12 && !path.ends_with("lib.rs") {
            offenders.push(format!("{path}: {header} lines"));
        }
    }
    none("files must open with a few lines of //!", offenders);
}

#[test]
fn files_stay_readable_in_one_sitting() {
    // About 400 lines of code; unit tests do not count, and flat tables may be longer.
    let long = |(path, text): (String, String)| {
        let lines = code(&text).lines().count();
        (!path.ends_with("tests.rs") && lines > 450).then(|| format!("{path}: {lines} lines"))
    };
    none("files over 450 lines: split them", files(".", ".rs").into_iter().filter_map(long).collect());
}

#[test]
fn runtime_knows_no_gpu_no_async_no_http() {
    let foreign = ["wgpu", "cudarc", "tokio", "axum", "hyper", "server::", "clap"];
    let offenders = lines_with(&files("runtime/src", ".rs"), &[], |line| {
        line.starts_with("use ") && foreign.iter().any(|name| line.contains(&format!("use {name}")))
    });
    none("runtime imports what it must not know", offenders);
}

#[test]
fn scheduling_never_sees_the_model() {
    let side: Vec<_> = ["scheduler", "kv", "sequence", "step", "spec"]
        .iter()
        .flat_map(|name| {
            files("runtime/src", ".rs").into_iter().filter(move |(path, _)| {
                path.starts_with(&format!("runtime/src/{name}.rs")) || path.starts_with(&format!("runtime/src/{name}/"))
            })
        })
        .collect();
    assert!(side.len() >= 4, "the rule has something to check");
    let offenders = lines_with(&side, &[], |line| {
        ["program", "model", "backend", "runner", "weights", "text"]
            .iter()
            .any(|name| line.contains(&format!("crate::{name}::")) || line.contains(&format!("use crate::{name}")))
    });
    none("scheduling imports the model's side", offenders);
}

#[test]
fn engine_code_never_sees_text() {
    let offenders = lines_with(&files("runtime/src", ".rs"), &["runtime/src/text/", "runtime/src/lib.rs"], |line| {
        line.contains("crate::text")
    });
    none("only the outside may import text", offenders);
}

#[test]
fn unsafe_stays_in_its_places() {
    let allowed = [
        "runtime/src/backend/cpu/",
        "runtime/src/backend/pool.rs",
        "runtime/src/weights/checkpoint.rs",
        "shaders/src/device.rs",
    ];
    let offenders = lines_with(
        &[files("runtime", ".rs"), files("server", ".rs"), files("shaders", ".rs"), files("src", ".rs")].concat(),
        &allowed,
        |line| line.contains("unsafe {") || line.contains("unsafe fn") || line.contains("unsafe impl"),
    );
    none("unsafe outside its places", offenders);
}

/// What is built into the program.
fn sources() -> Vec<(String, String)> {
    ["runtime/src", "server/src", "shaders/src", "src"].iter().flat_map(|dir| files(dir, ".rs")).collect()
}

#[test]
fn the_environment_is_read_in_main_only() {
    let offenders = lines_with(&sources(), &["src/main.rs"], |line| {
        ["env::var", "env::args", "env::vars"].iter().any(|call| line.contains(call))
    });
    none("environment reads outside main", offenders);
}

#[test]
fn no_globals() {
    let offenders = lines_with(&sources(), &[], |line| {
        ["static mut ", "thread_local!", "lazy_static!", "OnceLock<", "LazyLock<"]
            .iter()
            .any(|word| line.contains(word))
    });
    none("global state", offenders);
}

/// A kernel opens with its formula and bindings, what a lane or a workgroup owns, its tolerance, and the targets that it has
/// for other compilers; a file that kernels use opens with what it is. Both stay plain WGSL: directives are comments.
#[test]
fn shaders_open_with_what_they_compute() {
    let all = files("shaders/wgsl", ".wgsl");
    let is_kernel = |path: &str| !path["shaders/wgsl/".len()..].contains('/');
    assert!(all.iter().filter(|(path, _)| is_kernel(path)).count() >= 10, "the rule has something to check");
    let mut offenders = Vec::new();
    for (path, text) in &all {
        let header: String = text
            .lines()
            .take_while(|line| line.starts_with("//") && !line.starts_with("//!"))
            .collect::<Vec<_>>()
            .join("\n");
        let has = |words: &[&str]| words.iter().any(|word| header.contains(word));
        let mut rule = |holds: bool, what: &str| {
            if !holds {
                offenders.push(format!("{path}: {what}"));
            }
        };
        rule(header.len() > 40, "no comment says at the top what it is");
        if is_kernel(path) {
            rule(text.lines().filter(|line| line.starts_with("//!targets ")).count() == 1, "no line `//!targets`");
            rule(has(&["olerance", "Exact"]), "the header names no tolerance");
            rule(has(&["A lane owns", "a lane owns", "A workgroup owns"]), "the header does not say what a lane owns");
        }
    }
    none("headers of WGSL files", offenders);
}

#[test]
fn ignored_tests_are_explained_in_the_readme() {
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).expect("README.md");
    let mut offenders = Vec::new();
    for (path, text) in files(".", ".rs") {
        let ignored = text.lines().any(|line| line.trim_start().starts_with("#[ignore"));
        if ignored && !readme.contains(&path) {
            offenders.push(path);
        }
    }
    none("#[ignore] without a line in the README", offenders);
}

#[test]
fn fixtures_stay_small() {
    fn bytes(dir: &Path) -> u64 {
        let entries = fs::read_dir(dir).expect("fixtures").flatten();
        entries
            .map(
                |entry| {
                    if entry.path().is_dir() { bytes(&entry.path()) } else { entry.metadata().expect("metadata").len() }
                },
            )
            .sum()
    }
    let total = bytes(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures"));
    assert!(total < 10 << 20, "tests/fixtures holds {total} bytes, limit 10 MiB");
}
