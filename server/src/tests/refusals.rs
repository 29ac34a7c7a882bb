//! Bad input: each a clear error that names the thing, in one shape.

use std::sync::Arc;

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::{Answer, Server, json_request};

/// A chat body with one field changed.
fn chat(field: &str, value: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2});
    body[field] = value;
    body
}

#[tokio::test]
async fn a_bad_value_is_400_and_names_its_field() {
    let server = Server::new();
    let cases = [
        ("temperature", json!(-1)),
        ("temperature", json!(2.5)),
        ("temperature", json!("0.5")),
        ("top_p", json!(0)),
        ("top_p", json!(1.5)),
        ("top_k", json!(-2)),
        ("top_k", json!(1.5)),
        ("min_p", json!(-0.1)),
        ("repetition_penalty", json!(0)),
        ("presence_penalty", json!(3)),
        ("frequency_penalty", json!(1e300)),
        ("max_tokens", json!(0)),
        ("max_tokens", json!(-5)),
        ("max_completion_tokens", json!(0)),
        ("max_tokens", json!(1e12)),
        ("min_tokens", json!(3)),
        ("min_tokens", json!(-1)),
        ("n", json!(0)),
        ("n", json!(100_000)),
        ("seed", json!("x")),
        ("stop", json!("")),
        ("stop", json!(["a", ""])),
        ("stop", json!(["1", "2", "3", "4", "5"])),
        ("stop", json!(7)),
        ("stop_token_ids", json!([512])),
        ("logit_bias", json!({"512": 1})),
        ("logit_bias", json!({"x": 1})),
        ("logit_bias", json!([1])),
        ("stream_options", json!({"include_usage": true})),
        ("top_logprobs", json!(2)),
        ("prompt_logprobs", json!(6)),
        ("prompt_logprobs", json!(-1)),
        ("cache_salt", json!("")),
        ("cache_salt", json!("a/b")),
        ("cache_salt", json!("x".repeat(129))),
        ("truncate_prompt_tokens", json!(0)),
        ("truncation_side", json!("middle")),
        ("ignore_eos", json!("yes")),
        ("messages", json!([])),
        ("messages", json!("Hi")),
        ("messages", Value::Null),
        ("chat_template", json!("{{ messages }}")),
        ("add_special_tokens", json!(true)),
        ("echo", json!(true)),
        ("tools", json!([])),
        ("response_format", json!({"type": "json_object"})),
        ("priority", json!(1)),
        ("priority", json!("high")),
        ("allowed_token_ids", json!([])),
        ("allowed_token_ids", json!([1, 512])),
        ("allowed_token_ids", json!(1)),
        ("bad_words", json!([""])),
        ("bad_words", json!(["a", "  "])),
        ("bad_words", json!("a")),
        ("bad_words", json!(vec!["a"; 513])),
        ("bad_words", json!(["a".repeat(257)])),
        ("logit_bias", json!({"+1": 1})),
        ("logit_bias", json!({"1": 1, "01": 1})),
    ];
    for (field, value) in cases {
        let answer = server.chat(chat(field, value.clone())).await;
        let param = answer.refused(400);
        let names = param.as_deref().is_some_and(|param| param.split(['[', '.']).next() == Some(field));
        assert!(names, "{field} = {value}: {}", answer.body);
    }
    assert_eq!(server.controls.num_steps(), 0, "nothing reached the engine");
}

#[tokio::test]
async fn paths_inside_messages_are_exact() {
    let server = Server::new();
    let image = json!([{"type": "text", "text": "what is this"}, {"type": "image_url", "image_url": {"url": "x"}}]);
    for (message, path) in [
        (json!({"role": "user", "content": 5}), "messages[1].content"),
        (json!({"role": "user", "content": image}), "messages[1].content[1].type"),
        (json!({"role": "user", "content": [{"type": "text"}]}), "messages[1].content[0].text"),
        (json!({"role": "user"}), "messages[1].content"),
        (json!({"role": "<|im_start|>", "content": ""}), "messages[1].role"),
        (json!({"role": 1, "content": ""}), "messages[1].role"),
    ] {
        let messages = json!([{"role": "user", "content": "Hi"}, message]);
        assert_eq!(server.chat(chat("messages", messages)).await.refused(400).as_deref(), Some(path));
    }
}

