//! Random bodies: whatever a client sends, the answer is 200 or 4xx in the error shape, and the next request is served.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::Server;

/// Any JSON, strange numbers and nesting included.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-5i64..600).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (-3.0..3.0f64).prop_map(Value::from),
        "[a-z{}<|>%😀\u{0}]{0,12}".prop_map(Value::from),
        prop_oneof![Just("text"), Just("user"), Just("none"), Just("<|im_start|>"), Just("left")].prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec(("[a-z0-9]{0,8}|type|text|role|content", inner), 0..6)
                .prop_map(|fields| Value::Object(Map::from_iter(fields))),
        ]
    })
}

fn field() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec![
        "model",
        "messages",
        "prompt",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "seed",
        "stop",
        "stop_token_ids",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "ignore_eos",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "n",
        "stream",
        "stream_options",
        "prompt_logprobs",
        "logprobs",
        "top_logprobs",
        "cache_salt",
        "echo",
        "suffix",
        "truncate_prompt_tokens",
        "truncation_side",
        "return_token_ids",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "tools",
        "response_format",
        "tokens",
        "add_special_tokens",
        "allowed_token_ids",
        "bad_words",
        "priority",
        "something_else",
    ])
}

/// A body that is right but for a few fields.
fn body() -> impl Strategy<Value = Value> {
    prop::collection::vec((field(), any_json()), 0..4).prop_map(|changes| {
        let mut body =
            json!({"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "max_tokens": 3, "tokens": [1]});
        for (field, value) in changes {
            body[field] = value;
        }
        body
    })
}

#[test]
fn no_body_makes_the_server_fail() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let server = runtime.block_on(async { Server::new() });
    let paths = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"];
    let mut config = ProptestConfig::with_cases(if cfg!(debug_assertions) { 400 } else { 100 });
    config.failure_persistence = None;
    let strategy = (prop::sample::select(paths.to_vec()), prop_oneof![8 => body(), 1 => any_json()]);
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let result = runner.run(&strategy, |(path, body)| {
        let answer = runtime.block_on(server.post(path, &body));
        let status = answer.status.as_u16();
        prop_assert!(status == 200 || (400..500).contains(&status), "{status}: {}", answer.body);
        if status != 200 {
            prop_assert_eq!(&answer.json()["error"]["code"], status);
        }
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
    runtime.block_on(async {
        let answer = server.complete(json!({"prompt": "Hi", "max_tokens": 5, "temperature": 0})).await;
        assert_eq!(answer.json()["choices"][0]["text"], server.said(5));
        server.idle().await;
    });
}
