//! The engine's own gauges and counters, read when somebody scrapes.
//!
//! Invariant: one `Stats` snapshot per scrape, so that the series of one answer belong together.

use std::fmt::Error;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use runtime::engine::{Engine, Stats};

use crate::config::ServedModel;

/// Reads `Engine::stats` at each scrape.
#[derive(Debug)]
pub struct EngineCollector {
    prefix: String,
    engine: Engine,
    cache_labels: Vec<(String, String)>,
    num_replaced_kernels: usize,
    /// The most that was told of the prompt tokens computed. The engine counts hits when a request starts and computed
    /// tokens when they are, so that the difference falls when one ends in between: a counter may not.
    computed_told: AtomicU64,
}

impl EngineCollector {
    /// The model's `cache_labels` are put after the engine's own on `cache_config_info`.
    pub fn new(prefix: &str, engine: Engine, model: &ServedModel) -> Self {
        let config = engine.config();
        let mut labels = vec![
            ("block_size".to_owned(), config.block_size.to_string()),
            ("num_gpu_blocks".to_owned(), config.num_blocks.to_string()),
            (
                "enable_prefix_caching".to_owned(),
                if config.enable_prefix_caching { "True" } else { "False" }.to_owned(),
            ),
        ];
        labels.extend_from_slice(&model.cache_labels);
        let num_replaced_kernels = model.replaced_kernels.len();
        let computed_told = AtomicU64::new(0);
        Self { prefix: prefix.to_owned(), engine, cache_labels: labels, num_replaced_kernels, computed_told }
    }
}

/// Writes metrics whose names share a prefix.
struct Writer<'a, 'b> {
    encoder: DescriptorEncoder<'b>,
    prefix: &'a str,
}

impl Writer<'_, '_> {
    fn gauge(&mut self, name: &str, help: &str, value: f64) -> Result<(), Error> {
        let gauge = ConstGauge::new(value);
        gauge.encode(self.encoder.encode_descriptor(
            &format!("{}{name}", self.prefix),
            help,
            None,
            MetricType::Gauge,
        )?)
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) -> Result<(), Error> {
        let counter = ConstCounter::new(value);
        counter.encode(self.encoder.encode_descriptor(
            &format!("{}{name}", self.prefix),
            help,
            None,
            MetricType::Counter,
        )?)
    }

    /// One series per value of `label`.
    fn family<M: EncodeMetric>(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        series: &[(&str, M)],
    ) -> Result<(), Error> {
        let kind = series[0].1.metric_type();
        let name = format!("{}{name}", self.prefix);
        let mut encoder = self.encoder.encode_descriptor(&name, help, None, kind)?;
        for (value, metric) in series {
            metric.encode(encoder.encode_family(&[(label, *value)])?)?;
        }
        Ok(())
    }

    fn step_sizes(&mut self, stats: &Stats) -> Result<(), Error> {
        // The engine counts by powers of two; vLLM's bounds are 1 and those from 8 to 16384.
        let sizes = &stats.counters.step_tokens_histogram;
        let mut buckets: Vec<(f64, u64)> = Vec::new();
        let mut start = 0;
        for exponent in std::iter::once(0).chain(3..=14) {
            let end = sizes.len().min(exponent + 1);
            buckets.push(((exponent as f64).exp2(), sizes[start..end].iter().sum()));
            start = end;
        }
        buckets.push((f64::INFINITY, sizes[start..].iter().sum()));
        let name = format!("{}iteration_tokens_total", self.prefix);
        let mut encoder = self.encoder.encode_descriptor(&name, "Tokens per step", None, MetricType::Histogram)?;
        encoder.encode_histogram::<NoLabelSet>(
            stats.counters.step_tokens as f64,
            stats.counters.num_steps,
            &buckets,
            None,
        )
    }
}

impl Collector for EngineCollector {
    fn encode(&self, encoder: DescriptorEncoder) -> Result<(), Error> {
        let stats = self.engine.stats();
        let mut w = Writer { encoder, prefix: &self.prefix };
        w.gauge("num_requests_running", "Sequences in rows", f64::from(stats.num_running))?;
        w.gauge("num_requests_waiting", "Sequences that wait for a row", f64::from(stats.num_waiting))?;
        w.family(
            "num_requests_waiting_by_reason",
            "Sequences that wait, by reason",
            "reason",
            &[("capacity", ConstGauge::new(f64::from(stats.num_waiting))), ("deferred", ConstGauge::new(0.0))],
        )?;
        let usage = f64::from(stats.num_used_blocks) / f64::from(stats.num_total_blocks.max(1));
        w.gauge("kv_cache_usage_perc", "KV blocks in use, 0 to 1", usage)?;
        let what = "Kernels that the start-up self-test has replaced by their plain variant";
        w.gauge("num_replaced_kernels", what, self.num_replaced_kernels as f64)?;
        let hits = stats.counters.prefix_cache_hits_tokens;
        w.counter(
            "prefix_cache_queries",
            "Prompt tokens looked up in the cache",
            stats.counters.prefix_cache_queries_tokens,
        )?;
        w.counter("prefix_cache_hits", "Prompt tokens found in the cache", hits)?;
        w.counter("num_preemptions", "Preemptions", stats.counters.num_preemptions)?;
        w.counter("prompt_tokens", "Prompt tokens computed or found", stats.counters.prompt_tokens)?;
        w.counter("prompt_tokens_cached", "Prompt tokens found in the cache", hits)?;
        let computed = stats.counters.prompt_tokens.saturating_sub(hits);
        let computed = computed.max(self.computed_told.fetch_max(computed, Ordering::Relaxed));
        w.family(
            "prompt_tokens_by_source",
            "Prompt tokens by where they came from",
            "source",
            &[("local_compute", ConstCounter::new(computed)), ("local_cache_hit", ConstCounter::new(hits))],
        )?;
        w.counter("generation_tokens", "Tokens drawn", stats.counters.generation_tokens)?;
        w.counter("corrupted_requests", "Requests whose logits were not finite", stats.counters.num_corrupted)?;
        w.step_sizes(&stats)?;
        let name = format!("{}cache_config_info", self.prefix);
        let mut info = w.encoder.encode_descriptor(&name, "Options of the KV cache", None, MetricType::Gauge)?;
        ConstGauge::new(1.0).encode(info.encode_family(&self.cache_labels)?)
    }
}
