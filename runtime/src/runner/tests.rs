//! The runner on the reference backend: chunks, rows, corruption, padding.

use std::sync::Arc;

use super::*;
use crate::backend::reference::ReferenceBackend;
use crate::backend::{Caps, Compiled, DeviceOutput};
use crate::ids::{BlockId, Layer, SeqId};
use crate::model::tests::tiny_model;
use crate::program::{Program, StateSpec};
use crate::step::DrawnToken;
use crate::weights::HostTensor;

const CONFIG: RunnerConfig = RunnerConfig {
    max_num_batched_tokens: 16,
    max_num_seqs: 4,
    max_model_len: 32,
    block_size: 4,
    num_blocks: 32,
    max_logit_rows: 16,
};

/// Claims padded buckets and makes the padding real: the inner backend runs as many tokens and rows as the bucket has.
struct Padding {
    inner: ReferenceBackend,
    caps: Caps,
    buckets: Vec<Bucket>,
    /// Tokens, read rows and sampled rows.
    in_use: [usize; 3],
}

impl Padding {
    fn new(sizes: &[u32]) -> Self {
        let inner = ReferenceBackend::new(1);
        let caps = Caps { buckets: Buckets::Padded(sizes.to_vec()), ..inner.caps().clone() };
        Self { inner, caps, buckets: Vec::new(), in_use: [0; 3] }
    }
}

impl Backend for Padding {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn memory(&self) -> MemoryReport {
        self.inner.memory()
    }

    fn upload(&mut self, id: WeightId, tensor: &HostTensor) -> Result<(), DeviceError> {
        self.inner.upload(id, tensor)
    }

    fn alloc_state(&mut self, specs: &[StateSpec], num_blocks: u32, block_size: u32) -> Result<(), DeviceError> {
        self.inner.alloc_state(specs, num_blocks, block_size)
    }

    fn compile(
        &mut self,
        program: &Program,
        bucket: Bucket,
        layout: &InputLayout,
        progress: Compiled<'_>,
    ) -> Result<PlanId, DeviceError> {
        self.buckets.push(bucket);
        progress(1, 2);
        self.inner.compile(program, bucket, layout, progress)
    }

    fn submit(&mut self, plan: PlanId, inputs: &StepInputs) -> Result<Ticket, DeviceError> {
        self.in_use = [inputs.num_tokens(), inputs.num_read_rows(), inputs.num_sampled_rows()];
        self.inner.submit(plan, &inputs.with_padding_in_use(self.buckets[plan.index()]))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<DeviceOutput<'_>, DeviceError> {
        let [tokens, read_rows, sampled_rows] = self.in_use;
        let DeviceOutput { logits, samples, non_finite } = self.inner.wait(ticket)?;
        assert_eq!(logits.len(), read_rows * crate::model::tests::VOCAB);
        Ok(DeviceOutput { logits, samples: &samples[..sampled_rows], non_finite: &non_finite[..tokens] })
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
        self.inner.copy_blocks(pairs)
    }

    fn read_block(&mut self, layer: Layer, block: BlockId, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.inner.read_block(layer, block, out)
    }

    fn write_block(&mut self, layer: Layer, block: BlockId, bytes: &[u8]) -> Result<(), DeviceError> {
        self.inner.write_block(layer, block, bytes)
    }
}

fn runner(backend: Box<dyn Backend>) -> ModelRunner {
    ModelRunner::new(backend, &tiny_model(), CONFIG, &mut |_| ()).expect("the tiny model fits")
}

fn reference() -> ModelRunner {
    runner(Box::new(ReferenceBackend::new(1)))
}

fn greedy() -> SamplingParams {
    SamplingParams { temperature: 0.0, logprobs: Some(3), max_tokens: 8, ..SamplingParams::default() }
}

fn new_row(row: u32, tokens: &[u32], params: SamplingParams) -> NewRow {
    NewRow {
        row: Row(row),
        seq: SeqId(u64::from(row)),
        tokens: tokens.iter().copied().map(TokenId).collect(),
        prompt_len: tokens.len() as u32,
        params: Arc::new(params),
        seed: 1,
    }
}

