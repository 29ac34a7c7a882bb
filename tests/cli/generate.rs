//! `generate`: text and `--json`, seeds, stops, log-probabilities, and every value that must be refused.

use serde_json::{Value, json};

use super::{Said, command, fixture, keys, kittiwake, tiny};

/// `generate` on the tiny model, greedy unless `arguments` say otherwise.
fn generate(arguments: &[&str]) -> Said {
    let tiny = tiny();
    kittiwake([&["generate", &tiny, "--threads=1", "--temperature=0"][..], arguments].concat())
}

#[test]
fn json_has_every_promised_key() {
    let answer = generate(&["--prompt", "hello", "--max-tokens", "5", "--json"]).json();
    assert_eq!(keys(&answer), ["device", "finish_reason", "prompt_ids", "text", "timings", "token_ids"]);
    assert_eq!(keys(&answer["timings"]), ["decode_tokens_per_s", "load_s", "prefill_tokens_per_s", "ttft_s"]);
    for (name, value) in answer["timings"].as_object().expect("an object") {
        assert!(value.as_f64().expect("a number") > 0.0, "{name}: {value}");
    }
    assert_eq!(answer["finish_reason"], "length");
    assert_eq!(answer["token_ids"].as_array().map(Vec::len), Some(5));
    assert!(answer["device"].as_str().expect("text").starts_with("CPU, 1 thread"), "{}", answer["device"]);
    assert_eq!(answer["prompt_ids"][0], 508, "the model's BOS comes first");
}

#[test]
fn ids_go_in_and_the_golden_tokens_come_out() {
    let golden = std::fs::read_to_string(fixture("llama-tiny/golden.json")).expect("the golden");
    let golden: Value = serde_json::from_str(&golden).expect("JSON");
    for prompt in golden["prompts"].as_array().expect("prompts") {
        let ids: Vec<String> = prompt["ids"].as_array().expect("ids").iter().map(Value::to_string).collect();
        let answer = generate(&["--prompt-ids", &ids.join(","), "--max-tokens=24", "--ignore-eos", "--json"]).json();
        assert_eq!(answer["prompt_ids"], prompt["ids"]);
        assert_eq!(answer["token_ids"], prompt["greedy"]["ids"]);
    }
}

#[test]
fn text_is_what_json_says() {
    let arguments = ["--prompt", "🐦 keeps its 👩‍👩‍👧 and\ttabs\r\n", "--max-tokens", "40", "--ignore-eos"];
    let text = generate(&arguments).ok();
    let answer = generate(&[&arguments[..], &["--json"]].concat()).json();
    assert_eq!(text, format!("{}\n", answer["text"].as_str().expect("text")));
    assert_eq!(answer["token_ids"].as_array().map(Vec::len), Some(40));
}

#[test]
fn logprobs_are_lists_of_alternatives_best_first() {
    let answer =
        generate(&["--prompt", "hello", "--max-tokens=4", "--logprobs=3", "--prompt-logprobs=2", "--json"]).json();
    let entries = answer["logprobs"].as_array().expect("a list");
    assert_eq!(entries.len(), 4);
    for (entry, id) in entries.iter().zip(answer["token_ids"].as_array().expect("ids")) {
        assert_eq!(keys(entry), ["id", "logprob", "top"]);
        assert_eq!(&entry["id"], id);
        let top: Vec<(u32, f64)> = serde_json::from_value(entry["top"].clone()).expect("pairs of id and logprob");
        assert_eq!(top.len(), 3);
        assert_eq!(json!(top[0]), json!([entry["id"], entry["logprob"]]), "greedy takes the best");
        assert!(top.is_sorted_by(|a, b| a.1 >= b.1) && top[0].1 < 0.0, "{top:?}");
    }
    let prompt = answer["prompt_logprobs"].as_array().expect("a list");
    assert_eq!(prompt.len(), answer["prompt_ids"].as_array().expect("ids").len());
    assert!(prompt[0].is_null() && prompt[1..].iter().all(|entry| entry["top"].as_array().map(Vec::len) == Some(2)));
    let plain = generate(&["--prompt", "hello", "--max-tokens=1", "--logprobs=0", "--json"]).json();
    assert_eq!(plain["logprobs"][0]["top"], json!([]), "0 alternatives still report the token itself");
}

