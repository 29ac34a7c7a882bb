//! Both tokenizer origins against the official implementations, on the committed vocabularies and corpus.
//!
//! The rule: ids equal Hugging Face's (`*.hf.json`) and llama.cpp's (`*.expected.json`). Where those two differ (`qwen2`:
//! composing characters, `tekken`: letter classes; see `tests/fixtures/README.md`) Hugging Face's count, for both
//! origins: they are what such models were trained with.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use runtime::ids::TokenId;
use runtime::text::{ChatInput, TextModel, TextStreamOptions};
use runtime::weights::gguf::MetaValue;
use runtime::weights::{Checkpoint, Container};
use serde_json::{Map, Value, json};

const BYTE_LEVEL: [&str; 6] = ["smollm", "llama-bpe", "qwen2", "gpt-2", "default", "tekken"];
const ALL: [&str; 7] = ["smollm", "llama-bpe", "qwen2", "gpt-2", "default", "tekken", "llama"];

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures")
}

fn read(name: &str) -> Value {
    let path = fixtures().join("tokenizers").join(name);
    serde_json::from_slice(&std::fs::read(path).expect("the fixture is there")).expect("the fixture is JSON")
}

fn corpus() -> Vec<String> {
    serde_json::from_value(read("corpus.json")).expect("a list of strings")
}

fn ids(json: &Value) -> Vec<TokenId> {
    serde_json::from_value(json.clone()).expect("a list of ids")
}

fn from_gguf(name: &str) -> TextModel {
    let checkpoint = Checkpoint::open(&fixtures().join(format!("tokenizers/{name}.gguf"))).expect("the file opens");
    TextModel::load(&checkpoint, None, None).expect("the tokenizer loads")
}

fn from_json(name: &str) -> TextModel {
    let dir = fixtures().join("tokenizers");
    let checkpoint = Checkpoint::open(&dir.join(format!("{name}.gguf"))).expect("the file opens");
    TextModel::load(&checkpoint, Some(&dir.join(format!("{name}.json"))), None).expect("the tokenizer loads")
}

fn library(name: &str) -> tokenizers::Tokenizer {
    tokenizers::Tokenizer::from_file(fixtures().join(format!("tokenizers/{name}.json"))).expect("the library loads it")
}

#[test]
fn gguf_vocabularies_give_the_official_ids() {
    for name in ALL {
        let (model, official, llama_cpp) =
            (from_gguf(name), read(&format!("{name}.hf.json")), read(&format!("{name}.expected.json")));
        let mut num_different = 0;
        for (index, text) in corpus().iter().enumerate() {
            let special = ids(&official["ids"][index]);
            assert_eq!(model.encode(text, false, true), special, "{name}: {text:?} with special tokens");
            let differs = special != ids(&llama_cpp["ids_special"][index]);
            num_different += usize::from(differs);
            if !differs {
                let plain = ids(&llama_cpp["ids"][index]);
                assert_eq!(model.encode(text, false, false), plain, "{name}: {text:?} as plain text");
            }
        }
        let expected = match name {
            "qwen2" => 4,
            "tekken" => 10,
            _ => 0,
        };
        assert_eq!(num_different, expected, "{name}: strings where llama.cpp is not the official tokenizer");
        assert_eq!(model.encode("Hello", true, false), ids(&llama_cpp["with_bos"]), "{name}: BOS");
        assert_eq!(model.encode("Hello", true, false), ids(&official["with_bos"]), "{name}: BOS");
    }
}

