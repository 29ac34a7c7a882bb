//! What one step costs on the host besides the model: `schedule` and `apply` of running decodes, and the admission of a
//! long prompt that the prefix cache holds almost whole. The allocator is counted: decodes must not allocate per token.

use std::sync::Arc;

use divan::{AllocProfiler, Bencher};
use runtime::ids::{SeqId, TokenId};
use runtime::kv::KvCacheManager;
use runtime::request::{Request, SamplingParams};
use runtime::scheduler::{Scheduler, SchedulerConfig};
use runtime::step::{DrawnToken, LogitRows, RowOutput, StepOutput, StepPlan};

#[global_allocator]
static ALLOCATOR: AllocProfiler = AllocProfiler::system();

const BLOCK_SIZE: u32 = 16;
const MAX_MODEL_LEN: u32 = 8 * 1024 + 64;

fn main() {
    divan::main();
}

/// Scheduler and cache with a runner that draws noise.
struct Host {
    scheduler: Scheduler,
    kv: KvCacheManager,
    output: StepOutput,
    noise: u32,
    num_added: u64,
}

impl Host {
    fn new(num_rows: u32, num_blocks: u32) -> Self {
        let config = SchedulerConfig {
            max_model_len: MAX_MODEL_LEN,
            max_num_batched_tokens: 8 * 1024,
            max_num_seqs: num_rows,
            long_prefill_token_threshold: 0,
            prompt_logprob_chunk: 64,
            seed: 0,
        };
        let kv = KvCacheManager::new(num_blocks, BLOCK_SIZE, true);
        Self { scheduler: Scheduler::new(config), kv, output: StepOutput::default(), noise: 1, num_added: 0 }
    }

    fn draw(&mut self) -> TokenId {
        self.noise = self.noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        TokenId(self.noise >> 15)
    }

    fn add(&mut self, prompt: Arc<[TokenId]>, max_tokens: u32) {
        let params = SamplingParams { max_tokens, eos_token_ids: vec![TokenId(u32::MAX)], ..SamplingParams::default() };
        self.scheduler.add(Request { id: SeqId(self.num_added), prompt, params, cache_salt: None }, 0);
        self.num_added += 1;
    }

    fn step(&mut self) {
        let plan = self.scheduler.schedule(&mut self.kv, 0);
        self.run(&plan);
        self.scheduler.apply(&mut self.kv, plan, &mut self.output, 0);
        self.scheduler.drain_events().for_each(|event| drop(divan::black_box(event)));
    }

    fn run(&mut self, plan: &StepPlan) {
        self.output.rows.resize_with(plan.work.len(), RowOutput::default);
        for (i, work) in plan.work.iter().enumerate() {
            if work.logits == LogitRows::Last {
                let id = self.draw();
                self.output.rows[i].tokens.push(DrawnToken { id, logprobs: None });
            }
        }
    }
}

/// One step of `num_rows` decodes, their block borders spread evenly.
#[divan::bench(args = [1, 64, 256, 1024], sample_count = 100, sample_size = 32)]
fn decode_step(bencher: Bencher, num_rows: u32) {
    let num_steps = 100 * 32 + 256;
    let mut host = Host::new(num_rows, num_rows * (num_steps / BLOCK_SIZE + 8) + 1);
    for i in 0..num_rows {
        let prompt = (0..32 + i % BLOCK_SIZE).map(|_| host.draw()).collect();
        host.add(prompt, MAX_MODEL_LEN);
    }
    while host.scheduler.num_waiting() > 0 {
        host.step();
    }
    (0..64).for_each(|_| host.step());
    bencher.bench_local(|| host.step());
}

/// From `add` to the last event of a prompt of 8,192 tokens of which 8,176 are cached, with one token of output.
#[divan::bench]
fn admit_cached_prompt(bencher: Bencher) {
    let mut host = Host::new(256, 4096);
    let prompt: Arc<[TokenId]> = (0..8192).map(|_| host.draw()).collect();
    host.add(prompt.clone(), 1);
    host.step();
    bencher.bench_local(|| {
        host.add(prompt.clone(), 1);
        host.step();
        assert!(!host.scheduler.has_work());
    });
}
