#!/usr/bin/env bash
# The first command of a stranger, as a stranger meets it: a fresh copy of the tree at a path with spaces, called from another
# directory, twice. Builds in release, so that it costs minutes the first time; the copy stays in target/ and makes reruns cheap.
#   tests/quickstart.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

copy="$PWD/target/quick start/kittiwake"
mkdir -p "$copy"
# Sources that are gone from the tree must be gone from the copy too.
find "$copy" -mindepth 1 -maxdepth 1 ! -name target ! -name models -exec rm -rf {} +
tar -c --exclude=./target --exclude=./models --exclude=./.cache --exclude=./.git . | tar -x -C "$copy"

for run in first second; do
    echo "== quickstart, $run run"
    said="$copy/target/quickstart.log"
    mkdir -p "$copy/target"
    (cd / && env -u CARGO_TARGET_DIR "$copy/examples/quickstart.sh" "What colour is the sky? One word.") 2>&1 | tee "$said"
    # What ran where, how fast, and the next two commands.
    for promise in "[CPU, " "tokens/s]" "serve demo" "chat demo"; do
        grep -qF "$promise" "$said" || { echo "quickstart does not say '$promise'" >&2; exit 1; }
    done
    answer=$(awk '/^== What colour/ { found = 1; next } found { print; exit }' "$said")
    [[ $answer == *[[:alpha:]]* && $answer != "["* ]] || { echo "quickstart gave no answer: '$answer'" >&2; exit 1; }
done