/// Names whose tokenizers differ in their splits only, on one vocabulary that has merges across every boundary that any of
/// them makes and along every piece: what llama.cpp makes of the same bytes, but where it approximates the official pattern.
#[test]
fn every_other_split_is_the_official_one() {
    let (official, different) = (read("shared.hf.json"), read("shared.expected.json"));
    let names = official["ids"].as_object().expect("ids by name");
    for (name, expected) in names {
        let mut checkpoint = Checkpoint::open(&fixtures().join("tokenizers/shared.gguf")).expect("the file opens");
        let Container::Gguf(metadata) = &mut checkpoint.container else { panic!("it is a GGUF file") };
        metadata.values.insert("tokenizer.ggml.pre".into(), MetaValue::Str(name.clone()));
        let model = TextModel::load(&checkpoint, None, None).expect("the tokenizer loads");
        for (index, text) in corpus().iter().enumerate() {
            assert_eq!(model.encode(text, false, true), ids(&expected[index]), "{name}: {text:?}");
        }
        let others = names.iter().filter(|(other, _)| *other != name);
        let same: Vec<&String> = others.filter(|(_, ids)| *ids == expected).map(|(other, _)| other).collect();
        let twin = match name.as_str() {
            "dbrx" => vec!["smaug-bpe"],
            "smaug-bpe" => vec!["dbrx"],
            _ => vec![],
        };
        assert_eq!(same, twin, "{name}: the corpus tells the others apart");
        let num_different = different["different"][name].as_object().expect("ids by index").len();
        // Classes of letters; runs of digits, which no true vocabulary of the kind has as tokens, and spaces outside ASCII.
        let approximated = match name.as_str() {
            "gpt-4o" => 13,
            "deepseek-llm" => 25,
            "deepseek-coder" => 3,
            _ => 0,
        };
        assert_eq!(num_different, approximated, "{name}: strings where llama.cpp is not the official tokenizer");
    }
}

#[test]
fn both_origins_agree() {
    for name in ALL {
        let (gguf, json) = (from_gguf(name), from_json(name));
        for text in corpus() {
            for special in [false, true] {
                let expected = json.encode(&text, true, special);
                assert_eq!(gguf.encode(&text, true, special), expected, "{name}: {text:?}, special {special}");
                assert_eq!(gguf.decode(&expected, special), json.decode(&expected, special), "{name}: {text:?}");
            }
        }
        assert_eq!(gguf.vocab_size(), json.vocab_size());
        for id in (0..gguf.vocab_size() as u32).map(TokenId) {
            assert_eq!(gguf.token_bytes(id), json.token_bytes(id), "{name}: {id}");
            assert_eq!(gguf.token_str(id), json.token_str(id), "{name}: {id}");
            assert_eq!(gguf.is_special(id), json.is_special(id), "{name}: {id}");
        }
    }
}

#[test]
fn decoding_is_the_librarys_and_streaming_is_decoding() {
    for name in ALL {
        let (model, library) = (from_gguf(name), library(name));
        for text in corpus() {
            let ids = model.encode(&text, true, true);
            let raw: Vec<u32> = ids.iter().map(|id| id.0).collect();
            for skip_special in [false, true] {
                let whole = model.decode(&ids, skip_special);
                assert_eq!(whole, library.decode(&raw, skip_special).expect("decodes"), "{name}: {text:?}");
                let mut detokenizer = model.detokenizer(skip_special, false);
                let mut streamed: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
                streamed.push_str(&detokenizer.flush());
                assert_eq!(streamed, whole, "{name}: {text:?}");
            }
        }
    }
}

#[test]
fn plain_text_comes_back() {
    for name in ALL.into_iter().filter(|&name| name != "qwen2") {
        let model = from_gguf(name);
        // SentencePiece writes a space as U+2581, so that character itself comes back as a space.
        for text in corpus().into_iter().filter(|text| name != "llama" || !text.contains('\u{2581}')) {
            assert_eq!(model.decode(&model.encode(&text, false, false), false), text, "{name}");
        }
    }
}

/// Long runs, scripts without spaces, lone marks and joiners, control characters.
#[test]
fn hard_texts_give_the_official_ids() {
    let hard = read("hard.json");
    let texts: Vec<Vec<(String, usize)>> = serde_json::from_value(hard["texts"].clone()).expect("pieces and times");
    for name in ALL {
        let (gguf, json) = (from_gguf(name), from_json(name));
        for (index, pieces) in texts.iter().enumerate() {
            let text: String = pieces.iter().map(|(piece, times)| piece.repeat(*times)).collect();
            let runs: Vec<(Vec<TokenId>, usize)> =
                serde_json::from_value(hard["ids"][name][index].clone()).expect("ids and times");
            let expected: Vec<TokenId> = runs.iter().flat_map(|(ids, times)| ids.repeat(*times)).collect();
            assert!(gguf.encode(&text, false, true) == expected, "{name}: {pieces:?} from GGUF");
            assert!(json.encode(&text, false, true) == expected, "{name}: {pieces:?} from tokenizer.json");
        }
    }
}

