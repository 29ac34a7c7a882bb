//! The wire, asked by the official `openai` client: runs `tests/http/test_*.py` against the binary just built.
//!
//! The scripts' own tests are the tests; this file only starts them and shows what they say. Python and the client come from
//! `tests/run.sh`; `KITTIWAKE_TEST_PYTHON` names another interpreter.

use std::path::Path;
use std::process::Command;

#[test]
fn the_official_client_is_served() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = std::env::var_os("KITTIWAKE_TEST_PYTHON").unwrap_or_else(|| "python3".into());
    let mut script = Command::new(&python);
    script.args(["-m", "unittest", "discover", "--verbose", "--start-directory"]).arg(root.join("tests/http"));
    script.env("KITTIWAKE_BINARY", env!("CARGO_BIN_EXE_kittiwake"));
    script.env("KITTIWAKE_MODEL", root.join("tests/fixtures/llama-tiny"));
    script.env("PYTHONDONTWRITEBYTECODE", "1");
    let output = script.output().unwrap_or_else(|error| panic!("{}: {error}", python.display()));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stdout));
    assert!(said.contains("\nOK"), "the scripts ran no tests: {said}");
}
