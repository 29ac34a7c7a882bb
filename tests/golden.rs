//! Tiny models against `transformers`: log-probabilities of every prompt position and greedy tokens, through the runner,
//! whole and in chunks, for every container and weight format. Also each architecture's program as text.
//!
//! Invariant: a backend is one line of `backends`; its tolerances say why. `tests/fixtures/README.md` has the schema.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use runtime::backend::Backend;
use runtime::backend::cpu::{CpuBackend, CpuOptions};
use runtime::backend::reference::ReferenceBackend;
use runtime::ids::{BlockId, Row, SeqId, TokenId};
use runtime::model::{Model, load};
use runtime::program::KvDtype;
use runtime::request::{SamplingParams, TokenLogprobs};
use runtime::runner::{ModelRunner, RunnerConfig};
use runtime::step::{LogitRows, NewRow, RowWork, StepOutput, StepPlan, StepRunner};
use runtime::weights::{Checkpoint, WeightFormat};
use serde_json::Value;
use shaders::{AdapterChoice, GpuOptions, WgpuBackend, WgpuDevice};

#[path = "support/gpu.rs"]
mod gpu;

/// A backend and how far its log-probabilities may be from the golden ones, whose spread is about 4.
struct Tested {
    name: &'static str,
    make: Box<dyn Fn() -> Box<dyn Backend>>,
    /// Models of float weights.
    float: Tolerance,
    /// Models of quantised weights.
    quantised: Tolerance,
}

/// Errors of log-probabilities.
#[derive(Clone, Copy)]
struct Tolerance {
    rms: f32,
    max: f32,
}

/// f32 in another order of summation: the sixth digit.
const F32: Tolerance = Tolerance { rms: 2e-5, max: 1e-4 };

/// Activations rounded to 8 bits per block before every product: 0.5 % of their scale each time, some 3 % at the end of
/// two layers (llama.cpp differs as much on these files, `tests/fixtures/README.md`).
const ROUNDED: Tolerance = Tolerance { rms: 0.15, max: 0.8 };

/// The backends under test; those of wgpu share a device.
fn backends() -> Vec<Tested> {
    let cpu = || CpuBackend::new(CpuOptions { threads: 2, isa: None }).expect("every machine has a CPU");
    // The golden logits are those of the dequantised weights, and neither the reference nor wgpu rounds activations.
    let mut all = vec![
        Tested { name: "reference", make: Box::new(|| Box::new(ReferenceBackend::new(2))), float: F32, quantised: F32 },
        Tested { name: "cpu", make: Box::new(move || Box::new(cpu())), float: F32, quantised: ROUNDED },
    ];
    all.extend(gpu::device(GpuOptions::default()).map(|device| Tested {
        name: "wgpu",
        make: Box::new(move || Box::new(WgpuBackend::new(&device))),
        float: F32,
        quantised: F32,
    }));
    all
}

/// How a prompt is cut into steps.
const CHUNKS: &[u32] = &[64, 3, 16];
const BLOCK_SIZE: u32 = 16;
const VOCAB: u32 = 512;
/// Of the log-probabilities of a position every so manieth is golden, each time another one.
const STRIDE: usize = 8;

const CONFIG: RunnerConfig = RunnerConfig {
    max_num_batched_tokens: 64,
    max_num_seqs: 2,
    max_model_len: 128,
    block_size: BLOCK_SIZE,
    num_blocks: 32,
    max_logit_rows: 64,
};

struct Golden {
    name: String,
    model: Model,
    prompts: Vec<Prompt>,
}