#[test]
fn a_seed_makes_noise_reproducible() {
    let draw = |seed: &str| {
        let arguments =
            ["--prompt=a", "--temperature=1.5", "--max-tokens=16", "--ignore-eos", "--json", "--seed", seed];
        generate(&arguments).json()["token_ids"].clone()
    };
    assert_eq!(draw("7"), draw("7"));
    assert_ne!(draw("7"), draw("18446744073709551615"));
}

#[test]
fn an_answer_ends_where_it_is_told_to() {
    // The tiny model's greedy answer to "a" is taken as it comes; its third token is made the end.
    let ids = |arguments: &[&str]| {
        let all = [&["--prompt=a", "--max-tokens=8", "--json"][..], arguments].concat();
        let answer = generate(&all).json();
        let ids: Vec<u32> = serde_json::from_value(answer["token_ids"].clone()).expect("ids");
        (ids, answer["finish_reason"].as_str().expect("a reason").to_owned(), answer["text"].clone())
    };
    let (free, reason, text) = ids(&["--ignore-eos"]);
    assert_eq!((free.len(), reason.as_str()), (8, "length"));
    let end = free[2];
    let first = free.iter().position(|id| *id == end).expect("it is there");
    let (stopped, reason, _) = ids(&["--ignore-eos", "--stop-token-ids", &end.to_string()]);
    assert_eq!((&stopped[..], reason.as_str()), (&free[..=first], "stop"));
    let (pushed, _, _) = ids(&["--ignore-eos", "--min-tokens=8", "--stop-token-ids", &end.to_string()]);
    assert!(pushed.len() == 8 && !pushed[..7].contains(&end), "{pushed:?}");
    let (banned, _, _) = ids(&["--ignore-eos", "--logit-bias", &format!("{}=-100", free[0])]);
    assert_ne!(banned[0], free[0]);
    let (allowed, _, _) = ids(&["--ignore-eos", "--allowed-token-ids", "9,7,9"]);
    assert!(allowed.len() == 8 && allowed.iter().all(|id| [7, 9].contains(id)), "{allowed:?}");

    let model = super::support::load(&super::support::options(fixture("llama-tiny"), kittiwake::Device::Cpu)).text;
    let [word] = model.encode("a", false, true)[..] else { panic!("'a' is one token") };
    let wanted = format!("{word}=100");
    let (eager, _, _) = ids(&["--ignore-eos", "--logit-bias", &wanted]);
    assert!(eager.contains(&word.0), "{eager:?}");
    let (clean, _, _) = ids(&["--ignore-eos", "--logit-bias", &wanted, "--bad-words", "a"]);
    assert!(!clean.contains(&word.0), "{clean:?}");

    let text = text.as_str().expect("text").to_owned();
    let stop: String = text.chars().skip(2).take(1).collect();
    let before = &text[..text.find(&stop).expect("it is there")];
    let (_, reason, cut) = ids(&["--ignore-eos", "--stop", "-never-", "--stop", &stop]);
    assert_eq!((cut.as_str(), reason.as_str()), (Some(before), "stop"));
    let (_, _, kept) = ids(&["--ignore-eos", "--stop", &stop, "--include-stop-str-in-output"]);
    assert_eq!(kept.as_str(), Some(format!("{before}{stop}").as_str()));
}

#[test]
fn values_that_look_like_flags_are_values() {
    for prompt in ["-1 is less than 0", "--max_tokens", "--no-json"] {
        let answer = generate(&["--prompt", prompt, "--max-tokens=1", "--json"]).json();
        let text = super::support::load(&super::support::options(fixture("llama-tiny"), kittiwake::Device::Cpu)).text;
        let ids: Vec<u32> = text.encode(prompt, true, true).iter().map(|id| id.0).collect();
        assert_eq!(answer["prompt_ids"], json!(ids), "{prompt}");
    }
}

