//! What MODEL and the flags around it may be, and what is said when it is not there, not whole, or has nowhere to run.

use super::{Scratch, fixture, kittiwake, support, tiny};

fn generate(model: &str, arguments: &[&str]) -> super::Said {
    let common = ["generate", model, "--prompt=a", "--max-tokens=2", "--threads=1", "--temperature=0"];
    kittiwake([&common[..], arguments].concat())
}

#[test]
fn demo_is_looked_up_in_the_download_dir() {
    let demo = support::demo();
    let dir = demo.parent().expect("a directory").display().to_string();
    let answer = generate("demo", &["--download-dir", &dir, "--json"]).json();
    assert_eq!(answer["token_ids"].as_array().map(Vec::len), Some(2));
    // Any other name too.
    let fixtures = fixture("").display().to_string();
    generate("llama-tiny", &["--download-dir", &fixtures]).ok();
}

#[test]
fn an_absent_model_is_an_error_that_says_what_to_run() {
    let empty = Scratch::new("no models");
    let dir = empty.0.display().to_string();
    generate("demo", &["--download-dir", &dir]).refused(&["quickstart.sh", "--download-dir", &dir]);
    generate("nowhere", &["--download-dir", &dir]).refused(&["nowhere", &dir, "quickstart.sh"]);
    kittiwake(["serve", "demo", "--download-dir", &dir]).refused(&["quickstart.sh"]);
    kittiwake(["bench", "--download-dir", &dir]).refused(&["quickstart.sh"]);
}

#[test]
fn a_model_that_is_not_whole_is_refused_by_file() {
    let scratch = Scratch::new("broken models");
    let empty = scratch.0.display().to_string();
    let said = generate(&empty, &[]).refused(&["config.json"]);
    assert_eq!(said.matches(&empty).count(), 1, "the path is said once: {said}");
    let said = generate(&tiny(), &["--tokenizer", "/no/such"]).refused(&["/no/such/tokenizer.json", &tiny()]);
    assert_eq!(said.matches("No such file").count(), 1, "the cause is said once: {said}");
    let whole = std::fs::read(fixture("gguf/llama-q8_0.gguf")).expect("the fixture");
    for len in [0, 3, 1000, whole.len() / 2, whole.len() - 1] {
        let cut = scratch.file("cut.gguf", &whole[..len]);
        let said = generate(&cut, &[]).refused(&["cut.gguf"]);
        assert!(!said.contains("panicked"), "{len} bytes: {said}");
    }
    generate(&scratch.file("text.gguf", "not a model at all, but long enough"), &[]).refused(&["text.gguf", "magic"]);
}

#[cfg(unix)]
#[test]
fn a_file_that_may_not_be_read_is_named() {
    use std::os::unix::fs::PermissionsExt;

    let scratch = Scratch::new("unreadable");
    let path = scratch.file("secret.gguf", std::fs::read(fixture("gguf/llama-q8_0.gguf")).expect("the fixture"));
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o000)).expect("chmod");
    if std::fs::File::open(&path).is_ok() {
        eprintln!("skipped: this user may read everything");
        return;
    }
    generate(&path, &[]).refused(&["secret.gguf", "denied"]);
}

#[test]
fn an_absent_device_is_never_replaced() {
    for name in ["wgpu:9", "wgpu:no such card", "wgpu:", "cuda", "CPU", "nonsense", ""] {
        let said = generate(&tiny(), &["--device", name]).refused(&["not available"]);
        assert!(said.contains(&format!("'{name}'")), "{said}");
    }
    for (name, described) in [("auto", "CPU"), ("cpu", "CPU"), ("reference", "reference")] {
        let answer = generate(&tiny(), &["--device", name, "--json"]).json();
        assert!(answer["device"].as_str().is_some_and(|device| device.starts_with(described)), "{}", answer["device"]);
    }
}

#[test]
fn load_formats_are_what_they_say() {
    let gguf = fixture("gguf/llama-q8_0.gguf").display().to_string();
    let ids =
        |model: &str, format: &str| generate(model, &["--load-format", format, "--json"]).json()["token_ids"].clone();
    assert_eq!(ids(&tiny(), "safetensors"), ids(&tiny(), "auto"));
    assert_eq!(ids(&gguf, "gguf"), ids(&gguf, "auto"));
    generate(&gguf, &["--load-format", "safetensors"]).refused(&["--load-format safetensors"]);
    generate(&tiny(), &["--load-format", "gguf"]).refused(&["--load-format gguf"]);
    generate(&tiny(), &["--load-format", "pickle"]).refused(&["pickle", "safetensors"]);

    // Dummy weights need the shapes only.
    let scratch = Scratch::new("no weights");
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        scratch.file(name, std::fs::read(fixture("llama-tiny").join(name)).expect("the fixture"));
    }
    let dir = scratch.0.display().to_string();
    generate(&dir, &[]).refused(&["model.safetensors"]);
    generate(&dir, &["--load-format", "dummy"]).ok();
}

#[test]
fn context_lengths_take_suffixes_and_are_never_cut_in_silence() {
    generate(&tiny(), &["--max-model-len", "32k"]).refused(&["--max-model-len", "32000", "512 tokens (the model's)"]);
    for refused in ["0", "-2", "0.5k", "k", "9999999T"] {
        generate(&tiny(), &["--max-model-len", refused]).refused(&["--max-model-len", refused]);
    }
    for accepted in ["-1", "auto", "512", "256"] {
        generate(&tiny(), &["--max-model-len", accepted]).ok();
    }
    let gguf = support::demo().display().to_string();
    generate(&gguf, &["--max-model-len", "4k"]).ok();
}
