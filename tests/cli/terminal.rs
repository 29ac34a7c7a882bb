//! What is shown on a terminal only: the progress bar of a load and the prompt of a conversation. Python gives the pseudo-terminal.

use std::io::Write;
use std::process::Stdio;

use super::{isolated, kittiwake, python, support, tiny};

/// Runs the rest of its arguments on an 80-column terminal that hears standard input; the exit code is the program's.
const ON_A_TERMINAL: &str = r#"
import os, pty, sys
command = ["sh", "-c", 'stty cols 80 rows 24; exec "$0" "$@"', *sys.argv[1:]]
sys.exit(os.waitstatus_to_exitcode(pty.spawn(command)))
"#;

/// What a terminal showed, and the exit code.
fn on_a_terminal(input: &str, arguments: &[&str]) -> (String, Option<i32>) {
    let mut command = isolated(python());
    command.args(["-c", ON_A_TERMINAL, env!("CARGO_BIN_EXE_kittiwake")]).args(arguments).env("TERM", "xterm");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("python runs");
    let mut typed = child.stdin.take().expect("piped");
    typed.write_all(input.as_bytes()).expect("a terminal that hears");
    let output = child.wait_with_output().expect("it ends");
    drop(typed);
    (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.code())
}

#[test]
fn a_load_shows_its_progress_on_a_terminal_only() {
    let demo = support::demo().display().to_string();
    let arguments = ["generate", &demo, "--prompt=The sky is", "--max-tokens=2", "--temperature=0"];
    let piped = kittiwake(arguments);
    assert!(!piped.err.contains("loading") && !piped.out.contains("loading"), "{piped:?}");
    let answer = piped.ok();
    let (shown, code) = on_a_terminal("", &arguments);
    assert_eq!(code, Some(0), "{shown}");
    assert!(shown.contains("loading") && shown.contains("MiB"), "no progress bar: {shown:?}");
    // The bar is gone when the answer comes.
    let last_line = shown.trim_end().rsplit(['\r', '\n']).next().unwrap_or_default();
    assert!(last_line.ends_with(answer.trim_end()) && !last_line.contains("loading"), "{shown:?}");
}

#[test]
fn a_conversation_on_a_terminal_survives_a_bad_message() {
    let long = "much too long ".repeat(30);
    let arguments = ["chat", &tiny(), "--max-tokens=4", "--max-model-len=64", "--temperature=0", "--ignore-eos"];
    let (shown, code) = on_a_terminal(&format!("Hi\n{long}\n/help\nHi\n/exit\n"), &arguments);
    assert_eq!(code, Some(0), "{shown}");
    assert!(shown.contains("\n> ") && shown.contains("the context of 64 tokens"), "{shown}");
    assert_eq!(shown.matches("/reset forgets").count(), 2, "at the start and for /help: {shown}");
    assert_eq!(shown.matches("[cut: --max-tokens").count(), 2, "both short messages were answered: {shown}");
}
