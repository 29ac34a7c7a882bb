//! Unit tests of the text side that need no fixture: stop strings, streams, templates, masks, bad metadata.

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::mask::Mask;
use super::{ChatInput, ChatTemplate, StopMatcher, TextModel, TextStreamOptions};
use crate::error::{LoadError, RequestError};
use crate::ids::TokenId;
use crate::weights::gguf::{MetaValue, Metadata};
use crate::weights::{Checkpoint, Container};

/// A byte-level vocabulary: the 256 bytes in order, then `extra` with their types.
fn byte_level(extra: &[(&str, i64)]) -> Metadata {
    let mut unprintable = 0x100..;
    let alphabet = (0..=u8::MAX).map(|byte| match byte {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte).to_string(),
        _ => char::from_u32(unprintable.next().expect("endless")).expect("a scalar").to_string(),
    });
    let mut tokens: Vec<String> = alphabet.collect();
    let mut types = vec![1; 256];
    for (token, kind) in extra {
        tokens.push((*token).into());
        types.push(*kind);
    }
    metadata([
        ("tokenizer.ggml.model", MetaValue::Str("gpt2".into())),
        ("tokenizer.ggml.pre", MetaValue::Str("gpt-2".into())),
        ("tokenizer.ggml.tokens", MetaValue::Strs(tokens)),
        ("tokenizer.ggml.token_type", MetaValue::Ints(types)),
        ("tokenizer.ggml.merges", MetaValue::Strs(Vec::new())),
    ])
}

fn metadata<const N: usize>(values: [(&str, MetaValue); N]) -> Metadata {
    let values = values.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    Metadata { path: "test.gguf".into(), values }
}

fn with(mut meta: Metadata, key: &str, value: MetaValue) -> Metadata {
    meta.values.insert(key.into(), value);
    meta
}

fn load(meta: Metadata, template: Option<&str>) -> Result<TextModel, LoadError> {
    let checkpoint = Checkpoint {
        path: "test.gguf".into(),
        container: Container::Gguf(meta),
        tensors: Default::default(),
        quantised: Default::default(),
        dummy: false,
    };
    TextModel::load(&checkpoint, None, template)
}

fn model() -> TextModel {
    load(byte_level(&[("<|im_start|>", 3), ("<|im_end|>", 3)]), None).expect("loads")
}

fn render(template: &str, messages: Value) -> Result<String, RequestError> {
    render_with(template, messages, Map::new())
}

fn render_with(template: &str, messages: Value, kwargs: Map<String, Value>) -> Result<String, RequestError> {
    let model = load(byte_level(&[("<|im_start|>", 3), ("<|im_end|>", 3)]), Some(template)).expect("loads");
    model.render_chat(&ChatInput {
        messages: &messages,
        add_generation_prompt: false,
        continue_final_message: false,
        kwargs: &kwargs,
    })
}

/// The text before the stop that ends first, found the obvious way.
fn cut(text: &str, stops: &[String], include: bool) -> (String, Option<usize>) {
    for end in text.char_indices().map(|(at, c)| at + c.len_utf8()) {
        let ending = (0..stops.len()).filter(|&i| !stops[i].is_empty() && text[..end].ends_with(&stops[i]));
        // Of equal ones the first, as `max_by_key` of the reversed order gives.
        if let Some(index) = ending.rev().max_by_key(|&i| stops[i].len()) {
            let end = if include { end } else { end - stops[index].len() };
            return (text[..end].to_owned(), Some(index));
        }
    }
    (text.to_owned(), None)
}

/// Feeds pieces, checking at each step that nothing is shown that the final text will not have.
fn stream<'p>(pieces: impl Iterator<Item = &'p str>, stops: &[String], include: bool) -> (String, Option<usize>) {
    let mut matcher = StopMatcher::new(stops, include);
    let mut text: String = pieces.map(|piece| matcher.push(piece, true)).collect();
    text.push_str(&matcher.flush());
    (text, matcher.matched())
}

fn strings(list: &[&str]) -> Vec<String> {
    list.iter().map(|&text| text.to_owned()).collect()
}

