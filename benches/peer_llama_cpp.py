#!/usr/bin/env python3
"""Kittiwake beside llama.cpp on one device: same GGUF, same threads, in alternation.

    python3 benches/peer_llama_cpp.py [--device cpu|wgpu] [--model PATH] [--threads 2] [--rounds 5] [--json] [--server]

`--device cpu` (default) holds our cpu backend against llama.cpp's; `--device wgpu` holds our WGSL backend against its
Vulkan backend, both on the same adapter, which may be a software one.

llama.cpp comes from the pinned PyPI sdist of `llama-cpp-python`, which vendors its sources. It is built natively
into `.cache/llama.cpp` (git-ignored), a folder for each device, and rebuilt only when the pin, the flags or the CPU
change. Needs python3 with pip, cargo and a C++ compiler; cmake and ninja are taken from PATH, else from PyPI. The
Vulkan build needs the Vulkan loader with its headers, glslc and SPIRV-Headers too, and a driver to run on.

The peer runs at its best: 2 MiB pages (`GLIBC_TUNABLES=glibc.malloc.hugetlb=1`) with the weights read into that
memory instead of mapped (its `--no-mmap`), and flash attention on. Ours is given the same environment.

On Vulkan llama.cpp skips software adapters unless `GGML_VK_VISIBLE_DEVICES` (set to 0 here, where it is not set) names
them, and then computes on the CPU while it still reports Vulkan. Therefore its device is named (`-dev Vulkan0`), one
verbose run at the start has to show the adapter with all layers and operations on it, each measurement has to report
that adapter, and so has ours. The software driver gets `--threads` threads on both sides (`LP_NUM_THREADS`).

One round measures ours, theirs, ours, theirs. The machine may be shared and drift 2x within minutes, therefore only
the ratio inside a round counts, and the result is the median of these ratios (ours / theirs, above 1 = ours is
faster). Round 0 warms caches up and is not counted.

Busy neighbours distort even the ratio: llama.cpp's threads spin at a barrier after each operation, and when one of them
is descheduled its decode falls to a tenth. So each measurement notes what share of the CPUs went to other processes
while it ran; a round in which that exceeds 10 % is repeated, up to twice as many rounds as asked for, and the
quietest are counted. `other_load` in the output is the worst share among those: distrust a ratio where it is high.
The server's times are not guarded like this.

Both sides do the same work in each figure, and neither counts loading, tokenising or detokenising. P and N are 512 and
128 tokens on the cpu, 128 and 32 on wgpu, where llama.cpp may need a second for a token:

    figure      theirs                                      ours (`kittiwake bench MODEL --threads T --json ...`)
    prefillP    llama-bench -p P                            --prompt-tokens P --output-tokens N --batch 1
                P tokens into an empty cache, logits of the last one only
    decode      llama-bench -n N                            the same run: decode is its own pass, from a
                N tokens, one at a time, from an            prompt of 1 token
                empty cache
    parallel8   (cpu only)                                  --prompt-tokens 128 --output-tokens 64 --depth 128 --batch 8
                llama-batched-bench -npp 128 -ntg 64        64 tokens for each sequence after its 128;
                -npl 8: 8 sequences with 128 tokens         the prefill is not counted
                each in the cache, then 64 steps of 8
                rows; all sequences' tokens count
    ttft_*      (cpu with --server only) milliseconds to the first streamed token of /v1/completions, one client: a new
                1,500-token prefix with a tail of 16 tokens (cold), then the same prefix with another tail (warm)

Ours includes greedy sampling; theirs computes all logits but samples nothing (it feeds random tokens).

Ours prints one JSON object: {"device": "words that name the adapter", "runs": [{"batch": 1, "prefill_tokens_per_s": x,
"decode_tokens_per_s": y}, ...]}. If a run says `decode_context_tokens` (tokens in each sequence's cache when its decode
starts), the peer is measured at that depth too, so that the comparison stays fair if our bench changes; without it the
table above is taken as true.
"""

import argparse
import hashlib
import http.client
import json
import os
import random
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "llama.cpp"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
SOURCE_STAMP = ".sdist-sha256"
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


@dataclass(frozen=True)
class Comparison:
    """What one of our devices is held against: a build of llama.cpp, its settings, the work."""

    backend: str  # as llama-bench names it
    cmake_flags: list  # on top of CMAKE_FLAGS
    needs: str  # what has to be installed for that build
    suffix: str  # of its folder and stamp in the cache
    targets: list
    settings: list  # of every tool of theirs
    prompt_tokens: int
    output_tokens: int
    parallel: bool  # whether parallel8 is measured


