//! `eval`: the perplexity of a text against llama.cpp's, of a model against another, and what cannot be measured.
//!
//! What llama.cpp says is from `tests/fixtures/llama_cpp_perplexity.py`.

use super::{Said, Scratch, fixture, keys, kittiwake, support, tiny};

fn eval(model: &str, text: &str, arguments: &[&str]) -> Said {
    kittiwake([&["eval", model, "--text", text, "--device=cpu", "--threads=2"][..], arguments].concat())
}

fn prose() -> String {
    fixture("perplexity.txt").display().to_string()
}

/// `llama_cpp_perplexity.py models/SmolLM2-135M-Instruct.Q4_1.gguf perplexity.txt 512`
const LLAMA_CPP: (u64, f64, f64) = (1020, 35.292_006_435_894_35, 3.076_894_806_746_85);

#[test]
fn the_perplexity_is_llama_cpps() {
    let demo = support::demo().display().to_string();
    let report = eval(&demo, &prose(), &["--context=512", "--kv-cache-dtype=f32", "--json"]).json();
    let (tokens, perplexity, standard_error) = LLAMA_CPP;
    assert_eq!(report["tokens"], tokens, "{report}");
    let near = |key: &str, want: f64, part: f64| {
        let got = report[key].as_f64().expect("a number");
        assert!((got / want - 1.0).abs() <= part, "{key}: {got}, llama.cpp has {want}");
    };
    // Both round activations to 8 bits, in other places.
    near("perplexity", perplexity, 0.005);
    near("standard_error", standard_error, 0.02);
}

#[test]
fn a_model_is_no_way_off_from_itself_and_some_way_from_another() {
    let report = eval(&tiny(), &prose(), &["--context=64", "--json", "--against", &tiny()]).json();
    let expected =
        ["against", "context", "device", "model", "perplexity", "seconds", "standard_error", "tokens", "windows"];
    assert_eq!(keys(&report), expected);
    let against = &report["against"];
    assert_eq!(keys(against), ["mean_kl_divergence", "model", "perplexity", "same_top_token", "standard_error"]);
    assert_eq!((&against["mean_kl_divergence"], &against["same_top_token"]), (&0.0.into(), &1.0.into()));
    assert_eq!(against["perplexity"], report["perplexity"]);
    let (windows, tokens) = (report["windows"].as_u64().expect("a count"), report["tokens"].as_u64());
    assert_eq!(tokens, Some(windows * 31), "of 64 tokens those after the 33rd are scored");
    // Random weights know nothing: the vocabulary has 512 tokens.
    assert!(report["perplexity"].as_f64().is_some_and(|perplexity| perplexity > 100.0), "{report}");

    let other = fixture("gguf/llama-q4_1.gguf").display().to_string();
    let finer = fixture("gguf/llama-q8_0.gguf").display().to_string();
    let report = eval(&other, &prose(), &["--context=64", "--json", "--against", &finer]).json();
    let divergence = report["against"]["mean_kl_divergence"].as_f64().expect("a number");
    assert!(divergence > 1e-4 && divergence < 10.0, "{report}");
    let said = eval(&other, &prose(), &["--context=64", "--against", &finer]).ok();
    assert!(
        said.contains("perplexity ") && said.contains("mean KL divergence ") && said.contains(" windows of 64"),
        "{said}"
    );
}

#[test]
fn the_context_is_the_models_unless_it_is_given() {
    let report = eval(&tiny(), &prose(), &["--json"]).json();
    assert_eq!(
        (&report["context"], &report["tokens"]),
        (&512.into(), &(report["windows"].as_u64().unwrap() * 255).into())
    );
    assert!(!keys(&report).contains(&"against"));
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let scratch = Scratch::new("eval");
    let short = scratch.file("short.txt", "A few words.");
    eval(&tiny(), &short, &["--context=64"]).refused(&["the text has", "a window 64", "--context"]);
    eval(&tiny(), "/no/such.txt", &[]).refused(&["--text /no/such.txt"]);
    eval(&tiny(), &prose(), &["--context=513"]).refused(&["a context of 513 tokens", "limit 512"]);
    eval(&tiny(), &prose(), &["--context=3"]).refused(&["--context"]);
    let demo = support::demo().display().to_string();
    eval(&tiny(), &prose(), &["--context=64", "--against", &demo]).refused(&["vocabulary", "MODEL"]);
}

/// A model in fewer bits against itself: further off the fewer they are, and less where a rule spares a part.
#[test]
fn rounding_at_load_is_measured_against_the_model_itself() {
    let tiny = tiny();
    let divergence = |flags: &[&str]| {
        let flags = [&["--context=64", "--json", "--against", &tiny], flags].concat();
        let report = eval(&tiny, &prose(), &flags).json();
        report["against"]["mean_kl_divergence"].as_f64().expect("a number")
    };
    let (int4, int8, fp8) =
        (divergence(&["--quantization=int4"]), divergence(&["--quantization=int8"]), divergence(&["-q", "fp8"]));
    let spared = divergence(&["--quantization=int4", "--quantization-overrides=attn=none"]);
    assert!(int8 > 0.0 && int8 < fp8 && fp8 < int4, "int8 {int8}, fp8 {fp8}, int4 {int4}");
    assert!(spared < int4 && spared > int8, "{spared} against {int4}");
    eval(&tiny, &prose(), &["--quantization=int3"]).refused(&["--quantization", "int3", "int4, int8, fp8"]);
    eval(&tiny, &prose(), &["--quantization-overrides=(=int8"]).refused(&["--quantization-overrides", "'('"]);
}
