//! Groups of real programs, and what scaling alone does to a model: nothing.

use std::path::PathBuf;
use std::sync::Mutex;

use super::*;
use crate::backend::reference::ReferenceBackend;
use crate::backend::{Backend, Bucket, InputLayout, StepInputs};
use crate::model;
use crate::program::{Activation, KvDtype, LinearEnd, Op, Program};
use crate::weights::pack::Rows;
use crate::weights::testing::TempDir;

const INT4: Packing = Packing::Int4 { group: 32, symmetric: true };

fn fixture(name: &str) -> Checkpoint {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name);
    Checkpoint::open(&path).unwrap()
}

fn load(checkpoint: &Checkpoint) -> Model {
    model::load(checkpoint, KvDtype::F32).unwrap()
}

fn tokens(from: u32, len: u32) -> Vec<TokenId> {
    (from..from + len).map(|i| TokenId(i * 37 % 500)).collect()
}

/// The logits of every position.
fn logits(model: &Model, tokens: &[TokenId]) -> Vec<f32> {
    let mut backend = ReferenceBackend::new(2);
    for (i, tensor) in model.weights.iter().enumerate() {
        backend.upload(WeightId(i as u32), tensor).unwrap();
    }
    backend.alloc_state(&model.program.states, 4, 16).unwrap();
    let len = tokens.len() as u32;
    let bucket = Bucket { tokens: len, rows: 1, logit_rows: len };
    let layout = InputLayout::new(bucket, 3, 16, 1);
    let plan = backend.compile(&model.program, bucket, &layout, &mut |_, _| ()).unwrap();
    let mut inputs = StepInputs::new(layout);
    inputs.push_row(tokens.iter().map(|token| token.0), 0, &[1, 2, 3]);
    (0..len).for_each(|token| inputs.push_logit_row(token));
    let ticket = backend.submit(plan, &inputs).unwrap();
    backend.wait(ticket).unwrap().logits.to_vec()
}

/// The checkpoint with its scales, but not rounded.
fn scaled(job: &Job<'_>) -> Checkpoint {
    let mut checkpoint = job.checkpoint.clone();
    for tensor in checkpoint.tensors.values_mut() {
        let mut values = tensor.to_f32();
        if job.matrices.contains_key(&tensor.name) {
            let not_finite = Mutex::new(None);
            Scaled::new(tensor, &job.scaling, &not_finite).read(0..tensor.num_rows(), &mut values);
        } else if let Some(replaced) = job.scaling.vectors.get(&tensor.name) {
            values.clone_from(replaced);
        }
        *tensor = HostTensor::from_f32(tensor.name.clone(), tensor.shape.clone(), &values);
    }
    checkpoint
}

/// With biases, norms of 1 + w, norms behind blocks, matrices that are one for q, k and v, experts, and without any of that.
#[test]
fn scales_alone_change_nothing() {
    for (name, possible) in [
        ("llama-tiny", 8),
        ("llama-rope3", 8),
        ("qwen3-untied", 4),
        ("families/qwen2", 8),
        ("families/gemma2", 8),
        ("families/gemma3", 24),
        ("families/phi3", 8),
        ("families/mixtral", 4),
        ("families/smollm3", 16),
    ] {
        let checkpoint = fixture(name);
        let model = load(&checkpoint);
        assert_eq!(groups::groups(&model.program).len(), possible, "{name}");
        let mut job = Job::new(&checkpoint, &model, INT4, None).unwrap();
        let windows = [tokens(1, 150), tokens(7, 40)];
        let ScaledGroups { scaled: num_scaled, unscaled } = job.scale(&windows, 2, &mut |_, _, _| ()).unwrap();
        // Random weights have no outliers: sometimes 1 is best.
        assert!(num_scaled > possible / 2, "{name}: {num_scaled} of {possible} are scaled");
        // The experts of a layer are two linears.
        let left = if name.ends_with("mixtral") { 4 } else { 0 };
        assert_eq!(num_scaled + unscaled, possible + left, "{name}");
        let changed = load(&scaled(&job));
        let (before, after) = (logits(&model, &tokens(3, 40)), logits(&changed, &tokens(3, 40)));
        let most = before.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let off = before.iter().zip(&after).fold(0.0f32, |off, (a, b)| off.max((a - b).abs()));
        assert!(off <= 2e-5 * most, "{name}: {off} of {most}");
    }
}