# `-lm none` is the present spelling of --no-mmap; flash attention is what its `auto` takes on the CPU, and on software
# Vulkan it makes no difference at these lengths.
AT_ITS_BEST = ["-lm", "none", "-fa", "on"]
COMPARISONS = {
    "cpu": Comparison(
        backend="CPU",
        cmake_flags=[],
        needs="a C++ compiler",
        suffix="",
        targets=["llama-bench", "llama-batched-bench"],
        settings=AT_ITS_BEST,
        prompt_tokens=512,
        output_tokens=128,
        parallel=True,
    ),
    "wgpu": Comparison(
        backend="Vulkan",
        cmake_flags=["-DGGML_VULKAN=ON"],
        needs="a C++ compiler, the Vulkan loader and headers, glslc and SPIRV-Headers "
              "(Debian: apt-get install g++ libvulkan-dev glslc spirv-headers)",
        suffix="-vulkan",
        targets=["llama-bench"],
        settings=[*AT_ITS_BEST, "-dev", "Vulkan0", "-ngl", "99"],
        prompt_tokens=128,
        output_tokens=32,
        parallel=False,
    ),
}


@dataclass
class Setup:
    """Both sides of one comparison, built and ready to run."""

    comparison: Comparison
    device: str  # our --device
    model: Path
    threads: int
    ours: Path  # the executable
    tools: Path  # the folder of theirs
    environment: dict  # of both
    adapter: str = ""  # the GPU or software adapter that both have to report; none for the CPU


class BenchError(Exception):
    """A failure to be told in one line, without a traceback."""


def say(text):
    print(text, file=sys.stderr, flush=True)


def run(command, log=None, stderr=subprocess.PIPE, **options):
    """Runs `command`; returns its stdout, or stops with the end of its output (of `log`, if it went there)."""
    command = [str(part) for part in command]
    if log is not None:
        with open(log, "ab") as out:
            done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, **options)
        output, tail = "", log.read_text(errors="replace")
    else:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, errors="replace", **options)
        output, tail = done.stdout, done.stdout + (done.stderr or "")
    if done.returncode != 0:
        raise BenchError(f"{' '.join(command)} ended with {done.returncode}:\n{tail[-3000:]}")
    return output


# --- building the two sides ---


def build_stamp(comparison):
    """What a native build depends on: the pin, the flags, and the features of this CPU."""
    features = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    parts = [VERSION, SDIST_SHA256, *CMAKE_FLAGS, *comparison.cmake_flags, features]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def fetch_sources(source):
    """Puts the sources vendored in the pinned sdist into `source`, patched where this machine's tools need it."""
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
    patch_amx(source)
    patch_layer_settings(source)
    (source / SOURCE_STAMP).write_text(SDIST_SHA256)


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


def patch_layer_settings(source):
    """Lets the Vulkan backend compile with headers from before `VK_EXT_layer_settings` (1.3.272), as Debian 12 has them.

    It uses the extension only to configure the validation layers, which are off. Applied only where the known lines stand.
    """
    path = source / "ggml" / "src" / "ggml-vulkan" / "ggml-vulkan.cpp"
    first = "    VkBool32 enable_best_practice = layer_settings;\n"
    create = "    vk::InstanceCreateInfo instance_create_info(vk::InstanceCreateFlags{}, &app_info, layers, extensions"
    last = f"{create}, &layer_setting_info);\n"
    guard = "#if VK_HEADER_VERSION >= 272\n"
    text = path.read_text()
    if text.count(first) == 1 and text.count(last) == 1 and guard + first not in text:
        text = text.replace(first, guard + first).replace(last, f"{last}#else\n{create});\n#endif\n")
        path.write_text(text)


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


