//! Directories and headers, sound and broken.

use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::weights::testing::TempDir;
use crate::weights::{Checkpoint, Container};

fn file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

fn small_file() -> Vec<u8> {
    file(
        r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2],"data_offsets":[8,12]},"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}"#,
        &[&1.5f32.to_le_bytes()[..], &(-2.0f32).to_le_bytes(), &[0x80, 0x3f, 0x00, 0x40]].concat(),
    )
}

fn problem(header: &str, data: &[u8]) -> String {
    match parse(Path::new("m.safetensors"), &file(header, data)) {
        Err(error @ (LoadError::Malformed { .. } | LoadError::Unsupported { .. })) => error.to_string(),
        other => panic!("expected an error, got {other:?}"),
    }
}

/// A directory of its own for one test, with these files and a config.
fn model_dir(test: &str, files: &[(&str, &[u8])]) -> TempDir {
    let dir = TempDir::new(&format!("safetensors-{test}"));
    for (name, bytes) in [("config.json", &b"{\"model_type\":\"llama\"}"[..])].iter().chain(files) {
        std::fs::write(dir.join(name), bytes).unwrap();
    }
    dir
}

#[test]
fn a_single_file_is_read() {
    let dir = model_dir(
        "single",
        &[
            ("model.safetensors", &small_file()),
            ("consolidated.safetensors", b"not looked at"),
            ("generation_config.json", b"{\"eos_token_id\":2}"),
        ],
    );
    let checkpoint = Checkpoint::open(&dir).unwrap();
    assert_eq!(checkpoint.tensors.len(), 2);
    assert_eq!(checkpoint.tensors["a"].to_f32(), [1.5, -2.0]);
    assert_eq!(checkpoint.tensors["a"].shape, [1, 2]);
    assert_eq!(checkpoint.tensors["b"].to_f32(), [1.0, 2.0]);
    let Container::HuggingFace { config, generation_config } = checkpoint.container else { panic!("a directory") };
    assert_eq!(config["model_type"], "llama");
    assert_eq!(generation_config.unwrap()["eos_token_id"], 2);
}