#[test]
fn fault_11_no_part_of_a_stop_string_is_shown() {
    let stops = strings(&["Observe"]);
    let mut matcher = StopMatcher::new(&stops, false);
    let shown: Vec<String> =
        ["I O", "bs", "er", "x Obs", "erv", "e it"].iter().map(|piece| matcher.push(piece, true)).collect();
    assert_eq!(
        shown,
        ["I ", "", "", "Obserx ", "", ""],
        "held back while it may match, flushed in order when it does not"
    );
    assert_eq!((matcher.matched(), matcher.flush().as_str()), (Some(0), ""));

    // At the very end; never completed; kept on request; overlapping stops: the one that ends first.
    assert_eq!(stream(["ab", "Obs", "erve"].into_iter(), &stops, false), ("ab".into(), Some(0)));
    assert_eq!(stream(["ab", "Obs", "erv"].into_iter(), &stops, false), ("abObserv".into(), None));
    assert_eq!(stream(["ab", "Obs", "erve", "d"].into_iter(), &stops, true), ("abObserve".into(), Some(0)));
    let overlapping = strings(&["abcd", "bc", "abc"]);
    for text in ["abcd", "xabcd"] {
        let expected = (text[..text.len() - 4].to_owned(), Some(2));
        assert_eq!(stream([text].into_iter(), &overlapping, false), expected);
        assert_eq!(stream(text.split_inclusive(|_: char| true), &overlapping, false), expected);
    }
}

#[test]
fn fault_12_stop_strings_never_split_a_character() {
    let text = "日本語😀のテスト👨‍👩‍👧 end é日本";
    let chars: Vec<char> = text.chars().collect();
    let model = model();
    for stop_len in 1..=12 {
        for start in 0..=chars.len() - stop_len {
            let stop: String = chars[start..start + stop_len].iter().collect();
            let stops = vec![stop.clone(), format!("{stop}☃")];
            let expected = cut(text, &stops, false);
            // One byte per token: every split point there is.
            let options = TextStreamOptions { stop: stops, ..TextStreamOptions::default() };
            let mut stream = model.stream(&options);
            let mut shown = String::new();
            let mut matched = None;
            for id in model.encode(text, false, false) {
                let delta = stream.push(id);
                shown.push_str(&delta.text);
                matched = matched.or(delta.stop);
            }
            shown.push_str(&stream.finish().text);
            assert_eq!((shown, matched), expected, "stop {stop:?}");
        }
    }
}

#[test]
fn stop_strings_wait_for_min_tokens() {
    let model = model();
    let run = |min_tokens: u32| {
        let options = TextStreamOptions { stop: strings(&["ab"]), min_tokens, ..TextStreamOptions::default() };
        let mut stream = model.stream(&options);
        let mut text = String::new();
        for id in model.encode("abXabYab", false, false) {
            text.push_str(&stream.push(id).text);
        }
        text + &stream.finish().text
    };
    assert_eq!(run(0), "");
    assert_eq!(run(1), "", "the match ends after one token");
    assert_eq!(run(2), "abX");
    assert_eq!(run(4), "abX", "a match may start before");
    assert_eq!(run(5), "abXabY");
    assert_eq!(run(8), "abXabYab");
}

#[test]
fn a_stream_tells_offsets_and_leaves_stop_tokens_out() {
    let model = model();
    let ids = model.encode("aé<|im_end|>", false, true);
    for (include_stop, text) in [(false, "aé"), (true, "aé<|im_end|>")] {
        let options = TextStreamOptions { include_stop, ..TextStreamOptions::default() };
        let mut stream = model.stream(&options);
        let (last, rest) = ids.split_last().expect("some");
        let mut deltas: Vec<_> = rest.iter().map(|&id| stream.push(id)).collect();
        deltas.push(stream.push_stop_token(*last));
        assert_eq!(deltas.iter().map(|delta| delta.offset_chars).collect::<Vec<_>>(), [0, 1, 1, 2]);
        assert_eq!(deltas.iter().map(|delta| delta.text.as_str()).collect::<String>(), text);
    }
}

#[test]
fn unfinished_characters_become_replacement_characters() {
    let model = model();
    for bytes in [
        &b"\xE6\x97"[..],
        b"a\xE6\x97b",
        b"\xF0\x9F\x98",
        b"\xFF\xFEx",
        b"\xC3\xC3\xA9",
        b"\xF0\x9Fa\xF0",
        b"\xED\xA0\x80",
    ] {
        let ids: Vec<TokenId> = bytes.iter().map(|&byte| TokenId(u32::from(byte))).collect();
        assert_eq!(model.decode(&ids, false), String::from_utf8_lossy(bytes));
    }
    assert_eq!(model.decode(&[TokenId(70_000)], false), "", "padding ids of the model are no text");
}