/// 100 kB without a break: neither the patterns' backtracking nor the merges give up.
#[test]
fn long_texts_without_a_break_come_back() {
    for name in ALL {
        let model = from_gguf(name);
        for piece in ["a", "the", " ", "\n", " \n", "1", "日", "é", "😀", "\u{301}", "-", "'s", "aA", "\u{200d}"] {
            let text = format!("{}x", piece.repeat(100_000 / piece.len()));
            let ids = model.encode(&text, false, false);
            assert!(model.decode(&ids, false) == text, "{name}: {piece:?}");
        }
    }
}

/// What is put around a text: `add_bos_token` and its like in tokenizer_config.json do not count beside a tokenizer.json.
#[test]
fn texts_start_as_transformers_has_them() {
    for (index, case) in read("added_bos.json")["cases"].as_array().expect("a list").iter().enumerate() {
        let dir = std::env::temp_dir().join(format!("kittiwake-added-bos-{}-{index}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        let name = case["tokenizer"].as_str().expect("a name");
        let tokenizer = fixtures().join(format!("tokenizers/{name}.json"));
        std::fs::copy(tokenizer, dir.join("tokenizer.json")).expect("copies");
        std::fs::write(dir.join("tokenizer_config.json"), case["config"].to_string()).expect("writes");
        let checkpoint = Checkpoint::open(&fixtures().join("llama-tiny")).expect("opens");
        let model = TextModel::load(&checkpoint, Some(&dir), None);
        std::fs::remove_dir_all(&dir).expect("removes");
        assert_eq!(model.expect("loads").encode("Hello", true, true), ids(&case["ids"]), "{}", case["config"]);
    }
}

/// Any ids, those past the vocabulary too: streaming is decoding, and each step only adds text. For byte-level
/// vocabularies it is the library's decoding; a SentencePiece one has it replace whole runs of bytes instead.
#[test]
fn any_ids_stream_as_they_decode() {
    // Every other one is a byte or a special token of some vocabulary: broken characters are common.
    let draws = prop::collection::vec(prop_oneof![0u32..262, 0u32..1700], 0..80);
    for name in ALL {
        let (models, library) = ([from_gguf(name), from_json(name)], library(name));
        let mut runner = TestRunner::new(ProptestConfig::with_cases(300));
        let outcome = runner.run(&(draws.clone(), any::<bool>()), |(raw, skip)| {
            let ids: Vec<TokenId> = raw.iter().copied().map(TokenId).collect();
            let whole = models[0].decode(&ids, skip);
            for model in &models {
                let mut detokenizer = model.detokenizer(skip, false);
                let mut text = String::new();
                for &id in &ids {
                    text.push_str(&detokenizer.push(id));
                    prop_assert!(whole.starts_with(&text));
                }
                text.push_str(&detokenizer.flush());
                prop_assert_eq!(&text, &whole);
            }
            if name != "llama" {
                prop_assert_eq!(library.decode(&raw, skip).expect("decodes"), whole);
            }
            Ok(())
        });
        outcome.unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

/// A prompt's continuation keeps the space that starts it; a text of its own does not.
#[test]
fn a_continuation_keeps_its_space() {
    let model = from_gguf("llama");
    let ids = model.encode("Hello", false, false);
    assert_eq!(model.decode(&ids, false), "Hello");
    let mut stream = model.stream(&TextStreamOptions::default());
    let text: String = ids.iter().map(|&id| stream.push(id).text).collect();
    assert_eq!(text + &stream.finish().text, " Hello");
}

#[test]
fn special_ids_of_gguf_files() {
    let model = from_gguf("smollm");
    let id = |piece: &str| model.encode(piece, false, true)[0];
    assert_eq!(model.bos_token_id(), Some(id("<|begin_of_text|>")));
    assert_eq!(model.eos_token_ids(), [id("<|end_of_text|>"), id("<|im_end|>")]);
    assert!(model.is_special(id("<|im_start|>")));
    assert!(!model.is_special(id("<tool_call>")), "user-defined tokens are text");
    let model = from_gguf("llama");
    assert_eq!((model.bos_token_id(), model.eos_token_ids()), (Some(TokenId(1)), &[TokenId(2)][..]));
}

/// The end tokens of a directory: those of the tokenizer, of config.json and of generation_config.json that exist.
#[test]
fn end_tokens_come_from_every_file() {
    let dir = fixtures().join("llama-tiny");
    let eos = |config: Value, generation_config: Value| {
        let mut checkpoint = Checkpoint::open(&dir).expect("opens");
        checkpoint.container = Container::HuggingFace { config, generation_config: Some(generation_config) };
        TextModel::load(&checkpoint, None, None).map(|model| model.eos_token_ids().to_vec())
    };
    let im_end = TokenId(511);
    assert_eq!(eos(json!({}), json!({})).expect("loads"), [im_end]);
    let listed = eos(json!({"eos_token_id": 510}), json!({"eos_token_id": [509, 99_999, 511]})).expect("loads");
    assert_eq!(listed, [TokenId(509), TokenId(510), im_end]);
    let error = eos(json!({}), json!({"eos_token_id": [-1]})).expect_err("not an id").to_string();
    assert!(error.contains("generation_config.json: eos_token_id: expected a token id"), "{error}");
}

/// A broken tokenizer.json is an error that names the file, also where the library panics.
#[test]
fn broken_tokenizer_files_are_named() {
    let dir = std::env::temp_dir().join(format!("kittiwake-broken-tokenizer-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a directory");
    let file = dir.join("tokenizer.json");
    let checkpoint = Checkpoint::open(&fixtures().join("llama-tiny")).expect("opens");
    let sound = read("smollm.json");
    let broken: [(&str, Value, &str); 7] = [
        (
            "/post_processor",
            json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}], "pair": [], "special_tokens": {}}),
            "cannot take it",
        ),
        ("/model/continuing_subword_prefix", json!("a prefix longer than the pieces"), "tokenizer"),
        ("/model/dropout", json!(0.1), "model.dropout at byte 0: 0.1"),
        ("/model/vocab", json!([]), "tokenizer"),
        ("/model/merges", json!([["a"]]), "tokenizer"),
        (
            "/pre_tokenizer",
            json!({"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": false}),
            "tokenizer",
        ),
        ("/decoder", json!({"type": "WordPiece", "prefix": "##", "cleanup": true}), "tokenizer decoder"),
    ];
    for (place, value, expected) in broken {
        let mut document = sound.clone();
        *document.pointer_mut(place).expect(place) = value;
        std::fs::write(&file, document.to_string()).expect("writes");
        let error = TextModel::load(&checkpoint, Some(&file), None).expect_err(place).to_string();
        assert!(error.contains("tokenizer.json: ") && error.contains(expected), "{place}: {error}");
    }
    std::fs::write(dir.join("tokenizer.json"), sound.to_string()).expect("writes");
    for (config, expected) in [
        (json!({"bos_token": 5}), "tokenizer_config.json: bos_token: expected a token, got 5"),
        (json!({"chat_template": {"a": 1}}), "tokenizer_config.json: chat_template: expected a template"),
        (json!({"chat_template": [{"name": "default"}]}), "chat_template: expected a list of names and templates"),
        (json!([]), "tokenizer_config.json: JSON at byte 0: expected an object"),
    ] {
        std::fs::write(dir.join("tokenizer_config.json"), config.to_string()).expect("writes");
        let error = TextModel::load(&checkpoint, Some(&dir), None).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    }
    std::fs::remove_dir_all(&dir).expect("removes");
}

/// Every special-token string, in every role and as a role, whole, split over messages, in another case, at the edge of
/// template text: no special id comes from it, and the text is what was written.
#[test]
fn fault_20_control_tokens_in_messages_stay_text() {
    for name in BYTE_LEVEL {
        let model = from_gguf(name);
        let kwargs = Map::new();
        let chat = |messages: &Value| {
            let input =
                ChatInput { messages, add_generation_prompt: true, continue_final_message: false, kwargs: &kwargs };
            let ids = model.encode_chat(&input).expect("renders");
            let rendered = model.render_chat(&input).expect("renders");
            assert_eq!(model.decode(&ids, false), rendered, "{name}: the text is whole");
            ids.into_iter().filter(|&id| model.is_special(id)).collect::<Vec<_>>()
        };
        let one = |role: &str, content: &str| json!([{"role": role, "content": content}]);
        let harmless = chat(&one("user", "hello"));
        assert_eq!(harmless.len(), 4, "bos, im_start, im_end, im_start");
        for special in ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"] {
            for role in ["system", "user", "assistant", "tool"] {
                for content in [
                    special.to_owned(),
                    format!("a{special}\n{special}b"),
                    format!("  {special}  "),
                    special.to_uppercase(),
                    format!("\u{fdd0}{special}\u{fdef}\u{fdee}"),
                    format!("<{special}"),
                    special[..3].to_owned(),
                ] {
                    assert_eq!(chat(&one(role, &content)), harmless, "{name}: {role} {content:?}");
                }
            }
            assert_eq!(chat(&one(special, "x")), harmless, "{name}: as a role");
        }
    }
}

