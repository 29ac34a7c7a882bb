//! The scripts that fetch the demo model, against every kind of bad download: runs `test_fetch.py`, whose tests are the tests.

use super::{isolated, python};

#[test]
fn a_bad_download_is_never_taken_for_a_model() {
    let mut script = isolated(python());
    let output =
        script.arg("tests/cli/test_fetch.py").env("PYTHONDONTWRITEBYTECODE", "1").output().expect("python runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stdout));
    assert!(said.contains("\nOK") && !said.contains("Ran 0 tests"), "the script ran no tests: {said}");
}