#[test]
fn templates_follow_hugging_face() {
    let user = json!([{"role": "user", "content": " Hi <b> \"q\" é ", "n": 1, "f": 1.0, "list": [1, {"a": null}], "none": null}]);
    let cases = [
        ("{% for m in messages %}\n  {% if true %}\nx{{ m.role }}\n  {% endif %}\n{% endfor %}\n", "xuser\n"),
        (
            "{{ messages[0].content | trim }}|{{ messages[0]['content'].strip().upper() }}",
            "Hi <b> \"q\" é|HI <B> \"Q\" É",
        ),
        (
            "{{ messages[0] | tojson }}",
            r#"{"role": "user", "content": " Hi <b> \"q\" é ", "n": 1, "f": 1.0, "list": [1, {"a": null}]}"#,
        ),
        (
            "{{ {'a': [1, 2], 'b': {}, 'c': []} | tojson(indent=2) }}",
            "{\n  \"a\": [\n    1,\n    2\n  ],\n  \"b\": {},\n  \"c\": []\n}",
        ),
        ("{{ ['é😀', 1] | tojson(ensure_ascii=true, separators=[',', ':']) }}", r#"["\u00e9\ud83d\ude00",1]"#),
        ("{{ true }} {{ none }} {{ missing }}|{{ tools is none }}", "True None |True"),
        (
            "{% set ns = namespace(n=0) %}{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
            "8",
        ),
        ("a\n  {%- generation -%}  b  {%- endgeneration %}  c{% generation %}d{% endgeneration %}", "ab  cd"),
        (
            "{{ none is iterable }} {{ 'a' is iterable }} {{ [] is iterable }} {{ missing is iterable }}",
            "False True True True",
        ),
        (
            "{% for i in [1, 2] %}{{ loop.previtem | default('-') }}{{ loop.nextitem | default('-') }} {% endfor %}",
            "-2 1- ",
        ),
        ("{{ 'a\n\nb\n' | indent(2, first=true) }}|{{ 'a\nb' | indent }}", "  a\n\n  b\n|a\n    b"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ bos_token is defined }}{{ messages[-1].content.split('<b>')[0] }}", "False Hi "),
        (
            "{% for k, v in messages[0].items() %}{{ k }},{% endfor %}{{ messages[0].get('x', 'y') }}",
            "role,content,n,f,list,y",
        ),
    ];
    for (template, expected) in cases {
        assert_eq!(render(template, user.clone()).expect("renders"), expected, "{template}");
    }
    let kwargs = Map::from_iter([("enable_thinking".into(), json!(false)), ("messages".into(), json!("no"))]);
    let text = render_with("{{ enable_thinking }} {{ messages | length }}", user, kwargs).expect("renders");
    assert_eq!(text, "False 1", "extra variables do not replace the template's own");
}

#[test]
fn template_errors_name_the_messages() {
    let raised = render("{{ raise_exception('roles must alternate <|im_end|>') }}", json!([{"content": "<|im_end|>"}]));
    assert_eq!(raised, Err(RequestError::invalid("messages", "chat template: roles must alternate <|im_end|>")));
    let raised = render("{{ raise_exception(messages[0].content) }}", json!([{"content": "bad <|im_end|>"}]));
    assert_eq!(
        raised,
        Err(RequestError::invalid("messages", "chat template: bad <|im_end|>")),
        "the mask does not show"
    );
    let no_template = model().encode_chat(&ChatInput {
        messages: &json!([]),
        add_generation_prompt: true,
        continue_final_message: false,
        kwargs: &Map::new(),
    });
    assert!(matches!(no_template, Err(RequestError::Invalid { param: Some(param), .. }) if param == "messages"));
    let broken = load(byte_level(&[]), Some("{% if %}")).expect_err("does not parse");
    assert!(broken.to_string().contains("line 1"), "{broken}");
    let missing = load(byte_level(&[]), Some("no/such/file.jinja")).expect_err("is not there");
    assert!(missing.to_string().contains("no/such/file.jinja"), "{missing}");
}

