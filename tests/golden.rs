//! Tiny models against `transformers`: log-probabilities of every prompt position and greedy tokens, through the runner,
//! whole and in chunks, for every container and weight format. Also each architecture's program as text.
//!
//! Invariant: a backend is one line of `BACKENDS`; its tolerances say why. `tests/fixtures/README.md` has the schema.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use runtime::backend::Backend;
use runtime::backend::reference::ReferenceBackend;
use runtime::ids::{BlockId, Row, SeqId, TokenId};
use runtime::model::{Model, load};
use runtime::program::KvDtype;
use runtime::request::{SamplingParams, TokenLogprobs};
use runtime::runner::{ModelRunner, RunnerConfig};
use runtime::step::{LogitRows, NewRow, RowWork, StepOutput, StepPlan, StepRunner};
use runtime::weights::{Checkpoint, WeightFormat};
use serde_json::Value;

/// A backend and how far its log-probabilities may be from the golden ones, as largest absolute difference.
struct Tested {
    name: &'static str,
    make: fn() -> Box<dyn Backend>,
    /// Models of float weights.
    float: f32,
    /// Models of quantised weights.
    quantised: f32,
}

const BACKENDS: &[Tested] = &[Tested {
    name: "reference",
    make: || Box::new(ReferenceBackend::new(2)),
    // f32 in another order of summation: logits of a spread of 4 differ in their sixth digit. Quantised files have the same
    // tolerance, because the golden logits are those of the dequantised weights and the reference rounds no activations.
    float: 2e-4,
    quantised: 2e-4,
}];

/// How a prompt is cut into steps.
const CHUNKS: &[u32] = &[64, 3, 16];
const BLOCK_SIZE: u32 = 16;
const VOCAB: u32 = 512;

struct Golden {
    name: String,
    model: Model,
    prompts: Vec<Prompt>,
}

struct Prompt {
    ids: Vec<TokenId>,
    /// `[tokens, vocab]`, log-softmax of the golden logits.
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

fn gguf_models() -> Vec<(PathBuf, PathBuf)> {
    let formats = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"];
    let names = formats.iter().map(|format| format!("llama-{format}")).chain(["qwen3-q8_0".into()]);
    let at = |name: String| fixtures().join("gguf").join(name);
    names.map(|name| (at(format!("{name}.gguf")), at(format!("{name}.json")))).collect()
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
        let start = prompt["logits"]["offset_f32"].as_u64().expect("an offset") as usize;
        let logits = &numbers[start..start + ids.len() * VOCAB as usize];
        let gaps = prompt["greedy"]["top2_gap"].as_array().expect("a list");
        Prompt {
            ids,
            logprobs: logits.chunks_exact(VOCAB as usize).flat_map(log_softmax).collect(),
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

fn log_softmax(logits: &[f32]) -> Vec<f32> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
    logits.iter().map(|&l| (f64::from(l - max) - sum.ln()) as f32).collect()
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
    let config = RunnerConfig {
        max_num_batched_tokens: 64,
        max_num_seqs: 2,
        max_model_len: 128,
        block_size: BLOCK_SIZE,
        num_blocks: 32,
        max_logit_rows_per_row: 64,
    };
    let mut runner = ModelRunner::new((backend.make)(), model, config, &mut |_, _| {}).expect("the fixture fits");
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

/// Greedy tokens must be equal up to the first step whose two best are closer than the tolerance allows for.
fn check_greedy(prompt: &Prompt, drawn: &[u32], tolerance: f32) {
    let surely = prompt.top2_gap.iter().take_while(|&&gap| gap > 2.0 * tolerance).count();
    assert!(surely > 0, "the tolerance lets no token be compared");
    assert_eq!(drawn[..surely], prompt.greedy[..surely]);
}

fn check_models(models: &[(PathBuf, PathBuf)]) {
    for (model, golden) in models {
        let golden = read(model, golden);
        let is_float = golden.model.weights.iter().all(|weight| weight.format.block_len() == 1);
        for backend in BACKENDS {
            let tolerance = if is_float { backend.float } else { backend.quantised };
            for prompt in &golden.prompts {
                let what = format!("{} on {}, {} tokens", golden.name, backend.name, prompt.ids.len());
                let mut first: Option<(Vec<f32>, Vec<u32>)> = None;
                for &chunk in CHUNKS {
                    let (logprobs, drawn) = run(backend, &golden.model, prompt, chunk);
                    assert_eq!(logprobs.len(), prompt.logprobs.len(), "{what}");
                    let errors = logprobs.iter().zip(&prompt.logprobs).map(|(got, expected)| (got - expected).abs());
                    // `max` forgets a NaN, so that it is asked for first.
                    assert!(logprobs.iter().all(|value| value.is_finite()), "{what}");
                    let worst = errors.fold(0.0, f32::max);
                    assert!(worst <= tolerance, "{what}, chunks of {chunk}: off by {worst}, allowed {tolerance}");
                    check_greedy(prompt, &drawn, tolerance);
                    // The cut into chunks changes no bit.
                    let first = first.get_or_insert_with(|| (logprobs.clone(), drawn.clone()));
                    assert!(*first == (logprobs, drawn), "{what}: chunks of {chunk} differ from the whole");
                }
            }
        }
    }
}

#[test]
fn hugging_face_models_agree_with_transformers() {
    check_models(&hf_models());
}

#[test]
fn gguf_models_agree_with_transformers() {
    check_models(&gguf_models());
}

/// The fixtures cover what they are meant to cover.
#[test]
fn every_weight_format_has_a_model() {
    let mut formats = HashSet::new();
    for (model, _) in gguf_models() {
        formats.extend(Checkpoint::open(&model).expect("sound").tensors.into_values().map(|tensor| tensor.format));
    }
    use WeightFormat::{Bf16, F16, F32, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    assert_eq!(formats, HashSet::from([F32, F16, Bf16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4K, Q5K, Q6K]));
}

/// Each kind of program as text. After a wanted change: copy the printed text into the file.
#[test]
fn programs_are_as_written_down() {
    for (name, model) in [
        ("llama-tiny", "llama-tiny"),
        ("llama-rope3", "llama-rope3"),
        ("llama-gguf", "gguf/llama-f16.gguf"),
        ("qwen3-tiny", "qwen3-tiny"),
    ] {
        let checkpoint = Checkpoint::open(&fixtures().join(model)).expect("sound");
        let program = load(&checkpoint, KvDtype::F16).expect("sound").program.to_string();
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(format!("{name}.txt"));
        let expected = std::fs::read_to_string(&file).unwrap_or_default();
        assert!(program == expected, "{} differs; the program is now:\n{program}", file.display());
    }
}
