//! `kernel tune`, and the files that runs on a GPU leave and find.

use super::{Said, Scratch, kittiwake, tiny};

fn tune(more: &[&str]) -> Said {
    kittiwake([&["kernel", "tune", "--max-seconds=inf", "--max-candidates=2"], more].concat())
}

fn generate(more: &[&str]) -> Said {
    let arguments =
        ["generate", &tiny(), "--prompt-ids=1,2,3", "--max-tokens=20", "--ignore-eos", "--json", "--device=wgpu"];
    kittiwake([&arguments[..], more].concat())
}

#[test]
fn what_is_tuned_is_found_by_later_runs() {
    let scratch = Scratch::new("tune");
    let folder = format!("--kernel-cache-dir={}", scratch.0.join("cache").display());
    let report = tune(&["--model", &tiny(), &folder, "--dry-run", "--json"]).json();
    assert!(report["choices"].as_array().is_some_and(|choices| !choices.is_empty()), "{report}");
    assert!(report["num_measured"] == 2 && report["rejected"] == serde_json::json!([]), "{report}");
    assert!(!scratch.0.join("cache").exists(), "a dry run writes nothing");
    let text = tune(&["--model", &tiny(), &folder]).ok();
    assert!(text.contains("before us") && text.contains("linear, 1 tokens"), "{text}");

    std::fs::create_dir_all(scratch.0.join("cache")).expect("a scratch directory");
    // The table as it would be: whether something was faster just now is not for a test.
    let adapter = serde_json::json!({
        "adapter": shaders::adapters()[0].name,
        "driver": shaders::adapters()[0].driver,
        "class": shaders::adapters()[0].class.name(),
        "tuning": report["tuning"],
    });
    let table = serde_json::json!({ "format": 1, "devices": [adapter] });
    let file = scratch.file("cache/tuning.json", table.to_string());
    let expected = generate(&[]).json()["token_ids"].clone();
    assert_eq!(generate(&[&folder]).json()["token_ids"], expected);
    let kernels = std::fs::read_dir(scratch.0.join("cache")).expect("a folder").count();
    assert!(kernels >= 1, "compiled kernels are beside it, where the API hands them out");

    // A table that is not sound is refused wherever it comes from, is not overwritten, and can be left out.
    scratch.file("cache/tuning.json", table.to_string().replace("\"flat_lanes\"", "\"flat_planes\""));
    generate(&[&folder]).refused(&["tuning.json", "unknown field `flat_planes`", "kernel tune"]);
    tune(&[&folder]).refused(&["tuning.json", "unknown field `flat_planes`"]);
    assert_eq!(generate(&[&folder, "--kernel-tuning=none"]).json()["token_ids"], expected);
    generate(&["--kernel-tuning", &file]).refused(&["flat_planes"]);
    generate(&["--kernel-tuning=/no/such.json"]).refused(&["/no/such.json"]);
}

#[test]
fn tuning_needs_somewhere_to_write_and_a_gpu() {
    tune(&["--model", &tiny()]).refused(&["--kernel-tuning", "--dry-run"]);
    tune(&["--dry-run", "--device=cpu"]).refused(&["--device cpu"]);
    tune(&["--dry-run", "--model=/no/such/model"]).refused(&["/no/such/model"]);
    tune(&["--dry-run", "--max-seconds=many"]).refused(&["--max-seconds"]);
}