#[test]
fn fault_19_templates_end_in_bounded_work() {
    let hostile = [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}x{% endfor %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for a in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for a in range(99) %}{% set ns.s = ns.s.replace('x', 'xx') %}{% endfor %}",
        "{% set ns = namespace(s='\"') %}{% for a in range(99) %}{% set ns.s = ns.s | tojson %}{% endfor %}",
        "{{ 'x' * 99999999 }}{{ 'x' * 99999999 }}{{ 'x' * 99999999 }}",
        "{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
        "{% set ns = namespace(l=[1]) %}{% for a in range(99) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | tojson }}",
        "{% set ns = namespace(l=[1]) %}{% for a in range(99999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l | tojson }}",
        // A value so deep that dropping, comparing or printing it needs a deep stack.
        "{% set ns = namespace(l=1, m=1) %}{% for a in range(99999) %}{% set ns.l = [ns.l] %}{% set ns.m = [ns.m] %}{% endfor %}{{ ns.l == ns.m }}{{ ns.l }}{{ raise_exception('deep') }}",
        "{% set ns = namespace(l=1) %}{% for a in range(99999) %}{% for b in range(9) %}{% set ns.l = [ns.l] %}{% endfor %}{% endfor %}",
        "{{ 'a\n' | indent(999999999999, first=true) }}",
        "{{ range(99999) | list | tojson(separators=['x' * 99999, ':']) }}",
    ];
    for template in hostile {
        let error = render(template, json!([{"role": "user", "content": "hi"}])).expect_err(template);
        assert!(matches!(&error, RequestError::Invalid { param: Some(param), .. } if param == "messages"), "{error:?}");
    }
    let long = "x".repeat(2 << 20);
    assert_eq!(
        render("{% for m in messages %}{{ m.content | trim }}{% endfor %}", json!([{"content": long}])),
        Ok(long),
        "long messages are not hostile"
    );
}

#[test]
fn the_final_message_is_continued() {
    let render = |template: &str, messages: &Value| {
        let model = load(byte_level(&[("<|im_end|>", 3)]), Some(template)).expect("loads");
        let kwargs = Map::new();
        model.render_chat(&ChatInput {
            messages,
            add_generation_prompt: false,
            continue_final_message: true,
            kwargs: &kwargs,
        })
    };
    let messages = json!([{"role": "user", "content": "A"}, {"role": "assistant", "content": "A b "}]);
    let plain = "{% for m in messages %}[{{ m.content }}]<|im_end|>\n{% endfor %}";
    assert_eq!(render(plain, &messages).expect("renders"), "[A]<|im_end|>\n[A b ");
    let trims = "{% for m in messages %}[{{ m.content | trim }}]<|im_end|>\n{% endfor %}";
    assert_eq!(render(trims, &messages).expect("renders"), "[A]<|im_end|>\n[A b", "what the template strips is gone");
    let drops = "{{ messages[0].content }}";
    assert!(
        matches!(render(drops, &messages), Err(RequestError::Invalid { param: Some(param), .. }) if param == "continue_final_message")
    );
    for bad in [json!([]), json!([{"role": "assistant"}]), json!("text")] {
        assert!(render(plain, &bad).is_err(), "{bad}");
    }
}

#[test]
fn bad_metadata_is_named() {
    let strs = |list: &[&str]| MetaValue::Strs(strings(list));
    let cases = [
        (
            with(byte_level(&[]), "tokenizer.ggml.pre", MetaValue::Str("martian".into())),
            "'martian' is not supported (supported: gpt-2, smollm, llama-bpe",
        ),
        (
            with(byte_level(&[]), "tokenizer.ggml.model", MetaValue::Str("bert".into())),
            "'bert' is not supported (supported: gpt2, llama)",
        ),
        (metadata([("tokenizer.ggml.model", MetaValue::Str("gpt2".into()))]), "tokenizer.ggml.tokens"),
        (with(byte_level(&[]), "tokenizer.ggml.tokens", strs(&[])), "0 tokens"),
        (with(byte_level(&[]), "tokenizer.ggml.token_type", MetaValue::Ints(vec![1])), "1 types for 256 tokens"),
        (byte_level(&[("a", 1)]), "token 'a' has two ids, 97 and 256"),
        (with(byte_level(&[]), "tokenizer.ggml.merges", strs(&["a"])), "merge 0 is 'a'"),
        (with(byte_level(&[]), "tokenizer.ggml.merges", strs(&["a b"])), "`ab` out of vocabulary"),
        (
            with(byte_level(&[]), "tokenizer.ggml.eos_token_id", MetaValue::Int(256)),
            "256 is not an id of the 256 tokens",
        ),
        (with(byte_level(&[]), "tokenizer.ggml.add_bos_token", MetaValue::Bool(true)), "tokenizer.ggml.add_bos_token"),
        (sentence_piece(&[("<0x4", 6, 0.0)]), "'<0x4' has the type of a byte token"),
        (sentence_piece(&[("x", 1, f32::NAN)]), "a score is not a number"),
        (sentence_piece(&[(&"x".repeat(2000), 1, 0.0)]), "2000 bytes"),
    ];
    for (meta, expected) in cases {
        let error = load(meta, None).expect_err(expected).to_string();
        assert!(error.contains(expected) && error.contains("test.gguf"), "{error}");
    }
}

