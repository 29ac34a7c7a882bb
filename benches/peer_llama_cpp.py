#!/usr/bin/env python3
"""Kittiwake beside llama.cpp on the CPU: same GGUF, same threads, in alternation.

    python3 benches/peer_llama_cpp.py [--model PATH] [--threads 2] [--rounds 5] [--json] [--server]

llama.cpp comes from the pinned PyPI sdist of `llama-cpp-python`, which vendors its sources. It is built natively
into `.cache/llama.cpp` (git-ignored) and rebuilt only when the pin, the flags or the CPU change. Needs python3 with
pip, cargo and a C++ compiler; cmake and ninja are taken from PATH, else from PyPI.

The peer runs at its best: 2 MiB pages (`GLIBC_TUNABLES=glibc.malloc.hugetlb=1`) with the weights read into that
memory instead of mapped (its `--no-mmap`), and flash attention on. Ours is given the same environment.

One round measures ours, theirs, ours, theirs. The machine may be shared and drift 2x within minutes, therefore only
the ratio inside a round counts, and the result is the median of these ratios (ours / theirs, above 1 = ours is
faster). Round 0 warms caches up and is not counted.

Busy neighbours distort even the ratio: llama.cpp's threads spin at a barrier after each operation, and when one of them
is descheduled its decode falls to a tenth. So each measurement notes what share of the CPUs went to other processes
while it ran; a round in which that exceeds 10 % is repeated, up to twice as many rounds as asked for, and the
quietest are counted. `other_load` in the output is the worst share among those: distrust a ratio where it is high.
The server's times are not guarded like this.

Both sides do the same work in each figure, and neither counts loading, tokenising or detokenising:

    figure      theirs                                      ours (`kittiwake bench MODEL --threads N --json ...`)
    prefill512  llama-bench -p 512                          --prompt-tokens 512 --output-tokens 128 --batch 1
                512 tokens into an empty cache, logits of the last one only
    decode      llama-bench -n 128                          the same run: decode is its own pass, from a
                128 tokens, one at a time, from an          prompt of 1 token
                empty cache
    parallel8   llama-batched-bench -npp 128 -ntg 64        --prompt-tokens 128 --output-tokens 64 --depth 128 --batch 8
                -npl 8: 8 sequences with 128 tokens         64 tokens for each sequence after its 128;
                each in the cache, then 64 steps of 8       the prefill is not counted
                rows; all sequences' tokens count
    ttft_*      (--server only) milliseconds to the first streamed token of /v1/completions, one client: a new
                1,500-token prefix with a tail of 16 tokens (cold), then the same prefix with another tail (warm)

Ours includes greedy sampling; theirs computes all logits but samples nothing (it feeds random tokens).

Ours prints one JSON object: {"runs": [{"batch": 1, "prefill_tokens_per_s": x, "decode_tokens_per_s": y}, ...]}. If a run
says `decode_context_tokens` (tokens in each sequence's cache when its decode starts), the peer is measured at that
depth too, so that the comparison stays fair if our bench changes; without it the table above is taken as true.
"""

import argparse
import hashlib
import http.client
import json
import os
import random
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "llama.cpp"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
TARGETS = ["llama-bench", "llama-batched-bench"]
CMAKE_FLAGS = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=ON",
    "-DLLAMA_BUILD_COMMON=ON",
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
]

# Above this share of the CPUs in other processes a round is repeated.
QUIET = 0.1
PREFIX_TOKENS = 1500
TAIL_TOKENS = 16
HUGE_PAGES = "glibc.malloc.hugetlb=1"
# `-lm none` is the present spelling of --no-mmap; flash attention is what its `auto` takes on the CPU.
AT_ITS_BEST = ["-lm", "none", "-fa", "on"]


class BenchError(Exception):
    """A failure to be told in one line, without a traceback."""


def say(text):
    print(text, file=sys.stderr, flush=True)