struct Prompt {
    ids: Vec<TokenId>,
    /// `[tokens, VOCAB / STRIDE]`: of the tokens t % STRIDE, t % STRIDE + STRIDE, … at position t.
    logprobs: Vec<f32>,
    greedy: Vec<u32>,
    top2_gap: Vec<f32>,
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// The models of a folder, `(checkpoint, golden.json)`.
fn hf_models() -> Vec<(PathBuf, PathBuf)> {
    let names = ["llama-tiny", "llama-rope3", "llama-linear", "qwen3-tiny", "qwen3-untied"];
    names.map(|name| (fixtures().join(name), fixtures().join(name).join("golden.json"))).to_vec()
}

/// Families beside Llama and Qwen3, `(checkpoint, golden.json)`: directories, and GGUF files of the same numbers.
fn family_models() -> Vec<(PathBuf, PathBuf)> {
    let folders = std::fs::read_dir(fixtures().join("families")).expect("the fixtures").flatten();
    let mut all: Vec<(PathBuf, PathBuf)> = Vec::new();
    for folder in folders.map(|entry| entry.path()) {
        let golden = folder.join("golden.json");
        let files = std::fs::read_dir(&folder).expect("a folder").flatten().map(|entry| entry.path());
        let gguf = files.filter(|file| file.extension().is_some_and(|ext| ext == "gguf"));
        all.extend(gguf.map(|file| (file, golden.clone())));
        all.push((folder, golden));
    }
    assert!(all.len() >= 7, "only {} models", all.len());
    all
}

fn gguf_models() -> Vec<(PathBuf, PathBuf)> {
    let formats = WeightFormat::all().filter(|format| format.ggml_type().is_some());
    let names = formats.map(|format| format!("llama-{}", format.name().to_lowercase())).chain(["qwen3-q8_0".into()]);
    let at = |name: String| fixtures().join("gguf").join(name);
    names.map(|name| (at(format!("{name}.gguf")), at(format!("{name}.json")))).collect()
}

/// One model per scheme; together they have every kind of matrix that one can make.
fn quantised_models() -> Vec<(PathBuf, PathBuf)> {
    let names = ["llama-gptq", "llama-awq", "llama-compressed", "llama-fp8"];
    names.map(|name| fixtures().join("quantised").join(name)).map(|dir| (dir.clone(), dir.join("golden.json"))).to_vec()
}

fn read(model: &Path, golden: &Path) -> Golden {
    let checkpoint = Checkpoint::open(model).expect("a sound fixture");
    let document: Value = serde_json::from_slice(&std::fs::read(golden).expect("a golden")).expect("JSON");
    let bin = golden.with_file_name(document["bin"].as_str().expect("bin is a name"));
    let bytes = std::fs::read(bin).expect("the golden's numbers");
    let numbers: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let ints = |value: &Value| -> Vec<u32> {
        value.as_array().expect("a list").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
    };
    let prompt = |prompt: &Value| {
        let ids: Vec<TokenId> = ints(&prompt["ids"]).into_iter().map(TokenId).collect();
        let start = prompt["logprobs"]["offset_f32"].as_u64().expect("an offset") as usize;
        assert_eq!(prompt["logprobs"]["stride"].as_u64(), Some(STRIDE as u64));
        let gaps = prompt["greedy"]["top2_gap"].as_array().expect("a list");
        let prompt_len = ids.len();
        Prompt {
            ids,
            logprobs: numbers[start..start + prompt_len * VOCAB as usize / STRIDE].to_vec(),
            greedy: ints(&prompt["greedy"]["ids"]),
            top2_gap: gaps.iter().map(|gap| gap.as_f64().expect("a number") as f32).collect(),
        }
    };
    Golden {
        name: document["model"].as_str().expect("a name").into(),
        model: load(&checkpoint, KvDtype::F32).expect("a sound fixture"),
        prompts: document["prompts"].as_array().expect("a list").iter().map(prompt).collect(),
    }
}

/// Log-probabilities of the whole vocabulary at one position, by token.
fn dense(logprobs: &TokenLogprobs) -> Vec<f32> {
    assert_eq!(logprobs.top.len(), VOCAB as usize);
    let mut row = vec![f32::NAN; VOCAB as usize];
    for &(token, logprob) in &logprobs.top {
        row[token.index()] = logprob;
    }
    row
}

/// Runs a prompt in chunks, then greedily: `[tokens, vocab]` log-probabilities and the drawn tokens.
fn run(backend: &Tested, model: &Model, prompt: &Prompt, chunk: u32) -> (Vec<f32>, Vec<u32>) {
    let mut runner = ModelRunner::new((backend.make)(), model, CONFIG, &mut |_| ()).expect("the fixture fits");
    let prompt_len = prompt.ids.len() as u32;
    let params = SamplingParams {
        temperature: 0.0,
        logprobs: Some(VOCAB),
        prompt_logprobs: Some(VOCAB),
        ignore_eos: true,
        max_tokens: prompt.greedy.len() as u32,
        ..SamplingParams::default()
    };
    let (tokens, params) = (prompt.ids.clone(), Arc::new(params));
    let mut admitted = vec![NewRow { row: Row(1), seq: SeqId(0), tokens, prompt_len, params, seed: 0 }];
    let (mut logprobs, mut drawn) = (Vec::new(), Vec::new());
    let (mut start, mut output) = (0, StepOutput::default());
    while drawn.len() < prompt.greedy.len() {
        let length = if start < prompt_len { chunk.min(prompt_len - start) } else { 1 };
        let end = start + length;
        let logits = if start < prompt_len { LogitRows::All { draw: end == prompt_len } } else { LogitRows::Last };
        // Blocks from the far end of the pool, so that no block has the number of its place.
        let new_blocks = (start.div_ceil(BLOCK_SIZE)..end.div_ceil(BLOCK_SIZE)).map(|i| BlockId(31 - i)).collect();
        let work = vec![RowWork { row: Row(1), start, length, num_drafts: 0, new_blocks, logits }];
        let plan = StepPlan { admitted: std::mem::take(&mut admitted), work, ..StepPlan::default() };
        runner.submit(&plan).expect("the device works");
        runner.wait(&mut output).expect("the device works");
        let row = &output.rows[0];
        assert!(!row.corrupt);
        logprobs.extend(row.prompt_logprobs.iter().flat_map(dense));
        for token in &row.tokens {
            if drawn.is_empty() {
                logprobs.extend(dense(token.logprobs.as_ref().expect("logprobs were asked for")));
            }
            drawn.push(token.id.0);
        }
        start = end;
    }
    (logprobs, drawn)
}

/// Both measures of `tolerance` on what is golden of `got`, `[tokens, VOCAB]`; a NaN fails.
fn check_logprobs(got: &[f32], expected: &[f32], tolerance: Tolerance) -> Result<(), String> {
    let rows = got.chunks_exact(VOCAB as usize).enumerate();
    let got: Vec<f32> = rows.flat_map(|(t, row)| row.iter().skip(t % STRIDE).step_by(STRIDE).copied()).collect();
    assert_eq!(got.len(), expected.len());
    let errors = || got.iter().zip(expected).map(|(got, expected)| (got - expected).abs());
    let rms = (errors().map(|error| error * error).sum::<f32>() / got.len() as f32).sqrt();
    let max = errors().fold(0.0, f32::max);
    let is_close = rms <= tolerance.rms && max <= tolerance.max;
    is_close.then_some(()).ok_or_else(|| format!("log-probabilities are off by {rms} rms, {max} at most"))
}

/// With the golden continuation as prompt: the best token after each of its tokens must be the next one, wherever the two
/// best are further apart than twice the tolerance. Returns how many were compared.
fn check_forced(backend: &Tested, model: &Model, prompt: &Prompt, tolerance: Tolerance) -> usize {
    let (&last, known) = prompt.greedy.split_last().expect("goldens have tokens");
    let ids = prompt.ids.iter().copied().chain(known.iter().copied().map(TokenId)).collect();
    let forced = Prompt { ids, greedy: vec![last], logprobs: Vec::new(), top2_gap: Vec::new() };
    let (logprobs, _) = run(backend, model, &forced, CHUNKS[0]);
    let after = logprobs.chunks_exact(VOCAB as usize).skip(prompt.ids.len() - 1);
    let sure = after.zip(&prompt.greedy).zip(&prompt.top2_gap).filter(|(_, gap)| **gap > 2.0 * tolerance.max);
    sure.map(|((row, &expected), _)| {
        let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(token, _)| token as u32);
        assert_eq!(best, Some(expected));
    })
    .count()
}