def build_llama_cpp(comparison, targets):
    """Builds `targets` unless the stamp says that they are built; returns the folder of the executables."""
    source, build = CACHE / "src", CACHE / f"build{comparison.suffix}"
    stamp_file, stamp = CACHE / f"stamp{comparison.suffix}", build_stamp(comparison)
    CACHE.mkdir(parents=True, exist_ok=True)
    current = stamp_file.exists() and stamp_file.read_text() == stamp
    if current and all((build / "bin" / name).exists() for name in targets):
        return build / "bin"
    cmake, ninja = build_tools()
    # The shader generator of the Vulkan build configures itself and looks for ninja there.
    env = dict(os.environ, PATH=os.pathsep.join([str(Path(ninja).parent), os.environ.get("PATH", "")]))
    log = CACHE / f"build{comparison.suffix}.log"
    if not current:
        source_stamp = source / SOURCE_STAMP
        if not source_stamp.exists() or source_stamp.read_text() != SDIST_SHA256:
            fetch_sources(source)
        shutil.rmtree(build, ignore_errors=True)
        try:
            run([cmake, "-S", source, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *CMAKE_FLAGS,
                 *comparison.cmake_flags], log=log, env=env)
        except BenchError as error:
            raise BenchError(f"{error}\nllama.cpp's {comparison.backend} build needs {comparison.needs}") from None
        stamp_file.write_text(stamp)
    say(f"building llama.cpp (minutes, once; see .cache/llama.cpp/{log.name})")
    run([ninja, "-C", build, *targets], log=log, env=env)
    return build / "bin"


def build_kittiwake():
    say("building kittiwake")
    if subprocess.run(["cargo", "build", "--release"], cwd=ROOT).returncode != 0:
        raise BenchError("cargo build --release failed")
    binary = ROOT / "target" / "release" / "kittiwake"
    if not binary.exists():
        raise BenchError("cargo build --release left no target/release/kittiwake")
    return binary


def environment(comparison, threads):
    """The environment of both sides."""
    env = dict(os.environ, GLIBC_TUNABLES=HUGE_PAGES)
    if comparison.backend == "Vulkan":
        env["LP_NUM_THREADS"] = str(threads)
        env.setdefault("GGML_VK_VISIBLE_DEVICES", "0")
    return env


def huge_pages_mode():
    """The kernel's transparent huge page mode; with `never` the peer is not at its best, and the output says so."""
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not path.exists():
        return "unknown"
    return path.read_text().split("[")[-1].split("]")[0]


# --- which device theirs runs on ---


def llama_bench(setup, *work):
    """The command that measures `work` once."""
    return [setup.tools / "llama-bench", "-m", setup.model, "-t", setup.threads, "-r", 1, *setup.comparison.settings,
            "-o", "json", *work]


def vulkan_adapter(setup):
    """The name of the adapter that llama.cpp's Vulkan backend computes on, shown by a verbose run of it.

    The log has to show that adapter, all layers on it, and the graph in two pieces: the look-up of the embedding, which it
    always keeps on the CPU, and the rest. Work that the backend cannot do would cut the graph into more.
    """
    devices = run([setup.tools / "llama-bench", "--list-devices"], env=setup.environment)
    adapters = re.findall(r"^ *Vulkan\d+: (.+) \(\d+ MiB, \d+ MiB free\)$", devices, re.MULTILINE)
    if len(adapters) != 1:
        raise BenchError(
            f"with GGML_VK_VISIBLE_DEVICES={setup.environment['GGML_VK_VISIBLE_DEVICES']} llama.cpp sees {len(adapters)} Vulkan "
            "adapters, expected 1; `vulkaninfo --summary` lists them (a software one: Debian's mesa-vulkan-drivers)"
        )
    log = run([*llama_bench(setup, "-p", 1, "-n", 0, "--no-warmup"), "-v"], env=setup.environment, stderr=subprocess.STDOUT)
    seen = f"ggml_vulkan: 0 = {adapters[0]} (" in log
    layers = re.findall(r"offloaded (\d+)/(\d+) layers to GPU", log)
    pieces = re.findall(r"graph: nodes = \d+, splits = (\d+)", log)
    if not seen or len(layers) != 1 or layers[0][0] != layers[0][1] or set(pieces) != {"2"}:
        raise BenchError(f"llama.cpp does not compute on {adapters[0]} alone: layers {layers}, pieces of the graph {pieces}")
    return adapters[0]


# --- how busy the machine was with other work ---


class Neighbours:
    """The largest share of the CPUs, 0 to 1, that other processes took during any `watch` so far."""

    def __init__(self, env):
        self.env, self.share = env, 0.0

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
        output = run(command, env=self.env)
        wall = time.monotonic() - start
        self.share = max(self.share, (self.other_seconds() - before) / (wall * os.cpu_count()))
        return output


# --- measuring: each function starts one process and returns tokens per second ---


def number(record, key, command):
    value = record.get(key) if isinstance(record, dict) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise BenchError(f"{command}: no positive number `{key}` in {json.dumps(record)[:500]}")
    return float(value)