def run(command, log=None, **options):
    """Runs `command`; returns its stdout, or stops with the end of its output (of `log`, if it went there)."""
    command = [str(part) for part in command]
    if log is not None:
        with open(log, "ab") as out:
            done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, **options)
        output, tail = "", log.read_text(errors="replace")
    else:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", **options)
        output, tail = done.stdout, done.stdout + done.stderr
    if done.returncode != 0:
        raise BenchError(f"{' '.join(command)} ended with {done.returncode}:\n{tail[-3000:]}")
    return output


# --- building the two sides ---


def build_stamp():
    """What a native build depends on: the pin, the flags, and the features of this CPU."""
    features = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256("\n".join([VERSION, SDIST_SHA256, *CMAKE_FLAGS, features]).encode()).hexdigest()


def fetch_sources(source):
    """Puts the sources vendored in the pinned sdist into `source`."""
    sdist = CACHE / f"llama_cpp_python-{VERSION}.tar.gz"
    if not sdist.exists():
        say(f"fetching the sdist of {PACKAGE} {VERSION}")
        # Only this package as source: its build requirements would take an hour to compile.
        run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", PACKAGE, "-d", CACHE,
             f"{PACKAGE}=={VERSION}"], log=CACHE / "build.log")
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if digest != SDIST_SHA256:
        raise BenchError(f"{sdist.name} has sha256 {digest}, expected {SDIST_SHA256}")
    unpacked = CACHE / "sdist"
    shutil.rmtree(unpacked, ignore_errors=True)
    shutil.rmtree(source, ignore_errors=True)
    unpacked.mkdir()
    run(["tar", "-xzf", sdist, "-C", unpacked])
    vendored = unpacked / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"
    vendored.rename(source)
    shutil.rmtree(unpacked)


def patch_amx(source):
    """Works around gcc 12's miscompiled AMX path (SIGILL at `tilezero`).

    The compiler believes that only 8 bytes of the tile configuration are read and drops the other stores; an empty
    asm that takes its address keeps them. Applied only where the known line stands.
    """
    path = source / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    load = "    _tile_loadconfig(&tc);\n"
    barrier = '    __asm__ volatile("" : : "r"(&tc) : "memory");\n'
    if not path.exists():
        return
    text = path.read_text()
    if text.count(load) == 1 and barrier not in text:
        path.write_text(text.replace(load, barrier + load))


def build_tools():
    """Paths of cmake and ninja, from PATH or else from PyPI into the cache."""
    found = [shutil.which(name) for name in ("cmake", "ninja")]
    if all(found):
        return found
    venv = CACHE / "venv"
    if not (venv / "bin" / "ninja").exists():
        run([sys.executable, "-m", "venv", venv])
        run([venv / "bin" / "pip", "install", "-q", "cmake", "ninja"])
    return [venv / "bin" / "cmake", venv / "bin" / "ninja"]


def build_llama_cpp(targets):
    """Builds `targets` unless the stamp says that they are built; returns the folder of the executables."""
    source, build = CACHE / "src", CACHE / "build"
    stamp_file, stamp = CACHE / "stamp", build_stamp()
    CACHE.mkdir(parents=True, exist_ok=True)
    current = stamp_file.exists() and stamp_file.read_text() == stamp
    if current and all((build / "bin" / name).exists() for name in targets):
        return build / "bin"
    cmake, ninja = build_tools()
    log = CACHE / "build.log"
    if not current:
        fetch_sources(source)
        patch_amx(source)
        shutil.rmtree(build, ignore_errors=True)
        run([cmake, "-S", source, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *CMAKE_FLAGS], log=log)
        stamp_file.write_text(stamp)
    say("building llama.cpp (minutes, once; see .cache/llama.cpp/build.log)")
    run([ninja, "-C", build, *targets], log=log)
    return build / "bin"


def build_kittiwake():
    say("building kittiwake")
    if subprocess.run(["cargo", "build", "--release"], cwd=ROOT).returncode != 0:
        raise BenchError("cargo build --release failed")
    binary = ROOT / "target" / "release" / "kittiwake"
    if not binary.exists():
        raise BenchError("cargo build --release left no target/release/kittiwake")
    return binary


def environment():
    env = dict(os.environ)
    env["GLIBC_TUNABLES"] = HUGE_PAGES
    return env


