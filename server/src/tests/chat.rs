//! Chats: whole answers, streams, and that both say the same.

use serde_json::{Value, json};

use super::{SCRIPT, Server};

fn hello() -> Value {
    json!({"model": "org/tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "temperature": 0})
}

fn with(changes: Value) -> Value {
    let mut body = hello();
    body.as_object_mut().expect("an object").extend(changes.as_object().expect("an object").clone());
    body
}

/// Content and finish reason of choice `index` of a stream.
fn joined(events: &[Value], index: usize) -> (String, Vec<Value>) {
    let choices = events.iter().flat_map(|event| event["choices"].as_array().into_iter().flatten());
    let own: Vec<&Value> = choices.filter(|choice| choice["index"] == index).collect();
    let text = own.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
    let reasons = own.iter().map(|choice| choice["finish_reason"].clone()).filter(|reason| !reason.is_null()).collect();
    (text, reasons)
}

#[tokio::test]
async fn a_whole_answer_has_text_reason_and_usage() {
    let server = Server::new();
    let answer = server.chat(hello()).await.json();
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], "org/tiny");
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"], json!({"role": "assistant", "content": server.said(12), "refusal": null}));
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["stop_reason"], Value::Null);
    let prompt = answer["usage"]["prompt_tokens"].as_u64().expect("a number");
    assert_eq!(answer["usage"]["completion_tokens"], 12);
    assert_eq!(answer["usage"]["total_tokens"], prompt + 12);
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);

    let again = server.chat(hello()).await.json();
    assert!(again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64() > Some(0), "{again}");
    assert_ne!(answer["id"], again["id"]);
}

#[tokio::test]
async fn a_stream_says_what_a_whole_answer_says_with_one_id_and_one_reason() {
    let server = Server::new();
    let answer = server.chat(with(json!({"stream": true, "stream_options": {"include_usage": true}}))).await;
    assert_eq!(answer.headers["content-type"], "text/event-stream; charset=utf-8");
    assert_eq!(answer.headers["cache-control"], "no-cache");
    assert_eq!(answer.headers["x-accel-buffering"], "no");
    let mut events = answer.events();
    assert_eq!(events.pop(), Some("[DONE]".into()));
    let usage = events.pop().expect("a usage chunk");
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], 12);
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    for event in events.iter().chain([&usage]) {
        for field in ["id", "created", "model"] {
            assert_eq!(event[field], events[0][field]);
        }
        assert_eq!(event["object"], "chat.completion.chunk");
    }
    assert!(events.iter().all(|event| event.get("usage").is_none()), "usage is in the last chunk only");
    assert_eq!(joined(&events, 0), (server.said(12), vec!["length".into()]));
    assert!(!events.last().expect("chunks")["choices"][0]["finish_reason"].is_null(), "the last chunk has the reason");
}

#[tokio::test]
async fn usage_is_sent_only_when_asked_for_and_in_every_chunk_when_asked_for_that() {
    let server = Server::new();
    let plain = server.chat(with(json!({"stream": true}))).await.events();
    assert!(plain.iter().all(|event| event.get("usage").is_none()));
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let events = server.chat(with(json!({"stream": true, "stream_options": options}))).await.events();
    let counts: Vec<u64> = events.iter().filter_map(|event| event["usage"]["completion_tokens"].as_u64()).collect();
    assert_eq!(counts.len(), events.len() - 1);
    assert_eq!((counts[0], counts.last()), (0, Some(&12)));
    assert!(counts.is_sorted());
}

#[tokio::test]
async fn every_cut_of_the_stream_is_whole_characters() {
    let server = Server::new();
    let all = server.encode(SCRIPT).len();
    for max_tokens in 1..=all {
        let body = with(json!({"stream": true, "max_tokens": max_tokens}));
        let (text, reasons) = joined(&server.chat(body).await.events(), 0);
        assert_eq!(text, server.said(max_tokens));
        assert_eq!(reasons, ["length"]);
    }
}

#[tokio::test]
async fn a_stop_string_never_leaks_and_is_named() {
    let server = Server::new();
    for (stop, text) in [("blue. 今", "The sea is "), ("😀", "The sea is blue. 今天 "), ("T", ""), ("is b", "The sea ")]
    {
        for stream in [false, true] {
            let answer = server.chat(with(json!({"max_tokens": 60, "stop": stop, "stream": stream}))).await;
            if stream {
                assert_eq!(joined(&answer.events(), 0), (text.to_owned(), vec!["stop".into()]), "{stop}");
                continue;
            }
            let choice = &answer.json()["choices"][0];
            assert_eq!(choice["message"]["content"], text);
            assert_eq!(choice["finish_reason"], "stop");
            assert_eq!(choice["stop_reason"], stop);
        }
    }
    let body = with(json!({"max_tokens": 60, "stop": ["xyz", "blue."], "include_stop_str_in_output": true}));
    assert_eq!(server.chat(body).await.json()["choices"][0]["message"]["content"], "The sea is blue.");
    // Looked for only after `min_tokens`: the next time that the script comes round.
    let all = server.encode(SCRIPT).len();
    let body = with(json!({"max_tokens": 3 * all, "min_tokens": all, "stop": "is b"}));
    assert_eq!(server.chat(body).await.json()["choices"][0]["message"]["content"], format!("{SCRIPT}The sea "));
    server.idle().await;
}