fn work(row: u32, start: u32, length: u32, new_blocks: &[u32], logits: LogitRows) -> RowWork {
    let new_blocks = new_blocks.iter().copied().map(BlockId).collect();
    RowWork { row: Row(row), start, length, num_drafts: 0, new_blocks, logits }
}

fn step(runner: &mut ModelRunner, plan: StepPlan) -> StepOutput {
    // A used output: what was there must not shine through.
    let stale = RowOutput {
        tokens: vec![DrawnToken { id: TokenId(0), logprobs: None }],
        corrupt: true,
        ..RowOutput::default()
    };
    let mut output = StepOutput { rows: vec![stale; 7] };
    runner.submit(&plan).expect("the reference does not fail");
    runner.wait(&mut output).expect("the reference does not fail");
    output
}

const PROMPT: [u32; 7] = [3, 1, 4, 1, 5, 9, 2];

/// Two rows: one prompt whole, one in chunks of 3, 3, 1; then both decode twice; then row 0's place is taken by another.
fn script(runner: &mut ModelRunner) -> Vec<StepOutput> {
    let last = LogitRows::Last;
    vec![
        step(
            runner,
            StepPlan {
                admitted: vec![new_row(2, &PROMPT, greedy()), new_row(0, &PROMPT, greedy())],
                work: vec![work(0, 0, 3, &[5], LogitRows::None), work(2, 0, 7, &[9, 3], last)],
                ..StepPlan::default()
            },
        ),
        step(runner, StepPlan { work: vec![work(0, 3, 3, &[2], LogitRows::None)], ..StepPlan::default() }),
        step(runner, StepPlan { work: vec![work(0, 6, 1, &[], last)], ..StepPlan::default() }),
        step(
            runner,
            StepPlan { work: vec![work(2, 7, 1, &[], last), work(0, 7, 1, &[], last)], ..StepPlan::default() },
        ),
        step(
            runner,
            StepPlan {
                released: vec![Row(0)],
                admitted: vec![new_row(0, &PROMPT[..2], greedy())],
                work: vec![work(2, 8, 1, &[12], last), work(0, 0, 2, &[5], last)],
                ..StepPlan::default()
            },
        ),
        step(runner, StepPlan::default()),
    ]
}

#[test]
fn chunks_and_mates_do_not_change_a_row() {
    let outputs = script(&mut reference());
    assert_eq!(outputs[0].rows.len(), 2);
    assert_eq!(outputs[0].rows[0], RowOutput::default(), "an inner chunk draws nothing");
    assert_eq!(outputs[0].rows[1].tokens.len(), 1);
    // Log-probabilities are compared too, so that these are the same bits, not only the same tokens.
    assert_eq!(outputs[0].rows[1], outputs[2].rows[0], "whole = chunked");
    assert_eq!(outputs[3].rows[0], outputs[3].rows[1], "decodes of equal rows");
    assert_ne!(outputs[4].rows[0], outputs[4].rows[1], "row 0 is another sequence now");
    assert!(outputs[5].rows.is_empty());
}

#[test]
fn padding_changes_nothing() {
    let expected = script(&mut reference());
    for sizes in [&[1, 2, 4, 8, 16][..], &[16], &[3, 5, 64]] {
        assert_eq!(script(&mut runner(Box::new(Padding::new(sizes)))), expected, "{sizes:?}");
    }
}

#[test]
fn the_smallest_bucket_that_holds_a_step_is_taken() {
    let mut runner = runner(Box::new(Padding::new(&[2, 4, 8, 32, 64])));
    let compiled: Vec<(u32, u32)> = runner.plans.iter().map(|(bucket, _)| (bucket.tokens, bucket.rows)).collect();
    assert_eq!(compiled, [(2, 2), (4, 4), (8, 4), (32, 4)], "64 is never needed");
    let plan = StepPlan {
        admitted: vec![new_row(1, &PROMPT, greedy())],
        work: vec![work(1, 0, 3, &[1], LogitRows::None)],
        ..StepPlan::default()
    };
    runner.submit(&plan).expect("the reference does not fail");
    assert_eq!(runner.pick().0.tokens, 4);
}

