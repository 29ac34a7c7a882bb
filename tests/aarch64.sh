#!/usr/bin/env bash
# The CPU kernels on aarch64 without such a machine: builds for it, and runs what depends on it under QEMU.
#   tests/aarch64.sh
# Needs a Rust toolchain with the target aarch64-unknown-linux-gnu, aarch64-linux-gnu-gcc and qemu-aarch64.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=aarch64-unknown-linux-gnu
missing=()
[ -d "$(rustc --print target-libdir --target $target)" ] ||
    missing+=("Rust's standard library for $target (rustup target add $target; Debian: libstd-rust-dev:arm64)")
command -v aarch64-linux-gnu-gcc >/dev/null ||
    missing+=("aarch64-linux-gnu-gcc (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross)")
command -v qemu-aarch64 >/dev/null || missing+=("qemu-aarch64 (Debian: qemu-user)")
if [ "${#missing[@]}" -gt 0 ]; then
    printf 'missing: %s\n' "${missing[@]}" >&2
    exit 1
fi

export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
libraries=$(dirname "$(aarch64-linux-gnu-gcc -print-file-name=libc.so.6)")

# A CPU and the fastest instruction set that must be found on it. The tests run every set that a CPU has: the second has all,
# and the first stops at an instruction that strayed into the smallest.
for pair in cortex-a53:neon max:neon-i8mm; do
    cpu=${pair%:*} isa=${pair#*:}
    echo "== $cpu"
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -cpu $cpu -L $libraries/.."
    found=$(cargo run --target $target --locked --profile ci --quiet -- devices)
    echo "$found"
    grep -q ", $isa  (auto)\$" <<<"$found" || { echo "$isa was not found on a $cpu" >&2; exit 1; }
    cargo test --target $target --workspace --locked --profile ci --lib backend::cpu
    cargo test --target $target --workspace --locked --profile ci --test ops --test golden
done
