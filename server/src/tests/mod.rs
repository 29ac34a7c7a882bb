//! The router over a real engine whose runner follows a script: one test per promise of the wire.
//!
//! Invariant: no socket, no model; the text of every answer is known in advance, so that each test compares whole answers.

mod body_fuzz;
mod chat;
mod completions;
mod lifecycle;
mod openapi;
mod refusals;
mod script;
mod sockets;

use std::path::Path;
use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request, StatusCode};
use axum::response::Response;
use runtime::engine::{Engine, EngineConfig};
use runtime::ids::TokenId;
use runtime::text::TextModel;
use runtime::weights::Checkpoint;
use serde_json::Value;
use tower::ServiceExt;

use crate::{AppState, ServedModel, ServerConfig, router};
use script::{Controls, Script};

/// What the scripted model says, again and again.
const SCRIPT: &str = "The sea is blue. 今天 😀 and so on, ";

/// A server whose model follows the script.
struct Server {
    state: Arc<AppState>,
    controls: Controls,
}

/// One answer.
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: String,
}

impl Answer {
    async fn of(response: Response) -> Self {
        let (parts, body) = response.into_parts();
        let body = to_bytes(body, usize::MAX).await.expect("the body is whole");
        let body = String::from_utf8(body.to_vec()).expect("answers are UTF-8");
        Self { status: parts.status, headers: parts.headers, body }
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// The data of each event; `[DONE]` is a string.
    fn events(&self) -> Vec<Value> {
        assert!(self.body.ends_with("\n\n"), "the stream breaks off: {}", self.body);
        let lines = self.body.split("\n\n").filter(|event| !event.is_empty() && !event.starts_with(':'));
        let data = lines.map(|event| event.strip_prefix("data: ").expect("an event has data"));
        data.map(|data| serde_json::from_str(data).unwrap_or_else(|_| data.into())).collect()
    }

    /// `error.param` of a refusal with this status.
    fn refused(&self, status: u16) -> Option<String> {
        assert_eq!(self.status.as_u16(), status, "{}", self.body);
        let error = &self.json()["error"];
        assert_eq!(error["code"], status);
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{}", self.body);
        assert!(error["type"].is_string(), "{}", self.body);
        error["param"].as_str().map(str::to_owned)
    }
}

impl Server {
    fn new() -> Self {
        Self::with(|_, _| ())
    }

    fn with(change: impl FnOnce(&mut ServerConfig, &mut EngineConfig)) -> Self {
        let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/llama-tiny"));
        let checkpoint = Checkpoint::open(path).expect("the fixture opens");
        let text = TextModel::load(&checkpoint, None, None).expect("the fixture has a tokenizer");
        let mut engine_config = EngineConfig {
            vocab_size: 512,
            max_model_len: 256,
            max_num_batched_tokens: 64,
            max_num_seqs: 8,
            block_size: 4,
            num_blocks: 512,
            enable_prefix_caching: true,
            long_prefill_token_threshold: 0,
            max_num_queued_reqs: 32,
            max_num_queued_tokens: 0,
            seed: 0,
            max_logprobs: 5,
            prompt_logprob_chunk: 8,
        };
        let mut config =
            ServerConfig { served_model_names: vec!["org/tiny".into(), "tiny".into()], ..ServerConfig::default() };
        change(&mut config, &mut engine_config);
        let (script, controls) = Script::new(text.encode(SCRIPT, false, false));
        let engine = Engine::start(move || Ok((Box::new(script), engine_config))).expect("the engine starts");
        let model = ServedModel {
            root: "/models/tiny".into(),
            cache_labels: vec![("cache_dtype".into(), "f16".into())],
            replaced_kernels: vec!["kernel rope runs its plain variant".into()],
        };
        Self { state: AppState::new(config, engine, text, model), controls }
    }

    async fn send(&self, request: Request<Body>) -> Answer {
        Answer::of(router(Arc::clone(&self.state)).oneshot(request).await.expect("the router answers")).await
    }

    async fn get(&self, path: &str) -> Answer {
        self.send(Request::get(path).body(Body::empty()).expect("a request")).await
    }

    async fn post(&self, path: &str, body: impl ToString) -> Answer {
        self.send(json_request(path, body.to_string())).await
    }

    async fn chat(&self, body: Value) -> Answer {
        self.post("/v1/chat/completions", body).await
    }

    async fn complete(&self, body: Value) -> Answer {
        self.post("/v1/completions", body).await
    }

    /// The value of one series of `/metrics`.
    async fn metric(&self, series: &str) -> f64 {
        let answer = self.get("/metrics").await;
        let line = answer.body.lines().find_map(|line| {
            let (name, value) = line.rsplit_once(' ')?;
            let (bare, labels) = name.split_once('{')?;
            let wanted =
                series.split_once('{').map_or((series, ""), |(bare, label)| (bare, label.trim_end_matches('}')));
            (bare == wanted.0 && labels.contains(wanted.1)).then_some(value)
        });
        line.unwrap_or_else(|| panic!("no {series} in {}", answer.body)).parse().expect("a number")
    }

    /// Waits until nothing runs and nothing holds a block; fails when that never happens.
    async fn idle(&self) {
        for _ in 0..10_000 {
            let stats = self.state.engine.stats();
            if stats.num_running == 0 && stats.num_waiting == 0 && stats.num_used_blocks == 0 {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        panic!("requests or blocks are left: {:?}", self.state.engine.stats());
    }

    fn encode(&self, text: &str) -> Vec<TokenId> {
        self.state.text.encode(text, false, false)
    }

    /// The first `num_tokens` tokens of the script as text, whole characters only.
    fn said(&self, num_tokens: usize) -> String {
        let script = self.encode(SCRIPT);
        let ids: Vec<TokenId> = script.iter().copied().cycle().take(num_tokens).collect();
        self.state.text.decode(&ids, true)
    }
}

fn json_request(path: &str, body: String) -> Request<Body> {
    let request = Request::post(path).header("content-type", "application/json");
    request.body(Body::from(body)).expect("a request")
}
