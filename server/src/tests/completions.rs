//! Text completions, tokenise and models.

use serde_json::{Value, json};

use super::{SCRIPT, Server};

#[tokio::test]
async fn a_prompt_comes_in_four_shapes_and_gives_the_same_answer() {
    let server = Server::new();
    let ids: Vec<u32> = server.encode("Hello").iter().map(|id| id.0).collect();
    for prompt in [json!("Hello"), json!(["Hello"]), json!(ids), json!([ids])] {
        let answer = server.complete(json!({"prompt": prompt, "temperature": 0})).await.json();
        assert_eq!(answer["object"], "text_completion");
        assert_eq!(answer["choices"][0]["text"], server.said(16), "16 tokens is the default");
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
        assert_eq!(answer["model"], "org/tiny");
    }
}

#[tokio::test]
async fn several_prompts_have_their_choices_in_order() {
    let server = Server::new();
    let body = json!({"prompt": ["one", "two, too"], "n": 2, "seed": 3, "max_tokens": 4, "echo": true});
    let answer = server.complete(body).await.json();
    let script = server.encode(SCRIPT);
    for (i, prompt) in ["one", "one", "two, too", "two, too"].into_iter().enumerate() {
        let shift = 3 + i % 2;
        let said = server.state.text.decode(&script[shift..shift + 4], true);
        assert_eq!(answer["choices"][i]["text"], format!("{prompt}{said}"));
        assert_eq!(answer["choices"][i]["index"], i);
    }
    let ids = |text: &str| server.state.text.encode(text, true, true).len();
    assert_eq!(answer["usage"]["prompt_tokens"], ids("one") + ids("two, too"));
    assert_eq!(answer["usage"]["completion_tokens"], 16);
}

#[tokio::test]
async fn echo_with_logprobs_covers_prompt_and_answer() {
    let server = Server::new();
    for max_tokens in [0, 5] {
        let body =
            json!({"prompt": "Hello, 世界!", "echo": true, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0});
        let answer = server.complete(body).await.json();
        let choice = &answer["choices"][0];
        let text = format!("Hello, 世界!{}", server.said(max_tokens));
        assert_eq!(choice["text"], text);
        assert_eq!(choice["finish_reason"], "length");
        assert_eq!(answer["usage"]["completion_tokens"], max_tokens);
        let prompt_len = server.state.text.encode("Hello, 世界!", true, true).len();
        let logprobs = &choice["logprobs"];
        for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            assert_eq!(logprobs[list].as_array().map(Vec::len), Some(prompt_len + max_tokens), "{list}: {choice}");
        }
        assert_eq!(logprobs["token_logprobs"][0], Value::Null);
        assert_eq!(logprobs["top_logprobs"][0], Value::Null);
        assert_eq!(logprobs["token_logprobs"][1], -0.5);
        let offsets: Vec<u64> = logprobs["text_offset"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|at| at.as_u64().expect("a number"))
            .collect();
        assert!(offsets.is_sorted() && offsets[0] == 0);
        if max_tokens > 0 {
            assert_eq!(offsets[prompt_len], "Hello, 世界!".chars().count() as u64);
        }
    }
}

#[tokio::test]
async fn prompt_logprobs_are_equal_with_a_warm_cache() {
    let server = Server::new();
    let body = json!({"prompt": "The sea and the sea", "prompt_logprobs": 1, "max_tokens": 1, "temperature": 0});
    let first = server.complete(body.clone()).await.json()["choices"][0]["prompt_logprobs"].clone();
    let ids = server.state.text.encode("The sea and the sea", true, true);
    assert_eq!(first.as_array().map(Vec::len), Some(ids.len()));
    assert_eq!(first[0], Value::Null);
    assert_eq!(first[1][ids[1].to_string()]["rank"], 1);
    assert_eq!(server.complete(body).await.json()["choices"][0]["prompt_logprobs"], first);
}