def bench_ours(watch, setup, prompt_tokens, output_tokens, depth, batch):
    """One run of `kittiwake bench`, as its record for `batch`."""
    command = [setup.ours, "bench", setup.model, "--device", setup.device, "--threads", setup.threads,
               "--prompt-tokens", prompt_tokens, "--output-tokens", output_tokens, "--depth", depth, "--batch", batch,
               "--log-level", "warn", "--json"]
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
    for key, wanted in (("threads", setup.threads), ("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if report.get(key, wanted) != wanted:
            raise BenchError(f"kittiwake bench was asked for {key} {wanted} and ran {report[key]}")
    wanted, device = setup.adapter or setup.comparison.backend, report.get("device")
    if not isinstance(device, str) or wanted not in device:
        raise BenchError(f"llama.cpp runs on {wanted!r}, but kittiwake bench --device {setup.device} on {device!r}; "
                         "GGML_VK_VISIBLE_DEVICES chooses theirs")
    for record in report["runs"]:
        if isinstance(record, dict) and record.get("batch") == batch:
            number(record, "prefill_tokens_per_s", "kittiwake bench")
            number(record, "decode_tokens_per_s", "kittiwake bench")
            return record
    raise BenchError(f"kittiwake bench printed no run of batch {batch}: {json.dumps(report)[:1000]}")


def bench_theirs_single(watch, setup, prompt_tokens, output_tokens, depth):
    """llama-bench: (prefill, decode at `depth`), each once after its own warm-up."""

    def one(*work):
        records = json.loads(watch(llama_bench(setup, *work)))
        if len(records) != 1:
            raise BenchError(f"llama-bench printed {len(records)} records, expected 1")
        for key, wanted in (("backends", setup.comparison.backend), ("gpu_info", setup.adapter)):
            if records[0].get(key) != wanted:
                raise BenchError(f"llama-bench ran with {key} {records[0].get(key)!r}, expected {wanted!r}")
        return number(records[0], "avg_ts", "llama-bench")

    prefill = one("-p", prompt_tokens, "-n", 0)
    decode = one("-p", 0, "-n", output_tokens, "-d", depth)
    return prefill, decode


def bench_theirs_parallel(watch, setup, depth, output_tokens, batch):
    """llama-batched-bench: decode tokens per second of `batch` sequences together, `depth` tokens deep."""
    # One step of its cache is 256 cells a sequence, and too small a context is skipped without an error.
    context = batch * (depth + output_tokens + 256)
    command = [setup.tools / "llama-batched-bench", "-m", setup.model, "-t", setup.threads, "-tb", setup.threads,
               *setup.comparison.settings, "-c", context, "-b", 2048, "-ub", 512, "-npp", depth, "-ntg", output_tokens,
               "-npl", batch, "--output-format", "jsonl"]
    output = watch(command)
    records = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if len(records) != 1:
        raise BenchError(f"llama-batched-bench printed {len(records)} records, expected 1:\n{output[-1000:]}")
    return number(records[0], "speed_tg", "llama-batched-bench")


def context_of(record, assumed):
    value = record.get("decode_context_tokens", assumed)
    return value if isinstance(value, int) and value >= 0 else assumed


def measure_round(setup):
    """One round A B A B: {figure: (ours, theirs)}, and what the report tells about the round."""
    neighbours = Neighbours(setup.environment)
    watch, comparison = neighbours.watch, setup.comparison
    prompt_tokens, output_tokens = comparison.prompt_tokens, comparison.output_tokens
    single = bench_ours(watch, setup, prompt_tokens, output_tokens, 1, 1)
    depth1 = context_of(single, 1)
    # A prompt of one token is what llama-bench -n starts from: its first step feeds BOS into an empty cache.
    prefill, decode = bench_theirs_single(watch, setup, prompt_tokens, output_tokens, depth1 if depth1 > 1 else 0)
    figures = {
        f"prefill{prompt_tokens}": (single["prefill_tokens_per_s"], prefill),
        "decode": (single["decode_tokens_per_s"], decode),
    }
    facts = {"decode_tokens": output_tokens, "decode_context_tokens": depth1}
    if comparison.parallel:
        batch = bench_ours(watch, setup, 128, 64, 128, 8)
        depth8 = max(1, context_of(batch, 128))
        parallel = bench_theirs_parallel(watch, setup, depth8, 64, 8)
        figures["parallel8"] = (batch["decode_tokens_per_s"], parallel)
        facts["parallel8_context_tokens"] = depth8
    facts["other_load"] = round(neighbours.share, 3)
    return figures, facts


# --- the server: time to first token of a long prefix, cold and warm ---


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Server:
    """A server process on a free port, ready when entered, stopped when left."""

    def __init__(self, name, command, env):
        self.name, self.port, self.env = name, free_port(), env
        self.command = [str(part) for part in [*command, "--host", "127.0.0.1", "--port", self.port]]

    def __enter__(self):
        self.process = subprocess.Popen(self.command, env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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


def measure(options, setup):
    """The counted rounds: ([{figure: (ours, theirs)}], facts for the report)."""
    tries = []
    for index in range(2 * options.rounds + 1):
        figures, facts = measure_round(setup)
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
        ours = [setup.ours, "serve", setup.model, "--device", setup.device, "--threads", setup.threads,
                "--max-model-len", context]
        theirs = [setup.tools / "llama-server", "-m", setup.model, "-t", setup.threads, *setup.comparison.settings,
                  "-c", context, "-np", 1]
        env = setup.environment
        with Server("kittiwake", ours, env) as first, Server("llama-server", theirs, env) as second:
            for index in range(options.rounds + 1):
                figures = measure_server_round((first, second), index)
                say(f"server round {index}{'' if index else ' (not counted)'}: " + show(figures))
                if index:
                    rounds[index - 1].update(figures)
    return rounds, facts


def show(figures):
    return "  ".join(f"{name} {ours:.2f} / {theirs:.2f}" for name, (ours, theirs) in figures.items())


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
        print(f"{name:14} {row['ours']:10.2f} {row['theirs']:10.2f} {row['ratio']:7.2f}  {spread}")
    print("tokens/s (ttft: ms), medians; ratio: median over the rounds, above 1 = ours is faster")


def cpu_name():
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def as_json(summary, facts, options, setup):
    result = {}
    for name, row in summary.items():
        result[name] = round(row["ratio"], 4)
        result[f"{name}_ours"] = round(row["ours"], 2)
        result[f"{name}_theirs"] = round(row["theirs"], 2)
    result.update(facts, device=setup.device, threads=setup.threads, rounds=options.rounds, model=setup.model.name,
                  cpu=cpu_name(), adapter=setup.adapter or None, huge_pages=huge_pages_mode(),
                  peer=f"llama.cpp of {PACKAGE} {VERSION}, {setup.comparison.backend}")
    return json.dumps(result)


def parse_arguments():
    parser = argparse.ArgumentParser(description="Kittiwake beside llama.cpp on one device.")
    parser.add_argument("--device", choices=COMPARISONS, default="cpu", help="ours; wgpu: against their Vulkan backend")
    parser.add_argument("--model", type=Path, default=MODEL, help="GGUF file (default: the demo model)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="rounds to count")
    parser.add_argument("--json", action="store_true", help="last line of stdout: one JSON object")
    parser.add_argument("--server", action="store_true", help="also time to first token, cold and warm (cpu only)")
    parser.add_argument("--ours", type=Path, help="use this kittiwake instead of building it")
    options = parser.parse_args()
    if options.threads < 1 or options.rounds < 1:
        parser.error("--threads and --rounds start at 1")
    if options.server and options.device != "cpu":
        parser.error("--server: on a software adapter their prompt alone takes minutes; it is measured on the cpu only")
    return options


def set_up(options):
    """Builds both sides and makes sure of the device that theirs runs on."""
    comparison = COMPARISONS[options.device]
    if not options.model.is_file():
        raise BenchError(f"no model at {options.model}; examples/quickstart.sh fetches the demo model")
    if options.ours is not None and not options.ours.is_file():
        raise BenchError(f"no executable at {options.ours}")
    setup = Setup(
        comparison=comparison,
        device=options.device,
        model=options.model,
        threads=options.threads,
        ours=options.ours or build_kittiwake(),
        tools=build_llama_cpp(comparison, comparison.targets + (["llama-server"] if options.server else [])),
        environment=environment(comparison, options.threads),
    )
    if comparison.backend == "Vulkan":
        setup.adapter = vulkan_adapter(setup)
        say(f"llama.cpp computes on {setup.adapter}")
    if huge_pages_mode() == "never":
        say("transparent huge pages are off: the peer is slower than its best")
    return setup


def main():
    options = parse_arguments()
    try:
        setup = set_up(options)
        rounds, facts = measure(options, setup)
    except BenchError as error:
        sys.exit(f"peer_llama_cpp: {error}")
    summary = summarise(rounds)
    print_table(summary)
    if facts["other_load"] > QUIET:
        print(f"NOT QUIET: other processes took up to {facts['other_load']:.0%} of the CPUs; do not quote these ratios")
    if options.json:
        print(as_json(summary, facts, options, setup))


if __name__ == "__main__":
    main()