#[tokio::test]
async fn completions_refuse_their_own_fields() {
    let server = Server::new();
    for (body, param) in [
        (json!({}), "prompt"),
        (json!({"prompt": null}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": [[]]}), "prompt"),
        (json!({"prompt": [512]}), "prompt"),
        (json!({"prompt": [-1]}), "prompt[0]"),
        (json!({"prompt": [2_147_483_648u32]}), "prompt"),
        (json!({"prompt": [[1, "a"]]}), "prompt[0][1]"),
        (json!({"prompt": "a", "max_tokens": 0}), "max_tokens"),
        (json!({"prompt": "a", "logprobs": 6}), "logprobs"),
        (json!({"prompt": "a", "logprobs": true}), "logprobs"),
        (json!({"prompt": "a", "suffix": "b"}), "suffix"),
        (json!({"prompt": "a", "best_of": 2}), "best_of"),
        (json!({"prompt": "a", "guided_regex": "a+"}), "guided_regex"),
        (json!({"prompt": "a", "n": 2, "temperature": 0}), "n"),
        (json!({"prompt": vec!["a"; 41]}), "prompt"),
        (json!({"prompt": "a", "stream": true, "prompt_logprobs": 1}), "prompt_logprobs"),
    ] {
        let answer = server.complete(body.clone()).await;
        assert_eq!(answer.refused(400).as_deref(), Some(param), "{body}");
    }
    assert_eq!(server.controls.num_steps(), 0);
}

#[tokio::test]
async fn ids_outside_the_vocabulary_do_not_touch_a_running_neighbour() {
    let server = Server::new();
    let witness = async {
        let body = json!({"prompt": "witness", "max_tokens": 100, "temperature": 0});
        server.complete(body).await.json()["choices"][0]["text"].clone()
    };
    let attack = async {
        for id in [-1i64, 512, 513, 1 << 31] {
            for (field, value) in [
                ("stop_token_ids", json!([id])),
                ("logit_bias", json!({id.to_string(): 5})),
                ("prompt", json!([1, id])),
                ("allowed_token_ids", json!([id])),
            ] {
                let mut body = json!({"prompt": "a", "max_tokens": 1});
                body[field] = value;
                let param = server.complete(body).await.refused(400).expect("a param");
                assert!(param.starts_with(field), "{param}");
            }
        }
    };
    let (text, ()) = tokio::join!(witness, attack);
    assert_eq!(text, server.said(100));
}

#[tokio::test]
async fn options_that_would_leave_no_token_are_refused() {
    let server = Server::new();
    let every_id: Vec<u32> = (0..512).collect();
    let eos: Vec<u32> = server.state.text.eos_token_ids().iter().map(|id| id.0).collect();
    let letter: Vec<u32> = server.encode("a").iter().map(|id| id.0).collect();
    for (field, options) in [
        ("stop_token_ids", json!({"min_tokens": 1, "stop_token_ids": every_id})),
        ("allowed_token_ids", json!({"min_tokens": 1, "allowed_token_ids": eos})),
        ("allowed_token_ids", json!({"bad_words": ["a"], "allowed_token_ids": letter})),
    ] {
        let mut body = json!({"prompt": "a", "max_tokens": 2});
        body.as_object_mut().expect("an object").extend(options.as_object().expect("an object").clone());
        assert_eq!(server.complete(body).await.refused(400).as_deref(), Some(field));
    }
    assert_eq!(server.controls.num_steps(), 0);
    let body = json!({"prompt": "a", "max_tokens": 2, "min_tokens": 1, "ignore_eos": true, "allowed_token_ids": eos});
    assert_eq!(server.complete(body).await.status.as_u16(), 200, "eos ids that are ignored are not masked");
}

#[tokio::test]
async fn json_at_its_edges() {
    let server = Server::new();
    let send = async |fields: &str| {
        let body = format!(r#"{{"messages": [{{"role": "user", "content": "Hi"}}], {fields}}}"#);
        server.send(json_request("/v1/chat/completions", body)).await
    };
    let deep = |field: &str| format!("\"max_tokens\": 2, \"{field}\": {}1{}", "[".repeat(10_000), "]".repeat(10_000));
    for good in [
        r#""max_tokens": 2.0, "seed": -0, "temperature": -0.0"#,
        r#""max_tokens": 2, "n": null, "stop": null, "logit_bias": null, "stream_options": null, "tools": null"#,
        r#""max_tokens": 2, "seed": 9223372036854775807"#,
        r#""max_tokens": 2, "logit_bias": {"7": 1e300}"#,
        r#""max_tokens": 2, "stop": "\ud83d\ude00\u0000", "tomorrow": 1, "tomorrow": 2"#,
        &deep("tomorrow"),
    ] {
        assert_eq!(send(good).await.status.as_u16(), 200, "{good:.90}");
    }
    for (bad, param) in [
        (r#""max_tokens": 2.5"#, Some("max_tokens")),
        (r#""max_tokens": -0.0"#, Some("max_tokens")),
        (r#""max_tokens": 18446744073709551616"#, Some("max_tokens")),
        (r#""max_tokens": "2""#, Some("max_tokens")),
        (r#""max_tokens": true"#, Some("max_tokens")),
        (r#""seed": 9223372036854775808"#, Some("seed")),
        (r#""seed": 1e19"#, Some("seed")),
        (r#""repetition_penalty": 1e39"#, Some("repetition_penalty")),
        (r#""repetition_penalty": 1e-60"#, Some("repetition_penalty")),
        (r#""top_p": 1e-60"#, Some("top_p")),
        (r#""max_tokens": 1, "max_tokens": 2"#, Some("max_tokens")),
        (r#""tools": null, "tools": []"#, Some("tools")),
        (r#""temperature": 1e400"#, None),
        (r#""temperature": NaN"#, None),
        (r#""temperature": 01"#, None),
        (r#""stop": "\ud800""#, None),
        ("\"stop\": \"a\u{1}b\"", None),
        (r#""tools": null,"#, None),
        (&deep("documents"), None),
        (&deep("response_format"), None),
    ] {
        let answer = send(bad).await;
        assert_eq!(answer.refused(400).as_deref(), param, "{bad:.90}: {}", answer.body);
    }
}

#[tokio::test]
async fn a_handler_that_panics_is_500_and_the_next_request_is_served() {
    async fn panics() {
        panic!("on purpose")
    }
    let server = Server::new();
    let router = crate::routes::guard(vec![("/panic", axum::routing::get(panics))], Arc::clone(&server.state));
    for _ in 0..2 {
        let request = Request::get("/panic").body(Body::empty()).expect("a request");
        let answer = Answer::of(router.clone().oneshot(request).await.expect("the router answers")).await;
        answer.refused(500);
        assert!(!answer.body.contains("on purpose"), "{}", answer.body);
    }
}

#[tokio::test]
async fn bodies_that_are_not_json_are_400_413_or_415() {
    let server = Server::with(|config, _| config.max_body_bytes = 4096);
    let path = "/v1/chat/completions";
    for body in ["", "{", "[]", "null", "7", "{\"messages\":}", "{\"a\":1}{", "\u{0}", "{\"messages\": \"\\ud800\"}"] {
        server.send(json_request(path, body.into())).await.refused(400);
    }
    let nested = format!("{{\"messages\": {}1{}}}", "[".repeat(1000), "]".repeat(1000));
    server.post(path, nested).await.refused(400);
    let broken = Request::post(path).header("content-type", "application/json").body(Body::from(vec![0xff, 0xfe]));
    server.send(broken.expect("a request")).await.refused(400);
    for kind in [None, Some("text/plain"), Some("application/x-www-form-urlencoded")] {
        let mut request = Request::post(path);
        if let Some(kind) = kind {
            request = request.header("content-type", kind);
        }
        server.send(request.body(Body::from("{}")).expect("a request")).await.refused(415);
    }
    for (encoding, status) in [("gzip", 415), ("identity", 400)] {
        let request = Request::post(path).header("content-type", "application/json; charset=utf-8");
        let request = request.header("content-encoding", encoding).body(Body::from("{}"));
        server.send(request.expect("a request")).await.refused(status);
    }
    let large = chat("user", json!("x".repeat(5000)));
    server.chat(large).await.refused(413);
}

#[tokio::test]
async fn an_error_about_a_large_body_is_small() {
    let server = Server::new();
    for body in [
        chat("temperature", json!("x".repeat(100_000))),
        chat(&"k".repeat(50_000), json!(1)),
        chat("model", json!("m".repeat(100_000))),
        chat("messages", json!([{"role": "r".repeat(100_000), "content": ""}])),
        chat("stop_token_ids", json!(vec!["y".repeat(1000); 1000])),
        chat("logit_bias", json!({"z".repeat(100_000): 1})),
    ] {
        let answer = server.chat(body).await;
        assert!(answer.body.len() < 4096, "{} bytes", answer.body.len());
    }
}

#[tokio::test]
async fn a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised() {
    let server = Server::new();
    let answer = server.complete(json!({"prompt": "x".repeat(1 << 20)})).await;
    assert_eq!(answer.refused(400).as_deref(), Some("prompt"));
    assert!(answer.body.contains("1048576 bytes"), "{}", answer.body);
}

#[tokio::test]
async fn paths_methods_and_models_that_are_not_there() {
    let server = Server::new();
    server.get("/v1/nothing").await.refused(404);
    server.get("/v1/chat/completions").await.refused(405);
    server.post("/health", "{}").await.refused(405);
    server.post("/v1/embeddings", "{}").await.refused(501);
    server.post("/v1/responses", "{}").await.refused(501);
    server.post("/v1/messages/count_tokens", "{}").await.refused(501);
    server.post("/reset_prefix_cache", "{}").await.refused(404);
    server.get("/v1/models/%ff").await.refused(400);
    server.get("/v1/models/org%zz").await.refused(404);
    assert_eq!(server.chat(chat("model", json!("gpt-x"))).await.refused(404).as_deref(), Some("model"));
}

#[tokio::test]
async fn keys_guard_v1_and_nothing_else() {
    let server = Server::with(|config, _| config.api_keys = vec!["first".into(), "second".into()]);
    let with =
        |key: &str| Request::get("/v1/models").header("authorization", key).body(Body::empty()).expect("a request");
    for key in ["Bearer first", "bearer second"] {
        assert_eq!(server.send(with(key)).await.status.as_u16(), 200);
    }
    for key in ["Bearer third", "Bearer ", "first", "Basic first", "Bearer first "] {
        let answer = server.send(with(key)).await;
        answer.refused(401);
        assert_eq!(answer.headers["www-authenticate"], "Bearer");
    }
    server.get("/v1/models").await.refused(401);
    for open in ["/health", "/metrics", "/version", "/live"] {
        assert_eq!(server.get(open).await.status.as_u16(), 200, "{open}");
    }
}

#[tokio::test]
async fn browsers_are_told_what_they_may_do() {
    let server = Server::with(|config, _| {
        config.allowed_origins = vec!["https://app.example".into()];
        config.api_keys = vec!["key".into()];
        config.enable_request_id_headers = true;
    });
    let ask = Request::options("/v1/chat/completions")
        .header("origin", "https://app.example")
        .header("access-control-request-method", "POST");
    let answer = server.send(ask.body(Body::empty()).expect("a request")).await;
    assert_eq!(answer.status.as_u16(), 200);
    assert_eq!(answer.headers["access-control-allow-origin"], "https://app.example");

    let named = Request::get("/version").header("x-request-id", "mine").body(Body::empty()).expect("a request");
    assert_eq!(server.send(named).await.headers["x-request-id"], "mine");
    assert!(!server.get("/version").await.headers["x-request-id"].is_empty());
}
