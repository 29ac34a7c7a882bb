#!/usr/bin/env bash
# Everything that must hold: format, lints, all tests, the quickstart. Installs what the tests need; ends non-zero on any failure.
#   tests/run.sh [arguments for `cargo test`; with any, the quickstart is left out]
# Needs the Rust toolchain, a C compiler and Python 3 with pip. Safe to run again, from anywhere.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

echo "== python packages of the tests"
site="$PWD/.cache/test-python"
if ! cmp -s tests/http/requirements.txt "$site/installed.txt"; then
    rm -rf "$site"
    python3 -m pip install --quiet --disable-pip-version-check --target "$site" -r tests/http/requirements.txt
    cp tests/http/requirements.txt "$site/installed.txt"
fi
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"

echo "== demo model"
python3 examples/fetch_demo.py

echo "== format"
cargo fmt --all --check
echo "== lints"
cargo clippy --workspace --all-targets --locked --profile ci -- -D warnings
echo "== tests"
cargo test --workspace --locked --profile ci "$@"
[[ $# -gt 0 ]] || tests/quickstart.sh
