#!/usr/bin/env python3
"""What weights cost on this machine: loading beside reading the file, and int4 checkpoints beside Q4_0.

    python3 benches/weights.py [--threads 2] [--rounds 5] [--ours PATH]

Takes the models of benches/synthetic.py, which have to be there. Both figures are medians of ratios within a round:

    load    seconds of `kittiwake bench` until the model is ready, over seconds in which a process reads the file into memory that
            it has just got, and adds it up in words of 8 bytes (both from the page cache)
    decode  tokens/s of the int4 directory over those of the Q4_0 file, each one token at a time from an empty context
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import peer_llama_cpp as peer
import synthetic

READ = """
import sys, time
import numpy as np
start = time.perf_counter()
total = sum(int(np.fromfile(path, np.uint64, count=np.memmap(path).size // 8).sum()) for path in sys.argv[1:])
print(time.perf_counter() - start)
"""


def weights_of(name):
    path = synthetic.path_of(name)
    if not path.exists():
        raise peer.BenchError(f"no model at {path}; benches/synthetic.py makes it")
    return path, path if path.is_file() else path / "model.safetensors"


def bench(options, path, output_tokens):
    command = [options.ours, "bench", path, "--threads", options.threads, "--prompt-tokens", 0, "--output-tokens", output_tokens,
               "--rounds", 1, "--batch", 1, "--log-level", "warn", "--json"]
    return json.loads(peer.run(command, env=dict(os.environ, GLIBC_TUNABLES=peer.HUGE_PAGES)).splitlines()[-1])


def read_seconds(file):
    python = synthetic.FOLDER / "venv" / "bin" / "python"
    return float(peer.run([python, "-c", READ, file]))


def show(name, pairs, unit):
    ratios = sorted(ours / other for ours, other in pairs)
    ours, other = (statistics.median(values) for values in zip(*pairs))
    print(f"{name:24} {ours:8.2f} {other:8.2f} {unit:9} {statistics.median(ratios):5.2f}  {ratios[0]:.2f}..{ratios[-1]:.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description="What weights cost on this machine.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ours", type=Path, help="use this kittiwake instead of building it")
    options = parser.parse_args()
    try:
        options.ours = options.ours or peer.build_kittiwake()
        print(f"{'figure':24} {'ours':>8} {'other':>8} {'unit':9} ratio  lowest..highest")
        for name in [*synthetic.GGUF, *synthetic.DIRECTORIES]:
            path, file = weights_of(name)
            pairs = [(bench(options, path, 1)["load_s"], read_seconds(file)) for _ in range(options.rounds + 1)]
            show(f"load {name}", pairs[1:], "s")
        q4_0, _ = weights_of("q4_0")
        for name in synthetic.DIRECTORIES:
            path, _ = weights_of(name)
            speed = lambda path: bench(options, path, 64)["runs"][0]["decode_tokens_per_s"]
            show(f"decode {name} / q4_0", [(speed(path), speed(q4_0)) for _ in range(options.rounds)], "tokens/s")
    except peer.BenchError as error:
        sys.exit(f"weights: {error}")


if __name__ == "__main__":
    main()