def huge_pages_mode():
    """The kernel's transparent huge page mode; with `never` the peer is not at its best, and the output says so."""
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not path.exists():
        return "unknown"
    return path.read_text().split("[")[-1].split("]")[0]


# --- how busy the machine was with other work ---


class Neighbours:
    """The largest share of the CPUs, 0 to 1, that other processes took during any `watch` so far."""

    def __init__(self):
        self.share = 0.0

    @staticmethod
    def other_seconds():
        """CPU seconds since boot that no finished child of ours used (0 where the kernel does not say)."""
        try:
            ticks = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        except OSError:
            return 0.0
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, ticks)
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return busy - children.ru_utime - children.ru_stime

    def watch(self, command):
        """Runs `command` in the benchmark's environment and returns its stdout."""
        start, before = time.monotonic(), self.other_seconds()
        output = run(command, env=environment())
        wall = time.monotonic() - start
        self.share = max(self.share, (self.other_seconds() - before) / (wall * os.cpu_count()))
        return output


# --- measuring: each function starts one process and returns tokens per second ---


def number(record, key, command):
    value = record.get(key) if isinstance(record, dict) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise BenchError(f"{command}: no positive number `{key}` in {json.dumps(record)[:500]}")
    return float(value)


def bench_ours(watch, binary, model, threads, prompt_tokens, output_tokens, depth, batch):
    """One run of `kittiwake bench`, as its record for `batch`."""
    command = [binary, "bench", model, "--threads", threads, "--prompt-tokens", prompt_tokens,
               "--output-tokens", output_tokens, "--depth", depth, "--batch", batch, "--log-level", "warn", "--json"]
    output = watch(command)
    report = None
    for line in [output, *reversed(output.splitlines())]:
        try:
            report = json.loads(line)
        except ValueError:
            continue
        if isinstance(report, dict):
            break
    if not isinstance(report, dict) or not isinstance(report.get("runs"), list):
        raise BenchError(f"kittiwake bench printed no JSON object with `runs`:\n{output[-1000:]}")
    for key, wanted in (("threads", threads), ("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if report.get(key, wanted) != wanted:
            raise BenchError(f"kittiwake bench was asked for {key} {wanted} and ran {report[key]}")
    for record in report["runs"]:
        if isinstance(record, dict) and record.get("batch") == batch:
            number(record, "prefill_tokens_per_s", "kittiwake bench")
            number(record, "decode_tokens_per_s", "kittiwake bench")
            return record
    raise BenchError(f"kittiwake bench printed no run of batch {batch}: {json.dumps(report)[:1000]}")


def bench_theirs_single(watch, tools, model, threads, prompt_tokens, output_tokens, depth):
    """llama-bench: (prefill, decode at `depth`), each once after its own warm-up."""

    def one(*work):
        command = [tools / "llama-bench", "-m", model, "-t", threads, "-r", 1, *AT_ITS_BEST, "-o", "json", *work]
        records = json.loads(watch(command))
        if len(records) != 1:
            raise BenchError(f"llama-bench printed {len(records)} records, expected 1")
        return number(records[0], "avg_ts", "llama-bench")

    prefill = one("-p", prompt_tokens, "-n", 0)
    decode = one("-p", 0, "-n", output_tokens, "-d", depth)
    return prefill, decode


def bench_theirs_parallel(watch, tools, model, threads, depth, output_tokens, batch):
    """llama-batched-bench: decode tokens per second of `batch` sequences together, `depth` tokens deep."""
    # One step of its cache is 256 cells a sequence, and too small a context is skipped without an error.
    context = batch * (depth + output_tokens + 256)
    command = [tools / "llama-batched-bench", "-m", model, "-t", threads, "-tb", threads, *AT_ITS_BEST, "-c", context,
               "-b", 2048, "-ub", 512, "-npp", depth, "-ntg", output_tokens, "-npl", batch, "--output-format", "jsonl"]
    output = watch(command)
    records = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if len(records) != 1:
        raise BenchError(f"llama-batched-bench printed {len(records)} records, expected 1:\n{output[-1000:]}")
    return number(records[0], "speed_tg", "llama-batched-bench")


def context_of(record, assumed):
    value = record.get("decode_context_tokens", assumed)
    return value if isinstance(value, int) and value >= 0 else assumed


def measure_round(ours, tools, model, threads):
    """One round A B A B: {figure: (ours, theirs)}, and what the report tells about the round."""
    neighbours = Neighbours()
    watch = neighbours.watch
    single = bench_ours(watch, ours, model, threads, 512, 128, 1, 1)
    depth1 = context_of(single, 1)
    # A prompt of one token is what llama-bench -n starts from: its first step feeds BOS into an empty cache.
    prefill, decode = bench_theirs_single(watch, tools, model, threads, 512, 128, depth1 if depth1 > 1 else 0)
    batch = bench_ours(watch, ours, model, threads, 128, 64, 128, 8)
    depth8 = max(1, context_of(batch, 128))
    parallel = bench_theirs_parallel(watch, tools, model, threads, depth8, 64, 8)
    figures = {
        "prefill512": (single["prefill_tokens_per_s"], prefill),
        "decode": (single["decode_tokens_per_s"], decode),
        "parallel8": (batch["decode_tokens_per_s"], parallel),
    }
    facts = {"decode_context_tokens": depth1, "parallel8_context_tokens": depth8, "other_load": round(neighbours.share, 3)}
    return figures, facts


# --- the server: time to first token of a long prefix, cold and warm ---


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Server:
    """A server process on a free port, ready when entered, stopped when left."""

    def __init__(self, name, command):
        self.name, self.port = name, free_port()
        self.command = [str(part) for part in [*command, "--host", "127.0.0.1", "--port", self.port]]

    def __enter__(self):
        self.process = subprocess.Popen(self.command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise BenchError(f"{' '.join(self.command)} ended with {self.process.returncode}")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/v1/models")
                response = connection.getresponse()
                if response.status == 200:
                    self.model = json.loads(response.read())["data"][0]["id"]
                    return self
            except (OSError, ValueError, LookupError):
                pass
            time.sleep(0.1)
        self.__exit__()
        raise BenchError(f"{self.name} was not ready after 120 s")

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def first_token_ms(self, prompt):
        """Milliseconds from sending `prompt` (token ids) to the first streamed event."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True, "ignore_eos": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise BenchError(f"{self.name}: status {response.status}: {response.read(500)!r}")
        for line in response:
            if line.startswith(b"data:"):
                elapsed = (time.perf_counter() - start) * 1000
                response.read()
                return elapsed
        raise BenchError(f"{self.name}: the stream had no event")


def measure_server_round(servers, seed):
    """{"ttft_cold_ms": (ours, theirs), "ttft_warm_ms": ...}, ours and theirs in turn; `seed` makes the prefix new."""
    draw = random.Random(seed)
    ids = [draw.randrange(1000, 40000) for _ in range(PREFIX_TOKENS + 2 * TAIL_TOKENS)]
    prefix, tails = ids[:PREFIX_TOKENS], (ids[PREFIX_TOKENS:-TAIL_TOKENS], ids[-TAIL_TOKENS:])
    cold, warm = ([server.first_token_ms(prefix + tail) for server in servers] for tail in tails)
    return {"ttft_cold_ms": tuple(cold), "ttft_warm_ms": tuple(warm)}


# --- the driver ---


def measure(options, ours, tools):
    """The counted rounds: ([{figure: (ours, theirs)}], facts for the report)."""
    tries = []
    for index in range(2 * options.rounds + 1):
        figures, facts = measure_round(ours, tools, options.model, options.threads)
        say(f"round {index}{'' if index else ' (not counted)'}: {show(figures)}  others took {facts['other_load']:.0%}")
        if index:
            tries.append((figures, facts))
        if sum(facts["other_load"] <= QUIET for _, facts in tries) == options.rounds:
            break
    tries.sort(key=lambda each: each[1]["other_load"])
    rounds = [figures for figures, _ in tries[: options.rounds]]
    facts = tries[options.rounds - 1][1]
    if options.server:
        context = 4096
        commands = (
            ("kittiwake", [ours, "serve", options.model, "--threads", options.threads, "--max-model-len", context]),
            ("llama-server", [tools / "llama-server", "-m", options.model, "-t", options.threads, *AT_ITS_BEST,
                              "-c", context, "-np", 1]),
        )
        with Server(*commands[0]) as first, Server(*commands[1]) as second:
            for index in range(options.rounds + 1):
                figures = measure_server_round((first, second), index)
                say(f"server round {index}{'' if index else ' (not counted)'}: " + show(figures))
                if index:
                    rounds[index - 1].update(figures)
    return rounds, facts


def show(figures):
    return "  ".join(f"{name} {ours:.1f} / {theirs:.1f}" for name, (ours, theirs) in figures.items())


def summarise(rounds):
    """{figure: {ratio, ours, theirs}}: medians; for times the ratio is inverted, so that above 1 stays better."""
    summary = {}
    for name in rounds[0]:
        pairs = [figures[name] for figures in rounds]
        ratios = [theirs / ours if name.endswith("_ms") else ours / theirs for ours, theirs in pairs]
        summary[name] = {
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "ours": statistics.median(ours for ours, _ in pairs),
            "theirs": statistics.median(theirs for _, theirs in pairs),
        }
    return summary


def print_table(summary):
    print(f"{'figure':14} {'ours':>10} {'llama.cpp':>10} {'ratio':>7}  lowest..highest")
    for name, row in summary.items():
        spread = f"{min(row['ratios']):.2f}..{max(row['ratios']):.2f}"
        print(f"{name:14} {row['ours']:10.1f} {row['theirs']:10.1f} {row['ratio']:7.2f}  {spread}")
    print("tokens/s (ttft: ms), medians; ratio: median over the rounds, above 1 = ours is faster")


def cpu_name():
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def as_json(summary, facts, options):
    result = {}
    for name, row in summary.items():
        result[name] = round(row["ratio"], 4)
        result[f"{name}_ours"] = round(row["ours"], 2)
        result[f"{name}_theirs"] = round(row["theirs"], 2)
    result.update(facts, threads=options.threads, rounds=options.rounds, model=options.model.name, cpu=cpu_name(),
                  huge_pages=huge_pages_mode(), peer=f"llama.cpp of {PACKAGE} {VERSION}")
    return json.dumps(result)


def parse_arguments():
    parser = argparse.ArgumentParser(description="Kittiwake beside llama.cpp on the CPU.")
    parser.add_argument("--model", type=Path, default=MODEL, help="GGUF file (default: the demo model)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="rounds to count")
    parser.add_argument("--json", action="store_true", help="last line of stdout: one JSON object")
    parser.add_argument("--server", action="store_true", help="also time to first token, cold and warm")
    parser.add_argument("--ours", type=Path, help="use this kittiwake instead of building it")
    options = parser.parse_args()
    if options.threads < 1 or options.rounds < 1:
        parser.error("--threads and --rounds start at 1")
    return options


def main():
    options = parse_arguments()
    try:
        if not options.model.is_file():
            raise BenchError(f"no model at {options.model}; examples/quickstart.sh fetches the demo model")
        if options.ours is not None and not options.ours.is_file():
            raise BenchError(f"no executable at {options.ours}")
        ours = options.ours or build_kittiwake()
        tools = build_llama_cpp(TARGETS + (["llama-server"] if options.server else []))
        if huge_pages_mode() == "never":
            say("transparent huge pages are off: the peer is slower than its best")
        rounds, facts = measure(options, ours, tools)
    except BenchError as error:
        sys.exit(f"peer_llama_cpp: {error}")
    summary = summarise(rounds)
    print_table(summary)
    if facts["other_load"] > QUIET:
        print(f"NOT QUIET: other processes took up to {facts['other_load']:.0%} of the CPUs; do not quote these ratios")
    if options.json:
        print(as_json(summary, facts, options))


if __name__ == "__main__":
    main()