#[test]
fn prompt_logprobs_belong_to_the_following_token() {
    let params = SamplingParams { prompt_logprobs: Some(2), ..greedy() };
    let whole = |start, length, logits| {
        let mut runner = reference();
        let mut rows = Vec::new();
        for (start, length, logits) in [(0, start, LogitRows::All { draw: false }), (start, length, logits)] {
            if length > 0 {
                let (admitted, blocks) = match rows.len() {
                    0 => (vec![new_row(0, &PROMPT, params.clone())], &[1, 2][..]),
                    _ => (Vec::new(), &[][..]),
                };
                let plan =
                    StepPlan { admitted, work: vec![work(0, start, length, blocks, logits)], ..StepPlan::default() };
                rows.extend(step(&mut runner, plan).rows);
            }
        }
        rows
    };
    let chunks = whole(4, 3, LogitRows::All { draw: true });
    let lens: Vec<usize> = chunks.iter().map(|row| row.prompt_logprobs.len()).collect();
    // Four positions predict tokens 1..=4; positions 4 and 5 predict 5 and 6, and the last one is drawn from.
    assert_eq!(lens, [4, 2]);
    assert_eq!((chunks[0].tokens.len(), chunks[1].tokens.len()), (0, 1));
    for logprobs in chunks.iter().flat_map(|row| &row.prompt_logprobs) {
        assert_eq!(logprobs.top.len(), 2);
        assert!(logprobs.logprob <= logprobs.top[0].1);
    }
    let other = whole(1, 3, LogitRows::All { draw: false });
    assert_eq!(other[0].prompt_logprobs[..], chunks[0].prompt_logprobs[..1]);
    assert_eq!(other[1].prompt_logprobs[..], chunks[0].prompt_logprobs[1..]);
}

/// A bias of nothing: the host samples, from the same logits.
fn on_host(params: SamplingParams) -> SamplingParams {
    SamplingParams { logit_bias: vec![(TokenId(0), 0.0)], ..params }
}

#[test]
fn rows_are_sampled_on_the_device_or_on_the_host_with_the_same_tokens() {
    let seeded = SamplingParams { temperature: 1.5, ..greedy() };
    let with_prompt = SamplingParams { prompt_logprobs: Some(2), ..seeded.clone() };
    let all = [greedy(), seeded, with_prompt];
    let mut runner = reference();
    // Row 2 i on the device, row 2 i + 1 on the host.
    for params in all {
        let logits = match params.prompt_logprobs {
            Some(_) => LogitRows::All { draw: true },
            None => LogitRows::Last,
        };
        let both = |runner: &mut ModelRunner, plan: StepPlan| {
            runner.submit(&plan).expect("the reference does not fail");
            let read = (runner.inputs.num_read_rows(), runner.inputs.num_sampled_rows());
            let mut output = StepOutput::default();
            runner.wait(&mut output).expect("the reference does not fail");
            assert_eq!(output.rows[0], output.rows[1], "{params:?}");
            assert!(!output.rows[0].corrupt && output.rows[0].tokens.len() == 1);
            read
        };
        let admitted = vec![new_row(0, &PROMPT, params.clone()), new_row(1, &PROMPT, on_host(params.clone()))];
        let work_of = |start, length, logits| {
            let blocks = |row: u32| if start == 0 { vec![2 * row + 1, 2 * row + 2] } else { Vec::new() };
            vec![work(0, start, length, &blocks(0), logits), work(1, start, length, &blocks(1), logits)]
        };
        let plan = StepPlan { admitted, work: work_of(0, 7, logits), ..StepPlan::default() };
        // All prompt positions but the last of the row that the device samples.
        let read = if params.prompt_logprobs.is_some() { 6 + 7 } else { 1 };
        assert_eq!(both(&mut runner, plan), (read, 1), "{params:?}");
        let plan = StepPlan { work: work_of(7, 1, LogitRows::Last), ..StepPlan::default() };
        assert_eq!(both(&mut runner, plan), (1, 1), "a decode reads the host's row only");
        let released = vec![Row(0), Row(1)];
        step(&mut runner, StepPlan { released, ..StepPlan::default() });
    }
}