fn check_models(models: &[(PathBuf, PathBuf)]) {
    let backends = backends();
    for (model, golden) in models {
        let golden = read(model, golden);
        let is_float = golden.model.weights.iter().all(|weight| weight.format.block_len() == 1);
        for backend in &backends {
            let tolerance = if is_float { backend.float } else { backend.quantised };
            let mut num_sure = 0;
            for prompt in &golden.prompts {
                check_prompt(backend, &golden, prompt, tolerance);
                num_sure += check_forced(backend, &golden.model, prompt, tolerance);
            }
            assert!(num_sure >= 5, "{} on {}: {num_sure} tokens compared", golden.name, backend.name);
        }
    }
}

fn check_prompt(backend: &Tested, golden: &Golden, prompt: &Prompt, tolerance: Tolerance) {
    let what = format!("{} on {}, {} tokens", golden.name, backend.name, prompt.ids.len());
    let whole = run(backend, &golden.model, prompt, CHUNKS[0]);
    check_logprobs(&whole.0, &prompt.logprobs, tolerance).unwrap_or_else(|problem| panic!("{what}: {problem}"));
    if prompt.top2_gap.iter().all(|&gap| gap > 2.0 * tolerance.max) {
        assert_eq!(whole.1, prompt.greedy, "{what}");
    }
    for &chunk in &CHUNKS[1..] {
        let chunked = run(backend, &golden.model, prompt, chunk);
        assert!(chunked == whole, "{what}: chunks of {chunk} differ from the whole in some bit");
    }
}

