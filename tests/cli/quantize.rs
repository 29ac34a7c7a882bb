//! `quantize`: files against what the package compressed-tensors makes of them, and what is refused.
//!
//! What the package says is in `tests/fixtures/quantize.json`, written by `quantize_goldens.py` there.

use std::fs;
use std::path::Path;

use half::{bf16, f16};
use runtime::weights::Checkpoint;
use serde_json::Value;

use super::{Said, Scratch, fixture, kittiwake, support, tiny};

fn quantize(model: &str, out: &Path, arguments: &[&str]) -> Said {
    kittiwake([&["quantize", model, &out.display().to_string()][..], arguments].concat())
}

/// 64 bits of FNV-1a over little-endian words of 4 bytes.
fn fnv1a(words: impl Iterator<Item = u32>) -> String {
    let hash = words.fold(0xcbf2_9ce4_8422_2325, |hash, word| (hash ^ u64::from(word)).wrapping_mul(0x0100_0000_01b3));
    format!("{hash:016x}")
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.chunks(4).map(|bytes| {
        let mut word = [0; 4];
        word[..bytes.len()].copy_from_slice(bytes);
        u32::from_le_bytes(word)
    })
}

fn text<'a>(value: &'a Value, what: &str) -> &'a str {
    value.as_str().unwrap_or_else(|| panic!("{what}: {value}"))
}

#[test]
fn the_package_reads_the_bytes_that_are_written_as_we_do() {
    let golden: Value = serde_json::from_slice(&fs::read(fixture("quantize.json")).unwrap()).unwrap();
    let cases = golden["cases"].as_array().expect("cases");
    assert!(cases.len() >= 8);
    for (i, case) in cases.iter().enumerate() {
        let scratch = Scratch::new(&format!("quantize-{i}"));
        let out = scratch.0.join("out");
        let model = fixture(text(&case["model"], "model"));
        let arguments: Vec<&str> =
            case["arguments"].as_array().expect("arguments").iter().map(|word| text(word, "argument")).collect();
        assert_eq!(quantize(&model.display().to_string(), &out, &arguments).ok(), "");
        let what = format!("{} {arguments:?}", case["model"]);
        assert_eq!(fnv1a(words(&fs::read(out.join("model.safetensors")).unwrap())), case["file"], "{what}");

        let (before, after) = (Checkpoint::open(&model).unwrap(), Checkpoint::open(&out).unwrap());
        let weights = case["weights"].as_object().expect("weights");
        assert!(weights.len() >= 4, "{what}");
        for (stem, hash) in weights {
            let shape = &before.tensors[&format!("{stem}.weight")].shape;
            let values = after.matrix(stem, shape).unwrap().tensor.to_f32();
            // The package multiplies in the type of the scales.
            let scales = after.tensors[&format!("{stem}.weight_scale")].format;
            let round = |x: f32| match scales.name() {
                "BF16" => bf16::from_f32(x).to_f32(),
                "F16" => f16::from_f32(x).to_f32(),
                _ => x,
            };
            // A product of 0 and a code below the zero point is -0 in one place and 0 in another.
            let bits = values.into_iter().map(|x| (round(x) + 0.0).to_bits());
            assert_eq!(fnv1a(bits), text(hash, stem), "{what} {stem}");
        }
    }
}

