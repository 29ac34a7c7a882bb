//! Scheduler, cache and scripted runner in one loop without threads, and what a lone request would hear.

use std::collections::BTreeMap;
use std::sync::Arc;

use runtime::ids::{SeqId, TokenId};
use runtime::kv::KvCacheManager;
use runtime::request::{Event, FinishReason, Request, SamplingParams, TokenLogprobs};
use runtime::scheduler::{Scheduler, SchedulerConfig};
use runtime::step::{StepOutput, StepPlan, StepRunner};

use super::scripted::{ScriptedRunner, logprob, next_token, path_of};

/// Sizes of a simulated engine.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub vocab_size: u32,
    pub block_size: u32,
    /// Blocks that sequences can have.
    pub num_blocks: u32,
    pub caching: bool,
    pub scheduler: SchedulerConfig,
}

impl Default for Sizes {
    fn default() -> Self {
        let scheduler = SchedulerConfig {
            max_model_len: 64,
            max_num_batched_tokens: 16,
            max_num_seqs: 4,
            long_prefill_token_threshold: 0,
            prompt_logprob_chunk: 4,
            seed: 7,
        };
        Self { vocab_size: 16, block_size: 4, num_blocks: 16, caching: true, scheduler }
    }
}

pub struct Sim {
    pub sizes: Sizes,
    pub scheduler: Scheduler,
    pub kv: KvCacheManager,
    pub runner: ScriptedRunner,
    output: StepOutput,
    next_id: u64,
    /// Advances with each step; the scheduler's clock.
    pub now_us: u64,
    pub heard: BTreeMap<SeqId, Vec<Event>>,
    /// The plan of the last step.
    pub last_plan: StepPlan,
    /// All plans and events, for comparing runs.
    pub trace: String,
    /// The step in which each sequence ended.
    pub ended_in_step: BTreeMap<SeqId, u64>,
}

impl Sim {
    pub fn new(sizes: Sizes) -> Self {
        let max_rows = sizes.scheduler.max_num_seqs;
        let mut runner = ScriptedRunner::new(sizes.vocab_size, sizes.block_size, sizes.num_blocks + 1, max_rows);
        runner.max_tokens = sizes.scheduler.max_num_batched_tokens;
        runner.max_logit_rows = max_rows + sizes.scheduler.prompt_logprob_chunk - 1;
        Self {
            sizes,
            scheduler: Scheduler::new(sizes.scheduler),
            kv: KvCacheManager::new(sizes.num_blocks + 1, sizes.block_size, sizes.caching),
            runner,
            output: StepOutput::default(),
            next_id: 0,
            now_us: 0,
            heard: BTreeMap::new(),
            last_plan: StepPlan::default(),
            trace: String::new(),
            ended_in_step: BTreeMap::new(),
        }
    }

    pub fn add(&mut self, prompt: &[TokenId], params: SamplingParams) -> SeqId {
        self.add_salted(prompt, params, None)
    }

    pub fn add_salted(&mut self, prompt: &[TokenId], params: SamplingParams, cache_salt: Option<Arc<str>>) -> SeqId {
        let id = SeqId(self.next_id);
        self.next_id += 1;
        self.heard.insert(id, Vec::new());
        self.scheduler.add(Request { id, prompt: prompt.into(), params, cache_salt }, self.now_us);
        id
    }

    pub fn abort(&mut self, id: SeqId) {
        self.scheduler.abort(&mut self.kv, id, self.now_us);
        self.listen();
        self.scheduler.check_invariants(&self.kv);
    }

    pub fn finish(&mut self, id: SeqId) {
        self.scheduler.finish(&mut self.kv, id, self.now_us);
        self.listen();
        self.scheduler.check_invariants(&self.kv);
    }

    /// Runs one step; `false`: there was nothing to do.
    pub fn step(&mut self) -> bool {
        self.step_with(|_| ())
    }

    /// Runs one step and does something between its planning and its results.
    pub fn step_with(&mut self, meanwhile: impl FnOnce(&mut Self)) -> bool {
        self.now_us += 1;
        let plan = self.scheduler.schedule(&mut self.kv, self.now_us);
        if plan.work.is_empty() {
            return false;
        }
        self.runner.submit(&plan).expect("the script does not fail");
        self.runner.wait(&mut self.output).expect("the script does not fail");
        self.last_plan = plan.clone();
        self.trace += &format!("{plan:?}\n");
        meanwhile(self);
        self.scheduler.apply(&mut self.kv, plan, &mut self.output, self.now_us);
        self.listen();
        self.scheduler.check_invariants(&self.kv);
        true
    }