#[test]
fn what_cannot_be_served_is_refused_by_name() {
    let refusals: [(&[&str], &[&str]); 25] = [
        (&["--temperature", "-1"], &["temperature must be between 0 and 2, got -1"]),
        (&["--temperature", "nan"], &["temperature"]),
        (&["--temperature", "hot"], &["--temperature", "hot"]),
        (&["--top-p", "0"], &["top_p must be above 0"]),
        (&["--top-k", "-2"], &["--top-k", "-2"]),
        (&["--top-k", "99999999999"], &["--top-k", "99999999999"]),
        (&["--min-p", "1.5"], &["min_p"]),
        (&["--repetition-penalty", "0"], &["repetition_penalty"]),
        (&["--presence-penalty", "-3"], &["presence_penalty must be between -2 and 2"]),
        (&["--frequency-penalty", "inf"], &["frequency_penalty"]),
        (&["--logit-bias", "5"], &["'5' is not ID=BIAS"]),
        (&["--logit-bias", "5=nan"], &["logit_bias of token 5"]),
        (&["--logit-bias", "99999=1"], &["logit_bias", "99999", "512"]),
        (&["--allowed-token-ids", "512"], &["allowed_token_ids", "512"]),
        (&["--bad-words", " "], &["bad_words"]),
        (&["--bad-words", ""], &["--bad-words"]),
        (&["--max-tokens", "0"], &["--max-tokens", "0"]),
        (&["--min-tokens", "300"], &["min_tokens must be at most max_tokens (256)"]),
        (&["--stop", ""], &["--stop"]),
        (&["--stop-token-ids", "512"], &["stop_token_ids", "512"]),
        (&["--seed", "-1"], &["--seed"]),
        (&["--logprobs", "2"], &["--logprobs", "--json"]),
        (&["--logprobs", "21", "--json"], &["logprobs must be at most 20, got 21"]),
        (&["--prompt-ids", "1"], &["--prompt-ids", "--prompt"]),
        (&["--max-tokns", "1"], &["--max-tokns", "--max-tokens"]),
    ];
    for (arguments, words) in refusals {
        generate(&[&["--prompt", "hello"][..], arguments].concat()).refused(words);
    }
    generate(&[]).refused(&["--prompt"]);
    generate(&["--prompt-ids", "1,,2"]).refused(&["--prompt-ids"]);
    generate(&["--prompt-ids", "1,512"]).refused(&["token id 512", "512 tokens"]);
}

#[test]
fn edges_of_the_ranges_are_served() {
    for arguments in [["--top-k", "4294967295"], ["--top-k", "-1"], ["--temperature", "2"], ["--min-p", "1"]] {
        generate(&[&["--prompt=a", "--max-tokens=1"][..], &arguments].concat()).ok();
    }
}

#[test]
fn a_prompt_longer_than_the_context_names_both_numbers() {
    let prompt = "word ".repeat(2000);
    let refused = generate(&["--prompt", &prompt]).refused(&["the context of 512 tokens"]);
    assert!(!refused.contains("panicked"), "{refused}");
    generate(&["--prompt-ids", "1,2,3", "--max-model-len", "3"]).refused(&["3 tokens", "the context of 3 tokens"]);
}

/// The reading end is closed before the process starts, so that the first write meets it.
#[test]
fn a_closed_pipe_ends_it_quietly() {
    for arguments in [
        &["generate", &tiny(), "--prompt=a", "--max-tokens=400", "--ignore-eos"][..],
        &["generate", &tiny(), "--prompt=a", "--max-tokens=4", "--json"],
        &["chat", &tiny(), "--message=a", "--max-tokens=4"],
        &["bench", &tiny(), "--prompt-tokens=4", "--output-tokens=2", "--batch=1", "--rounds=1"],
        &["devices"],
        &["devices", "--json"],
        &["--help"],
    ] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let said: Said = command().args(arguments).stdout(writer).output().expect("the binary runs").into();
        assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{arguments:?}");
    }
}

#[test]
fn closed_standard_error_is_no_reason_to_stop() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let mut command = command();
    command.args(["chat", &tiny(), "--message=a", "--max-tokens=4"]).stderr(writer);
    let said: Said = command.output().expect("the binary runs").into();
    assert_ne!(said.ok(), "");
}

/// An interrupt ends an answer under way at once, and what was shown so far is out.
#[cfg(unix)]
#[test]
fn an_interrupt_ends_it() {
    use std::io::Read;
    use std::os::unix::process::ExitStatusExt;

    let tiny = tiny();
    let mut command = command();
    command.args(["generate", &tiny, "--device=reference", "--prompt=a", "--max-tokens=500", "--ignore-eos"]);
    let mut child = command.stdout(std::process::Stdio::piped()).spawn().expect("the binary runs");
    let mut shown = [0];
    child.stdout.as_mut().expect("piped").read_exact(&mut shown).expect("a first piece of text");
    let interrupted = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(interrupted.expect("kill runs").success());
    let status = child.wait().expect("it ends");
    // It may have been done already; it must never be a panic or a hang.
    assert!(status.signal() == Some(2) || status.success(), "{status}");
}