#[test]
fn hugging_face_models_agree_with_transformers() {
    check_models(&hf_models());
}

#[test]
fn families_agree_with_transformers() {
    check_models(&family_models());
}

/// What the tests above leave out: the start-up test of each kernel that a family asks for, in its own shapes.
#[test]
fn families_pass_the_self_test_of_a_gpu() {
    if !gpu::is_there() {
        return;
    }
    let device = WgpuDevice::open(&AdapterChoice::Best, GpuOptions::default()).expect("it is there");
    for (path, _) in family_models() {
        let model = load(&Checkpoint::open(&path).expect("sound"), KvDtype::F16).expect("sound");
        let runner = ModelRunner::new(Box::new(WgpuBackend::new(&device)), &model, CONFIG, &mut |_| ());
        let runner = runner.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert_eq!(runner.caps().replaced_kernels, Vec::<String>::new(), "{}", path.display());
    }
}

#[test]
fn gguf_models_agree_with_transformers() {
    check_models(&gguf_models());
}

#[test]
fn quantised_checkpoints_agree_with_transformers() {
    check_models(&quantised_models());
}

/// How far a cache of each type may take log-probabilities from the golden ones, which are those of an f32 cache.
fn of_cache(dtype: KvDtype) -> Tolerance {
    // The rounding's rms error as a part of the values'; of int8 where the largest of a head is twice the rms.
    let rounding = match dtype {
        KvDtype::F32 => return F32,
        KvDtype::F16 => 1.4e-4,
        KvDtype::Bf16 => 1.1e-3,
        KvDtype::Fp8E4m3 => 1.8e-2,
        KvDtype::Int8PerTokenHead => 4e-3,
    };
    // The spread of 4, and as much again for what two layers of random weights make of an error; half of that is allowed on top. Of
    // some ten thousand values the worst is five deviations off.
    let rms = 1.5 * 4.0 * 4.0 * rounding;
    Tolerance { rms, max: 6.0 * rms }
}

#[test]
fn every_type_of_the_cache_stays_near_transformers() {
    let (model, golden) = &hf_models()[0];
    let mut golden = read(model, golden);
    for dtype in KvDtype::ALL {
        golden.model = load(&Checkpoint::open(model).expect("sound"), dtype).expect("sound");
        let tolerance = of_cache(dtype);
        for backend in &backends() {
            for prompt in &golden.prompts {
                check_prompt(backend, &golden, prompt, tolerance);
            }
        }
    }
}

/// The fixtures cover what they are meant to cover.
#[test]
fn every_weight_format_has_a_model() {
    let mut formats = HashSet::new();
    for (model, _) in gguf_models() {
        formats.extend(Checkpoint::open(&model).expect("sound").tensors.into_values().map(|tensor| tensor.format));
    }
    assert_eq!(formats, WeightFormat::all().filter(|format| format.ggml_type().is_some()).collect());
}

/// Each kind of program as text. After a wanted change: copy the printed text into the file.
#[test]
fn programs_are_as_written_down() {
    for (name, model) in [
        ("llama-tiny", "llama-tiny"),
        ("llama-rope3", "llama-rope3"),
        ("llama-gguf", "gguf/llama-f16.gguf"),
        ("qwen3-tiny", "qwen3-tiny"),
        ("qwen2", "families/qwen2"),
        ("ministral3", "families/ministral3"),
        ("mixtral", "families/mixtral"),
        ("gpt-oss", "families/gpt-oss"),
        ("gemma2", "families/gemma2"),
        ("gemma3", "families/gemma3"),
        ("phi3", "families/phi3"),
        ("smollm3", "families/smollm3"),
        ("deepseek3", "families/deepseek3"),
        ("llama-gptq", "quantised/llama-gptq"),
    ] {
        let checkpoint = Checkpoint::open(&fixtures().join(model)).expect("sound");
        let program = load(&checkpoint, KvDtype::F16).expect("sound").program.to_string();
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(format!("{name}.txt"));
        let expected = std::fs::read_to_string(&file).unwrap_or_default();
        assert!(program == expected, "{} differs; the program is now:\n{program}", file.display());
    }
}
