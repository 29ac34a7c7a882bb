//! Memory: a cap that each allocation of a load meets in turn, weights cut to small bindings, and a token loop that makes
//! nothing.

use std::path::Path;
use std::sync::Arc;

use runtime::backend::cases::{Case, CaseOp, EXACT, FusedCase, FusedEnd, PartCase, Tolerance, TurnCase, run_case};
use runtime::error::{DeviceError, LoadError};
use runtime::ids::{BlockId, Row, SeqId, TokenId};
use runtime::model::Model;
use runtime::program::{Activation, KvDtype, RopePairing};
use runtime::request::SamplingParams;
use runtime::runner::{ModelRunner, RunnerConfig};
use runtime::step::{LogitRows, NewRow, RowWork, StepOutput, StepPlan, StepRunner};
use runtime::weights::{Checkpoint, WeightFormat};
use shaders::{GpuOptions, WgpuBackend, WgpuDevice};

use crate::gpu;

const BLOCK_SIZE: u32 = 16;

pub fn tiny() -> Model {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/llama-tiny");
    runtime::model::load(&Checkpoint::open(&path).expect("a sound fixture"), KvDtype::F16).expect("a sound fixture")
}

pub fn load(device: &WgpuDevice, model: &Model) -> Result<ModelRunner, LoadError> {
    let config = RunnerConfig {
        max_num_batched_tokens: 32,
        max_num_seqs: 2,
        max_model_len: 128,
        block_size: BLOCK_SIZE,
        num_blocks: 10,
        max_logit_rows: 2,
    };
    ModelRunner::new(Box::new(WgpuBackend::new(device)), model, config, &mut |_| ())
}

/// Prefills a prompt and decodes greedily; `each` is called after every step.
fn generate(runner: &mut ModelRunner, each: &mut dyn FnMut()) -> Vec<TokenId> {
    let prompt: Vec<TokenId> = (1..20).map(TokenId).collect();
    let (prompt_len, num_tokens) = (prompt.len() as u32, 30);
    let params = SamplingParams { temperature: 0.0, ignore_eos: true, max_tokens: num_tokens, ..Default::default() };
    let new = NewRow { row: Row(1), seq: SeqId(0), tokens: prompt, prompt_len, params: Arc::new(params), seed: 0 };
    let mut admitted = vec![new];
    let (mut start, mut drawn, mut output) = (0, Vec::new(), StepOutput::default());
    while drawn.len() < num_tokens as usize {
        let end = if start == 0 { prompt_len } else { start + 1 };
        let new_blocks = (start.div_ceil(BLOCK_SIZE)..end.div_ceil(BLOCK_SIZE)).map(|i| BlockId(9 - i)).collect();
        let (length, logits) = (end - start, LogitRows::Last);
        let work = vec![RowWork { row: Row(1), start, length, num_drafts: 0, new_blocks, logits }];
        let plan = StepPlan { admitted: std::mem::take(&mut admitted), work, ..StepPlan::default() };
        runner.submit(&plan).expect("the device works");
        runner.wait(&mut output).expect("the device works");
        drawn.extend(output.rows[0].tokens.iter().map(|token| token.id));
        start = end;
        each();
    }
    drawn
}

#[test]
fn a_token_loop_makes_nothing_and_encodes_ahead() {
    let Some(device) = gpu::device(GpuOptions::default()) else { return };
    let mut runner = load(&device, &tiny()).expect("a tiny model fits");
    let before = (device.num_created(), device.memory_bytes());
    assert!(before.0 > 50, "{before:?}: a load makes buffers, pipelines and bind groups");
    let before_steps = device.num_encoded_ahead();
    generate(&mut runner, &mut || assert_eq!((device.num_created(), device.memory_bytes()), before));
    // Neither the prefill nor the first of 29 decodes, which nobody saw coming.
    assert_eq!(device.num_encoded_ahead() - before_steps, 28);
}

#[test]
fn each_allocation_of_a_load_may_fail() {
    let model = tiny();
    let Some(roomy) = gpu::device(GpuOptions::default()) else { return };
    let mut runner = load(&roomy, &model).expect("a tiny model fits");
    let (expected, total_bytes) = (generate(&mut runner, &mut || ()), roomy.memory_bytes());
    drop(runner);
    assert_eq!(roomy.memory_bytes(), 0, "what is dropped no longer counts");

    // A cap that holds what came before an allocation, and not the allocation.
    let (mut cap_bytes, mut failed) = (0, Vec::new());
    while cap_bytes < total_bytes {
        let options = GpuOptions { memory_bytes: Some(cap_bytes), ..GpuOptions::default() };
        let device = gpu::device(options).expect("it was there before");
        match load(&device, &model).err() {
            Some(LoadError::Device(DeviceError::OutOfMemory { what, needed_bytes })) => {
                assert!(cap_bytes + needed_bytes <= total_bytes, "{what} needs {needed_bytes} after {cap_bytes}");
                cap_bytes += needed_bytes;
                failed.push(what);
            }
            other => panic!("a cap of {cap_bytes} of {total_bytes} bytes, after {failed:?}: {other:?}"),
        }
        assert_eq!(device.memory_bytes(), 0, "a load that fails leaves nothing behind");
    }
    assert_eq!(cap_bytes, total_bytes);
    let parts = [
        "tensor '",
        "KV cache of layer 1",
        "activations",
        "step inputs",
        "partial sums",
        "samples",
        "upload",
        "readback",
    ];
    for part in parts {
        assert!(failed.iter().any(|what| what.contains(part)), "{part} is not among {failed:?}");
    }
    let fits = |memory_bytes| gpu::device(GpuOptions { memory_bytes, ..GpuOptions::default() }).expect("as before");
    assert!(load(&fits(Some(total_bytes - 1)), &model).is_err(), "one byte less than all");
    let mut runner = load(&fits(Some(total_bytes)), &model).expect("no byte more than all");
    assert_eq!(generate(&mut runner, &mut || ()), expected);
}