#[tokio::test]
async fn a_streamed_completion_joins_to_the_whole_one() {
    let server = Server::new();
    let mut body = json!({"prompt": "Hi", "echo": true, "logprobs": 2, "max_tokens": 20, "temperature": 0});
    let whole = server.complete(body.clone()).await.json()["choices"][0].clone();
    body["stream"] = true.into();
    let mut events = server.complete(body).await.events();
    assert_eq!(events.pop(), Some("[DONE]".into()));
    let choices: Vec<&Value> = events.iter().map(|event| &event["choices"][0]).collect();
    let text: String = choices.iter().map(|choice| choice["text"].as_str().expect("text")).collect();
    assert_eq!(whole["text"], text);
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        let joined: Vec<Value> =
            choices.iter().filter_map(|choice| choice["logprobs"][list].as_array()).flatten().cloned().collect();
        assert_eq!(whole["logprobs"][list], json!(joined), "{list}");
    }
    let reasons: Vec<&Value> = choices.iter().map(|choice| &choice["finish_reason"]).filter(|r| !r.is_null()).collect();
    assert_eq!(reasons, ["length"]);
}

#[tokio::test]
async fn a_prompt_is_cut_on_request_only() {
    let server = Server::new();
    let long = "a b c d ".repeat(200);
    let answer = server.complete(json!({"prompt": long, "max_tokens": 1})).await;
    assert_eq!(answer.refused(400).as_deref(), Some("prompt"));
    assert!(answer.body.contains("256"), "both numbers are named: {}", answer.body);
    let cut = json!({"prompt": long, "max_tokens": 1, "truncate_prompt_tokens": 10, "return_token_ids": true});
    let answer = server.complete(cut).await.json();
    let ids = server.state.text.encode(&long, true, true);
    let kept: Vec<u32> = ids[ids.len() - 10..].iter().map(|id| id.0).collect();
    assert_eq!(answer["choices"][0]["prompt_token_ids"], json!(kept));
}

#[tokio::test]
async fn prompts_around_the_context_limit_end_in_length_or_400() {
    let server = Server::new();
    for prompt_len in 254..=257usize {
        for max_tokens in [json!(1), json!(2), Value::Null] {
            let prompt = vec![40; prompt_len];
            let answer = server.complete(json!({"prompt": prompt, "max_tokens": max_tokens})).await;
            if prompt_len >= 256 {
                assert_eq!(answer.refused(400).as_deref(), Some("prompt"));
                continue;
            }
            let asked = max_tokens.as_u64().unwrap_or(16);
            let answer = answer.json();
            assert_eq!(answer["choices"][0]["finish_reason"], "length");
            assert_eq!(answer["usage"]["completion_tokens"], asked.min(256 - prompt_len as u64));
        }
    }
}

#[tokio::test]
async fn tokenize_and_detokenize_have_vllms_shapes() {
    let server = Server::new();
    let answer = server.post("/tokenize", json!({"prompt": "Hello", "return_token_strs": true})).await.json();
    assert_eq!(answer["max_model_len"], 256);
    assert_eq!(answer["count"].as_u64().map(|count| count as usize), answer["tokens"].as_array().map(Vec::len));
    assert_eq!(answer["token_strs"].as_array().map(Vec::len), answer["tokens"].as_array().map(Vec::len));
    let bare = server.post("/tokenize", json!({"prompt": "Hello", "add_special_tokens": false})).await.json();
    assert_eq!(bare["count"].as_u64().map(|count| count + 1), answer["count"].as_u64(), "without the BOS token");
    let text = server.post("/detokenize", json!({"tokens": bare["tokens"]})).await.json();
    assert_eq!(text, json!({"prompt": "Hello"}));
    assert_eq!(server.post("/detokenize", json!({"tokens": [512]})).await.refused(400).as_deref(), Some("tokens"));
}

#[tokio::test]
async fn models_are_listed_and_found_by_names_with_slashes() {
    let server = Server::new();
    let list = server.get("/v1/models").await.json();
    assert_eq!(list["object"], "list");
    assert_eq!(list["data"][0]["id"], "org/tiny");
    assert_eq!(list["data"][0]["max_model_len"], 256);
    assert_eq!(list["data"][1]["id"], "tiny");
    for path in ["/v1/models/org/tiny", "/v1/models/org%2Ftiny"] {
        assert_eq!(server.get(path).await.json()["id"], "org/tiny");
    }
    assert_eq!(server.get("/v1/models/org/other").await.refused(404).as_deref(), Some("model"));
}
