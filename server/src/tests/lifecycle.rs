//! What happens around answers: clients that leave, full queues, a failing device, the drain, metrics.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use futures_core::Stream;
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tower::ServiceExt;

use super::script::CORRUPT;
use super::sockets::{Listening, completion, rest};
use super::{Server, json_request};
use crate::router;

fn long(stream: bool) -> Value {
    json!({"prompt": "a b c", "max_tokens": 200, "temperature": 0, "stream": stream})
}

impl Server {
    /// Sends a completion and gives the response back with its body unread.
    async fn open(&self, body: &Value) -> Response {
        let request = json_request("/v1/completions", body.to_string());
        router(Arc::clone(&self.state)).oneshot(request).await.expect("the router answers")
    }

    /// Waits until `condition` holds for the engine's gauges.
    async fn until(&self, condition: impl Fn(u32, u32) -> bool) {
        for _ in 0..10_000 {
            let stats = self.state.engine.stats();
            if condition(stats.num_running, stats.num_waiting) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        panic!("never happened: {:?}", self.state.engine.stats());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_mid_stream_frees_everything() {
    let server = Server::new();
    server.controls.hold_after(1);
    let response = server.open(&long(true)).await;
    assert_eq!(response.status().as_u16(), 200);
    drop(response);
    // The step that runs may end, no other.
    server.controls.hold_after(1);
    server.idle().await;
    assert_eq!(server.metric("vllm:request_success_total{finished_reason=\"abort\"}").await, 1.0);
    assert_eq!(server.get("/load").await.json(), json!({"server_load": 0}));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_while_waiting_frees_all_choices() {
    for stream in [false, true] {
        let server = Server::new();
        server.controls.hold_after(0);
        // More choices than rows: some run, some wait.
        let mut body = long(stream);
        body["n"] = 20.into();
        body["temperature"] = 1.into();
        let request = tokio::time::timeout(Duration::from_secs(60), server.open(&body));
        let mut request = Box::pin(request);
        tokio::select! {
            _ = &mut request => panic!("no step ended"),
            () = server.until(|running, waiting| running + waiting >= 20) => {}
        }
        drop(request);
        server.controls.hold_after(1);
        server.idle().await;
        assert_eq!(server.metric("vllm:request_success_total{finished_reason=\"abort\"}").await, 20.0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_is_503_with_retry_after_and_counted() {
    let server = Server::with(|_, engine| (engine.max_num_seqs, engine.max_num_queued_reqs) = (1, 1));
    server.controls.hold_after(0);
    let bodies = [long(false), long(false)];
    let (first, second) = (server.open(&bodies[0]), server.open(&bodies[1]));
    let refused = async {
        server.until(|running, waiting| running + waiting == 2).await;
        let answer = server.complete(long(false)).await;
        server.controls.release();
        answer
    };
    let (first, second, refused) = tokio::join!(first, second, refused);
    assert_eq!((first.status().as_u16(), second.status().as_u16()), (200, 200));
    refused.refused(503);
    assert_eq!(refused.headers["retry-after"], "1");
    assert_eq!(server.metric("vllm:admission_rejections_total{reason=\"max_num_queued_reqs\"}").await, 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_device_is_500_before_the_first_token_and_an_event_after_it() {
    let server = Server::new();
    server.controls.hold_after(1);
    let streaming = server.open(&long(true)).await;
    assert_eq!(streaming.status().as_u16(), 200, "it has its first token");
    let fail = async {
        server.until(|running, waiting| running + waiting == 2).await;
        server.controls.fail();
        server.controls.release();
    };
    let (whole, ()) = tokio::join!(server.complete(long(false)), fail);
    whole.refused(500);
    let bytes = axum::body::to_bytes(streaming.into_body(), usize::MAX).await.expect("the body ends");
    let text = String::from_utf8(bytes.to_vec()).expect("UTF-8");
    assert!(!text.contains("[DONE]"), "{text}");
    assert!(text.trim_end().lines().last().is_some_and(|line| line.starts_with("data: {\"error\"")), "{text}");
    assert_eq!(server.metric("vllm:request_success_total{finished_reason=\"error\"}").await, 2.0);
    server.get("/health").await.refused(503);
    server.get("/ready").await.refused(503);
    assert_eq!(server.get("/live").await.status.as_u16(), 200);
    server.complete(long(false)).await.refused(503);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_that_are_not_finite_end_one_request_only() {
    let server = Server::new();
    let bad = async {
        for stream in [false, true] {
            let body = json!({"prompt": [40, CORRUPT, 41], "max_tokens": 5, "stream": stream});
            server.complete(body).await.refused(500);
        }
    };
    let good = async { server.complete(long(false)).await.json() };
    let ((), good) = tokio::join!(bad, good);
    assert_eq!(good["choices"][0]["text"], server.said(200));
    assert_eq!(server.metric("vllm:corrupted_requests_total").await, 2.0);
    let health = server.get("/health").await;
    assert_eq!(health.status.as_u16(), 200);
    assert_eq!(health.body, "kernel rope runs its plain variant", "what serves slower than it should is named");
}

#[tokio::test(start_paused = true)]
async fn silence_is_broken_by_comments_and_every_chunk_has_one_id() {
    let server = Server::new();
    server.controls.hold_after(0);
    // The clock jumps while the engine is held: the headers come without a token after one interval.
    let mut body = server.open(&long(true)).await.into_body().into_data_stream();
    let mut next = async || poll_fn(|cx| Pin::new(&mut body).poll_next(cx)).await.map(|bytes| bytes.expect("a frame"));
    for _ in 0..3 {
        assert_eq!(next().await.as_deref(), Some(&b": keep-alive\n\n"[..]));
    }
    server.controls.release();
    let mut text = String::new();
    while let Some(bytes) = next().await {
        text.push_str(std::str::from_utf8(&bytes).expect("whole characters"));
    }
    let answer = super::Answer { status: StatusCode::OK, headers: HeaderMap::new(), body: text };
    let mut events = answer.events();
    assert_eq!(events.pop(), Some("[DONE]".into()));
    assert!(events.iter().all(|event| event["id"] == events[0]["id"]));
    let said: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!(said, server.said(200));
}

#[tokio::test]
async fn metrics_count_what_happened_under_vllms_names() {
    let server = Server::new();
    for _ in 0..2 {
        server.complete(json!({"prompt": "The sea is blue", "max_tokens": 9, "temperature": 0})).await.json();
    }
    let text = server.get("/metrics").await;
    assert_eq!(text.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    let prompt = server.state.text.encode("The sea is blue", true, true).len() as f64;
    for (series, value) in [
        ("vllm:num_requests_running", 0.0),
        ("vllm:num_requests_waiting", 0.0),
        ("vllm:kv_cache_usage_perc", 0.0),
        ("vllm:num_replaced_kernels", 1.0),
        ("vllm:prompt_tokens_total", 2.0 * prompt),
        ("vllm:generation_tokens_total", 18.0),
        ("vllm:request_success_total{finished_reason=\"length\"}", 2.0),
        ("vllm:time_to_first_token_seconds_count", 2.0),
        ("vllm:inter_token_latency_seconds_count", 16.0),
        ("vllm:request_time_per_output_token_seconds_count", 2.0),
        ("vllm:e2e_request_latency_seconds_count", 2.0),
        ("vllm:request_queue_time_seconds_count", 2.0),
        ("vllm:request_prefill_time_seconds_count", 2.0),
        ("vllm:request_prompt_tokens_sum", 2.0 * prompt),
        ("vllm:request_generation_tokens_bucket{le=\"10.0\"}", 2.0),
        ("vllm:request_params_max_tokens_sum", 18.0),
        ("vllm:request_params_n_sum", 2.0),
        ("vllm:iteration_tokens_total_count", server.controls.num_steps() as f64),
        ("vllm:iteration_tokens_total_bucket{le=\"+Inf\"}", server.controls.num_steps() as f64),
        ("vllm:admission_rejections_total{reason=\"max_num_queued_tokens\"}", 0.0),
        ("vllm:num_preemptions_total", 0.0),
        ("vllm:cache_config_info{block_size=\"4\"}", 1.0),
        ("vllm:cache_config_info{num_gpu_blocks=\"512\"}", 1.0),
    ] {
        assert_eq!(server.metric(series).await, value, "{series}");
    }
    assert!(server.metric("vllm:prefix_cache_hits_total").await > 0.0);
    let line = text.body.lines().find(|line| line.starts_with("vllm:num_requests_running{")).expect("a gauge");
    assert!(line.contains("model_name=\"org/tiny\"") && line.contains("engine=\"0\""), "{line}");
    assert!(text.body.contains("# TYPE vllm:prompt_tokens_total counter"), "{}", text.body);
    assert!(!text.body.contains("# EOF"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_drain_lets_running_requests_end_and_refuses_new_ones() {
    let listening = Listening::start(Server::new());
    let server = &listening.server;
    server.controls.hold_after(1);
    let mut running = listening.send(&completion("1.1", "", &long(true))).await;
    let mut first = [0; 12];
    running.read_exact(&mut first).await.expect("the answer begins");
    assert_eq!(&first, b"HTTP/1.1 200");
    listening.stop.send(()).await.expect("the server listens");
    while server.get("/health").await.status.as_u16() == 200 {
        tokio::task::yield_now().await;
    }
    server.complete(long(false)).await.refused(503);
    server.controls.release();
    let rest = rest(running).await;
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("data: [DONE]"), "{rest}");
    listening.serving.await.expect("joined").expect("a clean end");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_server_ends_with_an_error_when_its_engine_fails() {
    let listening = Listening::start(Server::new());
    listening.server.controls.fail();
    listening.server.complete(long(false)).await.refused(500);
    let ended = listening.serving.await.expect("joined");
    assert!(matches!(&ended, Err(crate::ServeError::Engine(why)) if why.contains("on purpose")), "{ended:?}");
}

#[tokio::test]
async fn the_cache_is_forgotten_on_the_admin_route_only_where_it_is_enabled() {
    let server = Server::with(|config, _| config.enable_admin = true);
    let body = json!({"prompt": "The sea is blue and wide", "max_tokens": 1});
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    server.complete(body.clone()).await;
    assert!(cached(&server.complete(body.clone()).await.json()) > Some(0));
    assert_eq!(server.post("/reset_prefix_cache", "").await.status.as_u16(), 200);
    assert_eq!(cached(&server.complete(body).await.json()), Some(0));
}

#[tokio::test]
async fn tenants_with_different_salts_share_no_cache() {
    let server = Server::new();
    let ask = async |salt: &str| {
        let body = json!({"prompt": "The sea is blue and wide", "max_tokens": 1, "cache_salt": salt});
        server.complete(body).await.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64()
    };
    assert_eq!(ask("one").await, Some(0));
    assert_eq!(ask("two").await, Some(0));
    assert!(ask("one").await > Some(0));
}