#[test]
fn norms_are_divided_by_what_their_files_hold() {
    for (format, offset) in [(crate::weights::WeightFormat::Bf16, 1.0), (crate::weights::WeightFormat::F16, 0.0)] {
        let used = [1.25f32, 0.0, -0.3, 2.0];
        let mut scales = [3.0f32, 3.0, 1.7, 1.0];
        let stored = scaled::round_norm(&used, (format, offset), &mut scales);
        for i in [0, 2, 3] {
            let bytes = pack::float_bytes(stored[i], format);
            let mut held = [0.0];
            format.dequantize(&bytes, &mut held);
            assert_eq!(held, [stored[i]], "the file holds it");
            assert!(((stored[i] + offset) * scales[i] - used[i]).abs() <= 1e-6, "{stored:?} {scales:?}");
        }
        assert_eq!((stored[1] + offset, scales[1]), (0.0, 1.0), "nothing comes through a norm of 0");
    }
}

#[test]
fn what_cannot_be_quantised_is_refused_by_name() {
    let refusal = |name: &str, packing: Packing| {
        let checkpoint = fixture(name);
        Job::new(&checkpoint, &load(&checkpoint), packing, None).unwrap_err().to_string()
    };
    let said = refusal("gguf/llama-f16.gguf", INT4);
    assert!(said.contains("GGUF") && said.contains("Hugging Face"), "{said}");
    let said = refusal("quantised/llama-gptq", INT4);
    assert!(said.contains("quantised (gptq)"), "{said}");
    let said = refusal("llama-tiny", Packing::Int4 { group: 128, symmetric: true });
    assert!(said.contains("q_proj.weight") && said.contains("128 inputs (g64, g32 would do), got 64"), "{said}");
    let said = refusal("families/gpt-oss", INT4);
    assert!(said.contains("experts") && said.contains("is not the weight of one linear"), "{said}");
}

#[test]
fn weights_that_are_not_finite_are_refused_when_they_are_met() {
    let mut checkpoint = fixture("llama-tiny");
    let name = "model.layers.1.mlp.up_proj.weight";
    let tensor = checkpoint.tensors.get_mut(name).unwrap();
    let mut values = tensor.to_f32();
    values[77] = f32::NAN;
    *tensor = HostTensor::from_f32(name, tensor.shape.clone(), &values);
    let model = load(&checkpoint);
    let dir = TempDir::new("quantise-not-finite");
    let job = Job::new(&checkpoint, &model, INT4, None).unwrap();
    let said = job.write(&dir, SHARD_BYTES, &mut |_, _, _| ()).unwrap_err().to_string();
    assert!(said.contains(name) && said.contains("finite"), "{said}");
}

#[test]
fn shards_are_bounded_and_read_as_one_model() {
    let checkpoint = fixture("llama-tiny");
    let model = load(&checkpoint);
    let dir = TempDir::new("quantise-shards");
    let job = Job::new(&checkpoint, &model, INT4, None).unwrap();
    let mut heard = Vec::new();
    job.write(&dir, 16_000, &mut |stage, done, total| heard.push((stage, done, total))).unwrap();
    let (stage, done, total) = *heard.last().unwrap();
    assert_eq!((stage, done), (Stage::Write, total));
    let shards: Vec<u64> = std::fs::read_dir(&*dir)
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_name().to_string_lossy().ends_with(".safetensors"))
        .map(|entry| entry.metadata().unwrap().len())
        .collect();
    assert!(shards.len() > 2 && !dir.join("model.safetensors").exists(), "{shards:?}");
    // The embedding is larger than a shard and has one of its own.
    assert_eq!(shards.iter().filter(|&&bytes| bytes > 16_000 + 8_000).count(), 1, "{shards:?}");
    let quantised = load(&Checkpoint::open(&dir).unwrap());
    let whole = TempDir::new("quantise-whole");
    job.write(&whole, SHARD_BYTES, &mut |_, _, _| ()).unwrap();
    let in_one = load(&Checkpoint::open(&whole).unwrap());
    for (a, b) in quantised.weights.iter().zip(&in_one.weights) {
        assert_eq!((a.format, a.to_f32()), (b.format, b.to_f32()), "{}", a.name);
    }
    assert!(quantised.weights.iter().any(|weight| weight.format == crate::weights::WeightFormat::Q4_0));
}

