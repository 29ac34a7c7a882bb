//! `chat` through standard input: turns that build on each other, commands, and how it ends.

use super::{kittiwake, kittiwake_hears, tiny};

const GREEDY: [&str; 4] = ["--threads=1", "--temperature=0", "--max-tokens=12", "--log-level=warn"];

fn chat(input: impl AsRef<[u8]>, arguments: &[&str]) -> super::Said {
    kittiwake_hears(input.as_ref(), &[&["chat", &tiny()][..], &GREEDY, arguments].concat())
}

/// What the model says to a conversation that the tiny model's ChatML template has rendered by hand (BOS comes by itself).
fn answer_to(turns: &[(&str, &str)]) -> String {
    let said: String = turns.iter().map(|(role, text)| format!("<|im_start|>{role}\n{text}<|im_end|>\n")).collect();
    let prompt = format!("{said}<|im_start|>assistant\n");
    let text = kittiwake([&["generate", &tiny(), "--prompt", &prompt][..], &GREEDY].concat()).ok();
    text.strip_suffix('\n').expect("a last line end").to_owned()
}

#[test]
fn the_second_answer_sees_the_first() {
    let first = answer_to(&[("user", "Hi there")]);
    let second = answer_to(&[("user", "Hi there"), ("assistant", &first), ("user", "And now?")]);
    let alone = answer_to(&[("user", "And now?")]);
    assert_ne!(second, alone, "the fixture tells a conversation from a question");
    assert_eq!(chat("Hi there\nAnd now?\n", &[]).ok(), format!("{first}\n{second}\n"));
    // No line end after the last message, empty lines between: the same. A forgotten conversation: not.
    assert_eq!(chat("\nHi there\n\n  And now?", &[]).ok(), format!("{first}\n{second}\n"));
    assert_eq!(chat("Hi there\n/reset\nAnd now?\n", &[]).ok(), format!("{first}\n{alone}\n"));
    assert_eq!(chat("Hi there\n/exit\nAnd now?\n", &[]).ok(), format!("{first}\n"));
}

#[test]
fn a_system_message_opens_every_conversation() {
    let expected = answer_to(&[("system", "- be brief"), ("user", "Hi")]);
    assert_ne!(expected, answer_to(&[("user", "Hi")]));
    assert_eq!(chat("Hi\n/reset\nHi\n", &["--system", "- be brief"]).ok(), format!("{expected}\n{expected}\n"));
}

#[test]
fn end_of_input_is_a_good_end() {
    assert_eq!(chat("", &[]).ok(), "");
}

#[test]
fn one_message_is_answered_with_what_it_took() {
    let said = chat("", &["--message", "Hi there"]);
    let speed = said.err.clone();
    assert_eq!(said.ok(), format!("{}\n", answer_to(&[("user", "Hi there")])));
    assert!(speed.contains("loaded in") && speed.contains("tokens/s]"), "{speed}");
}

#[test]
fn a_cut_answer_says_so() {
    let said = chat("Hi there\n", &["--ignore-eos"]);
    assert!(said.err.contains("--max-tokens"), "{}", said.err);
    let said = chat("Hi there\n", &["--ignore-eos", "--max-tokens=400", "--max-model-len=64"]);
    assert!(said.err.contains("the context is full"), "{}", said.err);
}

#[test]
fn a_script_hears_of_what_cannot_be_answered() {
    let long = "word ".repeat(2000);
    chat(format!("{long}\nHi\n"), &[]).refused(&["the context of 512 tokens"]);
    chat(b"\xff\xfe\n", &[]).refused(&["standard input", "UTF-8"]);
    chat("Hi\n", &["--temperature", "3"]).refused(&["temperature"]);
}