/// A model whose embedding, which is the head too, has `value` in token 5's row.
fn model_with_bad_token(value: f32) -> Model {
    let mut model = tiny_model();
    let table = &mut model.weights[0];
    let mut values = table.to_f32();
    values[5 * table.row_len()] = value;
    *table = HostTensor::from_f32("embed", table.shape.clone(), &values);
    model
}

#[test]
fn logits_that_are_not_finite_are_flagged() {
    let backend = Box::new(ReferenceBackend::new(1));
    let mut runner = ModelRunner::new(backend, &model_with_bad_token(f32::NAN), CONFIG, &mut |_| ()).expect("fits");
    let rows = [(0, greedy()), (1, greedy()), (2, on_host(greedy()))];
    let admitted = rows.map(|(row, params)| new_row(row, &[3, 6, 4], params)).to_vec();
    let last = LogitRows::Last;
    let work = vec![work(0, 0, 3, &[1], last), work(1, 0, 2, &[2], LogitRows::None), work(2, 0, 3, &[3], last)];
    let output = step(&mut runner, StepPlan { admitted, work, ..StepPlan::default() });
    // Hidden states are sound here; only the head's row of token 5 is not.
    assert_eq!(output.rows.iter().map(|row| row.corrupt).collect::<Vec<_>>(), [true, false, true]);
    assert!(output.rows.iter().all(|row| row.tokens.is_empty()));
}

#[test]
fn inner_chunks_are_flagged_by_their_own_values_only() {
    let backend = Box::new(ReferenceBackend::new(1));
    let model = model_with_bad_token(f32::INFINITY);
    let mut runner = ModelRunner::new(backend, &model, CONFIG, &mut |_| ()).expect("fits");
    let admitted = vec![new_row(0, &[3, 5, 4], greedy()), new_row(1, &[3, 6, 4], greedy())];
    let work = vec![work(0, 0, 2, &[1], LogitRows::None), work(1, 0, 2, &[2], LogitRows::None)];
    let output = step(&mut runner, StepPlan { admitted, work, ..StepPlan::default() });
    assert_eq!((output.rows[0].corrupt, output.rows[1].corrupt), (true, false));
}

#[test]
fn what_cannot_fit_is_a_typed_error() {
    let problem = |backend: Padding, config: RunnerConfig| {
        let runner = ModelRunner::new(Box::new(backend), &tiny_model(), config, &mut |_| ());
        runner.err().map(|error| error.to_string()).unwrap_or_default()
    };
    let few = problem(Padding::new(&[1, 8]), CONFIG);
    assert_eq!(few, "max_num_batched_tokens: needs 16 tokens, limit 8 tokens (the device's largest bucket)");
    let mut small = Padding::new(&[16]);
    small.caps.max_binding_bytes = 100;
    assert!(problem(small, CONFIG).contains("max_binding_bytes of reference"));
    let many = RunnerConfig { num_blocks: u32::MAX, ..CONFIG };
    assert!(problem(Padding::new(&[16]), many).starts_with("KV cache: needs 4294967295 blocks of 4 tokens"));
}

#[test]
fn progress_counts_every_byte_once() {
    let model = tiny_model();
    let mut seen = Vec::new();
    let backend = Box::new(Padding::new(&[16]));
    let _ = ModelRunner::new(backend, &model, CONFIG, &mut |progress| seen.push(progress)).expect("fits");
    assert_eq!(seen.pop(), Some(Progress::Compile { done: 1, total: 2 }), "as the backend says");
    let total_bytes: u64 = model.weights.iter().map(|w| w.num_bytes() as u64).sum();
    assert_eq!(seen.len(), model.weights.len());
    assert_eq!(seen.last(), Some(&Progress::Upload { done_bytes: total_bytes, total_bytes }));
}