#[test]
fn a_quantised_model_is_a_model_like_any_other() {
    let scratch = Scratch::new("quantize");
    let prompt = ["--prompt-ids=1,2,3,4,5,6,7,8", "--max-tokens=4", "--ignore-eos", "--json", "--device=cpu"];
    let generate = |model: &str| kittiwake([&["generate", model][..], &prompt].concat()).json();
    for format in ["int4-g32", "int4-asym-g32", "int8", "fp8"] {
        let out = scratch.0.join(format);
        let said = quantize(&tiny(), &out, &["--format", format]);
        assert!(said.err.contains("bytes of weights"), "{}", said.err);
        said.ok();
        let mut files: Vec<String> =
            fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        files.sort();
        for file in
            ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
        {
            assert!(files.iter().any(|name| name == file), "{file} is not in {files:?}");
        }
        let config: Value = serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
        assert_eq!(config["architectures"][0], "LlamaForCausalLM");
        let scheme = &config["quantization_config"];
        assert_eq!((&scheme["quant_method"], &scheme["ignore"][0]), (&"compressed-tensors".into(), &"lm_head".into()));
        let answer = generate(&out.display().to_string());
        assert_eq!(answer["token_ids"].as_array().map(Vec::len), Some(4), "{answer}");
        // Eight bits are close enough for a random model to say the same.
        if format == "int8" {
            assert_eq!(answer["token_ids"], generate(&tiny())["token_ids"]);
        }
        quantize(&out.display().to_string(), &scratch.0.join("again"), &["--format=int8"])
            .refused(&["a checkpoint that is quantised (compressed-tensors)"]);
    }
}

#[test]
fn what_cannot_be_quantised_is_refused_and_leaves_nothing() {
    let scratch = Scratch::new("quantize-refused");
    let out = scratch.0.join("out");
    let refused = |model: &str, arguments: &[&str], words: &[&str]| {
        quantize(model, &out, arguments).refused(words);
        let left: Vec<_> = fs::read_dir(&scratch.0).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(left.iter().all(|name| !name.to_string_lossy().contains("out")), "{left:?}");
    };
    refused(&tiny(), &[], &["--format"]);
    refused(&tiny(), &["--format=int3"], &["'int3' is not one of int4-gN, int4-asym-gN", "int8, fp8"]);
    refused(&tiny(), &["--format=int4-g48"], &["'int4-g48': groups are a multiple of 32 inputs"]);
    refused(
        &tiny(),
        &["--format=int4-g128"],
        &["q_proj.weight", "a multiple of 128 inputs (g64, g32 would do), got 64"],
    );
    refused(&tiny(), &["--format=int8", "--ignore=("], &["--ignore"]);
    refused("/no/such/model", &["--format=int8"], &["no model at /no/such/model"]);
    refused(&support::demo().display().to_string(), &["--format=int8"], &["'a GGUF file' is not supported"]);
    let gptq = fixture("quantised/llama-gptq").display().to_string();
    refused(&gptq, &["--format=int8"], &["a checkpoint that is quantised (gptq)"]);
    refused(&tiny(), &["--format=int8", "--calibration=/no/such.txt"], &["--calibration /no/such.txt"]);
    let short = scratch.file("short.txt", "A few words.");
    let calibration = format!("--calibration={short}");
    refused(&tiny(), &["--format=int8", &calibration, "--calibration-len=100"], &["the text has", "a window 100"]);
    refused(
        &tiny(),
        &["--format=int8", &calibration, "--calibration-len=513"],
        &["--calibration-len 513", "512 tokens"],
    );
    let binary = scratch.file("binary.txt", [0xff, 0xfe]);
    refused(&tiny(), &["--format=int8", &format!("--calibration={binary}")], &["--calibration", "UTF-8"]);
}

#[test]
fn what_is_there_is_not_overwritten() {
    let scratch = Scratch::new("quantize-out");
    let full = scratch.0.join("full");
    fs::create_dir(&full).unwrap();
    fs::write(full.join("mine"), "kept").unwrap();
    quantize(&tiny(), &full, &["--format=int8"]).refused(&["OUT", "full is there and not empty"]);
    assert_eq!(fs::read_to_string(full.join("mine")).unwrap(), "kept");
    let file = scratch.file("file", "kept");
    quantize(&tiny(), Path::new(&file), &["--format=int8"]).refused(&["OUT", &file]);
    quantize(&tiny(), &scratch.0.join("no/such/parent"), &["--format=int8"]).refused(&["OUT: cannot make"]);
    let empty = scratch.0.join("empty");
    fs::create_dir(&empty).unwrap();
    quantize(&tiny(), &empty, &["--format=int8"]).ok();
    assert!(empty.join("model.safetensors").is_file());
}
