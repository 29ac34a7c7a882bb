#!/usr/bin/env bash
# From a fresh clone to an answer: build, fetch the demo model, ask it something.
#   examples/quickstart.sh ["a prompt"]
# Needs the Rust toolchain, a C compiler and Python 3 with pip. Safe to run again, from anywhere.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
prompt=${1:-"In one sentence: what is a kittiwake?"}

for tool in cargo cc python3; do
    command -v "$tool" >/dev/null || { echo "quickstart: '$tool' is not installed" >&2; exit 1; }
done
python3 -m pip --version >/dev/null 2>&1 || { echo "quickstart: Python has no pip (on Debian: apt install python3-pip)" >&2; exit 1; }

echo "== building (release)"
cargo build --release --locked
binary=${CARGO_TARGET_DIR:-target}/release/kittiwake

echo "== demo model"
python3 examples/fetch_demo.py

echo "== $prompt"
"$binary" chat demo --log-level warn --temperature 0 --message "$prompt"

cat <<EOF

Next, in $PWD:
  $binary serve demo     # OpenAI-compatible server on http://127.0.0.1:8000/v1
  $binary chat demo      # talk to it here
EOF