/// Linears and embeds of each layout of scales, whose weights take several pieces where a binding holds only a few panels.
#[test]
fn weights_larger_than_a_binding_give_the_same_bits() {
    let Some(whole) = gpu::device(GpuOptions::default()) else { return };
    // The activations of a case are a panel of 64 rows of f32 themselves: no binding may be smaller.
    let cut = GpuOptions { max_binding_bytes: Some(64 * 256 * 4), ..GpuOptions::default() };
    let cut = gpu::device(cut).expect("it was there before");
    let part = |out_features, format, bias| PartCase { out_features, format, bias };
    for format in [WeightFormat::F32, WeightFormat::F16, WeightFormat::Q8_0, WeightFormat::Q4_1, WeightFormat::Q6K] {
        let embed = CaseOp::Embed { format, width: 256, tokens: 600, scale: 1.0 };
        let parts = vec![part(1100, format, true), part(70, format, false), part(600, format, true)];
        for op in [embed, CaseOp::Linear { in_features: 256, parts, tokens: 5 }] {
            let tolerance = Tolerance { relative_rms: 0.0, relative_max: 0.0, reason: "the same sums" };
            let case = Case { op, tolerance, seed: 5 };
            let run = |device: &WgpuDevice| {
                let before = device.num_created();
                let output = run_case(&mut WgpuBackend::new(device), &case).expect("the device works");
                (output, device.num_created() - before)
            };
            let ((expected, num_whole), (got, num_cut)) = (run(&whole), run(&cut));
            assert!(
                num_cut > num_whole,
                "{case}: {num_cut} things made, {num_whole} with whole weights: nothing was cut"
            );
            tolerance.check(&got, &expected).unwrap_or_else(|problem| panic!("{case}: {problem}"));
        }
    }
    let too_small = gpu::device(GpuOptions { max_binding_bytes: Some(4096), ..GpuOptions::default() });
    let op = CaseOp::Embed { format: WeightFormat::Q8_0, width: 256, tokens: 100, scale: 1.0 };
    let tolerance = Tolerance { relative_rms: 0.0, relative_max: 0.0, reason: "it must be refused" };
    let case = Case { op, tolerance, seed: 1 };
    match run_case(&mut WgpuBackend::new(&too_small.expect("as before")), &case) {
        Err(DeviceError::OutOfMemory { what, .. }) => assert_eq!(what, "64 rows of tensor 'table'"),
        other => panic!("{other:?}"),
    }
}

/// Sizes that the kernels do not take are refused by name before anything runs.
#[test]
fn what_the_kernels_do_not_take_is_refused() {
    let Some(device) = gpu::device(GpuOptions::default()) else { return };
    let part = PartCase { out_features: 4, format: WeightFormat::F32, bias: false };
    // Whole panels, so that gates and ups would be one dispatch.
    let parts = vec![PartCase { out_features: 64, ..part }; 2];
    let gated = FusedCase { in_features: 36, parts, norm: true, end: FusedEnd::Gate(Activation::Silu), tokens: 1 };
    let (heads, head_dim) = (1, 8);
    let turn = TurnCase::whole(RopePairing::Half, head_dim);
    for (op, named) in [
        (CaseOp::Linear { in_features: 36, parts: vec![part], tokens: 1 }, "in_features 36 is not a multiple of 32"),
        (CaseOp::FusedLinear(gated), "in_features 36 is not a multiple of 32"),
        (CaseOp::RmsNorm { width: 18, tokens: 1 }, "width 18 is not a multiple of 4"),
        (CaseOp::Add { width: 4, tokens: 65_536 }, "steps of 65536 tokens"),
        (CaseOp::Rope { heads, head_dim, offset: 0, turn, start: 1 << 18, tokens: 1 }, "positions below 262144"),
    ] {
        let case = Case { op, tolerance: EXACT, seed: 1 };
        let said = run_case(&mut WgpuBackend::new(&device), &case).expect_err("refused").to_string();
        assert!(said.contains(named), "{said}");
    }
}