#[test]
fn shards_are_read_and_stay_in_the_directory() {
    let index = |file: &str| format!(r#"{{"weight_map":{{"a":"{file}"}}}}"#);
    let open = |file: &str| {
        let dir = model_dir("sharded", &[("s-1.safetensors", &small_file()), (INDEX, index(file).as_bytes())]);
        Checkpoint::open(&dir)
    };
    let checkpoint = open("s-1.safetensors").unwrap();
    assert_eq!(checkpoint.tensors.keys().collect::<Vec<_>>(), ["a"], "only what the index lists");
    for escape in ["../s-1.safetensors", "/etc/passwd", "sub/s-1.safetensors", "..", "", "./s-1.safetensors"] {
        let message = open(escape).unwrap_err().to_string();
        assert!(message.contains("a: expected the name of a file in the directory"), "{escape}: {message}");
    }
    let absent = open("absent.safetensors").unwrap_err();
    assert!(matches!(&absent, LoadError::Io { path, .. } if path.ends_with("absent.safetensors")), "{absent}");
    let dir = model_dir(
        "promised",
        &[("s.safetensors", &small_file()), (INDEX, br#"{"weight_map":{"zz":"s.safetensors"}}"#)],
    );
    assert!(matches!(Checkpoint::open(&dir), Err(LoadError::Tensor { tensor, .. }) if tensor == "zz"));
}

/// The index says what the model is, as it does for transformers and vLLM: shards that it does not name are warned of, copies
/// of the weights under another name are not.
#[test]
fn weights_beside_the_index_are_not_read() {
    let broken = &b"no header"[..];
    let files = [
        ("s-1.safetensors", &small_file()[..]),
        ("s-2.safetensors", broken),
        ("consolidated.safetensors", broken),
        ("consolidated-00001-of-00001.safetensors", broken),
        ("s-3.txt", broken),
        (INDEX, br#"{"weight_map":{"a":"s-1.safetensors","b":"s-1.safetensors"}}"#),
    ];
    let dir = model_dir("extra", &files);
    assert_eq!(Checkpoint::open(&dir).unwrap().tensors.len(), 2);
    assert_eq!(not_named(&dir, &["s-1.safetensors"]), ["s-2.safetensors"]);
    // They alone are no model.
    let dir = model_dir("copies", &[("consolidated.safetensors", &small_file())]);
    let message = Checkpoint::open(&dir).unwrap_err().to_string();
    assert!(message.contains("model.safetensors: not found"), "{message}");
}

#[test]
fn what_is_not_a_model_is_named() {
    let message = |path: &Path| Checkpoint::open(path).unwrap_err().to_string();
    let dir = model_dir("empty", &[]);
    assert!(message(&dir).contains("model.safetensors: not found, and neither is model.safetensors.index.json"));
    std::fs::write(dir.join("config.json"), "[1]").unwrap();
    assert!(message(&dir).contains("expected an object"));
    std::fs::write(dir.join("config.json"), "{").unwrap();
    assert!(message(&dir).contains("config.json: JSON"));
    std::fs::remove_file(dir.join("config.json")).unwrap();
    assert!(message(&dir).contains("config.json: not found"));
    assert!(matches!(Checkpoint::open(&dir.join("absent")), Err(LoadError::Io { .. })));
    std::fs::write(dir.join("empty.gguf"), "").unwrap();
    assert!(message(&dir.join("empty.gguf")).contains("magic at byte 0: the file ends"));
}

#[test]
fn json_files_are_capped() {
    let dir = model_dir("capped", &[]);
    let path = dir.join("config.json");
    let len = std::fs::metadata(&path).unwrap().len();
    assert!(checkpoint::read_json(&path, len).is_ok());
    assert!(checkpoint::read_json(&path, len - 1).unwrap_err().to_string().contains("more than"));
}

#[test]
fn offsets_must_tile_the_data() {
    let one = |shape: &str, begin: u64, end: u64| {
        format!(r#"{{"t":{{"dtype":"F32","shape":{shape},"data_offsets":[{begin},{end}]}}}}"#)
    };
    assert!(problem(&one("[2]", 4, 12), &[0; 12]).contains("does not follow 0"));
    assert!(problem(&one("[2]", 0, 8), &[0; 7]).contains("within 7 bytes"));
    assert!(problem(&one("[2]", 0, 8), &[0; 9]).contains("1 bytes after the last tensor"));
    assert!(problem(&one("[3]", 0, 8), &[0; 8]).contains("F32 [3] is not 8 bytes"));
    assert!(problem(&one("[4611686018427387905, 4]", 0, 16), &[0; 16]).contains("is not 16 bytes"));
    assert!(problem(&one("[2]", 8, 0), &[0; 8]).contains("does not follow"));
    let overlap = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#;
    assert!(problem(overlap, &[0; 12]).contains("tensor \"b\""));
}

#[test]
fn headers_are_bounded_json_without_duplicates() {
    let twice = r#"{"t":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"t":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#;
    assert!(problem(twice, &[]).contains("\"t\" is there twice"));
    assert!(problem("{\"t\":", &[]).contains("header at byte 8"));
    assert!(problem(r#"{"t":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#, &[0; 4]).contains("header"));
    let message = problem(r#"{"t":{"dtype":"F8_E5M2","shape":[4],"data_offsets":[0,4]}}"#, &[0; 4]);
    assert!(message.contains("F8_E5M2 of \"t\"") && message.contains("F32, F16, BF16"), "{message}");
    for len in [u64::MAX, 100_000_001, 9] {
        let bytes = [&len.to_le_bytes()[..], b"{}      "].concat();
        let error = parse(Path::new("m"), &bytes).unwrap_err().to_string();
        assert!(error.contains("header length at byte 0"), "{error}");
    }
}

#[test]
fn a_file_cut_at_any_byte_is_an_error() {
    let bytes = small_file();
    for len in 0..bytes.len() {
        assert!(matches!(parse(Path::new("m"), &bytes[..len]), Err(LoadError::Malformed { .. })), "cut at {len}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn mutated_files_never_panic(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let mut bytes = small_file();
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(tensors) = parse(Path::new("m"), &bytes) {
            for tensor in tensors {
                let len = tensor.kind.bytes_of(&tensor.shape).unwrap();
                prop_assert!(tensor.start + len <= bytes.len());
            }
        }
    }
}
