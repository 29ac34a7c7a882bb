//! `bench` and `devices`: the keys of their JSON, and bounds that keep sums of lengths from overflowing.

use serde_json::Value;

use super::{keys, kittiwake, tiny};

fn bench(arguments: &[&str]) -> super::Said {
    kittiwake([&["bench", &tiny(), "--threads=1", "--rounds=1"][..], arguments].concat())
}

#[test]
fn bench_json_has_every_key() {
    let report = bench(&["--prompt-tokens=16", "--output-tokens=4", "--batch=1,3", "--json"]).json();
    assert_eq!(keys(&report), ["device", "load_s", "model", "output_tokens", "prompt_tokens", "runs"]);
    let runs = report["runs"].as_array().expect("a list");
    assert_eq!(runs.iter().map(|run| &run["batch"]).collect::<Vec<_>>(), [&Value::from(1), &Value::from(3)]);
    let expected = ["batch", "decode_context_tokens", "decode_tokens_per_s", "prefill_tokens_per_s", "ttft_s"];
    for run in runs {
        assert_eq!(keys(run), expected);
        assert!(expected.iter().all(|key| run[key].as_f64().is_some_and(|value| value > 0.0)), "{run}");
    }
}

#[test]
fn bench_leaves_out_what_is_zero_and_prints_a_table() {
    let arguments = ["--prompt-tokens=0", "--output-tokens=2", "--batch=1"];
    let report = bench(&[&arguments[..], &["--json"]].concat()).json();
    assert!(report["runs"][0]["prefill_tokens_per_s"].is_null() && report["runs"][0]["ttft_s"].is_null());
    let table = bench(&arguments).ok();
    assert!(table.contains("decode tok/s") && table.lines().count() == 3, "{table}");
}

#[test]
fn bench_refuses_what_it_cannot_measure() {
    bench(&["--output-tokens", "4294967295"]).refused(&["--output-tokens"]);
    bench(&["--prompt-tokens", "4294967295"]).refused(&["--prompt-tokens"]);
    bench(&["--depth", "0"]).refused(&["--depth"]);
    bench(&["--batch", "0"]).refused(&["--batch"]);
    bench(&["--batch", "1,,2"]).refused(&["--batch"]);
    bench(&["--batch", "1,4096"]).refused(&["--batch 4096", "--max-num-batched-tokens 2048"]);
    bench(&["--prompt-tokens", "512"]).refused(&["a context of 513 tokens", "--prompt-tokens", "limit 512"]);
}

#[test]
fn devices_lists_what_there_is() {
    let rows = kittiwake(["devices", "--json"]).json();
    let rows = rows.as_array().expect("a list");
    assert!(rows.iter().all(|row| keys(row) == ["default", "description", "name", "rank"]), "{rows:?}");
    let names: Vec<&str> = rows.iter().map(|row| row["name"].as_str().expect("a name")).collect();
    assert!(names.contains(&"cpu") && names.contains(&"reference"), "{names:?}");
    assert_eq!(rows.iter().filter(|row| row["default"] == true).count(), 1, "auto takes one");
    let table = kittiwake(["devices"]).ok();
    assert!(names.iter().all(|name| table.lines().any(|line| line.starts_with(name))), "{table}");
}