/// What is written and read again is what `round` says, in each format.
#[test]
fn files_hold_what_rows_are_rounded_to() {
    let checkpoint = fixture("qwen3-untied");
    let model = load(&checkpoint);
    for format in ["int4-g32", "int4-g64", "int4-asym-g32", "int8", "fp8"] {
        let packing: Packing = format.parse().unwrap();
        // 96 inputs of down_proj are no groups of 64.
        let ignore = (format == "int4-g64").then(|| Regex::new("down_proj$").unwrap());
        let dir = TempDir::new(&format!("quantise-{format}"));
        let job = Job::new(&checkpoint, &model, packing, ignore.as_ref()).unwrap();
        job.write(&dir, SHARD_BYTES, &mut |_, _, _| ()).unwrap();
        let written = Checkpoint::open(&dir).unwrap();
        load(&written);
        assert_eq!(job.matrices.len(), if ignore.is_some() { 6 } else { 7 });
        for (name, tensor) in &job.matrices {
            let read = written.matrix(name.strip_suffix(".weight").unwrap(), &tensor.shape).unwrap().tensor;
            let rows = tensor.to_f32();
            let rounded = rows.chunks_exact(tensor.row_len()).map(|row| packing.rounded(row, None, tensor.format));
            let expected: Vec<f32> = rounded.flatten().collect();
            assert_eq!(read.to_f32(), expected, "{format}: {name}");
            assert!(expected != tensor.to_f32(), "{format}: {name} is rounded");
        }
        if ignore.is_some() {
            let name = "model.layers.0.mlp.down_proj.weight";
            assert_eq!(written.tensors[name].to_f32(), checkpoint.tensors[name].to_f32());
        }
    }
}

#[test]
fn formats_have_names_and_others_are_refused() {
    assert_eq!("int4-asym-g64".parse(), Ok(Packing::Int4 { group: 64, symmetric: false }));
    for bad in ["int4", "int4-g", "int4-g48", "int4-g0", "int4-asym-g-32", "int3-g32", "Q4_0", ""] {
        let said = bad.parse::<Packing>().unwrap_err();
        assert!(said.contains(&format!("'{bad}'")), "{said}");
    }
}

/// A tap that does not stand apart, an absorber that something else reads: such programs have no groups there.
#[test]
fn what_is_read_elsewhere_is_not_scaled() {
    let checkpoint = fixture("llama-tiny");
    let model = load(&checkpoint);
    let all = groups::groups(&model.program);
    let inputs = |program: &Program| groups::groups(program).iter().map(|group| group.input).collect::<Vec<_>>();
    let without = |input: Slot| all.iter().map(|group| group.input).filter(|slot| *slot != input).collect::<Vec<_>>();

    // Another op reads what the first linear's norm gives.
    let mut program = model.program.clone();
    program.ops.push(Op::CheckFinite { x: all[0].input });
    assert_eq!(inputs(&program), without(all[0].input));

    // Another op has a norm's weight.
    let Absorber::Norm(norm) = all[2].absorber else { panic!("{:?}", all[2]) };
    let mut program = model.program.clone();
    program.ops.push(Op::RmsNorm { x: Slot(0), weight: norm, eps: 0.0, out: Slot(0) });
    assert_eq!(inputs(&program), without(all[2].input));

    // Something is done to v between its product and its store.
    let mut program = model.program.clone();
    let stored = program.ops.iter().position(|op| matches!(op, Op::RopeStoreKv { .. })).unwrap();
    let Op::RopeStoreKv { v, .. } = program.ops[stored] else { unreachable!() };
    program.ops.insert(stored, Op::NormHeads { x: v, weight: WeightId(0), eps: 0.0 });
    assert_eq!(inputs(&program), without(all[1].input));

    // The up projection's product is clamped.
    let mut program = model.program.clone();
    let gate = program.ops.iter_mut().find_map(|op| match op {
        Op::FusedLinear { end: LinearEnd::Gate { activation, .. }, .. } => Some(activation),
        _ => None,
    });
    *gate.unwrap() = Activation::ClampedSwiglu;
    assert_eq!(inputs(&program), without(all[3].input));
}
