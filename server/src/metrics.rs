//! `/metrics`: vLLM's names, from the engine's snapshot and from what each request's own task saw.
//!
//! Invariant: gauges and the engine's counters are read at scrape time, so that they are fresh when nothing runs; a
//! request counts in `request_success` once per choice. The registry is a value of the server's state.

mod collect;

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use runtime::engine::Engine;
use runtime::request::{FinishReason, Times};

use crate::config::ServedModel;

/// Time to first token, seconds.
const FIRST_TOKEN_BUCKETS: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
/// Time between tokens, seconds; vLLM's and three finer ones, since small models decode in less than 10 ms.
const TOKEN_BUCKETS: [f64; 22] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
];
/// Times of whole requests, seconds.
const REQUEST_BUCKETS: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FinishLabels {
    finished_reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RejectLabels {
    reason: &'static str,
}

/// What the server can say about itself and its engine.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    finished: Family<FinishLabels, Counter<u64, AtomicU64>>,
    rejected: Family<RejectLabels, Counter<u64, AtomicU64>>,
    first_token_s: Histogram,
    between_tokens_s: Histogram,
    per_token_s: Histogram,
    whole_s: Histogram,
    queue_s: Histogram,
    inference_s: Histogram,
    prefill_s: Histogram,
    decode_s: Histogram,
    prompt_tokens: Histogram,
    generation_tokens: Histogram,
    max_generation_tokens: Histogram,
    max_tokens_param: Histogram,
    n_param: Histogram,
    computed_prompt_tokens: Histogram,
    num_preemptions: Histogram,
}

/// One finished choice.
#[derive(Clone, Copy, Debug)]
pub struct FinishedChoice {
    pub reason: FinishReason,
    pub times: Times,
    pub num_preemptions: u32,
    pub num_prompt_tokens: usize,
    pub num_cached_tokens: u32,
    pub num_tokens: u32,
    /// From the request's arrival at the server to its first token; `None` without a token.
    pub first_token: Option<Duration>,
    /// From the request's arrival to its end.
    pub whole: Duration,
}

/// Registers histograms under one prefix.
struct Register<'a> {
    registry: &'a mut Registry,
    prefix: &'a str,
}

impl Register<'_> {
    fn histogram(&mut self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        let histogram = Histogram::new(buckets.iter().copied());
        self.registry.register(format!("{}{name}", self.prefix), help, histogram.clone());
        histogram
    }
}

/// 1, 2, 5, 10, 20, 50, … up to `max`.
fn one_two_five(max: u32) -> Vec<f64> {
    let decades = (0..).map(|exponent| 10u64.pow(exponent));
    let values = decades.flat_map(|decade| [1, 2, 5].map(|mantissa| mantissa * decade));
    values.take_while(|value| *value <= u64::from(max)).map(|value| value as f64).collect()
}

impl Metrics {
    /// A registry for `engine`, whose series carry `model_name` and `engine="0"`; the model's `cache_labels` are more labels
    /// of `cache_config_info`.
    pub fn new(prefix: &str, model_name: &str, engine: Engine, model: &ServedModel) -> Self {
        let labels =
            [("model_name", model_name), ("engine", "0")].map(|(name, value)| (name.into(), value.to_owned().into()));
        let mut registry = Registry::with_labels(labels.into_iter());
        let tokens = one_two_five(engine.config().max_model_len);
        registry.register_collector(Box::new(collect::EngineCollector::new(prefix, engine, model)));
        let finished = Family::default();
        for reason in [FinishReason::Stop, FinishReason::Length, FinishReason::Abort, FinishReason::Error] {
            let _zero = finished.get_or_create(&FinishLabels { finished_reason: reason.as_str() });
        }
        let rejected = Family::default();
        for reason in ["max_num_queued_reqs", "max_num_queued_tokens"] {
            let _zero = rejected.get_or_create(&RejectLabels { reason });
        }
        registry.register(format!("{prefix}request_success"), "Requests by how they ended", finished.clone());
        registry.register(
            format!("{prefix}admission_rejections"),
            "Requests refused by a queue bound",
            rejected.clone(),
        );
        let mut r = Register { registry: &mut registry, prefix };
        Self {
            first_token_s: r.histogram("time_to_first_token_seconds", "Time to first token", &FIRST_TOKEN_BUCKETS),
            between_tokens_s: r.histogram("inter_token_latency_seconds", "Time between tokens", &TOKEN_BUCKETS),
            per_token_s: r.histogram(
                "request_time_per_output_token_seconds",
                "Mean time per output token after the first, per request",
                &TOKEN_BUCKETS,
            ),
            whole_s: r.histogram("e2e_request_latency_seconds", "Arrival to last token", &REQUEST_BUCKETS),
            queue_s: r.histogram("request_queue_time_seconds", "Time in the queue", &REQUEST_BUCKETS),
            inference_s: r.histogram("request_inference_time_seconds", "Time in a row", &REQUEST_BUCKETS),
            prefill_s: r.histogram("request_prefill_time_seconds", "Row to first token", &REQUEST_BUCKETS),
            decode_s: r.histogram("request_decode_time_seconds", "First token to last", &REQUEST_BUCKETS),
            prompt_tokens: r.histogram("request_prompt_tokens", "Prompt tokens per request", &tokens),
            generation_tokens: r.histogram("request_generation_tokens", "Output tokens per request", &tokens),
            max_generation_tokens: r.histogram(
                "request_max_num_generation_tokens",
                "Output tokens of a request's longest choice",
                &tokens,
            ),
            max_tokens_param: r.histogram("request_params_max_tokens", "max_tokens of requests", &tokens),
            n_param: r.histogram("request_params_n", "n of requests", &[1.0, 2.0, 5.0, 10.0, 20.0]),
            computed_prompt_tokens: r.histogram(
                "request_prefill_kv_computed_tokens",
                "Prompt tokens computed, cached ones excluded, per request",
                &tokens,
            ),
            num_preemptions: r.histogram(
                "request_num_preemptions",
                "Preemptions per request",
                &[1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0],
            ),
            registry,
            finished,
            rejected,
        }
    }