fn sentence_piece(extra: &[(&str, i64, f32)]) -> Metadata {
    let base = [("<unk>", 2, 0.0), ("<s>", 3, 0.0), ("</s>", 3, 0.0)];
    let all: Vec<_> = base.into_iter().chain(extra.iter().copied()).collect();
    metadata([
        ("tokenizer.ggml.model", MetaValue::Str("llama".into())),
        ("tokenizer.ggml.tokens", MetaValue::Strs(all.iter().map(|(piece, ..)| (*piece).to_owned()).collect())),
        ("tokenizer.ggml.token_type", MetaValue::Ints(all.iter().map(|(_, kind, _)| *kind).collect())),
        ("tokenizer.ggml.scores", MetaValue::Floats(all.iter().map(|(.., score)| *score).collect())),
    ])
}

/// Plain text that spells a control token is not merged into it, though its two halves are pieces.
#[test]
fn scores_never_merge_into_control_tokens() {
    let pieces =
        [("<", 1, -5.0), ("s", 1, -6.0), (">", 1, -7.0), ("<s", 1, -1.0), ("s>", 1, -2.0), ("\u{2581}", 1, -3.0)];
    let model = load(sentence_piece(&pieces), None).expect("loads");
    let plain = model.encode("<s>", false, false);
    assert!(plain.iter().all(|&id| !model.is_special(id)), "{plain:?}");
    assert_eq!(plain, [TokenId(8), TokenId(6), TokenId(5)], "space, the best score first, the rest");
    assert_eq!(model.encode("<s>", false, true), [TokenId(1)]);
}

#[test]
fn every_token_that_ends_a_turn_counts() {
    let extra = [("<s>", 3), ("</s>", 3), ("<turn>", 3), ("<message>", 3), ("<|eot_id|>", 3), ("<|im_end|>", 4)];
    let mut meta = byte_level(&extra);
    for (name, id) in [("bos", 256), ("eos", 257), ("eot", 258), ("eom", 259)] {
        meta = with(meta, &format!("tokenizer.ggml.{name}_token_id"), MetaValue::Int(id));
    }
    let model = load(meta, None).expect("loads");
    let expected = [257, 258, 259, 260].map(TokenId);
    assert_eq!(model.eos_token_ids(), expected, "named by the metadata or a control token of a known name");
    assert_eq!(model.bos_token_id(), Some(TokenId(256)));
}

/// A token of equal letters overlaps itself everywhere, which some ways of looking for it cannot stand.
#[test]
fn long_special_tokens_are_no_hang() {
    let error = load(byte_level(&[(&"x".repeat(200_000), 3)]), None).expect_err("too long").to_string();
    assert!(error.contains("special tokens at byte 0: one has 200000 bytes"), "{error}");
    let long = "x".repeat(1024);
    let model = load(byte_level(&[(&long, 3), ("<|im_end|>", 3)]), Some("{{ messages[0].content }}")).expect("loads");
    assert_eq!(model.encode(&format!("a{long}b"), false, true), [97, 256, 98].map(TokenId));
    let input = ChatInput {
        messages: &json!([{"content": long}]),
        add_generation_prompt: false,
        continue_final_message: false,
        kwargs: &Map::new(),
    };
    let ids = model.encode_chat(&input).expect("renders");
    assert!(ids.len() == long.len() && ids.iter().all(|&id| id == TokenId(u32::from(b'x'))), "all of it is text");
}