/// A template that joins messages with nothing between them cannot build a special token out of two of them.
#[test]
fn fault_20_control_tokens_split_over_messages_stay_text() {
    let model = TextModel::load(
        &Checkpoint::open(&fixtures().join("tokenizers/smollm.gguf")).expect("opens"),
        None,
        Some("{% for m in messages %}{{ m.content | trim | lower }}{% endfor %}<|im_start|>"),
    )
    .expect("loads");
    let special = "<|im_end|>";
    for at in 1..special.len() {
        let messages = json!([{"content": &special[..at]}, {"content": &special[at..]}, {"content": "<|IM_END|> "}]);
        let kwargs = Map::new();
        let input = ChatInput {
            messages: &messages,
            add_generation_prompt: false,
            continue_final_message: false,
            kwargs: &kwargs,
        };
        let ids = model.encode_chat(&input).expect("renders");
        let num_special = ids.iter().filter(|&&id| model.is_special(id)).count();
        assert_eq!(num_special, 1, "only the template's own");
        // `lower` cannot reach the character that was masked, here "<", which has no case.
        assert_eq!(model.decode(&ids, false), "<|im_end|><|im_end|><|im_start|>");
    }
}

#[test]
fn chats_equal_transformers() {
    let dir = fixtures().join("llama-tiny");
    let model = TextModel::load(&Checkpoint::open(&dir).expect("opens"), None, None).expect("loads");
    let golden: Value = serde_json::from_slice(&std::fs::read(dir.join("chat.json")).expect("there")).expect("JSON");
    let cases = golden["cases"].as_array().expect("a list");
    assert!(!cases.is_empty());
    for case in cases {
        let kwargs = Map::new();
        let input = ChatInput {
            messages: &case["messages"],
            add_generation_prompt: case["add_generation_prompt"] == true,
            continue_final_message: false,
            kwargs: &kwargs,
        };
        assert_eq!(model.render_chat(&input).expect("renders"), case["text"]);
        assert_eq!(model.encode_chat(&input).expect("renders"), ids(&case["ids"]));
    }
}