    pub fn run(&mut self) {
        while self.step() {
            assert!(self.now_us < 1_000_000, "the queue does not drain");
        }
        assert_eq!(self.kv.num_used_blocks(), 0, "blocks leak");
        assert_eq!((self.scheduler.num_running(), self.scheduler.num_waiting()), (0, 0));
    }

    fn listen(&mut self) {
        for event in self.scheduler.drain_events() {
            self.trace += &format!("{event:?}\n");
            if matches!(event.event, Event::Finished { .. }) {
                self.ended_in_step.insert(event.id, self.now_us);
            }
            self.heard.get_mut(&event.id).expect("a known request").push(event.event);
        }
    }

    pub fn cached_tokens(&self, id: SeqId) -> u32 {
        let cached = self.heard[&id].iter().find_map(|event| match event {
            Event::Started { cached_tokens } => Some(*cached_tokens),
            _ => None,
        });
        cached.expect("the request has started")
    }

    pub fn num_tokens_heard(&self, id: SeqId) -> usize {
        self.heard[&id].iter().filter(|event| matches!(event, Event::Token { .. })).count()
    }

    /// What the request heard, as a whole.
    pub fn answer(&self, id: SeqId) -> Answer {
        Answer::heard(&self.heard[&id])
    }

    /// Panics unless the request heard what it would have heard alone.
    pub fn expect_alone(&self, id: SeqId, prompt: &[TokenId], params: &SamplingParams) {
        assert_eq!(self.answer(id), Answer::alone(prompt, params, &self.sizes), "request {id}");
    }
}

/// All that a request hears, put together; `reason` is `None` while it runs.
#[derive(Debug, Default, PartialEq)]
pub struct Answer {
    pub tokens: Vec<TokenId>,
    pub logprobs: Vec<Option<TokenLogprobs>>,
    pub prompt_logprobs: Vec<Option<TokenLogprobs>>,
    pub reason: Option<FinishReason>,
}

impl Answer {
    /// Puts events together, checking their order: `Started`, `PromptLogprobs`*, `Token`*, then `Finished` once.
    pub fn heard(events: &[Event]) -> Self {
        let mut answer = Self::default();
        let mut kinds = String::new();
        for event in events {
            kinds.push(match event {
                Event::Started { .. } => 'S',
                Event::PromptLogprobs(entries) => {
                    answer.prompt_logprobs.extend(entries.iter().cloned());
                    'P'
                }
                Event::Token { id, logprobs } => {
                    answer.tokens.push(*id);
                    answer.logprobs.push(logprobs.as_deref().cloned());
                    'T'
                }
                Event::Finished { reason, .. } => {
                    answer.reason = Some(*reason);
                    'F'
                }
                Event::Failed(message) => panic!("the engine failed: {message}"),
            });
        }
        let rest = kinds.strip_suffix('F').unwrap_or(&kinds);
        let rest = rest.strip_prefix('S').map_or(rest, |rest| rest.trim_start_matches('P').trim_start_matches('T'));
        assert!(rest.is_empty(), "events out of order: {kinds}");
        answer
    }

    /// What a request hears that has the engine to itself: the oracle of every test here.
    pub fn alone(prompt: &[TokenId], params: &SamplingParams, sizes: &Sizes) -> Self {
        let mut known = prompt.to_vec();
        let mut answer = Self::default();
        if params.prompt_logprobs.is_some() {
            let entry = |i: usize| (i > 0).then(|| logprob(path_of(&prompt[..i]), prompt[i]));
            answer.prompt_logprobs = (0..prompt.len()).map(entry).collect();
        }
        while answer.reason.is_none() {
            let path = path_of(&known);
            let token = next_token(path, sizes.vocab_size);
            known.push(token);
            answer.tokens.push(token);
            answer.logprobs.push(params.logprobs.map(|_| logprob(path, token)));
            if params.is_stop(token) {
                answer.reason = Some(FinishReason::Stop);
            } else if answer.tokens.len() == params.max_tokens as usize
                || known.len() == sizes.scheduler.max_model_len as usize
            {
                answer.reason = Some(FinishReason::Length);
            }
        }
        answer
    }
}

pub fn prompt(ids: impl IntoIterator<Item = u32>) -> Vec<TokenId> {
    ids.into_iter().map(TokenId).collect()
}

pub fn max_tokens(max_tokens: u32) -> SamplingParams {
    SamplingParams { max_tokens, ..SamplingParams::default() }
}