    /// A request was submitted.
    pub fn submitted(&self, n: u32, max_tokens: u32) {
        self.n_param.observe(f64::from(n));
        self.max_tokens_param.observe(f64::from(max_tokens));
    }

    /// A queue bound refused a request; `reason` is the flag that sets the bound.
    pub fn rejected(&self, reason: &'static str) {
        self.rejected.get_or_create(&RejectLabels { reason }).inc();
    }

    /// The first token of a choice is known.
    pub fn first_token(&self, since_arrival: Duration) {
        self.first_token_s.observe(since_arrival.as_secs_f64());
    }

    /// One more token is known.
    pub fn next_token(&self, since_last: Duration) {
        self.between_tokens_s.observe(since_last.as_secs_f64());
    }

    /// A choice ended without telling its times: its client left, or the engine failed.
    pub fn ended(&self, reason: FinishReason) {
        self.finished.get_or_create(&FinishLabels { finished_reason: reason.as_str() }).inc();
    }

    /// A choice ended.
    pub fn finished(&self, choice: &FinishedChoice) {
        self.ended(choice.reason);
        let times = &choice.times;
        let seconds = |from_us: u64, to_us: u64| to_us.saturating_sub(from_us) as f64 / 1e6;
        self.whole_s.observe(choice.whole.as_secs_f64());
        self.queue_s.observe(seconds(times.arrived_us, times.scheduled_us));
        self.inference_s.observe(seconds(times.scheduled_us, times.finished_us));
        if let Some(first) = choice.first_token {
            self.prefill_s.observe(seconds(times.scheduled_us, times.first_token_us));
            self.decode_s.observe(seconds(times.first_token_us, times.finished_us));
            if choice.num_tokens > 1 {
                let rest = choice.whole.saturating_sub(first).as_secs_f64();
                self.per_token_s.observe(rest / f64::from(choice.num_tokens - 1));
            }
        }
        self.prompt_tokens.observe(choice.num_prompt_tokens as f64);
        let computed = choice.num_prompt_tokens.saturating_sub(choice.num_cached_tokens as usize);
        self.computed_prompt_tokens.observe(computed as f64);
        self.generation_tokens.observe(f64::from(choice.num_tokens));
        self.num_preemptions.observe(f64::from(choice.num_preemptions));
    }

    /// All choices of a prompt ended; the longest has `num_tokens`.
    pub fn longest_choice(&self, num_tokens: u32) {
        self.max_generation_tokens.observe(f64::from(num_tokens));
    }

    /// Prometheus' text format 0.0.4.
    pub fn encode(&self) -> String {
        let mut open_metrics = String::new();
        // Writing into a `String` cannot fail, and our own labels encode.
        let encoded = text::encode(&mut open_metrics, &self.registry);
        debug_assert!(encoded.is_ok(), "metrics must encode");
        to_text_0_0_4(&open_metrics)
    }
}

/// OpenMetrics names a counter's family without `_total`, the older text format by the name of its samples.
fn to_text_0_0_4(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len() + 256);
    let mut help: Option<(&str, &str)> = None;
    for line in open_metrics.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            let suffix = if kind == "counter" { "_total" } else { "" };
            if let Some((_, help)) = help.take().filter(|(helped, _)| *helped == name) {
                text.push_str(&format!("# HELP {name}{suffix} {help}\n"));
            }
            text.push_str(&format!("# TYPE {name}{suffix} {kind}\n"));
        } else if line != "# EOF" {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}