/// What a missing name means, and holes in the vocabulary.
#[test]
fn lenient_where_llama_cpp_is() {
    let mut meta = byte_level(&[("", 1), ("zz", 1)]);
    meta.values.remove("tokenizer.ggml.pre");
    let model = load(meta, None).expect("loads with the default");
    assert_eq!(model.decode(&[TokenId(256), TokenId(257)], false), "zz");
    assert_eq!(model.vocab_size(), 258);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// However text is cut into pieces, it is the same text with the same match.
    #[test]
    fn streamed_text_is_the_whole_text(
        pieces in vec("[abé日😀]{0,4}", 0..12),
        stops in vec("[abé日😀]{0,4}", 0..4),
        include in any::<bool>(),
    ) {
        let whole = pieces.concat();
        let expected = cut(&whole, &stops, include);
        prop_assert_eq!(&stream(pieces.iter().map(String::as_str), &stops, include), &expected);
        prop_assert_eq!(&stream([whole.as_str()].into_iter(), &stops, include), &expected);
        // And nothing is held longer than needed: what is held is the start of a stop string.
        let mut matcher = StopMatcher::new(&stops, include);
        let mut shown = String::new();
        for piece in &pieces {
            shown.push_str(&matcher.push(piece, true));
            prop_assert!(expected.0.starts_with(&shown));
        }
        if matcher.matched().is_none() {
            let held = matcher.flush();
            prop_assert!(held.is_empty() || stops.iter().any(|stop| stop.starts_with(&held)));
        }
    }

    /// Any bytes, one token each: streaming is decoding is the lossy reading of the bytes.
    #[test]
    fn streamed_bytes_are_the_decoded_bytes(bytes in vec(any::<u8>(), 0..40), text in "\\PC{0,12}") {
        let model = model();
        let all: Vec<u8> = bytes.iter().copied().chain(text.bytes()).chain(bytes.iter().copied()).collect();
        let ids: Vec<TokenId> = all.iter().map(|&byte| TokenId(u32::from(byte))).collect();
        prop_assert_eq!(model.decode(&ids, false), String::from_utf8_lossy(&all));
    }

    /// Masking is undone exactly, leaves no special token behind, and lets none form at the end.
    #[test]
    fn masks_come_off(parts in vec("<\\|x\\|>|<\\|X|<|\\|x\\|>|é|日| |[\u{fdd0}-\u{fdef}]|[a-c]|\u{100000}", 0..12), after in "[<|x> ]{0,5}") {
        let specials = ["<|x|>", "<|xy|>", "日本", "c"];
        let mask = Mask::new(specials.into_iter()).expect("builds");
        let text = parts.concat();
        let masked = mask.mask(&text);
        prop_assert_eq!(mask.restore(&masked), text.as_str());
        for special in specials {
            prop_assert!(!masked.to_lowercase().contains(special));
            let joined = format!("{masked}{after}");
            let inside = joined.find(special).is_some_and(|at| at < masked.len());
            prop_assert!(!inside, "{} starts in the message", special);
        }
    }

    /// No template and no messages make it panic.
    #[test]
    fn templates_never_panic(
        source in "(\\{\\{|\\}\\}|\\{%-?|-?%\\}| |for |in |if |endif|endfor|set |messages|range\\(9\\)|x|\\[|\\]|\\||tojson|trim|generation|~|\\*|'a'|9|\\.|,|\\(|\\)){0,24}",
        content in "\\PC{0,20}",
        role in proptest::option::of("[a-z<|>_]{0,8}"),
    ) {
        if let Ok(template) = ChatTemplate::parse(&source) {
            let kwargs = Map::new();
            let messages = json!([{"role": role, "content": content}, [content], role]);
            for continue_final_message in [false, true] {
                let input = ChatInput { messages: &messages, add_generation_prompt: false, continue_final_message, kwargs: &kwargs };
                let _ = model().encode_chat_with(&input, Some(&template));
            }
        }
    }

    /// Any metadata is a tokenizer or an error.
    #[test]
    fn metadata_never_panics(
        tokens in vec("\\PC{0,3}|<0x[0-9A-G]{1,3}>|<s>", 0..8),
        types in vec(-1i64..8, 0..8),
        scores in vec(proptest::num::f32::ANY, 0..8),
        merges in vec("\\PC{0,3} \\PC{0,3}", 0..3),
        kind in "gpt2|llama",
        id in -1i64..9,
    ) {
        let meta = metadata([
            ("tokenizer.ggml.model", MetaValue::Str(kind)),
            ("tokenizer.ggml.tokens", MetaValue::Strs(tokens)),
            ("tokenizer.ggml.token_type", MetaValue::Ints(types)),
            ("tokenizer.ggml.scores", MetaValue::Floats(scores)),
            ("tokenizer.ggml.merges", MetaValue::Strs(merges)),
            ("tokenizer.ggml.bos_token_id", MetaValue::Int(id)),
        ]);
        if let Ok(model) = load(meta, None) {
            let ids = model.encode("ab <s> é<0x41>", true, true);
            model.decode(&ids, false);
        }
    }
}
