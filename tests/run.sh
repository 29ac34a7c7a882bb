#!/usr/bin/env bash
# Everything that must hold: format, lints, all tests, the quickstart. Installs what the tests need; ends non-zero on any failure.
#   tests/run.sh [arguments for `cargo test`; with any, the quickstart is left out]
# Needs the Rust toolchain, a C compiler and Python 3 with pip; on Linux, where Mesa's software Vulkan or spirv-val is missing,
# apt-get as root or with sudo. KITTIWAKE_REQUIRE_WGPU=0 skips visibly what needs them. Safe to run again, from anywhere.
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

echo "== software Vulkan"
export KITTIWAKE_REQUIRE_WGPU="${KITTIWAKE_REQUIRE_WGPU:-1}"
# The drivers look for a folder of their own there.
export XDG_RUNTIME_DIR="${XDG_RUNTIME_DIR:-$(mktemp -d)}"
missing=()
if [[ $(uname) == Linux && $KITTIWAKE_REQUIRE_WGPU == 1 ]]; then
    compgen -G "/usr/share/vulkan/icd.d/*.json" >/dev/null || missing+=(mesa-vulkan-drivers)
    ldconfig -p | grep -q "libvulkan\.so\.1" || missing+=(libvulkan1)
    command -v spirv-val >/dev/null || missing+=(spirv-tools)
fi
if [[ ${#missing[@]} -gt 0 ]]; then
    as_root=()
    [[ $(id -u) == 0 ]] || as_root=(sudo)
    command -v apt-get >/dev/null && { [[ ${#as_root[@]} == 0 ]] || command -v sudo >/dev/null; } || {
        echo "missing: ${missing[*]}. Install them, or set KITTIWAKE_REQUIRE_WGPU=0 to skip the tests that need an adapter." >&2
        exit 1
    }
    "${as_root[@]}" apt-get update --quiet
    "${as_root[@]}" apt-get install --yes --quiet --no-install-recommends "${missing[@]}"
fi

echo "== Tint, a second WGSL compiler"
if command -v npm >/dev/null && command -v node >/dev/null; then
    tint="$PWD/.cache/tint"
    tint_version=0.6.2
    if [[ $(cat "$tint/installed.txt" 2>/dev/null) != "$tint_version" ]]; then
        rm -rf "$tint"
        npm install --silent --no-audit --no-fund --prefix "$tint" "webgpu@$tint_version"
        echo "$tint_version" >"$tint/installed.txt"
    fi
    export KITTIWAKE_TINT="$tint/node_modules"
else
    echo "no node with npm here: the check of kernels by Tint is skipped"
fi

echo "== demo model"
python3 examples/fetch_demo.py

echo "== format"
cargo fmt --all --check
echo "== lints"
cargo clippy --workspace --all-targets --locked --profile ci -- -D warnings
echo "== tests"
cargo test --workspace --locked --profile ci "$@"
[[ $# -gt 0 ]] || tests/quickstart.sh