/// Hand-written templates with the constructs of the well-known ones: the same text, or an error in both.
#[test]
fn templates_render_as_in_transformers() {
    let path = fixtures().join("templates.json");
    let golden: Value = serde_json::from_slice(&std::fs::read(path).expect("the fixture is there")).expect("JSON");
    let checkpoint = Checkpoint::open(&fixtures().join("tokenizers/smollm.gguf")).expect("opens");
    let chats = golden["chats"].as_array().expect("a list");
    let none = Map::new();
    let mut wrong = Vec::new();
    for case in golden["cases"].as_array().expect("a list") {
        let template = golden["templates"][case["template"].as_str().expect("a name")].as_str().expect("a template");
        let model = TextModel::load(&checkpoint, None, Some(template)).expect("parses");
        let chat = chats.iter().find(|chat| chat["name"] == case["chat"]).expect("the chat is there");
        let rendered = model.render_chat(&ChatInput {
            messages: &chat["messages"],
            add_generation_prompt: chat["add_generation_prompt"] != false,
            continue_final_message: false,
            kwargs: chat["kwargs"].as_object().unwrap_or(&none),
        });
        let agrees = match (&rendered, case["text"].as_str()) {
            (Ok(text), Some(expected)) => text == expected,
            (Err(error), None) if case["template"] == "raises" => {
                error.to_string() == format!("chat template: {}", case["error"].as_str().expect("an error"))
            }
            (rendered, expected) => rendered.is_err() && expected.is_none(),
        };
        if !agrees {
            wrong.push(format!(
                "{} of {}: expected {:?}, got {rendered:?}",
                case["template"],
                case["chat"],
                case.get("text")
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