#[tokio::test]
async fn stop_ids_end_an_answer_without_their_text() {
    let server = Server::new();
    let third = server.encode(SCRIPT)[2];
    let choice = server.chat(with(json!({"stop_token_ids": [third]}))).await.json()["choices"][0].clone();
    assert_eq!(choice["message"]["content"], server.said(2));
    assert_eq!(choice["stop_reason"], third.0);
    assert_eq!(choice["finish_reason"], "stop");
    let body = with(json!({"stop_token_ids": [third], "include_stop_str_in_output": true}));
    assert_eq!(server.chat(body).await.json()["choices"][0]["message"]["content"], server.said(3));
}

#[tokio::test]
async fn choices_have_their_own_seeds_and_arrive_under_their_index() {
    let server = Server::new();
    let body = json!({"n": 3, "temperature": 1, "seed": 1, "max_tokens": 8});
    let answer = server.chat(with(body.clone())).await.json();
    let whole: Vec<String> =
        (0..3).map(|i| answer["choices"][i]["message"]["content"].as_str().expect("text").to_owned()).collect();
    assert_eq!(answer["usage"]["completion_tokens"], 24);
    let script = server.encode(SCRIPT);
    for (i, text) in whole.iter().enumerate() {
        assert_eq!(answer["choices"][i]["index"], i);
        assert_eq!(*text, server.state.text.decode(&script[i + 1..i + 9], true));
    }
    let mut streamed = body;
    streamed["stream"] = true.into();
    let events = server.chat(with(streamed)).await.events();
    for (i, text) in whole.iter().enumerate() {
        assert_eq!(joined(&events, i), (text.clone(), vec!["length".into()]));
    }
}

#[tokio::test]
async fn logprobs_are_finite_and_complete() {
    let server = Server::new();
    let body = with(json!({"logprobs": true, "top_logprobs": 3, "max_tokens": 12}));
    let answer = server.chat(body.clone()).await.json();
    let content = answer["choices"][0]["logprobs"]["content"].as_array().expect("a list").clone();
    assert_eq!(content.len(), 12);
    let bytes: Vec<u8> = content
        .iter()
        .flat_map(|entry| entry["bytes"].as_array().expect("bytes"))
        .map(|byte| byte.as_u64().expect("a byte") as u8)
        .collect();
    assert_eq!(String::from_utf8_lossy(&bytes), server.said(12));
    assert_eq!(content[0]["logprob"], -0.5);
    assert_eq!(content[0]["top_logprobs"].as_array().map(Vec::len), Some(3));
    assert_eq!(content[0]["top_logprobs"][2]["logprob"], -9999.0);

    let mut stream = body;
    stream["stream"] = true.into();
    let events = server.chat(stream).await.events();
    let streamed: Vec<Value> = events
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(streamed, content);
}

#[tokio::test]
async fn parts_are_lines_and_the_last_message_can_be_continued() {
    let server = Server::new();
    let parts = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]});
    let lines = json!({"messages": [{"role": "user", "content": "a\nb"}]});
    let parts = server.post("/tokenize", parts).await.json();
    assert_eq!(parts, server.post("/tokenize", lines).await.json());

    let open = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The sea"}],
        "continue_final_message": true});
    let ids = server.post("/tokenize", open).await.json();
    let text = server.post("/detokenize", json!({"tokens": ids["tokens"]})).await.json();
    assert!(text["prompt"].as_str().expect("text").ends_with("assistant\nThe sea"), "{text}");
}

#[tokio::test]
async fn token_ids_are_returned_on_request() {
    let server = Server::new();
    let answer = server.chat(with(json!({"return_token_ids": true, "max_tokens": 3}))).await.json();
    let said: Vec<u32> = server.encode(SCRIPT)[..3].iter().map(|id| id.0).collect();
    assert_eq!(answer["choices"][0]["token_ids"], json!(said));
    let tokenized = server.post("/tokenize", json!({"messages": hello()["messages"]})).await.json();
    assert_eq!(answer["prompt_token_ids"], tokenized["tokens"]);
}

#[tokio::test]
async fn the_answer_fills_the_context_when_no_length_is_given() {
    let server = Server::new();
    let mut body = hello();
    body.as_object_mut().expect("an object").remove("max_tokens");
    let answer = server.chat(body).await.json();
    assert_eq!(answer["usage"]["total_tokens"], 256);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}
